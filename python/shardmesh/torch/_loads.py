"""Known changes of a model's weights: load_state_dict() of the model, or of a module in it, and what is done within
Optimizer.editing()."""
from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Optional

import torch

from .. import errors
from ._backward import hooked
from ._hooks import Hook, Loading
from ._model import Parameter


class Loads:
    """Which parameters were written to in a way that says so."""

    def __init__(
        self, model: Optional[torch.nn.Module], parameters: Sequence[Parameter], loaded: Callable[[], None],
        failed: Callable[[], None],
    ) -> None:
        """loaded, failed: called after load_state_dict() of the model itself."""
        self._ids = {id(parameter.tensor) for parameter in parameters}
        self._known: set[int] = set()
        self._handles: list[Any] = []
        for module in model.modules() if model is not None else ():
            self._handles.append(hooked(module).register_load_state_dict_post_hook(Hook(self._loaded)))
        if model is not None:
            self._handles.append(Loading(model, loaded, failed))

    def _loaded(self, module: torch.nn.Module, _: Any) -> None:
        self._known |= {id(tensor) for tensor in module.parameters(recurse=False)} & self._ids

    def note(self, changed: Sequence[Parameter]) -> None:
        """All that is changed by now is known."""
        self._known |= {id(parameter.tensor) for parameter in changed}

    def check(self, changed: Sequence[Parameter]) -> None:
        """FailedPrecondition: one was changed in another way."""
        strangers = [parameter.name for parameter in changed if id(parameter.tensor) not in self._known]
        if strangers:
            more = f" and {len(strangers) - 3} more" if len(strangers) > 3 else ""
            was, its, them = ("was", "its", "it") if len(strangers) == 1 else ("were", "their", "them")
            raise errors.FailedPrecondition(
                f"{', '.join(strangers[:3])}{more} {was} changed by hand since the last step; the service has {its} "
                f"weights. Change {them} within `with optimizer.editing():` on every rank, or by load_state_dict() of "
                "the module; or take the service's weights back with optimizer.revert()"
            )

    def clear(self) -> None:
        self._known.clear()

    def release(self) -> None:
        for handle in self._handles:
            handle.remove()
