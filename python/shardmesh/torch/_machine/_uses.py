"""The uses that a process makes of a service which ranks of its training started: it ends with the last one, whatever
order its optimizers are closed in."""
from __future__ import annotations

from typing import Optional, Protocol

from ... import _tls
from ._board import Board


class Running(Protocol):
    """A service that can be used. close() ends it, if this process started it."""

    @property
    def address(self) -> str: ...

    @property
    def board(self) -> Optional[Board]:
        """What its ranks tell each other; None: there are no others, or it is somebody else's service."""

    def close(self, at_once: bool = False) -> None: ...

    def failed(self, error: BaseException) -> BaseException:
        """This rank ends with `error` before it began: closes at once. Returns what to raise: that, or the error of
        rank 0 that it came from."""


class _Shared:
    """A service that this process uses several times: other optimizers may be given its address. It ends with its last
    use, whatever order they are closed in."""

    def __init__(self, running: Running) -> None:
        self.running, self.uses = running, 0


class _Use:
    """One use of it."""

    def __init__(self, shared: _Shared) -> None:
        self._shared, self._ended = shared, False
        self.address, self.board = shared.running.address, shared.running.board
        shared.uses += 1

    def _leave(self) -> bool:
        """Whether it was the last one."""
        if self._ended:
            return False
        self._ended = True
        self._shared.uses -= 1
        if self._shared.uses == 0:
            _shared.pop(self.address, None)
            _tls.ends(self.address)
        return self._shared.uses == 0

    def close(self, at_once: bool = False) -> None:
        if self._leave():
            self._shared.running.close(at_once)

    def failed(self, error: BaseException) -> BaseException:
        return self._shared.running.failed(error) if self._leave() else error


_shared: dict[str, _Shared] = {}  # by address


def first(running: Running) -> Running:
    """Of a service that has just started."""
    shared = _shared[running.address] = _Shared(running)
    _tls.begins(running.address)
    return _Use(shared)


def again(address: str) -> Optional[Running]:
    """Another one. None: this process does not use it, or it is somebody else's."""
    return _Use(_shared[address]) if address in _shared else None
