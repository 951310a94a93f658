"""What `.grad` shows. Where it could show a part of the gradients alone, or none, every use of it is an error."""
from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Optional

import torch

from ... import errors
from .._modules._backward import hooked
from .._modules._model import Parameter
from .._modules._modes import untraced

_FACTS = {"device", "dtype", "is_cpu", "is_cuda", "is_leaf", "is_meta", "is_sparse", "layout", "ndim", "requires_grad",
          "shape"}
_COMPILER = ("torch._dynamo.", "torch._subclasses.", "torch._guards", "torch.utils._python_dispatch")
_CHECK_OF_A_SCALER = "_amp_foreach_non_finite_check_and_unscale_"
SEVERAL = (
    "lies in several slots, of which .grad could show one; take one slot for each rank (slots=None, pulled=False) to "
    "read or change gradients, clip_norm= to clip them, and leave GradScaler.unscale_() to the job"
)
HANDED_OVER = (
    'was handed over to the service as it came, as residency="bucket" has it; take residency="full" to read or change '
    "gradients, clip_norm= to clip them, and leave GradScaler.unscale_() to the job"
)


class Withheld(torch.Tensor):
    """`.grad` of a gradient that lies elsewhere. FailedPrecondition: any use but of its type, shape and device. Its
    elements are NaN, for code that operates on it below Python."""

    _why: str

    @staticmethod
    def of(parameter: Any, why: str) -> Withheld:
        nowhere = torch.full((), torch.nan, dtype=parameter.grad_dtype, device=parameter.device)
        maker: Any = torch.Tensor._make_subclass
        made: Withheld = maker(Withheld, nowhere.expand(parameter.shape))
        made.__dict__["_why"] = why
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        asked = getattr(getattr(func, "__self__", None), "__name__", "") if name == "__get__" else ""
        if asked in _FACTS or _is_compiling():
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        if name == _CHECK_OF_A_SCALER and float(args[2]) == 1.0:
            return None  # GradScaler.step() looks for infinities, which the job does for the gradients of all ranks
        raise errors.FailedPrecondition(_why(args, kwargs))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Of calls that do not ask __torch_function__, such as torch.tensor() and set_()."""
        if _is_compiling():
            with torch._C._DisableTorchDispatch():
                return func(*args, **(kwargs or {}))
        raise errors.FailedPrecondition(_why(args, kwargs))


def _is_compiling() -> bool:
    """torch.compile asks, which describes the `.grad` of each parameter and computes nothing with it."""
    return str(sys._getframe(2).f_globals.get("__name__")).startswith(_COMPILER)


def _why(args: Any, kwargs: Any) -> str:
    for value in [*args, *(kwargs or {}).values()]:
        for one in value if isinstance(value, (list, tuple)) else [value]:
            if isinstance(one, Withheld):
                return str(one.__dict__["_why"])
    return f"a gradient {SEVERAL}"


class Shown:
    """`.grad` of an optimizer's trainable parameters, and the hooks that see gradients come."""

    def __init__(self, parameters: Sequence[Parameter], arrived: Callable[[int, torch.Tensor], None]) -> None:
        """arrived: called when autograd has left a gradient in `.grad`."""
        self._parameters = parameters
        self._withheld: list[Optional[Withheld]] = [None] * len(parameters)
        self._hidden = [False] * len(parameters)
        self._reason = ""
        seen = untraced(arrived)
        self._nodes: list[Any] = []  # of autograd, which makes others, without hooks, where nobody has them
        self._handles: list[Any] = [
            hooked(parameter.tensor).register_post_accumulate_grad_hook(partial(seen, index))
            for index, parameter in enumerate(parameters)
        ]

    def withhold(self, reason: str, window: Callable[[int], Optional[torch.Tensor]], first: bool) -> None:
        """From now on gradients may be hidden. window: what one that comes is to be added to; None: nothing. first: no
        other hook of a parameter sees its gradient, and nobody may put one there."""
        already, self._reason = bool(self._reason), self._reason or reason
        if already:
            return
        comes = untraced(self._comes)
        for index, parameter in enumerate(self._parameters):
            if first:
                _put_last_one_first(hooked(parameter.tensor)._post_accumulate_grad_hooks)
            node: Any = torch.autograd.graph.get_gradient_edge(parameter.tensor).node
            self._nodes.append(node)
            self._handles.append(node.register_prehook(partial(comes, index, window, first)))

    def _comes(
        self, index: int, window: Callable[[int], Optional[torch.Tensor]], check: bool, _: Any
    ) -> None:
        if check:
            self.check(index, None)
        if self._hidden[index]:
            self._parameters[index].tensor.grad = window(index)

    def hide(self, index: int) -> None:
        """REQUIRES: withhold()."""
        tensor = self._parameters[index].tensor
        if (withheld := self._withheld[index]) is None:
            why = f"the gradient of {self._parameters[index].name} {self._reason}"
            withheld = self._withheld[index] = Withheld.of(tensor, why)
        self._hidden[index] = True
        tensor.grad = withheld

    def hide_all(self) -> None:
        for index in range(len(self._parameters)):
            self.hide(index)

    def drop(self, index: int) -> None:
        """What has come goes nowhere."""
        self._parameters[index].tensor.grad = self._withheld[index] if self._hidden[index] else None

    def show(self, index: int, window: Optional[torch.Tensor]) -> None:
        """As check() wants it, whatever was put there."""
        self._parameters[index].tensor.grad = self._withheld[index] if self._hidden[index] else window

    def clear(self) -> None:
        """Of a step that begins: there is none."""
        for parameter in self._parameters:
            parameter.tensor.grad = None
        self._hidden = [False] * len(self._parameters)

    def check(self, index: int, window: Optional[torch.Tensor]) -> None:
        """FailedPrecondition: `.grad` is neither hidden nor this window. What was put there by hand would be lost."""
        parameter, gradient = self._parameters[index], self._parameters[index].tensor.grad
        if gradient is (self._withheld[index] if self._hidden[index] else window):
            return
        if gradient is None and self._hidden[index] and self._reason == HANDED_OVER:
            for other, hidden in enumerate(self._hidden):
                if hidden:
                    self.show(other, None)
            raise errors.FailedPrecondition(
                f".grad of {parameter.name} was set to None after a backward, as by model.zero_grad(), but its gradient "
                "was handed over to the service as it came, as residency=\"bucket\" has it, and counts: call step() "
                "again, and optimizer.zero_grad() instead from then on"
            )
        if gradient is None:
            raise errors.FailedPrecondition(
                f".grad of {parameter.name} was set to None after a backward, as by model.zero_grad(), but its gradient "
                "is in the step already: call optimizer.zero_grad(), and begin the step's backwards again"
            )
        raise errors.FailedPrecondition(
            f"the gradient of {parameter.name} was put into .grad by hand, which takes one slot for each rank "
            "(slots=None) and residency=\"full\"; here gradients come of backward() alone"
        )

    def release(self) -> None:
        """Parameters have no gradients, and take those of their own type."""
        for handle in self._handles:
            handle.remove()
        self._handles, self._nodes = [], []
        self.clear()
        for parameter in self._parameters:
            parameter.tensor.grad_dtype = parameter.tensor.dtype


def _put_last_one_first(hooks: Any) -> None:
    """In the order in which autograd calls them."""
    *others, last = list(hooks.items())
    hooks.clear()
    hooks.update([last, *others])
