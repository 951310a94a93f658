"""What the ranks of one machine tell each other beside the job: which process each is, and what it leaves or refuses.
They tell it in torch.distributed's store, or torchrun's."""
from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable
from typing import Any, NamedTuple, Optional

_ANSWER_SECONDS = 5.0  # that the store may take where nothing else is said
_LATE_SECONDS = 0.05  # the same, while an earlier call has no answer
_IN, _OUT = b"in", b"out"


class Late(RuntimeError):
    """The store did not answer in time."""


class Store:
    """A store of torch whose calls all have a limit. Torch's own have none for the handshake with a server that is
    stopped (SIGSTOP), nor for most answers. After one that was late, others fail soon, until it has come.

    RuntimeError: Late, or what torch raises."""

    def __init__(self, opens: Callable[[], Any], seconds: float) -> None:
        self._calls: queue.SimpleQueue[tuple[Callable[[], Any], queue.SimpleQueue[tuple[Any, Any]]]]
        self._calls = queue.SimpleQueue()
        self._late = False
        self._gone: Optional[RuntimeError] = None
        threading.Thread(target=_answer, args=(self._calls,), name="shardmesh-store", daemon=True).start()
        self._store = self._call(opens, seconds)

    def set(self, key: str, value: str, seconds: float = _ANSWER_SECONDS) -> None:
        self._call(lambda: self._store.set(key, value), seconds)

    def get(self, key: str, seconds: float = _ANSWER_SECONDS) -> Optional[bytes]:
        """None: it is not there."""
        said: Optional[bytes] = self._call(
            lambda: bytes(self._store.get(key)) if self._store.check([key]) else None, seconds
        )
        return said

    def _call(self, call: Callable[[], Any], seconds: float) -> Any:
        if self._gone is not None:
            raise self._gone  # torch would say so each time, with its stack
        answer: queue.SimpleQueue[tuple[Any, Any]] = queue.SimpleQueue()
        self._calls.put((call, answer))
        try:
            result, error = answer.get(timeout=max(min(seconds, _LATE_SECONDS if self._late else seconds), 0.001))
        except queue.Empty:
            self._late = True
            raise Late(f"the store did not answer within {seconds:g} s") from None
        self._late = False
        if isinstance(error, RuntimeError):
            self._gone = error
        if error is not None:
            raise error
        return result


def _answer(calls: Any) -> None:
    """Of one store, in a thread of its own: one that is never answered holds up nobody else."""
    while True:
        call, answer = calls.get()
        try:
            answer.put((call(), None))
        except BaseException as error:
            answer.put((None, error))
        del call, answer


class Process(NamedTuple):
    """One of this machine, whatever process gets its number later."""

    pid: int
    start: str  # when it began, as proc(5) has it
    space: str  # in which its number counts

    @classmethod
    def own(cls) -> Process:
        pid = os.getpid()
        return cls(pid, _stat(pid)[1], _space())

    @classmethod
    def read(cls, text: bytes) -> Process:
        pid, start, space = text.decode().split(" ")
        return cls(int(pid), start, space)

    def __str__(self) -> str:
        return f"{self.pid} {self.start} {self.space}"

    @property
    def ended(self) -> bool:
        """Known to have."""
        state, start = _stat(self.pid)
        return self.space == _space() and (state in ("", "Z") or start != self.start)

    @property
    def stopped(self) -> bool:
        """By SIGSTOP."""
        return self.space == _space() and _stat(self.pid)[0] == "T"


def _stat(pid: int) -> tuple[str, str]:
    """State and start; "": there is no such process."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b") ")[2].decode().split(" ")
    except OSError:
        return "", ""
    return fields[0], fields[19]


def _space() -> str:
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


class Board:
    """Of the ranks that use one service. What cannot be read, since the store is gone, counts as not said; a process
    that was read once is known without the store."""

    def __init__(self, store: Store, key: str, rank: int, timeout: float) -> None:
        """RuntimeError: the store does not take what this rank says of itself, within the timeout."""
        self.rank, self._store, self._key = rank, store, key
        self._seconds = min(_ANSWER_SECONDS, timeout)
        self._processes: dict[int, Process] = {}
        store.set(f"{key}/process/{rank}", str(Process.own()), self._seconds)

    def process(self, rank: int) -> Optional[Process]:
        """The newest one of that rank; None: it has not come."""
        said = self._read(f"process/{rank}")
        if said is not None:
            self._processes[rank] = Process.read(said)
        return self._processes.get(rank)

    def enter(self, job: str) -> None:
        self._say(f"job/{self.rank}/{job}", _IN.decode())

    def leave(self, job: str) -> None:
        self._say(f"job/{self.rank}/{job}", _OUT.decode())

    def left(self, rank: int, job: str) -> Optional[int]:
        """The process of a rank that ended, or left the job. None: it is not known to."""
        known = self._processes.get(rank)
        process = known if rank == 0 and known is not None and known.ended else self.process(rank)
        if process is None:
            return None
        return process.pid if process.ended or self._read(f"job/{rank}/{job}") == _OUT else None

    def refuse(self, job: str, change: int, why: str) -> None:
        """Other ranks wait for the job's weights to change, and they do not. change: counts those of this job."""
        self._say(f"refused/{job}/{change}", why)

    def refused(self, job: str, change: int) -> Optional[str]:
        """Why."""
        said = self._read(f"refused/{job}/{change}")
        return None if said is None else said.decode()

    def _say(self, what: str, text: str) -> None:
        try:
            self._store.set(f"{self._key}/{what}", text, self._seconds)
        except RuntimeError:
            pass

    def _read(self, what: str) -> Optional[bytes]:
        try:
            return self._store.get(f"{self._key}/{what}", self._seconds)
        except RuntimeError:
            return None
