"""What a program that uses shardmesh looks like to a type checker: types_parity_test.py runs mypy --strict over it."""
from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from shardmesh import Error, Mesh, client, connect, errors, layout, mesh as meshes, names, numerics, views


def shapes_of(plan: layout.Plan) -> dict[str, tuple[int, ...]]:
    return plan.shapes


def longest_group(mesh: Mesh, name: str) -> list[int]:
    groups: list[list[int]] = mesh.slice(name).groups(name)
    return max(groups, key=len)


def stored_elements(plan: layout.Plan, name: str, rank: int) -> int:
    return sum(part.num_elements for part in plan.shard_of(name) if rank in part.ranks)


def moved_elements(plan: layout.Plan, name: str, tp: Mesh, rank: int) -> int:
    wanted: views.View = views.placed(plan.shapes[name], tp, {"tp": layout.Shard(0)})
    copies: list[views.Copy] = views.reshard(plan.view(name), wanted, rank)
    by_name: dict[str, list[views.Copy]] = views.reshard({name: plan.view(name)}, {name: wanted}, rank)
    again = views.listed(wanted.shape, {rank: wanted.boxes(rank)})
    parts = {"q": views.Box((0, 0), (4, 2)), "k": views.Box((0, 2), (4, 2))}
    whole = views.packed((4, 4), parts, tp, [layout.Shard(0)], join_dim=1)
    return sum(copy.num_elements for copy in copies + by_name[name]) + len(again.shape) + len(whole.boxes(rank))


def shared_keys(mesh: Mesh) -> dict[str, list[int]]:
    asked = [(mesh, name) for name in mesh.names]
    return {each.key: each.ranks for each in meshes.communicators(asked) if len(each.uses) > 1}


def parameter_of(name: str) -> str:
    return names.parse_optimizer(names.canonical_optimizer(name), prefixes=["optim"]).parameter


def stepped(weights: npt.NDArray[np.float32], gradient: npt.NDArray[np.float32]) -> float:
    step = numerics.Step("AdamW", weights="bf16_sr", states="dyn8", seed=1, lr=1e-3, betas=(0.9, 0.99))
    state: numerics.State = step.init(weights)
    state.parts["exp_avg"]["codes"] = state.parts["exp_avg"]["codes"].copy()
    moved: bool = step.apply(state, [gradient, gradient], step=1, nonfinite="skip")
    published = numerics.encode(state.weights, "fp8_row", power_of_2=False)
    decoded = numerics.decode(published, "fp8_row", weights.shape)
    return float(decoded.max()) if moved else float(state.moments["exp_avg"].max())


def followed(address: str, name: str) -> list[int]:
    job: client.Job = connect(address, call_timeout=5).job(name, root_wrappers=["module"])
    steps: list[int] = job.versions().published
    with job.follow(since=3, way="attached") as follower:
        for version in follower:
            weights: npt.NDArray[np.float32] = version["w"]
            steps.append(version.step + weights.size + len(version.tensor("w").parts))
    job.follow(lambda held: held.step < 4, latest=True, timeout=1)
    with job.lease(ttl=30) as lease, job.hold(exact=lease.step) as held:
        lease.renew()
        steps += [held.step, job.pull(at_least=3).step]
    saved: client.SavedCheckpoint = connect(address).checkpoint(job, "folder", progress=lambda done, total: None)
    return steps + [saved.step, connect(address).restore("folder", mesh="fsdp=2").digest().value]


def main(parameters: Mapping[str, tuple[int, ...]]) -> int:
    mesh = Mesh([2, 4], ["ddp", "fsdp"], ranks=range(8)).flatten(["ddp", "fsdp"], into="dp")
    canonical: dict[str, str] = dict(zip(parameters, names.canonical_many(parameters, root_wrappers=["module"])))
    plan = layout.plan({canonical[raw]: shape for raw, shape in parameters.items()}, mesh, format="bf16")
    boxes = plan.boxes([layout.Shard(0)], coordinate=mesh.coordinate(3))
    same = plan.boxes({"dp": layout.Shard(0)}, coordinate=(3,))
    also = plan.boxes(lambda name: [layout.Replicate()] if name == "b" else {"dp": layout.Shard(0)}, (3,))
    first: tuple[int, ...] = next(iter(boxes.values()))[0].sizes
    try:
        plan.place("nothing")
    except errors.NotFound as error:
        print(error)
    except (Error, KeyError):
        pass
    moved = plan.reshard_to(layout.plan([("w", (4, 4))], mesh), rank=0)
    return sum(copy.num_elements for copy in moved.copies) + len(first) + len(same) + len(also)
