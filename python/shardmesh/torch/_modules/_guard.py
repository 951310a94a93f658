"""What a job relies on, of the parameters of a model: each is one optimizer's, and stays what and where it was."""
from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from operator import attrgetter
from typing import Any, NamedTuple, Optional

import torch
from torch.utils.weak import WeakIdKeyDictionary

from ... import errors
from ._locations import Locations, listed
from ._model import NO_GROUP, Facts, Parameter

_owners: Any = WeakIdKeyDictionary()  # a parameter's Owner
_REQUIRES_GRAD = attrgetter("requires_grad")


class Owner(NamedTuple):
    """The optimizer of this process that has a parameter."""

    job: str
    bucketed: bool


def of_one_optimizer(of: Facts, bucketed: bool) -> Facts:
    """Without parameters that were not given to this optimizer and are another's business: another optimizer of this
    process has them, or they ask for gradients, so that torch.optim may train them. Those on the meta device stay,
    since nothing else gives them weights.

    FailedPrecondition: another optimizer has one that was given. Unimplemented: two with bucket residency in one model.
    """
    own = []
    for parameter in of.parameters:
        owner, given = _owners.get(parameter.tensor), parameter.group != NO_GROUP
        if owner is not None and given:
            raise errors.FailedPrecondition(
                f"{parameter.name} is in another optimizer of this process, of the job {owner.job}; close() that one "
                "first"
            )
        if owner is not None and owner.bucketed and bucketed:
            raise errors.Unimplemented(
                f'{parameter.name} of this model is in another optimizer with residency="bucket", of the job '
                f'{owner.job}; a model can have one such optimizer: take residency="full" for this one'
            )
        if given or parameter.tensor.is_meta or (owner is None and not parameter.tensor.requires_grad):
            own.append(parameter)
    return of._replace(parameters=own)


def check_not_trained(tensors: Iterable[torch.nn.Parameter]) -> None:
    """FailedPrecondition: an optimizer of this process trains one of them."""
    for tensor in tensors:
        if (owner := _owners.get(tensor)) is not None:
            raise errors.FailedPrecondition(
                f"this model is trained by an optimizer of this process, of the job {owner.job}, and has its weights of the "
                "newest step already; give follow() a model of its own, or close() the optimizer first"
            )


class Guard:
    """Of one optimizer, which has the parameters until release()."""

    def __init__(self, model: Optional[torch.nn.Module], parameters: Sequence[Parameter], owner: Owner) -> None:
        self._parameters = parameters
        self._tensors = [parameter.tensor for parameter in parameters]
        given = [parameter for parameter in parameters if parameter.group != NO_GROUP]
        self._given = [parameter.tensor for parameter in given]
        self._trained = [not parameter.frozen for parameter in given]
        self._locations = Locations(model, parameters)
        self._places: list[tuple[torch.Tensor, int]] = []
        for parameter in parameters:
            _owners[parameter.tensor] = owner
        self.note()

    def note(self) -> None:
        """They lie where they are to be."""
        with torch._C.DisableTorchFunction():  # no use of their elements
            self._places = [(tensor.data, tensor.data_ptr()) for tensor in self._tensors]
        self._addresses = [address for _, address in self._places]

    def check(self, elsewhere: Collection[int] = (), frozen: bool = True) -> None:
        """FailedPrecondition: they lie elsewhere, but for these; others are in the model; with `frozen`, other ones are
        frozen."""
        self._locations.check()
        if list(map(torch.Tensor.data_ptr, self._tensors)) != self._addresses:
            self._check_places(elsewhere)
        if frozen and list(map(_REQUIRES_GRAD, self._given)) != self._trained:
            self._check_frozen()

    def check_replaced(self) -> None:
        """FailedPrecondition: others are in the model."""
        self._locations.check()

    def moved(self, elsewhere: Collection[int] = ()) -> list[Parameter]:
        """Those that lie elsewhere than the job's weights, but for these indices."""
        return [
            parameter for index, (parameter, address) in enumerate(zip(self._parameters, self._addresses))
            if parameter.tensor.data_ptr() != address and index not in elsewhere
        ]

    def drop_moved(self, elsewhere: Collection[int]) -> bool:
        """Takes the memory and gradients of those away, so that they can be placed anew; returns whether there were
        some. Another type makes torch forget the shape that it expects of their gradients."""
        moved = self.moved(elsewhere)
        for parameter in moved:
            parameter.tensor.grad = None
            parameter.tensor.data = torch.empty(0, dtype=torch.float64)
        return bool(moved)

    def _check_places(self, elsewhere: Collection[int]) -> None:
        if moved := [parameter.name for parameter in self.moved(elsewhere)]:
            raise errors.FailedPrecondition(
                f"{listed(moved)} lie elsewhere than the job's weights, after .data =, model.to() or share_memory(), "
                "so that the job does not train them. Call optimizer.revert(), which takes the job's weights back and "
                "drops these gradients, or close() this optimizer; move the model before the optimizer is made"
            )

    def _check_frozen(self) -> None:
        for parameter in self._parameters:
            if parameter.group != NO_GROUP and parameter.tensor.requires_grad is parameter.frozen:
                job = "does not train it" if parameter.frozen else "trains it"
                raise errors.FailedPrecondition(
                    f"requires_grad of {parameter.name} is {parameter.frozen} now, and the job {job}, which cannot "
                    f"change. Call requires_grad_({not parameter.frozen}) on it, or close() this optimizer and make "
                    "another"
                )

    def take_back(self) -> None:
        """Those that lie elsewhere with the same values, on the same kind of device, as after Module.to("cpu:0")."""
        with torch.no_grad():
            for parameter, (place, address) in zip(self._parameters, self._places):
                tensor = parameter.tensor
                elsewhere = tensor.data_ptr() != address and tensor.device.type == place.device.type
                if elsewhere and torch.equal(tensor, place):
                    tensor.data = place

    def release(self) -> None:
        for parameter in self._parameters:
            _owners.pop(parameter.tensor, None)
        self._places = []
