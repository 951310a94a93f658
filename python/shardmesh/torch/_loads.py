"""Known changes of a model's weights: load_state_dict() of any of its modules, and what is done within editing()."""
from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Optional

import torch

from .. import errors
from ._model import Parameter


class Loads:
    """Which parameters were written to in a way that says so."""

    def __init__(self, model: Optional[torch.nn.Module], parameters: Sequence[Parameter]) -> None:
        self._ids = {id(parameter.tensor) for parameter in parameters}
        self._known: set[int] = set()
        self._editing = False
        self._handles: list[Any] = []
        for module in model.modules() if model is not None else ():
            self._handles.append(module.register_load_state_dict_post_hook(partial(self._loaded)))

    def _loaded(self, module: torch.nn.Module, _: Any) -> None:
        self._known |= {id(tensor) for tensor in module.parameters(recurse=False)} & self._ids

    @contextmanager
    def editing(self) -> Iterator[None]:
        self._editing = True
        try:
            yield
        finally:
            self._editing = False

    @property
    def open(self) -> bool:
        return self._editing

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
