"""The extension module of the Python package, compiled with the system's Abseil, Highway and xxHash."""
import atexit
import glob
import os
import platform
import shutil
import subprocess
import sys
import tempfile

from pybind11.setup_helpers import ParallelCompile, Pybind11Extension
from setuptools import setup
from setuptools.command.build_ext import build_ext

# What python/binding/ needs of core/ and kernels/, tests left out.
CORE = """
    adamw box box_index box_parts bucket_layout communicator_key digest element_order format granule layout_boxes
    layout_picture layout_reshard mesh mesh_compose mesh_picture mesh_queries mesh_rank_map mesh_spec mesh_state muon
    names numeric_formats optimizer optimizer_names owner_balance placement reshard stored_plan stored_view view
    view_holders
""".split()
KERNELS = """
    blas encode encode_published encode_stored gemm muon newton_schulz optimizer_step
    optimizer_step_reference processor step_values tile/walk torchao_codec torchao_step
""".split()
# Compiled for AVX2 and FMA, and entered only after the processor was asked; as SIMD_COPTS of kernels/BUILD.
SIMD_FLAGS = "-O3 -mavx2 -mfma -mf16c -mbmi -mbmi2 -maes -mpclmul".split()
SIMD = dict.fromkeys(["gemm_simd", "muon_simd"], SIMD_FLAGS)
SIMD["optimizer_step_simd"] = [*SIMD_FLAGS, "-fschedule-insns"]
if platform.machine() != "x86_64":
    SIMD = {}
# pkg-config's name -> the package of packages.txt that has it.
NEEDED = "flat_hash_map inlined_vector status statusor str_format strings"  # of Abseil
LIBRARIES = {f"absl_{name}": "libabsl-dev" for name in NEEDED.split()}
LIBRARIES["libxxhash"] = "libxxhash-dev"
LIBRARIES["libhwy"] = "libhwy-dev"
# Not the repository's root, setuptools' own choice: nothing of it is to be left in a later wheel.
BUILD_FOLDER = tempfile.mkdtemp(prefix="shardmesh-build-")
atexit.register(shutil.rmtree, BUILD_FOLDER, ignore_errors=True)


def pkg_config(*arguments: str) -> list[str]:
    return subprocess.run(["pkg-config", *arguments], check=True, capture_output=True, text=True).stdout.split()


def check_libraries() -> None:
    if shutil.which("pkg-config") is None:
        sys.exit("shardmesh: pkg-config is not installed; on Debian: apt-get install pkg-config")
    found = {name: subprocess.run(["pkg-config", "--exists", name]).returncode == 0 for name in LIBRARIES}
    absent = {package for name, package in LIBRARIES.items() if not found[name]}
    if absent:
        sys.exit(f"shardmesh: headers are missing; on Debian: apt-get install {' '.join(sorted(absent))}")


class BuildExtension(build_ext):
    """Adds the flags of SIMD to the files that need them."""

    def build_extensions(self) -> None:
        compile_one = self.compiler._compile
        simd = {f"kernels/{name}.cc": flags for name, flags in SIMD.items()}

        def compile_with_flags(to, source, extension, arguments, flags, *rest):
            compile_one(to, source, extension, arguments, [*flags, *simd.get(os.path.normpath(source), [])], *rest)

        self.compiler._compile = compile_with_flags
        super().build_extensions()


check_libraries()
ParallelCompile().install()
setup(
    ext_modules=[
        Pybind11Extension(
            "shardmesh._core",
            sorted(glob.glob("python/binding/*.cc"))
            + [f"core/{name}.cc" for name in CORE]
            + [f"kernels/{name}.cc" for name in [*KERNELS, *SIMD]],
            depends=sorted(
                glob.glob("python/binding/*.h") + glob.glob("core/*.h") + glob.glob("kernels/**/*.h", recursive=True)
            ),
            include_dirs=["."],
            cxx_std=17,
            # As .bazelrc: all arithmetic is explicit.
            extra_compile_args=["-O2", "-g0", "-ffp-contract=off", *pkg_config("--cflags", *LIBRARIES)],
            extra_link_args=["-Wl,--as-needed", *pkg_config("--libs", *LIBRARIES)],
        )
    ],
    cmdclass={"build_ext": BuildExtension},
    options={"build": {"build_base": BUILD_FOLDER}, "egg_info": {"egg_base": BUILD_FOLDER}},
)
