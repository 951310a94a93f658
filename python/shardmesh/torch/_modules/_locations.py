"""Under which names a model has its parameters: an assignment puts others there, which no optimizer trains."""
from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from operator import is_, methodcaller
from typing import Any, Optional

import torch

from ... import errors
from ._model import Parameter

_VALUES = methodcaller("values")


class Locations:
    """Of one model, or of none."""

    def __init__(self, model: Optional[torch.nn.Module], parameters: Sequence[Parameter]) -> None:
        self._model, self._parameters = model, parameters
        self._own = {id(parameter.tensor) for parameter in parameters}
        found = list(self._found())
        self._at_first = {name: one for name, one in found if id(one) in self._own}
        self._others = {id(one): one for _, one in found if id(one) not in self._own}  # not this optimizer's business
        self._added: list[tuple[str, torch.Tensor]] = []
        self._note()

    def _found(self) -> Iterator[tuple[str, torch.Tensor]]:
        return iter(()) if self._model is None else _parameters(self._model, "", ())

    def _note(self) -> None:
        """What the model's modules hold, so that a check of a model that did not change takes no walk through it."""
        modules = list(self._model.modules()) if self._model is not None else []
        self._tables: list[dict[str, Any]] = [
            table for module in modules for table in (module._parameters, module._modules)
        ]
        self._held = list(chain.from_iterable(map(_VALUES, self._tables)))

    def check(self) -> None:
        """FailedPrecondition: a parameter was replaced by another, or one that was added gets gradients. Wrappers may
        come and go, and so may modules that nothing trains."""
        if not self._unchanged():
            self._check_replaced()
            self._note()
        for name, tensor in self._added:
            if tensor.requires_grad and tensor.grad is not None:
                raise errors.FailedPrecondition(
                    f"{name} has a gradient, but this optimizer does not train it: it was added to the model after the "
                    "optimizer was made. close() this optimizer and make another of the model as it is; or, if nothing "
                    "is to train it, call requires_grad_(False) on it"
                )

    def _unchanged(self) -> bool:
        held = list(chain.from_iterable(map(_VALUES, self._tables)))
        return len(held) == len(self._held) and all(map(is_, held, self._held))

    def _check_replaced(self) -> None:
        now = dict(self._found())
        replaced = [name for name, one in self._at_first.items() if now.get(name, one) is not one]
        added = [(name, one) for name, one in now.items() if id(one) not in self._own and id(one) not in self._others]
        if added:
            present = set(map(id, now.values()))
            gone = {id(one.tensor) for one in self._parameters} - present
            replaced += [name for name, one in self._at_first.items() if id(one) in gone and name not in replaced]
        if replaced:
            raise errors.FailedPrecondition(
                f"{listed(replaced)}: the model has other Parameter objects now, after an assignment, or a conversion "
                "that makes new ones; those are not trained. Put the old ones back, or close() this optimizer and make "
                "another of the model as it is. For other values: editing(), or load_state_dict() of the model"
            )
        self._added = added


def _parameters(
    module: torch.nn.Module, prefix: str, above: tuple[torch.nn.Module, ...]
) -> Iterator[tuple[str, torch.Tensor]]:
    """With each of the names of each. A module may contain itself."""
    for name, tensor in module._parameters.items():
        if tensor is not None:
            yield prefix + name, tensor
    for name, child in module._modules.items():
        if child is not None and child is not module and not any(child is one for one in above):
            yield from _parameters(child, f"{prefix}{name}.", (*above, module))


def listed(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
