"""Where the parameters of a model lie when the ranks of a mesh hold a part each.

Parameters of one format and one granule share buckets; a bucket is one flat space that is cut into equal shards of
whole granules. A granule is the piece that one rank must hold whole: "flat:256" elements, "rows:1" rows, "block:128"
blocks of 128 x 128, or "whole" matrices (each at one owner).
"""
from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, Union, overload

from . import _core
from ._core import Flat, Mesh, Owned, Placement, Replicate, Shard, StridedShard
from ._placement import Placements, along
from .views import Box, View

__all__ = [
    "Box", "Bucket", "Copy", "Flat", "Owned", "Padding", "Parameter", "Part", "Place", "Placement", "Plan",
    "Replicate", "Reshard", "Shard", "StridedShard", "plan",
]


class Parameter(NamedTuple):
    """A parameter of a model; None stands for the default given to plan()."""

    shape: Sequence[int]
    format: str | None = None
    granule: str | None = None
    tied_to: str | None = None  # the parameter whose storage this one shares


class HasShape(Protocol):
    """A tensor of any library."""

    @property
    def shape(self) -> Sequence[int]: ...


# A shape, (shape, format), (shape, format, granule), a Parameter, or a tensor.
Entry = Union[Sequence[int], "tuple[Sequence[int], str]", "tuple[Sequence[int], str, str]", Parameter, HasShape]


class Bucket(NamedTuple):
    """Parameters that are gathered and reduced together: one flat space, cut into equal shards."""

    format: str
    kind: str  # of its granules: flat, rows, block or whole
    granule_elements: int
    owned: bool  # of whole matrices, each at one owner: shards differ in size
    num_elements: int  # with padding
    shard_elements: int  # of each shard; in an owned bucket, of the largest
    padding: int  # elements of no parameter
    names: tuple[str, ...]


class Padding(NamedTuple):
    """What equal shards of whole granules cost, over all buckets of one kind of granule."""

    num_buckets: int
    num_elements: int  # without padding
    padding: int


class Place(NamedTuple):
    """Where a parameter lies. In an owned bucket, `offset` counts from the start of the owner's shard."""

    bucket: int | None  # None: it has no elements
    offset: int
    num_elements: int
    padded_elements: int  # of its whole granules
    owner: int | None  # the shard that holds it whole


class Part(NamedTuple):
    """What one shard holds of a parameter, in whole granules: the last one may reach into padding."""

    shard: int
    ranks: tuple[int, ...]  # that hold this shard: its replicas
    first_element: int  # in the parameter, as it is stored: row-major, or block by block
    shard_offset: int  # in the shard
    num_elements: int


class Copy(NamedTuple):
    """Elements of one rank's shard of a bucket that become elements of another's. Offsets count within the shard."""

    source: int  # a rank
    source_bucket: int
    source_offset: int
    destination_bucket: int
    destination_offset: int
    num_elements: int


class Reshard(NamedTuple):
    """What one rank copies to have its shard of another plan filled.

    Of a parameter with the same block granule in both plans whole blocks are copied, and counted, with the padding
    inside them; other padding is not copied.
    """

    copies: list[Copy]  # every element once, by destination bucket and offset
    elements_from: dict[int, int]  # how many from each rank

    @property
    def num_elements(self) -> int:
        return sum(self.elements_from.values())

    @property
    def num_copies(self) -> int:
        return len(self.copies)


class Plan:
    """A layout of parameters on the ranks of a mesh: a pure function of plan()'s arguments. plan() makes one."""

    def __init__(self, core: _core.Plan) -> None:
        self._mesh = core.mesh
        self._core = core

    @property
    def mesh(self) -> Mesh:
        return self._mesh

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The parameters in the plan's order."""
        return self._core.shapes

    @property
    def num_shards(self) -> int:
        return self._core.num_shards

    @property
    def hash(self) -> str:
        """32 hexadecimal digits: equal hashes, equal parameters at equal places on the same ranks."""
        return self._core.hash

    @property
    def buckets(self) -> list[Bucket]:
        return [Bucket(*bucket) for bucket in self._core.buckets]

    @property
    def padding(self) -> dict[str, Padding]:
        """By the kind of granule: flat, rows, block, whole; those that occur."""
        return {kind: Padding(*padding) for kind, padding in self._core.padding.items()}

    def place(self, name: str) -> Place:
        """Where a parameter lies; a tied one, where its storage does. NotFound: no such parameter."""
        bucket, offset, num_elements, padded_elements, owner = self._core.place(name)
        return Place(
            None if bucket < 0 else bucket, offset, num_elements, padded_elements, None if owner < 0 else owner
        )

    def shard_of(self, name: str) -> list[Part]:
        """Which shards hold a parameter, and which ranks these; in the order of its elements.

        NotFound: no such parameter.
        """
        return [Part(*part) for part in self._core.parts(name)]

    def stored_boxes(self, rank: int) -> dict[str, list[Box]]:
        """What a rank holds in this plan, by parameter. Each block is a box.

        NotFound: the rank is not in the mesh. ResourceExhausted: more than 2^20 blocks.
        """
        return {name: [Box(*box) for box in boxes] for name, boxes in self._core.stored_boxes(rank).items()}

    def view(self, name: str) -> View:
        """Who holds what of a parameter, for views.reshard(); of a tied one, its storage's. Each block is a box.

        Offsets count from the start of a rank's shard of the parameter's bucket (place().bucket). A rank of the mesh
        that holds none of it has no box. NotFound: no such parameter. ResourceExhausted: more than 2^20 boxes on all
        ranks together.
        """
        return View(_core.view_of(self._core, name))

    def boxes(
        self, placements: Placements | Callable[[str], Placements], coordinate: Sequence[int]
    ) -> dict[str, list[Box]]:
        """What a rank holds of each parameter where placements over this mesh say so, such as FSDP2's.

        One box, which may be empty; several or none with Flat. placements: for all parameters, or a function of the
        name. InvalidArgument: placements that a parameter's shape does not allow (it is named), or another number of
        them than of dimensions. OutOfRange: no such coordinate.
        """
        rank = self._mesh.rank_at(coordinate)
        by_name = {}
        for name in self._core.shapes:
            given = placements(name) if callable(placements) else placements
            by_name[name] = [Box(*box) for box in self._core.boxes(name, along(self._mesh, given), rank)]
        return by_name

    @overload
    def reshard_to(self, other: Plan, rank: None = None) -> dict[int, Reshard]: ...

    @overload
    def reshard_to(self, other: Plan, rank: int) -> Reshard: ...

    def reshard_to(self, other: Plan, rank: int | None = None) -> Reshard | dict[int, Reshard]:
        """What `rank` of the other plan's mesh, or each of its ranks, copies from ranks of this one's.

        It then has its shard of the other plan filled. A rank of both meshes copies from itself what it has. NotFound:
        the rank is not in the other mesh, or the other plan has a parameter that this one lacks. InvalidArgument: a
        parameter has another shape or format there. ResourceExhausted: more than 2^20 copies for one rank.
        """
        if not isinstance(other, Plan):
            raise TypeError(f"other is {other!r:.200}; give a Plan")
        self._core.check_reshard(other._core)
        if rank is not None:
            return self._copies(other, rank)
        return {each: self._copies(other, each) for each in other.mesh.ranks}

    def _copies(self, other: Plan, rank: int) -> Reshard:
        copies = [Copy(*copy) for copy in self._core.copies_into(other._core, rank)]
        elements_from: dict[int, int] = {}
        for copy in copies:
            elements_from[copy.source] = elements_from.get(copy.source, 0) + copy.num_elements
        return Reshard(copies, dict(sorted(elements_from.items())))

    def __reduce__(self) -> tuple[type[Plan], tuple[_core.Plan]]:
        return Plan, (self._core,)

    def __copy__(self) -> Plan:  # it is immutable
        return self

    def __deepcopy__(self, memo: Any) -> Plan:
        return self

    def __eq__(self, other: object) -> bool:
        """Whether both say the same: equal hashes."""
        return self.hash == other.hash if isinstance(other, Plan) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.hash)

    def __str__(self) -> str:
        return self._core.picture().rstrip("\n")

    def __repr__(self) -> str:
        return f"<shardmesh.layout.Plan {self.hash}: {len(self.buckets)} buckets in {self.num_shards} shards>"


def plan(
    parameters: Mapping[str, Entry] | Iterable[tuple[Any, ...]],
    mesh: Mesh,
    *,
    replicate: Sequence[str] | None = None,
    format: str = "fp32",
    granule: str = "flat:256",
    bucket_elements: int | None = None,
    max_padding: float | None = None,
    max_coarse_padding: float | None = None,
) -> Plan:
    """Lays the parameters out over the mesh.

    parameters: a mapping from names to shapes, (shape, format, granule) or tensors, taken in natural order of the
      names, so that the plan does not depend on the mapping's; or (name, shape) or (name, shape, format, granule)
      tuples, such as model.named_parameters(), in the order given.
    replicate: the dimensions of the mesh along which every rank holds the same. Without it, those named ddp,
      dp_replicate or replicate. All others shard.
    format, granule: of parameters that name none. A format is any text of 1 to 4,096 bytes:
      parameters of two formats share no bucket.
    bucket_elements, max_padding, max_coarse_padding: a bucket is closed when it has so many elements, and what fills it
      up to equal shards is at most this part of it; the last one for granules of more than 4,096 elements. What fills a
      parameter's last granule comes on top: it is less than a granule for each parameter.

    InvalidArgument: a bad or repeated name, a bad shape, format or granule, or a tie to another shape. NotFound: `replicate` names no
    dimension of the mesh. ResourceExhausted: more elements than a layout can have.
    """
    if not isinstance(mesh, Mesh):
        raise TypeError(f"mesh is {mesh!r:.200}; give a shardmesh.Mesh")
    if isinstance(parameters, Mapping):
        entries = [(name, parameters[name]) for name in sorted(parameters, key=_natural)]
    else:
        entries = [_pair(item) for item in parameters]
    if replicate is None:
        replicate = [name for name in mesh.names if _core.replicates(name)]
    tensors = [_tensor(name, entry, format, granule) for name, entry in entries]
    return Plan(_core.Plan(mesh, replicate, tensors, bucket_elements, max_padding, max_coarse_padding))


def _natural(name: str) -> tuple[list[str | tuple[int, str]], str]:
    """Sorts layers.2 before layers.10."""
    parts: list[str | tuple[int, str]] = list(re.split("([0-9]+)", name))
    for i in range(1, len(parts), 2):
        digits = str(parts[i]).lstrip("0")
        parts[i] = (len(digits), digits)
    return parts, name


def _pair(item: tuple[Any, ...]) -> tuple[str, Any]:
    if not isinstance(item, (tuple, list)) or len(item) < 2:
        raise TypeError(f"parameter {item!r:.200}; give (name, shape) or (name, shape, format, granule)")
    return item[0], item[1] if len(item) == 2 else Parameter(*item[1:])


def _tensor(name: str, entry: Any, format: str, granule: str) -> _core.Tensor:
    if not isinstance(entry, (tuple, list)):
        entry = getattr(entry, "shape", entry)
    if not isinstance(entry, (tuple, list)):
        raise TypeError(f"parameter {name!r:.200} is {entry!r:.200}; give a shape, (shape, format) or a tensor")
    if entry and isinstance(entry[0], (tuple, list)):
        parameter = Parameter(*entry)
    else:
        parameter = Parameter(entry)
    return _core.Tensor(
        name, parameter.shape, parameter.format or format, parameter.granule or granule, parameter.tied_to or ""
    )
