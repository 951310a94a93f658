"""Hooks of a model that are an optimizer's: a copy of the model has none of them, and pickles have none at all."""
from __future__ import annotations

import types
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NoReturn, Optional

import torch

from ... import errors


class _OfOne:
    """What belongs to one model object."""

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise errors.Unimplemented(
            "a model cannot be pickled while an optimizer of a service trains it; save its state_dict(), or close() "
            "the optimizer first"
        )


class Hook(_OfOne):
    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(*args, **kwargs)

    def __deepcopy__(self, memo: Any) -> Callable[..., None]:
        return _nothing


class Loading(_OfOne):
    """In place of a module's load_state_dict(). torch loads what fits, then says what does not: that is taken back."""

    def __init__(
        self, module: torch.nn.Module, around: Callable[[torch.nn.Module], Optional[AbstractContextManager[None]]]
    ) -> None:
        """Puts itself there. around: a load, which it takes back where it ends with an exception."""
        self._module, self._load, self._around = module, module.load_state_dict, around
        self._before = module.__dict__.get("load_state_dict")
        module.load_state_dict = self  # type: ignore[method-assign]

    def remove(self) -> None:
        """Also where another optimizer of the module has put its own in front."""
        at = self._module.__dict__.get("load_state_dict")
        if at is self:
            self._module.__dict__.pop("load_state_dict")
            if self._before is not None:
                self._module.__dict__["load_state_dict"] = self._before
        while isinstance(at, Loading):
            if at._before is self:
                at._load, at._before = self._load, self._before
            at = at._before

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self._around(self._module) or nullcontext():
            return self._load(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., Any]:
        """The copy's own."""
        copied = memo[id(self._module)]
        return types.MethodType(type(copied).load_state_dict, copied)


def refuse_copies(model: torch.nn.Module) -> Callable[[], None]:
    """Of a model whose weights are not there between its forwards, and of what is in it: deepcopy() and
    torch.jit.script(), which take them from the parameters. Returns what allows them again."""

    def refuse_copy(memo: Any) -> NoReturn:
        raise errors.Unimplemented(
            'with residency="bucket" a model\'s weights are not there to be copied; make another model and load this '
            'one\'s state_dict(), or close() the optimizer first'
        )

    def refuse_script() -> NoReturn:
        raise _of_a_program("torch.jit.script")

    refused = {"__deepcopy__": refuse_copy, "__prepare_scriptable__": refuse_script}
    modules = [module for module in model.modules() if any(True for _ in module.parameters())]
    for module in modules:
        module.__dict__.update(refused)

    def allow() -> None:
        for module in modules:
            for name in refused:
                module.__dict__.pop(name, None)

    return allow


def check_not_traced() -> None:
    """Unimplemented: this call is made into a program, which would read weights when nobody gathers them."""
    jit: Any = torch.jit
    if torch.compiler.is_exporting():
        raise _of_a_program("torch.export")
    if jit.is_tracing():
        raise _of_a_program("torch.jit.trace")


def _of_a_program(what: str) -> errors.Unimplemented:
    return errors.Unimplemented(
        f'{what} of a model with residency="bucket": the program would read weights that are not there between calls '
        "of the blocks. Load state_dict() into another model and take that, close() the optimizer first, or train with "
        'residency="full"'
    )


def _nothing(*_: Any, **__: Any) -> None:
    pass
