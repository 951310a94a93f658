"""Where a model has its parameters: assignments put others there, which no optimizer has."""
from __future__ import annotations

from collections.abc import Sequence
from operator import is_
from typing import Any, Optional

import torch

from .. import errors
from ._model import Parameter


class Seats:
    """Of one model, or of none."""

    def __init__(self, model: Optional[torch.nn.Module], parameters: Sequence[Parameter]) -> None:
        self._model, self._parameters = model, parameters
        self._own = {id(parameter.tensor) for parameter in parameters}
        self._note()

    def _note(self) -> None:
        seats: list[tuple[dict[str, Any], str, object]] = []
        for module in self._model.modules() if self._model is not None else ():
            of_module = [(name, tensor) for name, tensor in module._parameters.items() if id(tensor) in self._own]
            seats += [(module._parameters, name, tensor) for name, tensor in of_module]
            seats += [(module._modules, name, child) for name, child in module._modules.items()]
        self._tables = [table for table, _, _ in seats]
        self._names = [name for _, name, _ in seats]
        self._sitting = [thing for _, _, thing in seats]

    def check(self) -> None:
        """FailedPrecondition: some are not in the model any more, and others are. Wrappers may come and go."""
        if self._model is None or all(map(is_, map(dict.get, self._tables, self._names), self._sitting)):
            return
        now = {id(tensor) for tensor in self._model.parameters()}
        gone = [parameter.name for parameter in self._parameters if id(parameter.tensor) not in now]
        if gone and now - self._own:
            raise errors.FailedPrecondition(
                f"{listed(gone)}: the model has other Parameter objects now, after an assignment, or a conversion that "
                "makes new ones; those are not trained. Put the old ones back, or close() this optimizer and make "
                "another of the model as it is. For other values: editing(), or load_state_dict() of the model"
            )
        self._note()


def listed(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
