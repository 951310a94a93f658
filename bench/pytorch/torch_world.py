"""Ranks of a benchmark: processes of one thread each, which sleep at a pipe until they are asked for something.

  world = World("ddp", make, ranks=2)      # make(setup) is called in each process when it is first asked
  answers = world.ask("step", 7)           # of each rank: make(setup).step(7)
"""
from __future__ import annotations

import ctypes
import datetime
import logging
import multiprocessing
import os
import tempfile
import time
import warnings
from typing import Any, Callable, NamedTuple, Optional

os.environ["OMP_NUM_THREADS"] = "1"
os.environ["GLOO_SOCKET_IFNAME"] = "lo"
warnings.simplefilter("ignore")
logging.disable(logging.WARNING)

import torch
import torch.distributed as dist

SECONDS = 300  # an answer takes at most; the first step of 8-bit AdamW compiles
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of mallopt
PR_SET_PDEATHSIG, PR_SET_TIMERSLACK = 1, 29  # of prctl


class Setup(NamedTuple):
    """Who a rank is, and where it trains."""

    rank: int
    ranks: int
    slots: int
    meeting: str  # a file where gloo's ranks find each other
    service: Optional[str] = None  # a coordinator's address
    trim: bool = False  # memory that is freed goes back at once, which takes time
    pinned: bool = False  # to a core of its own

    def join_group(self) -> None:
        """Of gloo."""
        limit = datetime.timedelta(seconds=SECONDS)
        dist.init_process_group("gloo", f"file://{self.meeting}", rank=self.rank, world_size=self.ranks, timeout=limit)


def rank_main(link: Any, make: Callable[[Setup], Any], setup: Setup) -> None:
    libc = ctypes.CDLL(None)
    libc.prctl(PR_SET_PDEATHSIG, 9)  # ends with the one that asks
    libc.prctl(PR_SET_TIMERSLACK, 1)  # sleeps end when they should
    if setup.trim:
        libc.mallopt(M_MMAP_THRESHOLD, 64 << 10)
        libc.mallopt(M_TRIM_THRESHOLD, 0)
    if setup.pinned:
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[setup.rank % len(cores)]})
    torch.set_num_threads(1)
    made: Any = None
    while True:
        what, *arguments = link.recv()
        try:
            made = made or make(setup)
            link.send(("ok", getattr(made, what)(*arguments)))
        except BaseException as error:  # whatever the packages raise is the answer
            text = " ".join(f"{type(error).__name__}: {error}".split())
            link.send(("error", text if len(text) < 600 else "..." + text[-597:]))


class World:
    """The ranks of one arm. RuntimeError: one of them failed, or is silent; the message says why."""

    def __init__(self, arm: str, make: Callable[[Setup], Any], ranks: int, slots: int = 0, **setup: Any) -> None:
        """setup: of Setup's."""
        context = multiprocessing.get_context("fork")
        self.arm, self.ranks = arm, ranks
        self._folder = tempfile.TemporaryDirectory(prefix="bench-ranks-")
        first = Setup(0, ranks, slots or ranks, f"{self._folder.name}/ranks", **setup)
        pipes = [context.Pipe() for _ in range(ranks)]
        self._links = [mine for mine, _ in pipes]
        self._processes = [
            context.Process(target=rank_main, args=(theirs, make, first._replace(rank=rank)), daemon=True)
            for rank, (_, theirs) in enumerate(pipes)
        ]
        for process in self._processes:
            process.start()

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes if process.pid]

    def ask(self, *words: Any) -> list[Any]:
        """What each rank answers."""
        for link in self._links:
            link.send(words)
        answers, deadline = [], time.monotonic() + SECONDS
        for rank, link in enumerate(self._links):
            if not link.poll(max(0, deadline - time.monotonic())):
                raise RuntimeError(f"{self.arm}: rank {rank} is silent for {SECONDS} s")
            kind, answer = link.recv()
            if kind == "error":
                raise RuntimeError(f"{self.arm}: rank {rank}: {answer}")
            answers.append(answer)
        return answers

    def close(self) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        self._folder.cleanup()


def why_not_ours() -> str:
    try:
        import shardmesh.torch as _
    except ImportError as error:
        return f"no shardmesh.torch ({error})"
    return ""


def first_line(error: BaseException) -> str:
    return str(error).splitlines()[0][:300] if str(error) else type(error).__name__
