"""Where a model's parameters and gradients lie: in the service's windows, or in copies where that cannot be."""
from __future__ import annotations

from collections.abc import Sequence

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
        self._copied: list[int] = []
        self._versions: list[int] = []
        self.place(session)

    def place(self, session: Session) -> None:
        """Of a session that was opened, or opened again."""
        self._sources = [session.weights(parameter.name) for parameter in self._parameters]
        self._copied, reasons = [], {}
        with torch.no_grad():
            for index, (parameter, source) in enumerate(zip(self._parameters, self._sources)):
                tensor = parameter.tensor
                reason = _why_copied(parameter, source)
                if reason is None:
                    tensor.data = source.view
                else:
                    reasons.setdefault(reason, []).append(parameter.name)
                    self._copied.append(index)
                    if tensor.is_meta:
                        raise errors.Internal(f"{parameter.name} has no memory")
                    tensor.data = tensor.data.clone(memory_format=torch.preserve_format)
        for reason, names in reasons.items():
            LOG.info("%d parameters are copies (%s): %s%s", len(names), reason, ", ".join(names[:3]), ", ..." if names[3:] else "")
        self.refresh()

    def refresh(self) -> None:
        """After a step: copies get the new weights."""
        with torch.no_grad():
            for index in self._copied:
                self._sources[index].write_to(self._parameters[index].tensor)
        self._versions = [parameter.tensor._version for parameter in self._parameters]

    def changed(self) -> list[Parameter]:
        """Those that were written to since the last refresh(), through themselves: what is done to `.data` is not seen."""
        return [
            parameter for parameter, version in zip(self._parameters, self._versions)
            if parameter.tensor._version != version
        ]

    def forget(self, session: Session) -> None:
        """What was written is dropped: all have the job's weights again."""
        session.core.forget_writes()
        self.refresh()

    def release(self) -> None:
        """All become copies of their own, so that the model lives longer than the session."""
        for index, parameter in enumerate(self._parameters):
            if index not in self._copied:
                parameter.tensor.data = parameter.tensor.data.clone()
        self._sources = []


def _why_copied(parameter: Parameter, source: Weights) -> str | None:
    tensor = parameter.tensor
    if source.coded:
        return f"decoded from {source.format}"
    if source.view.dtype != tensor.dtype:
        return f"{source.format} in the window, {tensor.dtype} in the model".replace("torch.", "")
    if not parameter.contiguous:
        return "in another order in memory"
    return None if tensor.device.type == "cpu" else f"on {tensor.device}"
