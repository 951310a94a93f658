"""Bucket residency: the weights of a unit are gathered before it is used and dropped after it, forward and backward,
and its gradients are handed over as soon as they are there.

Addresses stay as they are when a bucket is dropped, so tensors, compiled blocks and what autograd saved stay valid.
"""
from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, Optional

import torch

from ... import errors
from .._job._session import LOG, TrainerSession
from .._modules._backward import hooked
from .._modules._canonical import is_naming
from .._modules._hooks import Hook, refuse_copies
from .._modules._model import Parameter
from .._modules._units import Unit, eager, units
from ._buckets import Buckets
from ._calls import Calls
from ._placed import Placed
from ._saved import Memory


class Residence:
    """Of one session. Unit 0 is the root."""

    def __init__(
        self, model: torch.nn.Module, parameters: Sequence[Parameter], placed: Placed, session: TrainerSession,
        begins: Callable[[], None],
    ) -> None:
        """begins: called before a forward of the whole model."""
        found, root = units(model, parameters)
        self._units = [Unit(model, root), *found]
        self._parameters, self._placed = parameters, placed
        self._buckets = Buckets(self._units, placed)
        self._calls = Calls(self._units, self._buckets, begins)
        self._handles: list[Any] = []
        self._allow_copies = refuse_copies(model)
        self._unit_of = {index: number for number, unit in enumerate(self._units) for index in unit.parameters}
        place_of = {
            id(parameters[index].tensor): (number, index)
            for number, unit in enumerate(self._units) for index in unit.parameters
        }
        for module in model.modules():
            own = [
                (name, *place_of[id(tensor)]) for name, tensor in module._parameters.items() if id(tensor) in place_of
            ]
            if own:
                hook = partial(self._put_into_state_dict, own)
                self._handles.append(hooked(module)._register_state_dict_hook(Hook(hook)))
        self._watch(place_of)
        self.attach(session)
        if not found:
            LOG.warning("all weights are held from the forward to the end of the backward: the model has no list of "
                        "blocks, or was compiled as a whole; compile its blocks, before the optimizer is made")

    def _watch(self, place_of: dict[int, tuple[int, int]]) -> None:
        """place_of: unit and index of each parameter."""
        blocks = {id(inner) for unit in self._units[1:] for inner in unit.module.modules()}
        for number, unit in enumerate(self._units):
            self._calls.watch(number, [
                inner for inner in eager(unit.module)
                if inner is not unit.module and (number > 0 or id(inner) not in blocks)
                and any(place_of.get(id(one), (-1, 0))[0] == number for one in inner.parameters(recurse=False))
            ])

    def attach(self, session: TrainerSession) -> None:
        """At first, or when the job has other weights: nothing is in use."""
        self._session = session
        self._bucket = [session.core.bucket(parameter.name) for parameter in self._parameters]
        self._buckets.attach(session, self._bucket)
        self._missing: dict[int, set[int]] = {}  # by bucket: trainable parameters without a gradient yet
        self._declared: set[int] = set()
        self._placed.reside()
        self._calls.attach(Memory(
            (number, self._parameters[index].name, tensor)
            for number, unit in enumerate(self._units) if number > 0
            for index in unit.parameters for tensor in self._placed.memory(index)
        ), [
            (number, self._parameters[index].tensor) for number, unit in enumerate(self._units) if number > 0
            for index in unit.parameters
        ])
        self.stepped()

    # -- weights ----------------------------------------------------------------------------------------------------

    def _put_into_state_dict(
        self, names: Sequence[tuple[str, int, int]], module: torch.nn.Module, state_dict: dict[str, Any], prefix: str,
        _: Any,
    ) -> None:
        """A module's state_dict() has copies: its parameters are not there all the time."""
        for name, unit, index in names:
            if prefix + name in state_dict and not is_naming():
                self._buckets.acquire(unit)
                state_dict[prefix + name] = self._placed.value(index)
                self._buckets.release(unit)

    def release_all(self) -> None:
        """Before a step."""
        self._calls.end()

    # -- gradients --------------------------------------------------------------------------------------------------

    def arrived(self, index: int, take: Callable[[int], None]) -> list[int]:
        """A gradient of the rank's last slot is in its window. Returns the parameters whose gradients are handed over
        now. take: called for each of these before."""
        bucket = self._bucket[index]
        missing = self._missing[bucket]
        missing.discard(index)
        if missing:
            return []
        handed_over = [
            other for other, of_other in enumerate(self._bucket)
            if of_other == bucket and not self._parameters[other].frozen
        ]
        for other in handed_over:
            take(other)
        self._session.declare(bucket)
        self._declared.add(bucket)
        return handed_over

    def check_open(self, index: int) -> bool:
        """Whether its gradient is wanted: what was handed over before a backward raised stays. FailedPrecondition: its
        weights were not there, or it is too late."""
        if self._unit_of[index] > 0 and self._unit_of[index] not in self._calls.called:
            raise errors.FailedPrecondition(
                f"{self._parameters[index].name} was used without a call of its block, or of a module in it, so that "
                "its weights were not there. residency=\"bucket\" gathers weights when a module is called: call the "
                "module, and compile functions that call the model after the optimizer is made"
            )
        if self.has_handed_over(index):
            if self._again:
                return False
            raise errors.FailedPrecondition(
                f"gradients of {self._parameters[index].name} were handed over already: with residency=\"bucket\" a "
                "slot has one backward. Accumulate with slots=, or within no_sync() up to the last one"
            )
        return True

    def has_handed_over(self, index: int) -> bool:
        """Whether the job has its gradient of this step."""
        return self._bucket[index] in self._declared

    def writer(self, slot: int, name: str) -> Callable[[Any], None]:
        """Puts bytes where a gradient is."""
        return partial(self._session.core.write_gradient, slot, name)

    @property
    def handed_over(self) -> bool:
        return bool(self._declared)

    def begin_again(self) -> None:
        """The slots of the step, after a backward that raised."""
        self.release_all()
        self._await_gradients()
        self._again = bool(self._declared)
        if self._again:
            LOG.warning("a backward raised; gradients of this step that were handed over before stay: take the same "
                        "batches again")

    def begin(self) -> None:
        """Of slots that are pulled: the next ones, whatever calls and backwards have left."""
        self.release_all()
        self.stepped()

    def stepped(self) -> None:
        self._declared.clear()
        self._again = False
        self._buckets.acquire_root()
        self._calls.called.clear()
        self._await_gradients()

    def _await_gradients(self) -> None:
        self._missing = {}
        for index, parameter in enumerate(self._parameters):
            if not parameter.frozen:
                self._missing.setdefault(self._bucket[index], set()).add(index)

    def own_all(self) -> None:
        """All weights become tensors of their own, until they are placed again."""
        self._calls.suspend()
        for number, unit in enumerate(self._units):
            self._buckets.acquire(number)
            self._placed.own(unit.parameters)
            self._buckets.release(number)

    def close(self) -> None:
        """All weights become memory of this process; NaN, where the service is gone."""
        for handle in self._handles:
            handle.remove()
        self._calls.close()
        self._allow_copies()
        lost: Optional[errors.Error] = None
        for number, unit in enumerate(self._units):
            try:
                self.release_all()
                self._buckets.acquire(number)
            except errors.Error as error:
                lost = lost or error
                self._placed.lose(unit.parameters)
                continue
            self._placed.release(unit.parameters)
            with suppress(errors.Error):  # it is gone since then
                self._buckets.release(number)
        if lost is not None:
            LOG.warning("the model's weights could not be fetched, and are NaN now: go on from a checkpoint. %s", lost)


@contextmanager
def whole(residence: Optional[Residence], take: Callable[[], None], again: Callable[[], None]) -> Iterator[None]:
    """Within it all weights are there and can be written. take: what was changed, at the end; again: they are placed
    as they were. None: all are there anyhow."""
    if residence is None:
        yield
        return
    residence.own_all()
    try:
        yield
        take()
    finally:
        again()
