#!/usr/bin/env python3
"""The rivals of bench/plan: reads commands from standard input, answers each with one line.

  names torch FILE          seconds in which torch's clean_tensor_name strips the wrappers of every line of FILE
  names accelerate FILE     the same with Accelerate's fsdp2_canonicalize_names
  dcp TENSORS RANKS         seconds in which torch.distributed.checkpoint plans a save of TENSORS sharded tensors on RANKS
                            ranks: one rank's local plan, and the coordinator's global plan over all of them
  versions                  of torch and accelerate

Run by bench/plan with the environment of tools/parity_env.sh. An answer that starts with "error " says why there is none.
"""
import dataclasses
import sys
import time


def best_of(work, times=3):
    """The fastest of a few runs: a rival is measured at its best."""
    best = float("inf")
    for _ in range(times):
        start = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - start)
    return best


def names(which, path):
    with open(path, encoding="utf-8") as lines:
        raw = lines.read().splitlines()
    if which == "torch":
        from torch.distributed.fsdp._common_utils import clean_tensor_name

        return best_of(lambda: [clean_tensor_name(name) for name in raw])
    from accelerate.utils.fsdp_utils import fsdp2_canonicalize_names

    parameters = dict.fromkeys(raw)
    return best_of(lambda: fsdp2_canonicalize_names(parameters))


def dcp(num_tensors, num_ranks):
    """A local plan is made for each rank alone and on all ranks at once, so one of them counts. The global plan waits for
    all and is made by one; its input here is the local plan with each rank's offsets in place."""
    import torch
    import torch.distributed as dist
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=num_ranks, store=FakeStore())
    try:
        mesh = init_device_mesh("cpu", (num_ranks,), mesh_dim_names=("fsdp",))
        rows = 2 * num_ranks
        state = {
            f"layers.{i}.weight": DTensor.from_local(
                torch.empty(2, 64, device="meta"), mesh, [Shard(0)], run_check=False, shape=torch.Size((rows, 64)), stride=(64, 1)
            )
            for i in range(num_tensors)
        }
        planner = DefaultSavePlanner()
        planner.set_up_planner(state, is_coordinator=True)
        start = time.perf_counter()
        local = planner.create_local_plan()
        seconds = time.perf_counter() - start
        plans = [of_rank(local, rank) for rank in range(num_ranks)]
        start = time.perf_counter()
        planner.create_global_plan(plans)
        return seconds + time.perf_counter() - start
    finally:
        dist.destroy_process_group()


def of_rank(plan, rank):
    """The local plan of another rank: the same items, two rows each, at that rank's offset."""
    import torch

    items = []
    for item in plan.items:
        offset = torch.Size((2 * rank, 0))
        chunk = dataclasses.replace(item.tensor_data.chunk, offsets=offset)
        items.append(
            dataclasses.replace(
                item,
                index=dataclasses.replace(item.index, offset=offset),
                tensor_data=dataclasses.replace(item.tensor_data, chunk=chunk),
            )
        )
    return dataclasses.replace(plan, items=items)


def answer(words):
    if words[0] == "names" and len(words) == 3 and words[1] in ("torch", "accelerate"):
        return names(words[1], words[2])
    if words[0] == "dcp" and len(words) == 3:
        return dcp(int(words[1]), int(words[2]))
    if words[0] == "versions":
        import accelerate
        import torch

        return f"torch {torch.__version__}, accelerate {accelerate.__version__}"
    return "error unknown command"


def main():
    for line in sys.stdin:
        try:
            print(answer(line.split()), flush=True)
        except Exception as error:  # whatever the rival's packages raise is the answer
            print(f"error {type(error).__name__}: {error}".replace("\n", " "), flush=True)


if __name__ == "__main__":
    main()
