"""The other ranks of a job: who has left it before anybody could miss them in a step, and changes of weights that all wait
for. It is known where the ranks share a service of their own."""
from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Optional

from ... import errors
from ._board import Board


class Others:
    """Of one optimizer. Without a board nothing is known."""

    def __init__(self, board: Optional[Board], job: str, rank: int) -> None:
        self._board, self._job, self._rank = board, job, rank
        self._changes = 0  # of the weights, for which every rank makes the same calls

    @property
    def are_known(self) -> bool:
        return self._board is not None

    def enter(self) -> None:
        if self._board is not None:
            self._board.enter(self._job)

    def leave(self) -> None:
        if self._board is not None:
            self._board.leave(self._job)

    def left(self, rank: int) -> Optional[int]:
        """The process of a rank that ended, or left the job. None: it is not known to."""
        return None if self._board is None else self._board.left(rank, self._job)

    def check_host(self, what: str, error: BaseException) -> None:
        """Raises FailedPrecondition from `error`: rank 0, whose service it was, has left."""
        pid = None if self._rank == 0 else self.left(0)
        if pid is not None:
            raise self._without_host(what, pid) from error

    def _without_host(self, what: str, pid: int) -> errors.Error:
        return errors.FailedPrecondition(
            f"{what} of job {self._job} needs rank 0 (pid {pid}), which left the job: its process ended, or it closed its "
            "optimizer, and the service of this training ends with it; look at how that rank ended"
        )

    @contextlib.contextmanager
    def change(self) -> Iterator[None]:
        """Around a change of the job's weights. Rank 0 makes it; other ranks hear of its error."""
        self._changes += 1
        try:
            yield
        except BaseException as error:
            if self._board is not None and self._rank == 0:
                self._board.refuse(self._job, self._changes, str(error) or type(error).__name__)
            raise

    def check_change(self) -> None:
        """FailedPrecondition: rank 0 will not make the change that this rank waits for."""
        if self._board is None:
            return
        pid = None if self._rank == 0 else self.left(0)
        why = self._board.refused(self._job, self._changes)  # rank 0 says so before it leaves
        if why is not None:
            raise errors.FailedPrecondition(
                f"rank 0 could not change the weights of job {self._job}, which are as they were: {why}"
            )
        if pid is not None:
            raise self._without_host("the change of weights", pid)
