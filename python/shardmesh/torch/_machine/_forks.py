"""A forked child has the weights that were there when it was forked, as it has all other memory of its parent. What the
service changes afterwards it would see otherwise, in the middle of its forward."""
from __future__ import annotations

import os
import select
import subprocess
import sys
import threading
from types import FrameType
from typing import Optional, Protocol
from weakref import WeakSet

_WAIT_MS = 60_000  # for a child to copy the weights; it may also have been killed
_WITHOUT = (os.path.join("torch", "utils", "data", "dataloader.py"), subprocess.__file__)

_lock = threading.Lock()  # of one fork at a time: else a child would hold the other's pipe open
_pipe: Optional[tuple[int, int]] = None
_registered = False


class HasWeights(Protocol):
    def keep(self) -> None:
        """What it shows now stays, whatever the service does."""


_live: WeakSet[HasWeights] = WeakSet()


def add(one: HasWeights) -> None:
    """Each forked child calls keep(), while the parent waits, as long as the object is there."""
    global _registered
    _live.add(one)
    if not _registered:
        _registered = True
        os.register_at_fork(before=_before, after_in_parent=_in_parent, after_in_child=_in_child)


def remove(one: HasWeights) -> None:
    _live.discard(one)


def _before() -> None:
    global _pipe
    _lock.acquire()
    _pipe = os.pipe() if _live and not _reads_no_weights() else None


def _in_parent() -> None:
    pipe = _pipe
    if pipe is not None:
        os.close(pipe[1])
    _lock.release()
    if pipe is not None:
        ended = select.poll()
        ended.register(pipe[0], select.POLLIN)
        ended.poll(_WAIT_MS)
        os.close(pipe[0])


def _in_child() -> None:
    pipe = _pipe
    _lock.release()
    if pipe is not None:
        try:
            for one in list(_live):
                one.keep()
        finally:
            os.close(pipe[0])
            os.close(pipe[1])


def _reads_no_weights() -> bool:
    """Workers of a DataLoader, and programs that are about to run, need no copy of them."""
    frame: Optional[FrameType] = sys._getframe()
    while frame is not None and not frame.f_code.co_filename.endswith(_WITHOUT):
        frame = frame.f_back
    return frame is not None
