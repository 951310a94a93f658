"""What a directory of torch.distributed.checkpoint holds, chunk by chunk as it was stored: so a tensor subclass of
torchao keeps its codes, which a load into plain tensors would decode."""
from __future__ import annotations

import importlib
import io
import pickle
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from . import errors


@dataclass(frozen=True)
class Chunk:
    """A box of a tensor, as one rank stored it."""

    offsets: tuple[int, ...]
    tensor: Any


class _Taken:
    """Stands where the loader would copy to."""

    def __init__(self, lengths: Any) -> None:
        self.lengths, self.tensor = lengths, None

    def detach(self) -> _Taken:
        return self

    def size(self) -> Any:
        return self.lengths

    def copy_(self, tensor: Any) -> None:
        self.tensor = tensor


class _Planner:
    """Takes what is read."""

    def __init__(self, torch: Any) -> None:
        self._torch = torch
        self.taken: dict[Any, Any] = {}  # by what was asked for

    def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:
        self.taken[read_item.dest_index] = self._torch.load(value, map_location="cpu", weights_only=True)

    def resolve_tensor(self, read_item: Any) -> Any:
        taken = _Taken(self._torch.Size(read_item.lengths))
        self.taken[read_item.dest_index] = taken
        return taken

    def commit_tensor(self, read_item: Any, tensor: Any) -> None:
        pass


class Directory:
    """The metadata of a directory, which is a pickle: of what is trusted alone."""

    def __init__(self, torch: Any, path: str) -> None:
        self._torch, self.path = torch, path
        self._reader = torch.distributed.checkpoint.FileSystemReader(path)
        try:
            self._metadata = self._reader.read_metadata()
        except (OSError, pickle.UnpicklingError, EOFError) as error:
            raise errors.InvalidArgument(f"{path} is no directory of torch.distributed.checkpoint: {error}") from error
        self.entries: dict[str, Any] = dict(self._metadata.state_dict_metadata)
        self._reader.set_up_storage_reader(self._metadata, is_coordinator=True)

    def is_tensor(self, name: str) -> bool:
        return hasattr(self.entries[name], "chunks")

    def sizes(self, name: str) -> tuple[int, ...]:
        return tuple(self.entries[name].size)

    def tensors(self, names: Iterable[str]) -> dict[str, list[Chunk]]:
        """Each tensor's chunks, in the order of their places; those without elements are left out."""
        planner = self._torch.distributed.checkpoint.planner
        index = self._torch.distributed.checkpoint.metadata.MetadataIndex
        chunks, items = {}, []
        for name in names:
            stored = sorted(enumerate(self.entries[name].chunks), key=lambda chunk: tuple(chunk[1].offsets))
            chunks[name] = [(index(name, chunk.offsets, i), chunk) for i, chunk in stored if 0 not in chunk.sizes]
            zeros = self._torch.Size([0] * len(self.entries[name].size))
            items += [planner.ReadItem(planner.LoadItemType.TENSOR, at, zeros, at, zeros, self._torch.Size(chunk.sizes))
                      for at, chunk in chunks[name]]
        taken = self._read(items)
        return {name: [Chunk(tuple(chunk.offsets), taken[at].tensor) for at, chunk in of_name]
                for name, of_name in chunks.items()}

    def values(self, names: Iterable[str]) -> dict[str, Any]:
        """What are no tensors: numbers, text and lists of them; tensors of one element become numbers."""
        planner = self._torch.distributed.checkpoint.planner
        index = self._torch.distributed.checkpoint.metadata.MetadataIndex
        names = list(names)
        none = self._torch.Size([0])
        places = {name: index(name) for name in names if not self.is_tensor(name)}
        items = [planner.ReadItem(planner.LoadItemType.BYTE_IO, at, none, at, none, none) for at in places.values()]
        taken = self._read(items)
        found = {name: taken[at] for name, at in places.items()}
        for name, chunks in self.tensors([name for name in names if self.is_tensor(name)]).items():
            if len(chunks) != 1 or chunks[0].tensor.numel() != 1:
                raise errors.InvalidArgument(f"{self.path}: {name} is no number; it has the sizes {self.sizes(name)}")
            found[name] = chunks[0].tensor.item()
        return found

    def _read(self, items: list[Any]) -> dict[Any, Any]:
        load_plan = self._torch.distributed.checkpoint.planner.LoadPlan(items)
        taker = _Planner(self._torch)
        try:
            self._reader.read_data(load_plan, taker).wait()
        except pickle.UnpicklingError as error:
            if "torchao" not in str(error):
                raise errors.InvalidArgument(f"{self.path} holds what is neither a tensor nor a value: {error}") from error
            _import_torchao(error)  # which makes its tensors known
            taker = _Planner(self._torch)
            self._reader.read_data(load_plan, taker).wait()
        return taker.taken


def _import_torchao(cause: Exception) -> None:
    try:
        importlib.import_module("torchao.optim")
    except ImportError as error:
        raise ImportError("this directory has optimizer states of torchao: pip install torchao") from cause
