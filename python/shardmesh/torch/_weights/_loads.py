"""Known changes of a model's weights: load_state_dict() of the model, or of a module in it, and what is done within
Optimizer.editing()."""
from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Optional

import torch

from ... import errors
from .._modules._backward import hooked
from .._modules._hooks import Hook, Loading
from .._modules._locations import listed
from .._modules._model import Parameter


class _Before:
    """Tensors of a module, and which it has, as they are now."""

    def __init__(self, module: torch.nn.Module, without: set[int]) -> None:
        """without: id() of those whose values are seen to elsewhere."""
        self._tables: list[tuple[Any, dict[str, Any]]] = [
            (table, dict(table)) for one in module.modules() for table in (one._parameters, one._buffers)
        ]
        found = {id(one): one for _, table in self._tables for one in table.values() if one is not None}
        self._values = [
            (one, one._version, one.detach().clone()) for key, one in found.items()
            if key not in without and not one.is_inference() and not torch.nn.parameter.is_lazy(one)
        ]

    @torch.no_grad()
    def put_back(self) -> None:
        for table, before in self._tables:
            table.clear()
            table.update(before)
        for tensor, version, value in self._values:
            if tensor._version != version:
                tensor.copy_(value)


class Loads:
    """Which parameters were written to in a way that says so."""

    def __init__(
        self, model: Optional[torch.nn.Module], parameters: Sequence[Parameter],
        around: Callable[[torch.nn.Module], Optional[AbstractContextManager[None]]],
    ) -> None:
        """around: load_state_dict() of the model and of each module in it."""
        self._ids = {id(parameter.tensor) for parameter in parameters}
        self._known: set[int] = set()
        self._editing = False
        self._handles: list[Any] = []
        for module in model.modules() if model is not None else ():
            self._handles.append(hooked(module).register_load_state_dict_post_hook(Hook(self._loaded)))
            self._handles.append(Loading(module, around))

    def _loaded(self, module: torch.nn.Module, _: Any) -> None:
        self._known |= {id(tensor) for tensor in module.parameters(recurse=False)} & self._ids

    @property
    def within_editing(self) -> bool:
        return self._editing

    def begin(self, module: torch.nn.Module) -> Callable[[], None]:
        """Before a load. Returns what puts back all that is not the job's, and what was known to be changed. Within
        editing() it puts back all."""
        before = _Before(module, set() if self._editing else self._ids)
        known = set(self._known)

        def put_back() -> None:
            before.put_back()
            self._known = set(known)

        return put_back

    @contextmanager
    def editing(self) -> Iterator[None]:
        before, self._editing = self._editing, True
        try:
            yield
        finally:
            self._editing = before

    def note(self, changed: Sequence[Parameter]) -> None:
        """All that is changed by now is known."""
        self._known |= {id(parameter.tensor) for parameter in changed}

    def check(self, changed: Sequence[Parameter]) -> None:
        """FailedPrecondition: one was changed in another way."""
        strangers = [parameter.name for parameter in changed if id(parameter.tensor) not in self._known]
        if strangers and self._editing:
            raise errors.FailedPrecondition(
                f"{listed(strangers)} changed within this block of editing(), and the job has that after the block; do "
                "this call after it"
            )
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
