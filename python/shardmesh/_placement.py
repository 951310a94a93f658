"""Placements in every form in which they are given."""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Union

from . import _core
from ._core import Mesh, Placement

# One for each dimension of the mesh, or by their names (the others replicate).
Placements = Union[Sequence[Placement], "Mapping[str, Placement]"]


def along(mesh: Mesh, placements: Placements) -> Sequence[Placement]:
    """One for each dimension of the mesh. NotFound: the mesh has no such dimension."""
    if isinstance(placements, Mapping):
        return _core.place_along(mesh, list(placements.items()))
    return placements
