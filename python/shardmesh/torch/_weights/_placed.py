"""Where a model's parameters and gradients lie: in the service's windows, or in copies where that cannot be."""
from __future__ import annotations

import mmap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Optional

import torch

from .._job._memory import Weights
from .._job._session import LOG, TrainerSession
from .._machine import _forks
from .._modules._model import Parameter
from ._quantized import Delivery
from ._writes import Copies, Writes

_MAPPED = ("cpu", "meta")  # devices whose copies this process can map privately; those of meta get memory


class Placed:
    """The weights of a model, each a view of the parameter window, a copy that is brought up to date after a step, or
    codes that its layers take.

    What is written to a view is this process's alone, and is forgotten at the next refresh().
    """

    def __init__(
        self, parameters: Sequence[Parameter], session: TrainerSession, *, resides: bool = False,
        delivery: Optional[Delivery] = None,
    ) -> None:
        """resides: reside() follows. delivery: of codes; None: all are decoded."""
        self._parameters = parameters
        self._like = [torch.empty_like(parameter.tensor, device="meta") for parameter in parameters]
        self._devices = [parameter.tensor.device for parameter in parameters]
        self._sources: list[Weights] = []
        self._copied: set[int] = set()
        self._delivered: set[int] = set()
        self._delivery = delivery
        self._versions: list[int] = []
        self._resides = resides
        self._copies = Copies(self._like, ())
        self._edited: Optional[Copies] = None  # within editing()
        self._targets: dict[int, torch.Tensor] = {}  # where the weights of copies are written to
        self._digests: dict[int, torch.Tensor] = {}  # of copies on other devices
        self._views: dict[int, torch.Tensor] = {}  # whose memory this process has mapped privately
        self._writes = Writes({})
        self.place(session)
        if not resides:
            _forks.add(self)

    def keep(self) -> None:
        """In a forked child: the weights stay what they are. Gradients are its parent's memory."""
        for parameter in self._parameters:
            parameter.tensor.grad = None
        self._writes.keep()

    def reside(self) -> None:
        """From now on weights are there only between fill() and empty()."""
        assert self._resides
        self.empty(range(len(self._parameters)))

    def own(self, indices: Iterable[int]) -> None:
        """Until place() these are tensors of their own, with the weights, that can be written. REQUIRES: the weights
        are there."""
        for index in indices:
            if index not in self._delivered:
                self._edit(index, self._parameters[index].tensor)
        self._writes = Writes(self._views)

    def _edit(self, index: int, values: torch.Tensor) -> None:
        if self._edited is None:
            self._edited = Copies(self._like, range(len(self._parameters)))
        self._edited.target(index).copy_(values)
        self._views[index] = self._parameters[index].tensor.data = self._edited.view(index)

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
                self._sources[index].write_to(self._targets[index])
                if not self._copies.has(index):
                    self._digests[index] = _digest(self._targets[index])

    def empty(self, indices: Iterable[int]) -> None:
        """Copies among these give their pages back, and are no weights any more."""
        for index in self._copied.intersection(indices):
            if self._copies.has(index):
                self._copies.empty(index)

    def place(self, session: TrainerSession) -> None:
        """Of a session that was opened, or opened again; or of the same one: whatever was written or moved is undone.
        """
        self._session: Optional[TrainerSession] = session
        self._sources = [session.weights(parameter.name) for parameter in self._parameters]
        self._delivered, self._edited = set(), None
        reasons: dict[int, str] = {}
        for index, source in enumerate(self._sources):
            if self._delivery is not None and self._delivery.takes(index, source):
                self._delivered.add(index)
            elif (reason := self._why_copied(index, source)) is not None:
                reasons[index] = reason
        on_cpu = [index for index in reasons if self._devices[index].type in _MAPPED]
        if not self._copies.are(on_cpu):
            self._copies = Copies(self._like, on_cpu, mmap.PAGESIZE if self._resides else 64)
        self._copied, self._views, self._targets, self._digests = set(reasons), {}, {}, {}
        with torch.no_grad():
            for index in range(len(self._parameters)):
                self._place(index)
        self._writes = Writes(self._views)
        self._log(reasons)
        self.refresh()

    def _place(self, index: int) -> None:
        tensor = self._parameters[index].tensor
        if index in self._delivered:
            self._deliver(index)
        elif index not in self._copied:
            self._views[index] = tensor.data = self._sources[index].view
        elif self._copies.has(index):
            self._targets[index] = self._copies.target(index)
            self._views[index] = tensor.data = self._copies.view(index)
        else:
            tensor.data = torch.empty_like(self._like[index], device=self._devices[index])
            self._targets[index] = tensor.data

    def _deliver(self, index: int) -> None:
        assert self._delivery is not None
        self._delivery.deliver(index, self._sources[index], None if self._resides else self.value)

    def _log(self, reasons: Mapping[int, str]) -> None:
        for reason in dict.fromkeys(reasons.values()):
            names = [self._parameters[index].name for index, other in reasons.items() if other == reason]
            more = ", ..." if names[3:] else ""
            LOG.info("%d parameters are copies (%s): %s%s", len(names), reason, ", ".join(names[:3]), more)
        if self._delivered:
            LOG.info("%d parameters are codes, which their layers take", len(self._delivered))
        elif self._delivery is not None:
            LOG.warning('deliver="quantized" changes nothing: no weight of a Linear is gathered as int8_row, fp8_row '
                        'or fp8_tensor')

    def _why_copied(self, index: int, source: Weights) -> str | None:
        dtype, device = self._like[index].dtype, self._devices[index]
        if source.quantized:
            return f"decoded from {source.format}"
        if source.view.dtype != dtype:
            return f"{source.format} in the window, {dtype} in the model".replace("torch.", "")
        if not self._parameters[index].contiguous:
            return "in another order in memory"
        return None if device.type == "cpu" else f"on {device}"

    def value(self, index: int) -> torch.Tensor:
        """A copy of the weights as they are. REQUIRES: with reside(), that they are there."""
        tensor = self._parameters[index].tensor
        if index in self._delivered and self._delivery is not None and self._delivery.quantized(index):
            return self._sources[index].values().to(tensor.dtype)
        return tensor.detach().clone()

    def decoded_for_now(self) -> set[int]:
        """Those whose layers take codes, and that wait with other values for the job to have them."""
        return {index for index in self._delivered if self._delivery is not None and not self._delivery.quantized(index)}

    @contextmanager
    def decoded(self) -> Iterator[None]:
        """Within it all parameters have elements, which can be written; those that are written keep them. With reside()
        they are NaN at first."""
        for index in self._delivered:
            assert self._delivery is not None
            tensor = self._parameters[index].tensor
            values = tensor.new_full(tensor.shape, torch.nan) if self._resides else self.value(index)
            self._delivery.decoded(index, values)
            self._edit(index, self._parameters[index].tensor)
        if self._delivered:
            self._writes = Writes(self._views)
        try:
            yield
        finally:
            changed = {id(parameter.tensor) for parameter in self.changed()}
            for index in self._delivered:
                if id(self._parameters[index].tensor) not in changed:
                    self._views.pop(index, None)
                    self._deliver(index)
            if self._delivered:
                self._writes = Writes(self._views)

    def refresh(self) -> None:
        """After a step: copies get the new weights, and views that this process wrote to are the window's again: a page
        that was written to would stay as it was, with all that lies beside. If none was, all stay mapped."""
        if not self._writes.clean:
            self._forget_writes()
        self._writes.clean = False
        if not self._resides:
            self.fill(self._copied)
        self._versions = [parameter.tensor._version for parameter in self._parameters]

    def _forget_writes(self) -> None:
        if self._session is not None:
            self._session.core.forget_writes()
        self._copies.forget_writes()
        if self._edited is not None:
            self._edited.forget_writes()

    def changed(self) -> list[Parameter]:
        """Those that were written to since the last refresh(), in whatever way. With reside(), a write to weights that
        are not there counts for all that lie on its page."""
        written = set(self._writes.changed(self._forget_writes, whole_pages=self._resides and self._edited is None))
        for index, digest in self._digests.items():
            if index not in self._views and bool(_digest(self._parameters[index].tensor) != digest):
                written.add(index)
        return [
            parameter for index, (parameter, version) in enumerate(zip(self._parameters, self._versions))
            if parameter.tensor._version != version or index in written
        ]

    def kept(self, parameters: Sequence[Parameter]) -> list[tuple[int, torch.Tensor]]:
        """For put()."""
        wanted = {id(parameter.tensor) for parameter in parameters}
        return [
            (index, parameter.tensor.detach().clone()) for index, parameter in enumerate(self._parameters)
            if id(parameter.tensor) in wanted
        ]

    @torch.no_grad()
    def put(self, kept: Sequence[tuple[int, torch.Tensor]]) -> None:
        """Writes these, so that they wait for the job to have them."""
        for index, value in kept:
            if index in self._delivered and self._delivery is not None and self._delivery.quantized(index):
                self._delivery.decoded(index, torch.empty_like(value))
            self._parameters[index].tensor.copy_(value)

    def release(self, indices: Iterable[int] | None = None) -> None:
        """They, or all, become copies of their own, so that the model lives longer than the session."""
        for index in range(len(self._parameters)) if indices is None else indices:
            tensor = self._parameters[index].tensor
            if index in self._delivered:
                assert self._delivery is not None
                self._delivery.withdraw(index, self.value(index))
            else:
                tensor.data = tensor.data.clone()

    def let_go(self) -> None:
        """Of the session's memory, after release(): slots are free when nothing is left of it."""
        self._sources, self._session, self._views, self._targets = [], None, {}, {}
        self._copies, self._edited, self._writes = Copies(self._like, ()), None, Writes({})
        _forks.remove(self)


def _digest(tensor: torch.Tensor) -> torch.Tensor:
    """The sum of its elements' bits: a read of it, where it lies."""
    bits = tensor.detach().view(torch.int32 if tensor.element_size() == 4 else torch.int16)
    return bits.sum(dtype=torch.int64)
