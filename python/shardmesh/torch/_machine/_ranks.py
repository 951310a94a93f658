"""Which rank this process is, of how many."""
from __future__ import annotations

import os
from typing import NamedTuple

import torch.distributed

from ... import errors


class Ranks(NamedTuple):
    rank: int
    world: int

    def slots(self, total: int | None) -> range:
        """Those of this rank, of `total`; None: one for each rank. InvalidArgument: they cannot be shared out."""
        count = self.world if total is None else total
        if count < 1 or count % self.world:
            raise errors.InvalidArgument(
                f"slots={total} cannot be shared out evenly over {self.world} ranks; give a multiple of {self.world}"
            )
        each = count // self.world
        return range(self.rank * each, (self.rank + 1) * each)


def check_process(pid: int) -> None:
    """FailedPrecondition: this is a fork of that process, whose memory of gradients it shares."""
    if os.getpid() != pid:
        raise errors.FailedPrecondition(
            f"process {os.getpid()} was forked from {pid}, which made this optimizer; make one in each process that is "
            "started anew (multiprocessing: \"spawn\" or \"forkserver\"), or fork before the first optimizer is made"
        )


def ranks() -> Ranks:
    """As torch.distributed has them, where it is initialised; else as torchrun's environment has them; else one."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return Ranks(torch.distributed.get_rank(), torch.distributed.get_world_size())
    found = os.environ.get("RANK"), os.environ.get("WORLD_SIZE")
    if found == (None, None):
        return Ranks(0, 1)
    try:
        rank, world = int(found[0] or ""), int(found[1] or "")
    except ValueError:
        rank, world = -1, 0
    if not 0 <= rank < world:
        raise errors.InvalidArgument(
            f"RANK={found[0]!r} and WORLD_SIZE={found[1]!r} of the environment are not a rank and how many there are; "
            "set both, as torchrun does, or none"
        )
    return Ranks(rank, world)
