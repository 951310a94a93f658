"""Known changes of a model's weights: load_state_dict() of the model, or of a module in it, and what is done within
Optimizer.editing()."""
from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Optional

import torch

from .. import errors
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
        self._model = model
        for module in model.modules() if model is not None else ():
            self._handles.append(module.register_load_state_dict_post_hook(self._loaded))
        if model is not None:
            model.load_state_dict = _loading(model.load_state_dict, loaded, failed)  # type: ignore[method-assign]

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
            raise errors.FailedPrecondition(
                f"{', '.join(strangers[:3])}{more} were changed by hand since the last step; the service has their weights. "
                "Change them within `with optimizer.editing():` on every rank, or by load_state_dict() of the module; or take "
                "the service's weights back with optimizer.revert()"
            )

    def clear(self) -> None:
        self._known.clear()

    def release(self) -> None:
        for handle in self._handles:
            handle.remove()
        if self._model is not None:
            self._model.__dict__.pop("load_state_dict", None)


def _loading(load: Callable[..., Any], loaded: Callable[[], None], failed: Callable[[], None]) -> Callable[..., Any]:
    """torch loads what fits before it says what does not: that is taken back."""

    @functools.wraps(load)
    def load_state_dict(*args: Any, **kwargs: Any) -> Any:
        try:
            result = load(*args, **kwargs)
        except Exception:
            failed()
            raise
        loaded()
        return result

    return load_state_dict
