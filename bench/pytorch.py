#!/usr/bin/env python3
"""Training a GPT in plain PyTorch: shardmesh.torch.Optimizer against DistributedDataParallel and FSDP2 over gloo.

Ranks are processes of one thread. Those of all arms (pytorch_arms.py) stay up, and a round lets each arm make one step
while the others sleep. The steps before the first round are compared: the arms train the same model on the same
batches.
Overhead is what a step takes beyond the same model's forward and backward with no framework around it.

  bazel run -c opt //bench:pytorch -- --quick
  bench/pytorch.py --bin-dir bazel-bin --sizes 30m --ranks 2
"""
from __future__ import annotations

import argparse
import importlib.util
import os
import pathlib
import sys

BY_BAZEL = "BUILD_WORKSPACE_DIRECTORY" in os.environ  # then all that is needed lies below the current folder
ROOT = pathlib.Path.cwd() if BY_BAZEL else pathlib.Path(__file__).resolve().parents[1]
HERE = ROOT / "bench"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--quick", action="store_true", help="30m on two ranks, five rounds, and not every arm")
    add("--sizes", default="30m,124m", help="models (default: %(default)s)")
    add("--ranks", default="2,4", help="(default: %(default)s); each rank wants a core")
    add("--arms", help="some of them alone: model,ddp,fsdp2,fsdp2 8-bit,full,bucket,... (default: all)")
    add("--rounds", type=int, default=9, help="(default: %(default)s)")
    add("--skip", default="", help="parts: time, memory, start, bits")
    add("--losses", metavar="FILE", help="draw each arm's losses, too (a picture; needs matplotlib)")
    add("--loss-steps", type=int, default=100, help="(default: %(default)s)")
    add("--json", metavar="FILE", help="write the rows there")
    add("--bin-dir", default=default_bin_dir(), help="where the built programs are (default: %(default)s)")
    add("--python", default=default_python(), help="one with PyTorch; tools/parity_env.sh makes it (%(default)s)")
    return parser.parse_args()


def default_bin_dir() -> str:
    return str(ROOT if BY_BAZEL else ROOT / "bazel-bin")


def default_python() -> str:
    root = pathlib.Path(os.environ.get("BUILD_WORKSPACE_DIRECTORY") or ROOT)
    return str(root / ".cache/parity/bin/python")


def main() -> None:
    flags = arguments()
    if importlib.util.find_spec("torch") is None:
        if os.environ.get("SHARDMESH_BENCH_AGAIN") or not os.path.exists(flags.python):
            sys.exit(f"pytorch: {flags.python} has no PyTorch; tools/parity_env.sh makes one, --python names another")
        os.environ["SHARDMESH_BENCH_AGAIN"] = "1"
        os.execv(flags.python, [flags.python, __file__, *sys.argv[1:]])
    directory = os.environ.get("BUILD_WORKING_DIRECTORY")
    if directory:
        os.chdir(directory)
    sys.path[:0] = [str(HERE), str(ROOT / "examples/gpt")]
    if importlib.util.find_spec("shardmesh") is None:
        sys.path.append(str(ROOT / "python"))
    import pytorch_rows

    pytorch_rows.run(flags)


if __name__ == "__main__":
    main()
