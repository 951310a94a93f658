"""The names of tensors: what a training framework's wrappers added is taken off, exactly, and nothing else.

A name is split on "."; the segments _orig_mod, _checkpoint_wrapped_module and _fsdp_wrapped_module are dropped at any
depth, but never the last one, which is the tensor's own. Every function takes what names alone cannot tell:

root_wrappers  the wrapper segments at the head of the names, in order: ("module",) for a data-parallel model,
               ("_orig_mod", "module") for a compiled one. `module` is dropped only where it is declared.
literal        prefixes of names as given whose last segment is a user's own child that is named like a wrapper: kept.
wrapped_at     prefixes of names as given behind which one `module` is a data-parallel wrapper.
"""
from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from . import _core

__all__ = [
    "AliasTable", "OptimizerName", "canonical", "canonical_many", "canonical_optimizer", "canonical_optimizer_many",
    "parse_optimizer",
]


class OptimizerName(NamedTuple):
    """A name of a flattened optimizer state dict, [prefix.]kind.parameter.state; str() is the name."""

    prefix: str  # "" when there is none
    kind: str  # "state" or "param_groups"
    parameter: str
    state: str  # the state's name, such as exp_avg, or the field's of the parameter group, such as lr

    def __str__(self) -> str:
        return ".".join(self if self.prefix else self[1:])


def canonical(
    raw: str, root_wrappers: Sequence[str] = (), literal: Iterable[str] = (), wrapped_at: Iterable[str] = ()
) -> str:
    """The canonical name of `raw`. InvalidArgument: it can be no tensor's name, or a rule is none."""
    return _core.Canonicalizer(*_rules(root_wrappers, literal, wrapped_at)).canonical(raw)


def canonical_many(
    raw: Iterable[str], root_wrappers: Sequence[str] = (), literal: Iterable[str] = (), wrapped_at: Iterable[str] = ()
) -> list[str]:
    """canonical() of each, in order. Two of them may come out equal: AliasTable refuses that."""
    canonicalizer = _core.Canonicalizer(*_rules(root_wrappers, literal, wrapped_at))
    return [canonicalizer.canonical(name) for name in _strings("raw", raw)]


def parse_optimizer(name: str, prefixes: Iterable[str] = ()) -> OptimizerName:
    """The parts of a name such as optim.state.layers.0.w.exp_avg.

    prefixes: what an application may have put before `state` or `param_groups`, such as optim. The last segment is the
    state's name: of a state that is itself a dict, the outer names count to the parameter's. InvalidArgument: not a
    name of this form, or a prefix that is none (one with a segment `state` or `param_groups`).
    """
    return OptimizerName(*_core.parse_optimizer(name, _strings("prefixes", prefixes)))


def canonical_optimizer(
    raw: str, root_wrappers: Sequence[str] = (), literal: Iterable[str] = (), wrapped_at: Iterable[str] = (),
    prefixes: Iterable[str] = (),
) -> str:
    """`raw` with its parameter's name made canonical; the rules are about that name alone, all else is kept.

    InvalidArgument: as canonical() and parse_optimizer().
    """
    return canonical_optimizer_many([raw], root_wrappers, literal, wrapped_at, prefixes)[0]


def canonical_optimizer_many(
    raw: Iterable[str], root_wrappers: Sequence[str] = (), literal: Iterable[str] = (), wrapped_at: Iterable[str] = (),
    prefixes: Iterable[str] = (),
) -> list[str]:
    """canonical_optimizer() of each, in order."""
    canonicalizer = _core.Canonicalizer(*_rules(root_wrappers, literal, wrapped_at))
    heads = _strings("prefixes", prefixes)
    return [canonicalizer.canonical_optimizer(name, heads) for name in _strings("raw", raw)]


class AliasTable:
    """One client's names: raw <-> canonical, and which names share one storage."""

    def __init__(
        self, root_wrappers: Sequence[str] = (), literal: Iterable[str] = (), wrapped_at: Iterable[str] = ()
    ) -> None:
        self._table = _core.AliasTable(*_rules(root_wrappers, literal, wrapped_at))

    def add(self, raw: str, tied_to: str | None = None) -> str:
        """Adds a raw name and returns its canonical one; it shares the storage of `tied_to`, a raw name added before.

        AlreadyExists: the canonical name belongs to another storage; the message has both raw names.
        """
        return self._table.add(raw, tied_to)

    def canonical(self, raw: str) -> str:
        """The canonical name of a raw one. NotFound, here and below: it was not added."""
        return self._table.canonical(raw)

    def raw(self, canonical: str) -> list[str]:
        """The raw names of a canonical one, oldest first; several only if they are tied."""
        return self._table.raw(canonical)

    def storage(self, canonical: str) -> str:
        """The canonical name that the bytes are stored under: the first one of its ties."""
        return self._table.storage(canonical)

    def export_names(self, canonical: str) -> list[str]:
        """Every raw name of the storage, oldest first: the names to write on export."""
        return self._table.export_names(canonical)

    @property
    def storages(self) -> list[str]:
        """The canonical names that own a storage, oldest first."""
        return self._table.storages

    def __len__(self) -> int:
        """How many raw names were added."""
        return len(self._table)


def _rules(
    root_wrappers: Iterable[str], literal: Iterable[str], wrapped_at: Iterable[str]
) -> tuple[list[str], list[str], list[str]]:
    return _strings("root_wrappers", root_wrappers), _strings("literal", literal), _strings("wrapped_at", wrapped_at)


def _strings(what: str, values: Iterable[str]) -> list[str]:
    if isinstance(values, str):
        raise TypeError(f"{what} is the string {values!r:.200}; give a list of strings")
    return list(values)
