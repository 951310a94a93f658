#!/usr/bin/env python3
"""Training a GPT in plain PyTorch: shardmesh.torch.Optimizer against DistributedDataParallel and FSDP2 over gloo.

Ranks are processes of one thread. Those of all arms (pytorch_arms.py) stay up, and a round lets each arm make one step
while the others sleep. The steps before the first round are compared: the arms train the same model on the same
batches.
Overhead is what a step takes beyond the same model's forward and backward with no framework around it.

  bazel run -c opt //bench:pytorch -- --quick
  bench/pytorch/pytorch.py --bin-dir bazel-bin --sizes 30m --ranks 2
"""
from __future__ import annotations

import argparse
import os
import pathlib
import sys

HERE = pathlib.Path.cwd() / "bench/pytorch" if "BUILD_WORKSPACE_DIRECTORY" in os.environ else pathlib.Path(__file__).parent
sys.path.insert(0, str(HERE.resolve()))
import torch_start  # noqa: E402


def arguments() -> argparse.Namespace:
    parser = torch_start.parser_of(__doc__ or "")
    add = parser.add_argument
    add("--quick", action="store_true", help="30m on two ranks, 5 rounds of one step, and not every arm: a minute")
    add("--sizes", default="30m,124m", help="models (default: %(default)s)")
    add("--ranks", default="2,4", help="(default: %(default)s); each rank wants a core")
    add("--arms", help="some of them alone: model,ddp,fsdp2,fsdp2 8-bit,full,bucket,... (default: all)")
    add("--rounds", type=int, default=9, help="(default: %(default)s)")
    add("--steps", type=int, default=3, help="of a round, of which the fastest counts (default: %(default)s)")
    add("--skip", default="", help="parts: time, memory, start, bits")
    add("--losses", metavar="FILE", help="draw each arm's losses, too (a picture; needs matplotlib)")
    add("--profile", metavar="FILE", help="profile steps of the first size on the first number of ranks, and draw them")
    add("--loss-steps", type=int, default=100, help="(default: %(default)s)")
    return parser.parse_args()


if __name__ == "__main__":
    torch_start.run(__file__, arguments(), "pytorch_rows")
