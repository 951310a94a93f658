#!/usr/bin/env python3
"""What waiting costs where samples have unequal lengths: shardmesh.torch.Optimizer against FSDP2 over gloo.

Minibatches of samples whose lengths resemble LongAlign's, in turns for all contestants (imbalance_arms.py). On two
ranks, one core and one thread each, a small GPT is trained; with more ranks than cores, or of unequal speeds, computing
is sleeping, for as long as a model of 1.5B parameters suggests, while gradients, exchanges and steps are real.

Beside wall time each scenario has the critical path: what forward and backward take by themselves (processor time of
the rank's thread, or sleep), as if exchanges, steps and waiting for a core took nothing: the sum over microbatches of
the slowest rank where ranks meet in each, the slowest rank's sum where they meet at the end.

  bazel run -c opt //bench:imbalance_torch -- --quick
  bench/imbalance/imbalance_torch.py --bin-dir bazel-bin --json imbalance.json --plots docs
"""
from __future__ import annotations

import argparse
import os
import pathlib
import sys

ROOT = pathlib.Path.cwd() if "BUILD_WORKSPACE_DIRECTORY" in os.environ else pathlib.Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "bench/imbalance"), str(ROOT / "bench/pytorch")]
import torch_start  # noqa: E402


def arguments() -> argparse.Namespace:
    parser = torch_start.parser_of(__doc__ or "")
    add = parser.add_argument
    add("--quick", action="store_true", help="not all scenarios; 7 rounds of one minibatch: a minute")
    add("--only", default="", help="scenarios whose name has this")
    add("--rounds", type=int, help="at least 7 (default: 9)")
    add("--minibatches", type=int, help="of a round (default: 3)")
    add("--seed", type=int, default=1, help="of lengths and speeds (default: %(default)s)")
    add("--plots", metavar="FOLDER", help="draw imbalance_*.svg there (needs matplotlib)")
    return parser.parse_args()


if __name__ == "__main__":
    torch_start.run(__file__, arguments(), "imbalance_rows")
