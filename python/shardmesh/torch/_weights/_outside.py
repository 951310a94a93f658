"""Uses of a block's weights by what is no call of the block: the model takes one by itself, a hook does, what the block
has returned, a penalty, an average of models. Each operation of torch is asked which parameters it gets, as DeepSpeed asks
when one is taken from its module (deepspeed/runtime/zero/parameter_offload.py)."""
from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

# Of a tensor's properties, those that have its elements; and methods that do not look at any.
_ELEMENTS = {"data", "H", "T", "imag", "mH", "mT", "real"}
_FACTS = {
    "__hash__", "__len__", "__set__", "__delete__", "data_ptr", "dim", "element_size", "get_device", "is_complex",
    "is_contiguous", "is_floating_point", "is_shared", "ndimension", "nelement", "numel", "register_hook",
    "register_post_accumulate_grad_hook", "requires_grad_", "retain_grad", "share_memory_", "size", "storage_offset",
    "stride", "untyped_storage",
}
_NODES = {"expand_as", "view_as"}  # of a tensor with itself, for the node of its gradient


class Outside(TorchFunctionMode):
    """Of one model. It sees what runs in the threads that enter() it, out of compiled code."""

    def __init__(self, used: Callable[[set[int]], None]) -> None:
        """used: called with units before an operation gets weights of theirs."""
        super().__init__()
        self._used = used
        self._unit_of: dict[int, int] = {}

    def watch(self, weights: Iterable[tuple[int, torch.Tensor]]) -> None:
        """From now on these. weights: parameters with the numbers of their units; somebody else keeps them alive."""
        self._unit_of = {id(tensor): unit for unit, tensor in weights}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not torch.compiler.is_compiling():  # compiled code does not call operations one by one
            units = None
            for value in (*args, *kwargs.values()) if kwargs else args:
                for each in value if isinstance(value, (list, tuple)) else (value,):
                    if id(each) in self._unit_of:
                        units = units or set()
                        units.add(self._unit_of[id(each)])
            if units and _looks_at_elements(func, args):
                self._used(units)
        return func(*args, **kwargs)

    def enter(self) -> None:
        """In this thread, once. Below all modes that others have entered and will leave, but that of
        torch.set_default_device(), which has to be the lowest."""
        modes = _taken_off()
        if self not in modes:
            default = getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None)
            modes.insert(int(default is not None and default in modes[:1]), self)
        _put_on(modes)

    def leave(self) -> None:
        """In whatever thread; in others it does nothing from now on."""
        self._unit_of = {}
        _put_on([mode for mode in _taken_off() if mode is not self])


def _looks_at_elements(func: Any, args: Any) -> bool:
    name = getattr(func, "__name__", "")
    if name in _NODES and len(args) == 2 and args[0] is args[1]:
        return False
    if name == "__get__":
        return getattr(getattr(func, "__self__", None), "__name__", "") in _ELEMENTS
    return name not in _FACTS


def _taken_off() -> list[Any]:
    """The lowest first."""
    modes = [torch._C._pop_torch_function_stack() for _ in range(torch._C._len_torch_function_stack())]
    return modes[::-1]


def _put_on(modes: list[Any]) -> None:
    for mode in modes:
        torch._C._push_on_torch_function_stack(mode)
