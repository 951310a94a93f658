"""The program of low_bit_parity_test.py: the examples low_bit_sharded.py and mesh_3d_fp8.py, small, on 1, 2 and 4 ranks; and
torchao under FSDP2.

Usage: low_bit_ranks.py COORDINATOR FOLDER.
"""
import os
import sys

import torch
import torchao.float8.float8_utils
import torchao.optim  # once for all ranks

import shardmesh.torch  # noqa: F401

HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path[:0] = [HERE, os.path.join(HERE, "..", "..", "examples", "torch")]
import low_bit_sharded
import mesh_3d_fp8
import ranks
from shardmesh.torch._rewrite import Saved

STATES, STEPS, WIDTH = ["fp32", "dyn8", "dyn4"], 6, 64
MESHES = {1: "fsdp=1", 2: "fsdp=2", 4: "ddp=2,fsdp=2"}


def ours(address, world):
    torch.set_num_threads(1)
    result = {}
    for states in STATES:
        result[states] = low_bit_sharded.train(
            states, width=WIDTH, layers=2, steps=STEPS, backend="aot_eager", service=address, mesh=MESHES[world],
            job=f"low-{states}-{world}")
    _, optimizer, losses = mesh_3d_fp8.train(STEPS, service=address, job=f"cube-{world}")
    result["cube"] = {"digest": str(optimizer.job.digest()), "losses": losses}
    optimizer.close()
    return result


def cube_beside_torchao(address, folder):
    """Of each matrix, whether codes, scale and values are torchao's of the stored weights."""
    torch.set_num_threads(1)
    model, optimizer, _ = mesh_3d_fp8.train(STEPS, service=address, job="cube")
    stored = Saved(optimizer.save(os.path.join(folder, "cube")).path).model
    e4m3 = torch.float8_e4m3fn
    equal = {}
    for name, values in model.named_parameters():
        if values.dim() != 2:
            continue
        weight, parts = stored[name], optimizer._session.weights(name).parts
        scale = torchao.float8.float8_utils.amax_to_scale(weight.abs().max(), e4m3)
        codes = torchao.float8.float8_utils.to_fp8_saturated(weight * scale, e4m3)
        equal[name] = {
            "codes": torch.equal(parts["codes"].view(-1), codes.view(torch.uint8).view(-1)),
            "scale": [(name, part.flatten().tolist()) for name, part in parts.items() if name != "codes"],
            "torchao_scale": scale.item(), "decoded": torch.equal(values, codes.float() / scale),
        }
    optimizer.close()
    return equal


def torchaos(folder, rank, world):
    """What low-bit optimizers do under FSDP2."""
    torch.set_num_threads(1)
    torch.compiler.set_stance("force_eager")  # the same arithmetic, sooner
    ranks.process_group(os.path.join(folder, f"store{world}"))
    try:
        # States of 4096 elements of a rank are quantized, of fewer not.
        low_bit_sharded.torchao_on_fsdp2("AdamW8bit", 2 * WIDTH, 1, bf16_stochastic_round=True)
        crash = ""
    except Exception as error:
        crash = f"{type(error).__name__}: {error}"
    return crash, low_bit_sharded.torchao_on_fsdp2("_AdamW", WIDTH, 6, bf16_stochastic_round=True)


def main(address, folder):
    result = {"ours": {world: ranks.fork(world, lambda _, world: ours(address, world), seconds=90) for world in (1, 2, 4)}}
    result["cube"] = ranks.fork(1, lambda *_: cube_beside_torchao(address, folder), seconds=60)[0]
    weights = {}
    for world in 1, 2:
        crash, weights[world] = ranks.fork(world, lambda rank, world: torchaos(folder, rank, world), seconds=60)[0]
    result["crash"] = crash
    differ = sum((one != two).sum().item() for one, two in zip(weights[1], weights[2]))
    result["differ"] = differ / sum(one.numel() for one in weights[1])
    ranks.report(result)


if __name__ == "__main__":
    main(*sys.argv[1:])
