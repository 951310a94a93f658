#!/usr/bin/env python3
"""A model of many small parameters: what calls of shardmesh.torch.Optimizer take, against a model of a tenth of them and
against torch.optim.AdamW.

A call whose work grows with the number of parameters takes at most ten times as long for ten times as many. First the
weights and the state_dict() of both are compared.

  bazel run -c opt //bench:many_parameters -- --quick
  bench/pytorch/many_parameters.py --bin-dir bazel-bin
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
    add("--quick", action="store_true", help="2,000 parameters, 5 rounds: half a minute")
    add("--parameters", type=int, default=10000, help="(default: %(default)s)")
    add("--rounds", type=int, default=7, help="(default: %(default)s)")
    flags = parser.parse_args()
    if flags.quick:
        flags.parameters, flags.rounds = 2000, 5
    return flags


if __name__ == "__main__":
    torch_start.run(__file__, arguments(), "many_parameters_rows")
