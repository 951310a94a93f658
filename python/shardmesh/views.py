"""Which rank holds which boxes of a tensor, and what a rank copies to have its boxes of another view filled.

A view knows no bytes: offsets and strides count elements of a rank's own memory of the tensor. placed(), part(),
packed() and listed() make one, and layout.Plan.view() that of a plan's parameter.
"""
from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple, Union, overload

from . import _core
from ._core import Mesh
from ._placement import Placements, along, sizes
from .errors import NotFound

__all__ = ["Box", "Copy", "LocalBox", "View", "listed", "packed", "part", "placed", "reshard"]

MAX_COPIES = 1 << 20  # unless reshard() is told otherwise: 0 to 2^22


class Box(NamedTuple):
    """A half-open box of a tensor's elements: [offset, offset + size) along every dimension."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


class LocalBox(NamedTuple):
    """A box and its place in memory: element box.offsets + i lies at offset + sum of i[d] * strides[d]."""

    box: Box
    offset: int
    strides: tuple[int, ...]


class Copy(NamedTuple):
    """Consecutive elements of the source's memory of a tensor that become consecutive ones of the reader's."""

    source: int  # a rank
    source_offset: int
    destination_offset: int
    num_elements: int


# A Box or a LocalBox, or a tuple like one.
AnyBox = Union[Box, "tuple[Sequence[int], Sequence[int]]"]
AnyLocalBox = Union[LocalBox, "tuple[AnyBox, int, Sequence[int]]"]


class View:
    """One tensor and who holds what of it. Immutable. It cannot be pickled: make it again."""

    def __init__(self, core: _core.View) -> None:
        self._core = core

    @property
    def shape(self) -> tuple[int, ...]:
        return self._core.shape

    def boxes(self, rank: int) -> list[LocalBox]:
        """What a rank holds: disjoint boxes. An empty shard may show as an empty box, or as none.

        NotFound: the rank is not in the mesh, or not listed.
        """
        return [LocalBox(Box(*box), offset, strides) for box, offset, strides in self._core.boxes(rank)]

    def __repr__(self) -> str:
        return f"<shardmesh.views.View of {list(self.shape)}>"


def placed(shape: Sequence[int], mesh: Mesh, placements: Placements) -> View:
    """A tensor by placements over a mesh, as FSDP2 and DTensor have it.

    InvalidArgument: a bad shape, another number of placements than of dimensions, or one that the shape or the mesh
    does not allow. NotFound: the mesh has no such dimension. ResourceExhausted: more than 8 dimensions or 2^62
    elements.
    """
    return View(_core.placed(sizes("shape", shape), mesh, along(mesh, placements)))


def part(shape: Sequence[int], box: AnyBox, mesh: Mesh, placements: Placements) -> View:
    """One part of a packed tensor, placed as if it were a tensor, in memory of its own: q out of a stored qkv.

    shape: of the packed tensor; the boxes are its own. Errors as placed(). InvalidArgument also: `box` is not inside.
    """
    return View(_core.part(sizes("shape", shape), box, mesh, along(mesh, placements)))


def packed(
    shape: Sequence[int], parts: Mapping[str, AnyBox], mesh: Mesh, placements: Placements | Callable[[str], Placements],
    join_dim: int = 0, gaps: bool = False,
) -> View:
    """Every part placed by itself, the local parts side by side in one local tensor along `join_dim`.

    This is what a rank of tensor parallelism holds of a packed qkv: [q_r; k_r; v_r]. parts: boxes of the tensor, in the
    order in which they lie side by side. placements: for all parts, or a function of the part's name. gaps: the
    tensor may have elements of no part.
    Errors as placed(), with the part's name. InvalidArgument also: no parts, parts that overlap or leave gaps, a
    dimension that the tensor lacks, a part that is flat, or parts that differ along another dimension than join_dim.
    ResourceExhausted also: more than 4,096 parts.
    """
    if not isinstance(parts, Mapping):
        raise TypeError(f"parts is {parts!r:.200}; give a mapping from names to boxes")
    each = []
    for name, box in parts.items():
        each.append((name, box, along(mesh, placements(name) if callable(placements) else placements)))
    return View(_core.packed(sizes("shape", shape), each, join_dim, mesh, gaps))


def listed(shape: Sequence[int], boxes: Mapping[int, Iterable[AnyLocalBox]]) -> View:
    """Any boxes, by rank. A rank with none has a part in the tensor all the same; one that is not listed has not.

    The boxes of one rank must not share places in its memory; of boxes that reach into each other there, the first 2^20
    runs of consecutive elements are checked. InvalidArgument: a bad shape, rank or box, a negative offset or stride, or
    boxes of one rank that overlap or share places. ResourceExhausted: as placed(), or a place beyond 2^62.
    """
    if not isinstance(boxes, Mapping):
        raise TypeError(f"boxes is {boxes!r:.200}; give a mapping from ranks to lists of boxes")
    return View(_core.listed(sizes("shape", shape), [(rank, list(of_rank)) for rank, of_rank in boxes.items()]))


@overload
def reshard(source: View, destination: View, rank: int, max_copies: int = MAX_COPIES) -> list[Copy]: ...


@overload
def reshard(
    source: Mapping[str, View], destination: Mapping[str, View], rank: int, max_copies: int = MAX_COPIES
) -> dict[str, list[Copy]]: ...


def reshard(
    source: View | Mapping[str, View], destination: View | Mapping[str, View], rank: int, max_copies: int = MAX_COPIES
) -> list[Copy] | dict[str, list[Copy]]:
    """What `rank` copies to have its boxes of the destination filled, by the tensors' names; or of one tensor.

    Every element once, by source and destination offset; of replicas the rank itself is read if it is one. Copies are
    maximal: no two of them could be one. The source may have tensors that the destination lacks. Of one that the rank
    has no part in, it gets nothing.
    NotFound: the source lacks a tensor, or the rank has no part in any. InvalidArgument: a tensor has another shape at
    the source, lacks elements there that the rank wants, or boxes of two ranks there overlap but are not equal.
    A max_copies below 0 or above 2^22 is InvalidArgument, too.
    ResourceExhausted: more than max_copies copies, counted before neighbours are joined.
    """
    if isinstance(source, View) and isinstance(destination, View):
        (copies,) = _core.reshard([source._core], [destination._core], [], rank, max_copies)
        return [Copy(*copy) for copy in copies]
    if not isinstance(source, Mapping) or not isinstance(destination, Mapping):
        raise TypeError(f"source is {source!r:.200}, destination {destination!r:.200}; give two views, or two mappings")
    absent = [name for name in destination if name not in source]
    if absent:
        raise NotFound(f"reshard: the source has no tensor {absent[0]!r:.200}; it has {', '.join(source)[:200]}")
    views = [_core_of(source[name]) for name in destination], [_core_of(view) for view in destination.values()]
    by_tensor = _core.reshard(*views, list(destination), rank, max_copies)
    return {name: [Copy(*copy) for copy in copies] for name, copies in zip(destination, by_tensor)}


def _core_of(view: View) -> _core.View:
    if not isinstance(view, View):
        raise TypeError(f"{view!r:.200} is no view; give a shardmesh.views.View")
    return view._core
