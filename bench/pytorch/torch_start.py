"""How benchmarks with PyTorch start: by hand with any Python, or by Bazel, whose Python may have none."""
from __future__ import annotations

import argparse
import importlib
import importlib.util
import os
import pathlib
import sys

BY_BAZEL = "BUILD_WORKSPACE_DIRECTORY" in os.environ  # then all that is needed lies below the current folder
ROOT = pathlib.Path.cwd() if BY_BAZEL else pathlib.Path(__file__).resolve().parents[2]


def parser_of(description: str) -> argparse.ArgumentParser:
    """With the flags that all of them have."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--json", metavar="FILE", help="write the rows there")
    add("--bin-dir", default=default_bin_dir(), help="where the built programs are (default: %(default)s)")
    add("--python", default=default_python(), help="one with PyTorch; tools/parity_env.sh makes it (%(default)s)")
    return parser


def default_bin_dir() -> str:
    return str(ROOT if BY_BAZEL else ROOT / "bazel-bin")


def default_python() -> str:
    root = pathlib.Path(os.environ.get("BUILD_WORKSPACE_DIRECTORY") or ROOT)
    return str(root / ".cache/parity/bin/python")


def run(program: str, flags: argparse.Namespace, module: str) -> None:
    """The module's run(flags), in a Python that has PyTorch, in the folder that `program` was called from.

    SystemExit: there is no such Python."""
    if importlib.util.find_spec("torch") is None:
        if os.environ.get("SHARDMESH_BENCH_AGAIN") or not os.path.exists(flags.python):
            name = pathlib.Path(program).stem
            sys.exit(f"{name}: {flags.python} has no PyTorch; tools/parity_env.sh makes one, --python names another")
        os.environ["SHARDMESH_BENCH_AGAIN"] = "1"
        os.execv(flags.python, [flags.python, program, *sys.argv[1:]])
    directory = os.environ.get("BUILD_WORKING_DIRECTORY")
    if directory:
        os.chdir(directory)
    sys.path[:0] = [str(ROOT / "examples/gpt"), str(ROOT / "bench/harness")]
    if importlib.util.find_spec("shardmesh") is None:
        sys.path.append(str(ROOT / "python"))
    importlib.import_module(module).run(flags)
