"""The numerics of the service on arrays: formats by encode() and decode(), one optimizer step by Step.

For checking against another library. Arrays are NumPy's, or PyTorch's tensors on the CPU; bf16 is uint16 in NumPy.
Results are NumPy arrays. Formats are the C++ library's: kernels/encode/encode.h says how each is defined.
"""
from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from . import _arguments, _arrays, _core
from ._arrays import np
from .errors import InvalidArgument

__all__ = ["State", "Step", "Stream", "decode", "encode"]

_PLACE = {"seed": 0, "step": 1, "tensor": 0, "first_element": 0}
_STATES: dict[str, Any] = {"signed": True, "compat": None}
# Each format's options and their defaults.
_OPTIONS: dict[str, dict[str, Any]] = {
    "fp32": {}, "bf16": {}, "bf16_sr": {**_PLACE, "state": None}, "bf16+16": {}, "bf16+8sr": _PLACE,
    "int8_row": {"stochastic": False, "compat": None, **_PLACE}, "nf4": {"mean": None},
    "dyn8": _STATES, "dyn4": _STATES, "fp8": _STATES, "fp8x32": {"signed": True, "stochastic": False, **_PLACE},
    "fp8_tensor": {"element": "e4m3", "power_of_2": False}, "fp8_row": {"power_of_2": True},
    "fp8_block": {"power_of_2": False}, "mx8": {"scaling": "rceil"},
}
_ALIGNMENT = 256  # of a step's first element
_CHOICES = {"compat": (None, "torchao"), "element": ("e4m3", "e5m2"), "scaling": ("rceil", "floor")}


def encode(array: Any, format: str, **options: Any) -> dict[str, np.ndarray[Any, Any]]:
    """The stored parts of `array` (fp32 or bf16): "codes", and as the format has them "remainder", "scales", ...

    Options, and what is taken where one is not given:
      bf16_sr, bf16+8sr, int8_row  seed=0, step=1, tensor=0, first_element=0: which random draws; bf16_sr also
                                   state=None (0, 1 or 2: those of that optimizer state); int8_row
                                   stochastic=False and compat=None ("torchao": its scales, bit for bit of fp32
                                   arrays; of bf16 ones torchao computes int8_row, and nf4, in bf16)
      dyn8, dyn4, fp8, fp8x32      signed=True (False: second moments; those of fp8x32 with stochastic=False and
                                   draws as above)
      dyn8, dyn4, fp8              compat=None ("torchao": its levels, scales and ties, bit for bit)
      fp8_tensor                   element="e4m3" (or "e5m2"), power_of_2=False
      fp8_row, fp8_block           power_of_2=True, and False: as torchao's recipes
      mx8                          scaling="rceil" (or "floor")
      nf4                          mean=None (a finite number: taken in place of the scales' own mean)
    InvalidArgument: no such format or option, values that the format cannot hold, a shape that it does not fit.
    """
    code, mean = _code(format, options)
    source = _arrays.floats("the array", array)
    _arguments.place(options.get("first_element", 0), source.size)
    parts = _empty(code, source.shape)
    code.encode(source.shape, source, list(parts.values()), mean)
    return parts


def decode(parts: Mapping[str, Any], format: str, shape: Sequence[int], **options: Any) -> np.ndarray[Any, Any]:
    """The fp32 values of an array of that shape, from its parts as encode() with the same options returns them.

    InvalidArgument: no such format or option, or parts that are not those of the shape.
    """
    code, _ = _code(format, options)
    sizes = tuple(_arguments.integer("a size of the shape", size) for size in shape)
    arrays = [_part(parts, f"{format}: ", name, dtype, of_part) for name, dtype, of_part in code.parts(sizes)]
    values = np.empty(sizes, np.float32)
    code.decode(sizes, arrays, values)
    return values


def _part(parts: Mapping[str, Any], prefix: str, name: str, dtype: str, shape: tuple[int, ...]) -> Any:
    if name not in parts:
        raise InvalidArgument(f"{prefix}there are no {name}; the parts are {', '.join(parts)[:200]}")
    return _arrays.part(prefix + name, parts[name], dtype, shape, writable=False)


def _empty(code: _core.Code, shape: tuple[int, ...]) -> dict[str, np.ndarray[Any, Any]]:
    return {name: np.empty(of_part, dtype) for name, dtype, of_part in code.parts(shape)}


def _code(format: str, options: Mapping[str, Any]) -> tuple[_core.Code, float | None]:
    """The format with its options, and nf4's mean."""
    known = _OPTIONS.get(_arguments.text("format", format), {})  # of no format: C++ says so
    for name, value in options.items():
        if format in _OPTIONS and name not in known:
            raise InvalidArgument(f"{format} has no option {name}; it has {', '.join(known) or 'none'}")
        if name in _CHOICES and value not in _CHOICES[name]:
            raise InvalidArgument(f"{format}: {name} is {value!r:.40}; it is one of {_CHOICES[name]}")
    chosen = {**known, **options}
    mean = None if chosen.get("mean") is None else _arguments.number(f"{format}: mean", chosen["mean"])
    code = _core.Code(
        format, signed=bool(chosen.get("signed", True)), torchao=chosen.get("compat") == "torchao",
        e5m2=chosen.get("element") == "e5m2", power_of_2=bool(chosen.get("power_of_2", False)),
        floor=chosen.get("scaling") == "floor", stochastic=bool(chosen.get("stochastic", False)),
        state=None if chosen.get("state") is None else _arguments.integer("state", chosen["state"]),
        **{name: _arguments.integer(name, chosen.get(name, value)) for name, value in _PLACE.items()},
    )
    return code, mean


class Stream(MutableMapping[str, "np.ndarray[Any, Any]"]):
    """The stored arrays of the weights or of one state, by part. They can be changed in place, and set.

    An array that is set is not copied: its memory becomes the state's. InvalidArgument: another part, type or size, or
    an array that cannot be written.
    """

    def __init__(self, name: str, format: str, options: Mapping[str, Any], shape: tuple[int, ...]) -> None:
        self._name, self._format, self._options, self._shape = name, format, options, shape
        self._code, _ = _code(format, options)
        self._layout = {part: (dtype, of_part) for part, dtype, of_part in self._code.parts(shape)}
        self._arrays = _empty(self._code, shape)

    def __getstate__(self) -> tuple[Any, ...]:
        return self._name, self._format, self._options, self._shape, self._arrays

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        Stream.__init__(self, *state[:-1])
        self.update(state[-1])

    def __getitem__(self, part: str) -> np.ndarray[Any, Any]:
        return self._arrays[part]

    def __setitem__(self, part: str, array: Any) -> None:
        if part not in self._layout:
            raise InvalidArgument(f"{self._name} has no {part}; {self._format} has {', '.join(self._layout)}")
        self._arrays[part] = _arrays.part(f"{self._name}.{part}", array, *self._layout[part], writable=True)

    def __delitem__(self, part: str) -> None:
        raise InvalidArgument(f"{self._name}.{part} cannot be deleted; set it")

    def __iter__(self) -> Iterator[str]:
        return iter(self._arrays)

    def __len__(self) -> int:
        return len(self._arrays)

    def __repr__(self) -> str:
        return f"Stream({self._name!r}, {self._format!r}, {self._arrays!r})"

    def _encode(self, values: np.ndarray[Any, Any]) -> None:
        self._code.encode(self._shape, values, list(self._arrays.values()))

    def _clear(self) -> None:
        """As torchao begins: all bytes 0, the scales too."""
        for array in self._arrays.values():
            array.fill(0)

    def _decode(self) -> np.ndarray[Any, Any]:
        values = np.empty(self._shape, np.float32)
        self._code.decode(self._shape, list(self._arrays.values()), values)
        return values


class _Kind(NamedTuple):
    """What a state and a step must have in common."""

    optimizer: str
    weights: str
    states: str
    compat: str | None
    moments: tuple[str, ...]

    def __str__(self) -> str:
        compat = "" if self.compat is None else f", compat {self.compat}"
        moments = ", ".join(self.moments) or "no moments"
        return f"{self.optimizer} ({moments}) with weights {self.weights}, states {self.states}{compat}"


class State:
    """The weights of one tensor and its optimizer states, as stored. Step.init() makes one.

    copy.deepcopy() and pickle copy the arrays; copy.copy() shares them.
    """

    def __init__(self, kind: _Kind, shape: tuple[int, ...], streams: dict[str, Stream]) -> None:
        self._kind, self._shape, self._streams = kind, shape, streams

    def __repr__(self) -> str:
        return f"<State of {self._kind}; shape {self._shape}>"

    @property
    def shape(self) -> tuple[int, ...]:
        return self._shape

    @property
    def weights(self) -> np.ndarray[Any, Any]:
        """Decoded."""
        return self._streams["weights"]._decode()

    @property
    def moments(self) -> dict[str, np.ndarray[Any, Any]]:
        """Decoded, by torch's names: exp_avg, exp_avg_sq, max_exp_avg_sq, momentum_buffer."""
        return {name: stream._decode() for name, stream in self._streams.items() if name != "weights"}

    @property
    def parts(self) -> Mapping[str, Stream]:
        """The stored arrays themselves: parts["weights"]["codes"], parts["exp_avg"]["scales"], ..."""
        return MappingProxyType(self._streams)


_ADAM = ("lr", "betas", "eps", "weight_decay", "amsgrad", "maximize")
_HYPERPARAMETERS = {
    "sgd": ("lr", "momentum", "dampening", "weight_decay", "nesterov", "maximize"),
    "adam": _ADAM, "adamw": _ADAM, "lion": ("lr", "betas", "weight_decay", "maximize"),
    "muon": ("lr", "weight_decay", "momentum", "nesterov", "ns_coefficients", "eps", "ns_steps", "adjust_lr_fn"),
}
# Hyper-parameters that are several numbers, and what _core calls these.
_SEVERAL = {"betas": ("beta1", "beta2"), "ns_coefficients": ("ns_a", "ns_b", "ns_c")}
_ADJUST_LR = {None: 0.0, "original": 0.0, "match_rms_adamw": 1.0}


class Step:
    """An optimizer with the formats of its weights and states; apply() takes one step.

    optimizer: "SGD", "Adam", "AdamW", "AMSGrad" (Adam with amsgrad), "Lion", or "Muon" for whole matrices;
    hyperparameters have torch.optim's names and defaults. seed: of the draws of stochastic rounding.
    implementation: "reference" or "simd", which have the same bits; None is the best for this processor.
    fast (of Muon): products by the machine's BLAS (`blas` says which), so weights close to the exact mode's, but not
    their bits.
    compat="torchao": codes, scales and weights as torchao's optimizers on a CPU (kernels/step/torchao_step.h), of Adam and
    AdamW with weights fp32, bf16 and bf16_sr and states fp32, dyn8, dyn4 and fp8, in whole blocks.
    InvalidArgument: no such optimizer, format or hyper-parameter, or a value out of its range. TypeError: no number.
    Unimplemented: implementation="simd" on a processor without AVX2 and FMA. FailedPrecondition: fast without a BLAS.
    """

    def __init__(
        self, optimizer: str, weights: str = "fp32", states: str = "fp32", compat: str | None = None, seed: int = 0,
        implementation: str | None = None, fast: bool = False, **hyperparameters: Any,
    ) -> None:
        if compat not in _CHOICES["compat"]:
            raise InvalidArgument(f"compat is {compat!r:.40}; it is one of {_CHOICES['compat']}")
        name = _arguments.text("optimizer", optimizer).lower()
        self._matrix = name == "muon"
        if name == "amsgrad":
            if not hyperparameters.get("amsgrad", True):
                raise InvalidArgument(f"AMSGrad: amsgrad is {hyperparameters['amsgrad']!r:.40}; Adam is without it")
            name, hyperparameters = "adam", {**hyperparameters, "amsgrad": True}
        self._seed = _arguments.integer("seed", seed)
        self._core = _core.OptimizerStep(
            name, _hyper(name, hyperparameters), _arguments.text("weights", weights), _arguments.text("states", states),
            compat == "torchao", self._seed,
            "" if implementation is None else _arguments.text("implementation", implementation), bool(fast),
        )
        self._kind = _Kind(name, weights, states, compat, self._core.states)

    @property
    def blas(self) -> str | None:
        """Of the fast mode: the file of the BLAS that multiplies, as the loader found it. None: not fast."""
        return self._core.blas

    def __repr__(self) -> str:
        return f"<Step of {self._kind}{'' if self.blas is None else f'; fast, by {self.blas}'}>"

    def init(self, array: Any, tensor: int = 0, first_element: int = 0) -> State:
        """A state with these weights (fp32 or bf16), rounded to nearest, and moments of 0.

        bf16+8sr, which has no such rounding, takes the draws of step 0; tensor and first_element place the array among
        them, as in apply(), so that pieces of a tensor have the bits of the whole. Errors as encode().
        """
        source = _arrays.floats("the weights", array)
        first = _arguments.place(first_element, source.size, _ALIGNMENT)
        names = {"weights": self._kind.weights, **dict.fromkeys(self._kind.moments, self._kind.states)}
        streams = {}
        for index, (name, format) in enumerate(names.items()):
            streams[name] = Stream(name, *self._code_of(index, format, tensor, first), source.shape)
            if index > 0 and self._kind.compat is not None:
                streams[name]._clear()
            else:
                streams[name]._encode(source if index == 0 else np.zeros(source.shape, np.float32))
        return State(self._kind, source.shape, streams)

    def apply(
        self, state: State, gradient: Any, step: int, tensor: int = 0, first_element: int = 0, clip: float = 1.0,
        divide: float | None = None, nonfinite: str = "fail",
    ) -> bool:
        """Moves `state` on by step number `step`, 1 being the first. True: it was moved.

        gradient: fp32 or bf16, of the state's shape; or a sequence of them, one for each slot: the slots are added in
        the service's order, divided by `divide` (None: by how many there are) and multiplied by `clip`. tensor and
        first_element place the array among the job's random draws; first_element is a multiple of 256.
        nonfinite: what a gradient does that is NaN, infinite, or at least FLT_MAX / slots. "fail": InvalidArgument with
        its index; "skip": False. InvalidArgument also: arrays of another shape or type, or that overlap; stored scales
        that are negative, 0 or not finite; a state of another optimizer, compat or formats. Nothing is changed then.
        """
        if not isinstance(state, State):
            raise TypeError(f"state is {state!r:.40}; it is a State, as init() makes one")
        if state._kind != self._kind:
            raise InvalidArgument(f"the state is of {state._kind}; the step is of {self._kind}")
        if nonfinite not in ("fail", "skip"):
            raise InvalidArgument(f"nonfinite is {nonfinite!r:.40}; it is fail or skip")
        slots = list(gradient) if isinstance(gradient, (list, tuple)) else [gradient]
        gradients = [_arrays.numbers(f"gradient {i}", slot) for i, slot in enumerate(slots)]
        for i, each in enumerate(gradients):
            if each.shape != state.shape:
                raise InvalidArgument(f"gradient {i} has the shape {each.shape}; the state has {state.shape}")
            if each.dtype != gradients[0].dtype:
                raise InvalidArgument(f"gradient {i} is of {each.dtype}, gradient 0 of {gradients[0].dtype}")
        if self._matrix and len(state.shape) != 2:
            raise InvalidArgument(f"muon steps matrices; the state has the shape {state.shape}")
        size = math.prod(state.shape)
        first = _arguments.place(first_element, size, _ALIGNMENT)
        weights, *moments = [list(stream.values()) for stream in state.parts.values()]
        return self._core.apply(
            size, state.shape[-1] if state.shape else 1, weights, moments, gradients,
            bool(gradients) and gradients[0].dtype == np.uint16, step=_arguments.integer("step", step),
            tensor=_arguments.integer("tensor", tensor), first_element=first, clip=_arguments.number("clip", clip),
            divide=_arguments.number("divide", len(gradients) if divide is None else divide), skip=nonfinite == "skip",
        )

    def _code_of(self, index: int, format: str, tensor: int, first: int) -> tuple[str, dict[str, Any]]:
        options: dict[str, Any] = {}
        if index > 0 and format in ("dyn8", "dyn4", "fp8", "fp8x32"):
            options["signed"] = index == 1
        if index > 0 and format in ("dyn8", "dyn4", "fp8"):
            options["compat"] = self._kind.compat
        if format == "bf16+8sr":
            options.update(seed=self._seed, step=0, tensor=tensor, first_element=first)
        # Initial weights are rounded to nearest; in bf16 the codes are the same ones.
        return "bf16" if format == "bf16_sr" else format, options


def _numbers(what: str, value: Any, count: int) -> list[Any]:
    try:
        numbers = [] if isinstance(value, str) else list(value)
    except TypeError:
        numbers = []
    if not numbers:
        raise TypeError(f"{what} is {value!r:.40}; it is {count} numbers")
    if len(numbers) != count:
        raise InvalidArgument(f"{what} has {len(numbers)} numbers; it has {count}")
    return numbers


def _hyper(optimizer: str, given: Mapping[str, Any]) -> list[tuple[str, float]]:
    """As _core takes them: numbers one by one. InvalidArgument: a name that the optimizer does not have."""
    known = _HYPERPARAMETERS.get(optimizer, tuple(given))  # of no optimizer: C++ says so
    values: list[tuple[str, float]] = []
    for name, value in given.items():
        if name not in known:
            raise InvalidArgument(f"{optimizer} has no hyper-parameter {name}; it has {', '.join(known)}")
        if name == "adjust_lr_fn":
            if value not in _ADJUST_LR:
                raise InvalidArgument(f"{optimizer}: {name} is {value!r:.40}; it is one of {tuple(_ADJUST_LR)}")
            values.append(("match_rms_adamw", _ADJUST_LR[value]))
            continue
        names = _SEVERAL.get(name, (name,))
        numbers = _numbers(f"{optimizer}: {name}", value, len(names)) if name in _SEVERAL else (value,)
        if name == "ns_steps" and not hasattr(value, "__index__"):
            raise InvalidArgument(f"{optimizer}: ns_steps is {value!r:.40}; it is an integer")
        values += [(each, _arguments.number(f"{optimizer}: {name}", one)) for each, one in zip(names, numbers)]
    return values
