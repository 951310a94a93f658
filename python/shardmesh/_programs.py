"""The service's programs: where they are, and the commands that the package installs for them."""
import os
import shutil
import sys

from . import errors

# Name -> its folder below bazel-bin.
PROGRAMS = {"shardctl": "client/cli", "shardmesh-coordinator": "server", "shardmesh-node": "worker",
            "shardmesh-worker": "worker"}
PACKAGED = os.path.join(os.path.dirname(os.path.abspath(__file__)), "bin")


def find(name: str) -> str:
    """The path of one of PROGRAMS: below $SHARDMESH_BIN_DIR (as bazel-bin, or all in one folder), where that is set;
    else the package's own, else that on PATH.

    NotFound: it is nowhere. Where SHARDMESH_BIN_DIR is set nothing else is looked at."""
    folder = os.environ.get("SHARDMESH_BIN_DIR")
    if folder:
        places = [os.path.join(folder, PROGRAMS[name], name), os.path.join(folder, name)]
    else:
        places = [os.path.join(PACKAGED, name), shutil.which(name) or ""]
    for place in places:
        if os.path.isfile(place) and os.access(place, os.X_OK):
            return place
    if folder:
        raise errors.NotFound(f"no program {name} in SHARDMESH_BIN_DIR={folder}; unset it, or build the program there")
    raise errors.NotFound(f"no program {name} in {PACKAGED} or on PATH; install the package from its wheel "
                          "(tools/wheel.sh), or set SHARDMESH_BIN_DIR to the folder of bazel's outputs")


def main() -> None:
    """Becomes the package's program that is called as this command is."""
    path = os.path.join(PACKAGED, os.path.basename(sys.argv[0]))
    try:
        os.execv(path, sys.argv)
    except OSError as error:
        sys.exit(f"{sys.argv[0]}: cannot start {path}: {error.strerror}")
