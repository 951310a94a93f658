"""What this process wrote to weights, through whatever alias: the kernel knows which pages of a private mapping it had
to copy for that. Version counters of tensors do not see writes through `.data`, NumPy or a pointer."""
from __future__ import annotations

import bisect
import ctypes
import mmap
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Optional

import torch

from .._job._session import LOG

_PAGE_MAP = "/proc/self/pagemap"
_ENTRY, _CHUNK = 8, 1 << 16  # bytes of an entry of the page map, and entries that are read at a time
# Of an entry's last byte: a page of the file, or one that is neither present nor swapped out.
_NOT_OWN = bytes(flags for flags in range(256) if flags & 0x20 or not flags & 0xC0)
_NEAR = 64 * mmap.PAGESIZE  # spans no further apart are read together
_NORESERVE = 0x4000
_PART = 1 << 22


class Copies:
    """Memory for parameters that cannot be views of the service's. What is put into target() is seen in view(), of
    which this process's own writes can be dropped, as of the service's memory."""

    def __init__(self, like: Sequence[torch.Tensor], indices: Iterable[int], alignment: int = 64) -> None:
        """like: of each index, on the meta device."""
        self._like, self._begins, end = like, dict[int, int](), 0
        for index in indices:
            tensor = like[index]
            self._begins[index] = begin = -(-end // alignment) * alignment
            end = begin + tensor.numel() * tensor.element_size()
        self._shared = self._private = mmap.mmap(-1, mmap.PAGESIZE)
        if end == 0:
            return
        file = os.memfd_create("shardmesh-copies")
        try:
            os.ftruncate(file, end)
            self._shared = mmap.mmap(file, end)
            self._private = mmap.mmap(file, end, flags=mmap.MAP_PRIVATE | _NORESERVE)
        finally:
            os.close(file)

    def are(self, indices: Iterable[int]) -> bool:
        return list(self._begins) == list(indices)

    def has(self, index: int) -> bool:
        return index in self._begins

    def target(self, index: int) -> torch.Tensor:
        return self._tensor(self._shared, index)

    def view(self, index: int) -> torch.Tensor:
        return self._tensor(self._private, index)

    def _tensor(self, memory: mmap.mmap, index: int) -> torch.Tensor:
        like = self._like[index]
        flat = torch.frombuffer(memory, dtype=like.dtype, count=like.numel(), offset=self._begins[index])
        return flat.as_strided(like.size(), like.stride())

    def forget_writes(self) -> None:
        self._private.madvise(mmap.MADV_DONTNEED)

    def empty(self, index: int) -> None:
        """It has no pages any more but the first, which is NaN (core/job/absent_weights.h). REQUIRES: alignment to pages."""
        begin, like = self._begins[index], self._like[index]
        size = like.numel() * like.element_size()
        self._shared.madvise(mmap.MADV_REMOVE, begin, size)
        shown = min(size, mmap.PAGESIZE)
        self._shared[begin:begin + shown] = b"\xff" * shown


class Writes:
    """Watches tensors whose memory is mapped privately, by a number for each."""

    _warned = False

    def __init__(self, tensors: Mapping[int, torch.Tensor]) -> None:
        spans = sorted((one.data_ptr(), one.numel() * one.element_size(), number) for number, one in tensors.items())
        self._spans = spans
        self.clean = False  # nothing was written when this was asked last, and it could be told
        self._begins = [begin for begin, _, _ in spans]
        self._regions: list[tuple[int, int]] = []
        for begin, size, _ in spans:
            if self._regions and begin - self._regions[-1][1] <= _NEAR:
                self._regions[-1] = self._regions[-1][0], begin + size
            else:
                self._regions.append((begin, begin + size))

    def touched(self) -> list[int]:
        """Those on whose pages something was written."""
        found: list[int] = []
        pages = self._own_pages()
        self.clean = pages == []
        for begin, end in pages or []:
            at = bisect.bisect_right(self._begins, begin) - 1
            for first, size, number in self._spans[max(at, 0):bisect.bisect_left(self._begins, end)]:
                if first + size > begin and number not in found[-1:]:
                    found.append(number)
        return found

    def changed(self, forget: Callable[[], None], whole_pages: bool) -> list[int]:
        """Those that differ from what they are without this process's writes. forget: drops those, of all of them.
        whole_pages: if none differs, all that were touched."""
        touched = set(self.touched())
        own = {span: ctypes.string_at(*span[:2]) for span in self._spans if span[2] in touched}
        if not own:
            return []
        forget()
        differ = [span for span, written in own.items() if ctypes.string_at(*span[:2]) != written]
        for span in differ:
            ctypes.memmove(span[0], own[span], span[1])
        return [number for _, _, number in differ or (own if whole_pages else [])]

    def keep(self) -> None:
        """From now on they are this process's own, as they are."""
        for begin, size, _ in self._spans:
            for at in range(begin, begin + size, _PART):
                part = min(_PART, begin + size - at)
                ctypes.memmove(at, ctypes.string_at(at, part), part)

    def _own_pages(self) -> Optional[list[tuple[int, int]]]:
        """Begin and end of each page that is this process's own; None: the system cannot say."""
        try:
            file = os.open(_PAGE_MAP, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            if not Writes._warned:
                LOG.warning("writes to parameters through .data are not detected: this system has no page map (%s)",
                            error)
            Writes._warned = True
            return None
        try:
            return [page for region in self._regions for page in _own_pages(file, *region)]
        finally:
            os.close(file)


def _own_pages(file: int, begin: int, end: int) -> list[tuple[int, int]]:
    found = []
    first, last = begin // mmap.PAGESIZE, -(-end // mmap.PAGESIZE)
    for at in range(first, last, _CHUNK):
        flags = os.pread(file, min(_CHUNK, last - at) * _ENTRY, at * _ENTRY)[_ENTRY - 1::_ENTRY]
        if flags.translate(None, _NOT_OWN):
            pages = [at + page for page, flag in enumerate(flags) if flag not in _NOT_OWN]
            found += [(page * mmap.PAGESIZE, (page + 1) * mmap.PAGESIZE) for page in pages]
    return found
