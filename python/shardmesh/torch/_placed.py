"""Where a model's parameters and gradients lie: in the service's windows, or in copies where that cannot be."""
from __future__ import annotations

import mmap
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Optional

import torch

from .. import errors
from ._memory import Weights
from ._model import Parameter
from ._quantized import Delivery
from ._session import LOG, Session


class Placed:
    """The weights of a model, each a view of the parameter window, a copy that is brought up to date after a step, or
    codes that its layers take.

    What is written to a view is this process's alone, and is forgotten at the next refresh().
    """

    def __init__(
        self, parameters: Sequence[Parameter], session: Session, *, resides: bool = False,
        delivery: Optional[Delivery] = None,
    ) -> None:
        """resides: reside() follows. delivery: of codes; None: all are decoded."""
        self._parameters = parameters
        self._sources: list[Weights] = []
        self._copied: set[int] = set()
        self._delivered: set[int] = set()
        self._delivery = delivery
        self._versions: list[int] = []
        self._resides = resides
        self._maps: dict[int, mmap.mmap] = {}  # of copies whose memory comes and goes
        self.place(session)

    def reside(self) -> None:
        """From now on weights are there only between fill() and empty()."""
        assert self._resides
        for index in self._copied - self._maps.keys():
            tensor = self._parameters[index].tensor
            memory = mmap.mmap(-1, max(tensor.numel() * tensor.element_size(), 1))
            self._maps[index] = memory
            self._map(index)
        self.empty(range(len(self._parameters)))

    def _map(self, index: int) -> None:
        tensor = self._parameters[index].tensor
        tensor.data = torch.frombuffer(self._maps[index], dtype=tensor.dtype).as_strided(tensor.size(), _dense(tensor))

    def own(self, indices: Iterable[int]) -> None:
        """Until place() these are tensors of their own, with the weights, that can be written. REQUIRES: the weights
        are there."""
        for index in indices:
            if index not in self._delivered:
                tensor = self._parameters[index].tensor
                tensor.data = tensor.data.clone(memory_format=torch.preserve_format)

    def lose(self, indices: Iterable[int]) -> None:
        """These become tensors of NaN: their weights are nowhere."""
        for index in indices:
            tensor = self._parameters[index].tensor
            nowhere = torch.full_like(tensor, torch.nan)
            if index in self._delivered and self._delivery is not None:
                self._delivery.withdraw(index, nowhere)
            else:
                tensor.data = nowhere

    def memory(self, index: int) -> list[torch.Tensor]:
        """All tensors that the weights may be read from."""
        return [self._parameters[index].tensor, *self._sources[index].parts.values()]

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
        self._session: Optional[Session] = session
        self._sources = [session.weights(parameter.name) for parameter in self._parameters]
        before, self._copied, self._delivered = self._copied, set(), set()
        reasons: dict[str, list[str]] = {}
        with torch.no_grad():
            for index, (parameter, source) in enumerate(zip(self._parameters, self._sources)):
                tensor = parameter.tensor
                reason = _why_copied(parameter, source)
                if self._delivery is not None and self._delivery.takes(index, source):
                    self._delivered.add(index)
                    self._deliver(index)
                elif reason is None:
                    tensor.data = source.view
                else:
                    reasons.setdefault(reason, []).append(parameter.name)
                    self._copied.add(index)
                    if tensor.is_meta:
                        raise errors.Internal(f"{parameter.name} has no memory")
                    if self._resides and index in self._maps:
                        self._map(index)
                    elif index not in before and not self._resides:
                        tensor.data = tensor.data.clone(memory_format=torch.preserve_format)
        for reason, names in reasons.items():
            more = ", ..." if names[3:] else ""
            LOG.info("%d parameters are copies (%s): %s%s", len(names), reason, ", ".join(names[:3]), more)
        self._log_delivered()
        self.refresh()

    def _deliver(self, index: int) -> None:
        assert self._delivery is not None
        self._delivery.deliver(index, self._sources[index], None if self._resides else self.value)

    def _log_delivered(self) -> None:
        if self._delivered:
            LOG.info("%d parameters are codes, which their layers take", len(self._delivered))
        elif self._delivery is not None:
            LOG.warning('deliver="quantized" changes nothing: no weight of a Linear is gathered as int8_row, fp8_row '
                        'or fp8_tensor')

    def value(self, index: int) -> torch.Tensor:
        """A copy of the weights as they are. REQUIRES: with reside(), that they are there."""
        tensor = self._parameters[index].tensor
        if index in self._delivered and self._delivery is not None and self._delivery.coded(index):
            return self._sources[index].values().to(tensor.dtype)
        return tensor.detach().clone()

    def decoded_for_now(self) -> set[int]:
        """Those whose layers take codes, and that wait with other values for the job to have them."""
        return {index for index in self._delivered if self._delivery is not None and not self._delivery.coded(index)}

    @contextmanager
    def decoded(self) -> Iterator[None]:
        """Within it all parameters have elements, which can be written; those that are written keep them. With reside()
        they are NaN at first."""
        for index in self._delivered:
            assert self._delivery is not None
            shape = self._parameters[index].tensor.shape
            self._delivery.decoded(index, torch.full(shape, torch.nan) if self._resides else self.value(index))
        try:
            yield
        finally:
            changed = {id(parameter.tensor) for parameter in self.changed()}
            for index in self._delivered:
                if id(self._parameters[index].tensor) not in changed:
                    self._deliver(index)

    def refresh(self) -> None:
        """After a step: copies get the new weights, and views that this process wrote to are the window's again: a page
        that was written to would stay as it was, with all that lies beside."""
        if self._session is not None:
            self._session.forget_writes()
        if self._copied and not self._resides:
            with torch.no_grad():
                for index in self._copied:
                    self._write(index)
        self._versions = [parameter.tensor._version for parameter in self._parameters]

    def changed(self) -> list[Parameter]:
        """Those that were written to since the last refresh(), through themselves; through `.data` is not seen."""
        return [
            parameter for parameter, version in zip(self._parameters, self._versions)
            if parameter.tensor._version != version
        ]

    def forget(self, session: Session) -> None:
        """What was written is dropped: all have the job's weights again."""
        session.core.forget_writes()  # an error, where they are a copy
        for index in self._delivered:
            self._deliver(index)
        self.refresh()

    def release(self, indices: Iterable[int] | None = None) -> None:
        """They, or all, become copies of their own, so that the model lives longer than the session."""
        for index in range(len(self._parameters)) if indices is None else indices:
            tensor = self._parameters[index].tensor
            if index in self._delivered:
                assert self._delivery is not None
                self._delivery.withdraw(index, self.value(index))
            elif index not in self._copied or self._resides:
                tensor.data = tensor.data.clone()

    def let_go(self) -> None:
        """Of the session's memory, after release(): slots are free when nothing is left of it."""
        self._sources, self._session = [], None


def _dense(tensor: torch.Tensor) -> tuple[int, ...]:
    """The strides of a copy."""
    return torch.empty_like(tensor, device="meta").stride()


def _why_copied(parameter: Parameter, source: Weights) -> str | None:
    tensor = parameter.tensor
    if source.coded:
        return f"decoded from {source.format}"
    if source.view.dtype != tensor.dtype:
        return f"{source.format} in the window, {tensor.dtype} in the model".replace("torch.", "")
    if not parameter.contiguous:
        return "in another order in memory"
    return None if tensor.device.type == "cpu" else f"on {tensor.device}"
