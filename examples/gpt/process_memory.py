"""What processes hold in memory, each page once: pages that several processes share count as fractions that add up.

Anonymous and shared memory alone: of programs and libraries, which are files, it depends on chance how much is mapped.

  tree([pid])            the process and all of its descendants
  held_bytes(pids)
  with Peak(pids) as peak: ...        # a thread looks again and again; peak.bytes afterwards
"""
from __future__ import annotations

import pathlib
import threading
from types import TracebackType
from typing import Iterable, Optional, Type

FIELDS = ("Pss_Anon:", "Pss_Shmem:")


def tree(pids: Iterable[int]) -> list[int]:
    found, open_ends = [], list(pids)
    while open_ends:
        pid = open_ends.pop()
        found.append(pid)
        for task in pathlib.Path(f"/proc/{pid}/task").glob("*/children"):
            try:
                open_ends += map(int, task.read_text().split())
            except OSError:  # it has just ended
                pass
    return found


def held_bytes(pids: Iterable[int], fields: tuple[str, ...] = FIELDS) -> int:
    """With fields=("Pss:",) files that are mapped count, too. Processes that ended hold nothing."""
    total = 0
    for pid in pids:
        try:
            lines = pathlib.Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        except OSError:
            continue
        total += sum(int(line.split()[1]) for line in lines if line.startswith(fields)) * 1024
    return total


class Peak:
    """The most that the processes held at once, as far as it was seen."""

    def __init__(self, pids: Iterable[int], fields: tuple[str, ...] = FIELDS, seconds: float = 0.001) -> None:
        self._pids, self._fields, self._seconds = list(pids), fields, seconds
        self.bytes, self.looks = 0, 0
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def _look(self) -> None:
        while not self._end.wait(self._seconds):
            self.bytes = max(self.bytes, held_bytes(self._pids, self._fields))
            self.looks += 1

    def __enter__(self) -> Peak:
        self._thread.start()
        return self

    def __exit__(self, kind: Optional[Type[BaseException]], error: Optional[BaseException],
                 trace: Optional[TracebackType]) -> None:
        self._end.set()
        self._thread.join()
