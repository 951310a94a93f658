#!/usr/bin/env python3
"""What torchao's quantized weights do under FSDP2 on two ranks today, on the CPU: one outcome a line.

    original.py int8 | nf4

Each try is a program of its own on two gloo ranks: quantize, then fully_shard; or the other way round; then two steps.
"""
import subprocess
import sys
import tempfile

ORDERS = ("quantize, then shard", "shard, then quantize")
WORLD = 2


def two_layers(rows, columns):
    import torch
    return torch.nn.Sequential(torch.nn.Linear(columns, rows, bias=False), torch.nn.Linear(rows, columns, bias=False))


def quantize(kind, model):
    import torch
    if kind == "int8":
        from torchao.prototype.quantized_training import int8_weight_only_quantized_training
        from torchao.quantization import quantize_
        quantize_(model, int8_weight_only_quantized_training())
    else:
        from torchao.quantization.quantize_.workflows.nf4.nf4_tensor import to_nf4
        for layer in model:
            layer.weight = torch.nn.Parameter(to_nf4(layer.weight), requires_grad=False)


class Adapted:
    """A frozen nf4 weight and two small matrices beside it."""

    @staticmethod
    def wrap(model):
        import torch
        from torchao.quantization.quantize_.workflows.nf4.nf4_tensor import linear_nf4

        class Layer(torch.nn.Module):
            def __init__(self, base):
                super().__init__()
                self.base = base
                self.a = torch.nn.Linear(base.in_features, 4, bias=False)
                self.b = torch.nn.Linear(4, base.out_features, bias=False)

            def forward(self, x):
                return linear_nf4(x, self.base.weight) + self.b(self.a(x))

        return torch.nn.Sequential(*(Layer(layer) for layer in model))


def rank_main(kind, order, size, rank, store):
    import torch
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard
    rows, columns = size
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=WORLD)
    torch.manual_seed(0)
    model = two_layers(rows, columns)

    def shard(module):
        for layer in module:
            fully_shard(layer)
        fully_shard(module)

    if order == 0:
        quantize(kind, model)
        model = Adapted.wrap(model) if kind == "nf4" else model
        shard(model)
    else:
        shard(model)
        quantize(kind, model)
        model = Adapted.wrap(model) if kind == "nf4" else model
    optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=1e-3)
    for _ in range(2):
        model(torch.ones(2, columns)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    dist.barrier()
    dist.destroy_process_group()


def outcome(kind, order, size, timeout=120):
    """"runs", or the last line of the first rank's error."""
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            subprocess.Popen([sys.executable, __file__, kind, str(order), *map(str, size), str(rank), f"{folder}/store"],
                             stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) for rank in range(WORLD)
        ]
        try:
            said = [rank.communicate(timeout=timeout)[1] for rank in ranks]
        except subprocess.TimeoutExpired:
            return "hangs"
        finally:
            for rank in ranks:
                rank.kill()
                rank.communicate()
    if not any(rank.returncode for rank in ranks):
        return "runs"
    lines = [line.split("]: ", 1)[-1] for text in said for line in text.splitlines() if "Error: " in line and "Warning" not in line]
    return next((line for line in lines if "onnection" not in line), "\n".join(said)[-200:])[:200]


def show(kind):
    for size in {"int8": ((64, 128),), "nf4": ((256, 256), (128, 128))}[kind]:
        for order, name in enumerate(ORDERS):
            print(f"torchao {kind} under FSDP2, {size[0]} x {size[1]}, {name}: {outcome(kind, order, size)}", flush=True)


if __name__ == "__main__":
    if len(sys.argv) == 2:
        show(sys.argv[1])
    else:
        kind, order, rows, columns, rank, store = sys.argv[1:]
        rank_main(kind, int(order), (int(rows), int(columns)), int(rank), store)
