"""What pickles name: functions that make a value of its state."""
from __future__ import annotations

from typing import Any

from . import _core


def mesh(state: Any) -> _core.Mesh:
    return _core.restore_mesh(state)


def placement(state: Any) -> _core.Placement:
    return _core.restore_placement(state)


def plan(state: Any) -> _core.Plan:
    return _core.restore_plan(state)
