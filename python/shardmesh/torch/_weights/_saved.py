"""What autograd saves within a unit's calls, and when a backward takes it out: then it needs the unit's weights.

A node's saved tensors are all that is known of a backward for certain. What a call returns is not: results may leave
it in objects, lists and attributes.
"""
from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, Optional

import torch

_autograd: Any = torch._C._autograd
Hooks = tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]


class _Tensor(NamedTuple):
    """A saved one."""

    unit: int  # whose weights it is, or within whose call it was saved
    version: int
    data: Any  # the tensor, or what the hooks around made of it


class Weight(NamedTuple):
    """Where a weight lies."""

    begin: int
    end: int
    unit: int
    name: str


class Memory:
    """Where the weights of units lie."""

    def __init__(self, weights: Iterable[tuple[int, str, torch.Tensor]]) -> None:
        """weights: tensors with the numbers of their units, and the names of the parameters."""
        self._weights = sorted(
            Weight(memory.data_ptr(), memory.data_ptr() + memory.nbytes(), unit, name)
            for unit, name, memory in ((unit, name, tensor.untyped_storage()) for unit, name, tensor in weights)
        )
        self._begins = [weight.begin for weight in self._weights]

    def find(self, tensor: torch.Tensor) -> Optional[Weight]:
        """None: it is no weight of a unit, nor a part of one."""
        try:
            address = tensor.data_ptr()
        except RuntimeError:  # it has no memory of its own, as within transforms of functions
            return None
        at = bisect_right(self._begins, address) - 1
        return self._weights[at] if at >= 0 and address < self._weights[at].end else None


class Saving:
    """The hooks of saved tensors for one call of a unit. Hooks that were there before, such as a checkpoint's or the
    user's, get each tensor as they would without these.
    """

    def __init__(
        self, unit: int, memory: Memory, read: Callable[[Weight], None], needed: Callable[[int], None],
        around: Optional[Hooks],
    ) -> None:
        """read: called with a weight of another unit that this one reads. needed: called with a unit before a node
        uses its weights."""
        self.unit, self._memory, self._read, self._needed, self._around = unit, memory, read, needed, around

    def _pack(self, tensor: torch.Tensor) -> _Tensor:
        unit = self.unit
        if (weight := self._memory.find(tensor)) is not None and weight.unit != unit:
            self._read(weight)
            unit = weight.unit
        if self._around is not None:
            return _Tensor(unit, 0, self._around[0](tensor))
        # A tensor that is its node's own result would keep itself.
        return _Tensor(unit, tensor._version, tensor.detach() if tensor.requires_grad else tensor)

    def _unpack(self, saved: _Tensor) -> torch.Tensor:
        if self._around is None:
            tensor: torch.Tensor = saved.data
            if tensor._version != saved.version:
                raise RuntimeError(
                    "one of the variables needed for gradient computation has been modified by an inplace operation: "
                    f"[{tensor.type()} {list(tensor.shape)}] is at version {tensor._version}; expected version "
                    f"{saved.version} instead"
                )
        else:
            tensor = self._around[1](saved.data)  # may run a forward
        self._needed(saved.unit)
        return tensor

    def enter(self) -> None:
        _autograd._push_saved_tensors_default_hooks(self._pack, self._unpack)

    def leave(self) -> None:
        """Unless others are above, which an interrupted call has left."""
        if innermost() is self:
            _autograd._pop_saved_tensors_default_hooks()


def saving(
    unit: int, memory: Memory, read: Callable[[Weight], None], needed: Callable[[int], None]
) -> Optional[Saving]:
    """For a call that begins now. None: torch allows no such hooks here, as within torch.func.grad."""
    if not _autograd._saved_tensors_hooks_is_enabled():
        return None
    around = _autograd._top_saved_tensors_default_hooks(True)
    outer = None if around is None else getattr(around[0], "__self__", None)
    return Saving(unit, memory, read, needed, outer._around if isinstance(outer, Saving) else around)


def innermost() -> Optional[Saving]:
    """Whose hooks the next saved tensor gets. None: none at all, or somebody else's."""
    top = _autograd._top_saved_tensors_default_hooks(True)
    found = None if top is None else getattr(top[0], "__self__", None)
    return found if isinstance(found, Saving) else None
