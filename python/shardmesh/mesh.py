"""Which ranks of a job meet along which named dimension, and which of their groups can use one communicator.

No communicators are opened here.
"""
from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple, Union

from . import _core
from ._core import Mesh

__all__ = ["Communicator", "Mesh", "Use", "communicator_key", "communicators"]


class Use(NamedTuple):
    """A group that uses a communicator."""

    asked: int  # index into what was asked
    group: int  # index into its mesh's groups(names)


class Communicator(NamedTuple):
    """One communicator for all groups of the same ranks."""

    key: str  # communicator_key(ranks)
    ranks: list[int]  # ascending
    uses: list[Use]  # in the order asked; more than one: they share it


def communicator_key(ranks: Iterable[int]) -> str:
    """32 hexadecimal digits: one name for every set of ranks, whatever their order, the same on every machine.

    InvalidArgument: no rank, a negative one, or a number beyond the ranks'.
    """
    return _core.communicator_key(list(ranks))


def communicators(asked: Iterable[tuple[Mesh, Union[str, Sequence[str]]]]) -> list[Communicator]:
    """The communicators that the groups of all (mesh, names) need together, in the order of their first uses.

    NotFound: a name that is no dimension of its mesh. InvalidArgument: a name twice, or none.
    """
    return [
        Communicator(key, ranks, [Use(*use) for use in uses]) for key, ranks, uses in _core.communicators(list(asked))
    ]
