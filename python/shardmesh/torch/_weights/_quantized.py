"""deliver="quantized": layers that take their weight as the codes and scales that were gathered, so that no decoded
copy of it is kept.

    y = x W^T, W = codes * scale (int8) or codes / scale (fp8), a scale for each row of W or for all of it. Products are
    of the activations and the codes in the activations' type; scales come in before or behind, in fp32.

The parameter stays what it is to everybody else: its name, shape, `.grad`; its elements read as NaN. Of the layers that
are compiled, all of this is traced: views, casts and matrix products.
"""
from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Optional

import torch

from ... import errors
from .._job._memory import Weights
from .._modules._canonical import is_naming
from .._modules._model import Parameter

FORMATS = ("int8_row", "fp8_row", "fp8_tensor")


def _scaled(values: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    scaled = values * scales if codes.dtype == torch.int8 else values / scales
    return scaled.to(values.dtype)


def _behind(x: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """x W^T"""
    return _scaled(x @ codes.to(x.dtype).t(), codes, scales)


def _before(x: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """x W"""
    return _scaled(x, codes, scales) @ codes.to(x.dtype)


class _Product(torch.autograd.Function):
    """x W^T, or x W. The weight is there for its gradient, which is what autograd computes of a decoded one."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, transposed: bool
    ) -> torch.Tensor:
        ctx.save_for_backward(x, codes, scales)
        ctx.transposed = transposed
        return (_behind if transposed else _before)(x, codes, scales)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        x, codes, scales = ctx.saved_tensors
        of_x = of_weight = None
        if ctx.needs_input_grad[0]:
            of_x = (_before if ctx.transposed else _behind)(gradient, codes, scales)
        if ctx.needs_input_grad[1]:
            of_weight = gradient.t().mm(x) if ctx.transposed else x.t().mm(gradient)
        return of_x, of_weight, None, None, None


class _Codes:
    """What a quantized layer has beside its parameters. No buffers: a state_dict() has no codes."""

    codes: Optional[torch.Tensor]  # None: the weight itself is there
    scales: torch.Tensor

    def product(self, x: torch.Tensor, weight: torch.Tensor, transposed: bool) -> torch.Tensor:
        assert self.codes is not None
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        flat = x.reshape(-1, x.shape[-1])
        y = _Product.apply(flat, weight, self.codes, self.scales, transposed)  # type: ignore[no-untyped-call]
        return y.view(*x.shape[:-1], y.shape[-1])  # type: ignore[no-any-return]


class QuantizedLinear(_Codes, torch.nn.Linear):
    """A Linear while its weight is delivered as codes."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.codes is None:
            return super().forward(x)
        y = self.product(x, self.weight, True)
        return y if self.bias is None else y + self.bias.to(y.dtype)


def _quantized_class(kind: type) -> Optional[type]:
    """None: such a layer needs its weight decoded. Conv1D is that of transformers, with rows of inputs."""
    if kind is torch.nn.Linear:
        return QuantizedLinear
    conv1d = getattr(sys.modules.get("transformers.pytorch_utils"), "Conv1D", None)
    return _conv1d(kind) if kind is conv1d else None


_CONV1D: dict[type, type] = {}


def _conv1d(base: Any) -> type:
    if base not in _CONV1D:

        class QuantizedConv1D(_Codes, base):  # type: ignore[misc]
            """A Conv1D while its weight is delivered as codes."""

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                if self.codes is None:
                    return super().forward(x)  # type: ignore[no-any-return]
                y: torch.Tensor = self.product(x, self.weight, False)
                result: torch.Tensor = y + self.bias.to(y.dtype)
                return result

        _CONV1D[base] = QuantizedConv1D
    return _CONV1D[base]


class Delivery:
    """The layers of a model that can take codes, by the index of the parameter that is their weight."""

    def __init__(self, model: torch.nn.Module, parameters: Sequence[Parameter]) -> None:
        self._parameters = parameters
        self._handles: dict[int, list[Any]] = {}
        users: dict[int, list[tuple[torch.nn.Module, str]]] = {}
        for module in model.modules():
            for name, tensor in module._parameters.items():
                users.setdefault(id(tensor), []).append((module, name))
        self._layers: dict[int, list[Any]] = {}
        for index, parameter in enumerate(parameters):
            layers = users.get(id(parameter.tensor), [])
            if layers and all(name == "weight" and _quantized_class(type(layer)) is not None for layer, name in layers):
                self._layers[index] = [module for module, _ in layers]
        self._empty = {index: without_memory(parameters[index].tensor) for index in self._layers}
        self._kinds = {index: type(layers[0]) for index, layers in self._layers.items()}

    def takes(self, index: int, source: Weights) -> bool:
        on_cpu = self._parameters[index].tensor.device.type == "cpu"
        return index in self._layers and source.format in FORMATS and on_cpu

    def deliver(self, index: int, source: Weights, value: Optional[Callable[[int], torch.Tensor]]) -> None:
        """The layers have these codes, and the parameter no memory. value: what a state_dict() has of it; None:
        somebody else sees to that."""
        codes, scales = source.parts["codes"], source.parts["scales"].view(-1)
        for layer in self._layers[index]:
            layer.codes = codes if codes.dtype == torch.int8 else codes.view(torch.float8_e4m3fn)
            layer.scales = scales
            layer.__class__ = _quantized_class(self._kinds[index])
        self._parameters[index].tensor.data = self._empty[index]
        if index not in self._handles:
            self._handles[index] = [
                layer.register_load_state_dict_pre_hook(partial(self._before_load, index))
                for layer in self._layers[index]
            ]
            if value is not None:
                self._handles[index] += [
                    layer._register_state_dict_hook(partial(_into_state_dict, index, value))
                    for layer in self._layers[index]
                ]

    def quantized(self, index: int) -> bool:
        """Whether the parameter has no memory now."""
        return self._layers[index][0].codes is not None

    def decoded(self, index: int, values: torch.Tensor) -> None:
        """The parameter has these, and the layers use it, until deliver()."""
        tensor = self._parameters[index].tensor
        tensor.data = values.to(tensor.dtype)
        for layer in self._layers[index]:
            layer.codes = None

    def withdraw(self, index: int, values: torch.Tensor) -> None:
        """For good."""
        self.decoded(index, values)
        for handle in self._handles.pop(index, []):
            handle.remove()
        for layer in self._layers[index]:
            layer.__class__ = self._kinds[index]
            del layer.codes, layer.scales

    def _before_load(self, index: int, module: Any, state_dict: Any, prefix: str, *_: Any) -> None:
        if prefix + "weight" in state_dict:
            tensor = self._parameters[index].tensor
            self.decoded(index, tensor.new_full(tensor.shape, torch.nan))


def _into_state_dict(
    index: int, value: Callable[[int], torch.Tensor], module: Any, state_dict: dict[str, Any], prefix: str, _: Any
) -> None:
    if prefix + "weight" in state_dict and not is_naming():
        state_dict[prefix + "weight"] = value(index)


def without_memory(tensor: torch.Tensor) -> torch.Tensor:
    """Of its type and shape; reads as NaN."""
    return torch.full((), torch.nan, dtype=tensor.dtype).expand(tensor.shape)
