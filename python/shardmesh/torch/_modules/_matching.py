"""Which of a model's names each name of a state dict is: the names of one dict are read together, since a single one may
be a wrapped module's or that of a user's own child that is called like a wrapper."""
from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Optional

from ... import names

_WRAPPERS = {"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module", "module"}
_ROOTS: tuple[tuple[str, ...], ...] = ((), ("module",), ("_orig_mod", "module"), ("module", "_orig_mod"))


def matched(given: Iterable[str], wanted: Iterable[str], own: Mapping[str, str]) -> dict[str, Optional[str]]:
    """The canonical name in `wanted` of each name in `given`; None: it is none of them. No two have the same.

    own: canonical by raw name, of the model as it is wrapped now; a dict that this model wrote has these.
    A module is taken for a wrapper only if it is the one child of another, and if more names are found then.
    """
    given, wanted = list(given), set(wanted)
    as_own = {raw: own[raw] for raw in given if own.get(raw) in wanted}
    by_tree = _matched(_tree(given), _tree(wanted))
    found = as_own if len(as_own) >= len(by_tree) else by_tree
    free = wanted - set(found.values())
    for raw in given:
        if raw not in found and (name := _without_wrappers(raw, free)) is not None:
            found[raw] = name
            free.remove(name)
    return {raw: found.get(raw) for raw in given}


def _tree(all_names: Iterable[str]) -> dict[str, Any]:
    """Of names by their segments; each leaf is the whole name."""
    tree: dict[str, Any] = {}
    for name in all_names:
        *path, last = name.split(".")
        at = tree
        for segment in path:
            below = at.setdefault(segment, {})
            if not isinstance(below, dict):
                break  # a tensor and a module of one name: no model has both
            at = below
        else:
            at.setdefault(last, name)
    return tree


def _matched(given: dict[str, Any], wanted: dict[str, Any]) -> dict[str, str]:
    found: dict[str, str] = {}
    for key, below in given.items():
        other = wanted.get(key)
        if isinstance(below, dict) and isinstance(other, dict):
            found.update(_matched(below, other))
        elif isinstance(below, str) and isinstance(other, str):
            found[below] = other
    if len(given) == 1:
        key, below = next(iter(given.items()))
        if key in _WRAPPERS and isinstance(below, dict):
            without = _matched(below, wanted)
            return without if len(without) > len(found) else found
    return found


def _without_wrappers(raw: str, free: set[str]) -> Optional[str]:
    """Of a name that the others say nothing of."""
    for root in _ROOTS:
        try:
            name = names.canonical(raw, root_wrappers=root)
        except ValueError:
            continue
        if name in free:
            return name
    return None
