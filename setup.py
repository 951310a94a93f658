"""The wheel's native parts, its extension modules and the service's programs: bazel builds them, this packs them."""
import atexit
import os
import platform
import shutil
import subprocess
import sys
import tempfile

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = os.path.dirname(os.path.abspath(__file__))
PYTHON = (3, 11)  # whose headers python/BUILD takes
MODULES = {"shardmesh._core": "python/shardmesh/_core.so", "shardmesh._client": "python/shardmesh/_client.so"}
PROGRAMS = ["server/shardmesh-coordinator", "worker/shardmesh-worker", "worker/shardmesh-node", "client/cli/shardctl"]
# Not the repository's root, setuptools' own choice: nothing of it is to be left in a later wheel.
BUILD_FOLDER = tempfile.mkdtemp(prefix="shardmesh-build-")
atexit.register(shutil.rmtree, BUILD_FOLDER, ignore_errors=True)


def target(path: str) -> str:
    """The label of bazel's output `path`: python/ is one package of it, with a module in a folder of its own."""
    folder, _, name = path.partition("/") if path.startswith("python/") else path.rpartition("/")
    return f"//{folder}:{name}"


def bazel(*arguments: str) -> str:
    environment = {**os.environ, "HOME": os.path.expanduser("~")}  # where bazel keeps its caches
    command = ["bazel", *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                          check=True, text=True).stdout.strip()


def check() -> None:
    if (sys.implementation.name, sys.version_info[:2]) != ("cpython", PYTHON):
        sys.exit(f"shardmesh: this is {sys.implementation.name} {platform.python_version()}; the extension modules are "
                 f"built for CPython {PYTHON[0]}.{PYTHON[1]}, Debian 12's")
    if not os.path.exists(os.path.join(ROOT, "WORKSPACE")):
        sys.exit("shardmesh: the package is built in the repository, not from a source distribution")
    absent = [program for program in ("bazel", "strip") if shutil.which(program) is None]
    if absent:
        sys.exit(f"shardmesh: no program {', '.join(absent)}; install the packages of packages.txt (Debian 12)")


class BuildNative(build_ext):
    """Has all built at once, and copies it stripped."""

    def run(self) -> None:
        check()
        outputs = [*MODULES.values(), *PROGRAMS]
        options = ["--symlink_prefix=/", "--noshow_progress", "--curses=no", "--color=no"]
        bazel("build", "--compilation_mode=opt", *options, *map(target, outputs))
        built = bazel("info", "--compilation_mode=opt", "bazel-bin")
        for module, path in MODULES.items():
            self.pack("--strip-unneeded", os.path.join(built, path), self.get_ext_fullpath(module))
        package = os.path.dirname(self.get_ext_fullpath("shardmesh._core"))
        for path in PROGRAMS:
            self.pack("--strip-all", os.path.join(built, path), os.path.join(package, "bin", os.path.basename(path)))

    def pack(self, strip: str, source: str, to: str) -> None:
        os.makedirs(os.path.dirname(to), exist_ok=True)
        subprocess.run(["strip", strip, "-o", to, source], check=True)
        os.chmod(to, 0o755)


setup(
    ext_modules=[Extension(module, sources=[]) for module in MODULES],
    cmdclass={"build_ext": BuildNative},
    options={"build": {"build_base": BUILD_FOLDER}, "egg_info": {"egg_base": BUILD_FOLDER}},
)
