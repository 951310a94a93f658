"""`optimizer.state` of an optimizer whose states lie in the service: nothing. What would read or write states is an error."""
from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterator
from typing import Any, NoReturn

import torch

from .. import errors
from ._job._session import LOG

_HOW = (
    "state_dict() has the states, and load_state_dict() takes others. To reset them: state = optimizer.state_dict(); "
    'optimizer.load_state_dict({**state, "state": {}})'
)


def refused(what: str) -> errors.FailedPrecondition:
    return errors.FailedPrecondition(f"{what}: the states of this optimizer lie in the service, not in optimizer.state; {_HOW}")


class NoStates(defaultdict[torch.Tensor, Any]):
    """Empty for whoever asks how many there are, or loops over them, as programs do that move states to a device. A
    loop could also be meant to reset states, so the first one, after a step, is logged. A copy is a plain dict."""

    def __init__(self) -> None:
        super().__init__(dict)
        self.has_states, self._told = False, False  # has_states: the service, after a step

    def _tell(self) -> None:
        if not self._told and self.has_states and not _is_torch_s(sys._getframe(2).f_globals.get("__name__")):
            self._told = True
            LOG.warning("a loop over optimizer.state finds nothing, and changes nothing: the states of this optimizer lie "
                        "in the service. %s", _HOW)

    def __iter__(self) -> Iterator[torch.Tensor]:
        self._tell()
        return super().__iter__()

    def keys(self) -> Any:
        self._tell()
        return super().keys()

    def values(self) -> Any:
        self._tell()
        return super().values()

    def items(self) -> Any:
        self._tell()
        return super().items()

    def __missing__(self, key: Any) -> NoReturn:
        raise refused("optimizer.state[...] was read")

    def __setitem__(self, key: Any, value: Any) -> NoReturn:
        raise refused("optimizer.state[...] was assigned")

    def __delitem__(self, key: Any) -> NoReturn:
        raise refused("del optimizer.state[...]")

    def __ior__(self, other: Any) -> NoReturn:  # type: ignore[misc]
        raise refused("optimizer.state |= ...")

    def clear(self) -> NoReturn:
        raise refused("optimizer.state.clear()")

    def update(self, *_: Any, **__: Any) -> NoReturn:
        raise refused("optimizer.state.update()")

    def setdefault(self, *_: Any) -> NoReturn:
        raise refused("optimizer.state.setdefault()")

    def pop(self, *_: Any) -> NoReturn:
        raise refused("optimizer.state.pop()")

    def popitem(self) -> NoReturn:
        raise refused("optimizer.state.popitem()")

    def copy(self) -> Any:
        return defaultdict(dict)

    def __copy__(self) -> Any:
        return defaultdict(dict)

    def __reduce__(self) -> Any:
        return defaultdict, (dict,)


def _is_torch_s(module: object) -> bool:
    return str(module).startswith("torch.")
