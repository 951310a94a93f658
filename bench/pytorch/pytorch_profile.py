"""Where a step of each arm spends its time: bench/pytorch/pytorch.py --profile."""
from __future__ import annotations

import math
import pathlib
from typing import Iterable, NamedTuple

from pytorch_arms import PHASES, Operation
from torch_world import World

STEPS = 5
# By the beginnings of operations' names, in the order in which they are drawn.
KINDS = {
    "matrix products, attention": ("aten::mm", "aten::addmm", "aten::bmm", "aten::_scaled_dot_product"),
    "copies": ("aten::copy_", "aten::cat", "aten::split_with_sizes_copy", "aten::_foreach_copy_", "fsdp::"),
    "exchanges, and waiting in them": ("c10d::", "gloo:", "record_param_comms", "FSDP::"),
    "step(): the fused optimizer, or waiting for the service's": ("aten::_fused_adamw_", "Optimizer.step", "step()"),
}
REST, WAITING = "other operations", "between operations: waiting for other ranks, Python"


class Profile(NamedTuple):
    """Of one arm's rank 0; milliseconds a step."""

    total: float
    kinds: dict[str, float]
    copies: dict[str, tuple[int, float]]  # by phase: of tensors as large as a parameter, how many, and MB


def kind_of(name: str) -> str:
    return next((kind for kind, begins in KINDS.items() if name.startswith(begins)), REST)


def profiled(world: World, first: int, shapes: Iterable[tuple[int, ...]]) -> Profile:
    """shapes: of the parameters."""
    operations: list[Operation]
    seconds, operations = world.ask("profile", first, STEPS)[0]
    kinds = dict.fromkeys((*KINDS, REST, WAITING), 0.0)
    for operation in operations:
        kinds[WAITING if operation.name in PHASES[:2] else kind_of(operation.name)] += operation.seconds * 1e3 / STEPS
    total = seconds * 1e3 / STEPS
    kinds[WAITING] += max(0.0, total - sum(kinds.values()))
    return Profile(total, kinds, {phase: copies_of(operations, phase, set(shapes)) for phase in PHASES})


def copies_of(operations: list[Operation], phase: str, shapes: set[tuple[int, ...]]) -> tuple[int, float]:
    found = [
        math.prod(operation.shapes[0]) for operation in operations
        if operation.phase == phase and operation.name == "aten::copy_" and tuple(operation.shapes[0]) in shapes
    ]
    return len(found) // STEPS, sum(found) * 4 / 1e6 / STEPS


def table(profiles: dict[str, Profile]) -> str:
    """For people."""
    lines = [f"ms of a step of rank 0, profiled (a mean of {STEPS})"]
    width = max(map(len, (*KINDS, WAITING)))
    lines.append(f"{'':{width}}" + "".join(f"{arm:>14}" for arm in profiles))
    for kind in (*KINDS, REST, WAITING):
        lines.append(f"{kind:{width}}" + "".join(f"{profile.kinds[kind]:14.1f}" for profile in profiles.values()))
    for phase in PHASES:
        cells = (profile.copies[phase] for profile in profiles.values())
        name = f"{phase}: copies of parameters' shapes, MB"
        lines.append(f"{name:{width}}" + "".join(f"{f'{count}, {size:.0f}':>14}" for count, size in cells))
    return "\n".join(lines)


def draw(profiles: dict[str, Profile], title: str, path: pathlib.Path) -> None:
    import plot

    pyplot = plot.pyplot_for("profile")
    figure, axes = pyplot.subplots(figsize=(8, 1.4 + 0.45 * len(profiles)), layout="constrained")
    left = [0.0] * len(profiles)
    for color, kind in zip(("C0", "C1", "C3", "C2", "0.7", "0.88"), (*KINDS, REST, WAITING)):
        values = [profile.kinds[kind] for profile in profiles.values()]
        axes.barh(list(profiles), values, left=left, color=color, label=kind)
        left = [before + value for before, value in zip(left, values)]
    axes.invert_yaxis()
    axes.set(title=title, xlabel="ms a step, with the profiler")
    figure.legend(loc="outside lower center", ncols=2, fontsize=8, frameon=False)
    pyplot.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
