"""Placements in every form in which they are given."""
from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any, Union

from . import _core
from ._core import Mesh, Placement

# One for each dimension of the mesh, or by their names (the others replicate).
Placements = Union[Sequence[Placement], "Mapping[str, Placement]"]


def along(mesh: Mesh, placements: Placements) -> Sequence[Placement]:
    """One for each dimension of the mesh. NotFound: the mesh has no such dimension."""
    if isinstance(placements, Mapping):
        return _core.place_along(mesh, list(placements.items()))
    if isinstance(placements, (str, bytes)) or not hasattr(placements, "__len__"):
        raise TypeError(f"placements is {placements!r:.200}; give a list of one for each dimension of the mesh, or a dict")
    return placements


def sizes(what: str, numbers: Any) -> list[int]:
    """A sequence of integers. TypeError: it is none; `what` it is."""
    try:
        if isinstance(numbers, (str, bytes)):
            raise TypeError
        return [operator.index(number) for number in numbers]
    except TypeError:
        raise TypeError(f"{what} is {numbers!r:.200}; give a sequence of integers, such as (8, 64)") from None
