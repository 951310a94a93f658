"""The tensors in whatever a call takes or returns: lists, dicts, dataclasses, objects of any kind."""
from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

import torch

_MOST = 2000  # values that are looked at
_PLAIN = (str, bytes, bool, int, float, complex, type(None), type, torch.dtype, torch.device, torch.nn.Module)
_SEQUENCES = (list, tuple, set, frozenset, deque)


def tensors(tree: Any) -> Iterator[torch.Tensor]:
    """Each once, the outer ones first. Attributes of objects count, those of modules and what a property would compute do
    not."""
    seen: set[int] = set()
    left = deque([tree])
    while left and len(seen) < _MOST:
        value = left.popleft()
        if isinstance(value, _PLAIN) or id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, torch.Tensor):
            yield value
        else:
            left.extend(_within(value))


def _within(value: Any) -> Iterator[Any]:
    if isinstance(value, Mapping):
        yield from value.values()
    elif isinstance(value, _SEQUENCES):
        yield from value
    yield from getattr(value, "__dict__", {}).values()
    for kind in type(value).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if hasattr(kind, name) and not name.startswith("__") and hasattr(value, name):
                yield getattr(value, name)
