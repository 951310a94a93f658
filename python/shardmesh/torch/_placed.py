"""Where a model's parameters and gradients lie: in the service's windows, or in copies where that cannot be."""
from __future__ import annotations

import mmap
from collections.abc import Iterable, Sequence

import torch

from .. import errors
from ._memory import Weights
from ._model import Parameter
from ._session import LOG, Session


class Placed:
    """The weights of a model, each a view of the parameter window, or a copy that is brought up to date after a step.

    What is written to a view is this process's alone, and is forgotten at the next forget().
    """

    def __init__(self, parameters: Sequence[Parameter], session: Session) -> None:
        self._parameters = parameters
        self._sources: list[Weights] = []
        self._copied: set[int] = set()
        self._versions: list[int] = []
        self._resides = False
        self._maps: dict[int, mmap.mmap] = {}  # of copies whose memory comes and goes
        self._addresses: list[int] = []
        self.place(session)

    @property
    def emptied(self) -> bool:
        """Whether weights are there only between fill() and empty()."""
        return self._resides

    def reside(self) -> None:
        """From now on they are."""
        self._resides = True
        for index in self._copied - self._maps.keys():
            tensor = self._parameters[index].tensor
            memory = mmap.mmap(-1, max(tensor.numel() * tensor.element_size(), 1))
            self._maps[index] = memory
            tensor.data = torch.frombuffer(memory, dtype=tensor.dtype).as_strided(tensor.size(), tensor.stride())
        self.empty(range(len(self._parameters)))

    def fill(self, indices: Iterable[int]) -> None:
        """Copies among these get the weights."""
        with torch.no_grad():
            for index in self._copied.intersection(indices):
                self._write(index)

    def empty(self, indices: Iterable[int]) -> None:
        """Copies among these have no pages any more; they read as zeros."""
        for index in self._copied.intersection(indices):
            self._maps[index].madvise(mmap.MADV_DONTNEED)

    def _write(self, index: int) -> None:
        """Of what this process does itself nothing counts as a change."""
        tensor = self._parameters[index].tensor
        with torch.autograd.grad_mode._unsafe_preserve_version_counter(tensor):
            self._sources[index].write_to(tensor)

    def place(self, session: Session) -> None:
        """Of a session that was opened, or opened again."""
        self._sources = [session.weights(parameter.name) for parameter in self._parameters]
        before, self._copied = self._copied, set()
        reasons: dict[str, list[str]] = {}
        with torch.no_grad():
            for index, (parameter, source) in enumerate(zip(self._parameters, self._sources)):
                tensor = parameter.tensor
                reason = _why_copied(parameter, source)
                if reason is None:
                    tensor.data = source.view
                else:
                    reasons.setdefault(reason, []).append(parameter.name)
                    self._copied.add(index)
                    if tensor.is_meta:
                        raise errors.Internal(f"{parameter.name} has no memory")
                    if index not in before:
                        tensor.data = tensor.data.clone(memory_format=torch.preserve_format)
        for reason, names in reasons.items():
            LOG.info("%d parameters are copies (%s): %s%s", len(names), reason, ", ".join(names[:3]), ", ..." if names[3:] else "")
        self.refresh()

    def refresh(self) -> None:
        """After a step: copies get the new weights."""
        if not self._resides:
            with torch.no_grad():
                for index in self._copied:
                    self._write(index)
        self._versions = [parameter.tensor._version for parameter in self._parameters]
        self._addresses = [parameter.tensor.data_ptr() for parameter in self._parameters]

    def changed(self) -> list[Parameter]:
        """Those that were written to since the last refresh(), through themselves: what is done to `.data` is not seen.
        Those that got other memory with the same values, as by Module.to(), are views again, or copies where they are now."""
        moved = [index for index, (parameter, address) in enumerate(zip(self._parameters, self._addresses))
                 if parameter.tensor.data_ptr() != address]
        others = self._place_again(moved) if moved and not self._resides else set()
        return [
            parameter for index, (parameter, version) in enumerate(zip(self._parameters, self._versions))
            if parameter.tensor._version != version or index in others
        ]

    def _place_again(self, moved: list[int]) -> set[int]:
        """Returns those that have other values."""
        others = set()
        for index in moved:
            tensor, source = self._parameters[index].tensor, self._sources[index]
            now = torch.empty_like(tensor, requires_grad=False)
            source.write_to(now)
            if not torch.equal(now, tensor.detach()):
                others.add(index)
            elif index not in self._copied:
                reason = _why_copied(self._parameters[index], source)
                if reason is None:
                    tensor.data = source.view
                else:
                    LOG.info("%s was moved and is a copy from now on: %s", self._parameters[index].name, reason)
                    self._copied.add(index)
            self._addresses[index] = tensor.data_ptr()
        return others

    def forget(self, session: Session) -> None:
        """What was written is dropped: all have the job's weights again."""
        session.core.forget_writes()
        self.refresh()

    def release(self, indices: Iterable[int] | None = None) -> None:
        """They, or all, become copies of their own, so that the model lives longer than the session."""
        for index in range(len(self._parameters)) if indices is None else indices:
            tensor = self._parameters[index].tensor
            if index not in self._copied or self._resides:
                tensor.data = tensor.data.clone()


def _why_copied(parameter: Parameter, source: Weights) -> str | None:
    tensor = parameter.tensor
    if source.coded:
        return f"decoded from {source.format}"
    if source.view.dtype != tensor.dtype:
        return f"{source.format} in the window, {tensor.dtype} in the model".replace("torch.", "")
    if not parameter.contiguous:
        return "in another order in memory"
    return None if tensor.device.type == "cpu" else f"on {tensor.device}"
