"""The extension modules of the Python package, compiled with the system's Abseil, Highway, xxHash, gRPC, Protobuf."""
import atexit
import glob
import os
import platform
import shutil
import subprocess
import sys
import tempfile

from pybind11.setup_helpers import ParallelCompile, Pybind11Extension, naive_recompile
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
# What python/client_binding/ needs, by folder.
CLIENT = {
    "checkpoint": "file_changes folder manifest safetensors safetensors_read stored_files strict_json",
    "client/cpp": """
        attached_channel attached_reader attached_session await_weights checkpoint client connected_session
        grpc_coordinator_transport pulling_session session session_buckets session_device session_resume
        shard_transport version_reader
    """,
    "core": """
        adamw box box_index box_parts bucket_layout digest format gather_format granule job layout mesh mesh_compose
        mesh_queries mesh_rank_map mesh_spec mesh_state muon names numeric_formats optimizer owner_balance
    """,
    "local": "device_runtime device_segment file_hold futex host_id mailbox segment shared_library socket",
    "proto": "bulk convert",
    "rpc": "address channel status tls",
}
PROTOS = [f"proto/shardmesh/v1/{name}" for name in "coordinator job keeper local shard".split()]
SERVICES = [f"proto/shardmesh/v1/{name}" for name in "coordinator shard".split()]
# Compiled for AVX2 and FMA, and entered only after the processor was asked; as SIMD_COPTS of kernels/BUILD.
SIMD_FLAGS = "-O3 -mavx2 -mfma -mf16c -mbmi -mbmi2 -maes -mpclmul".split()
SIMD = dict.fromkeys(["gemm_simd", "muon_simd"], SIMD_FLAGS)
SIMD["optimizer_step_simd"] = [*SIMD_FLAGS, "-fschedule-insns"]
if platform.machine() != "x86_64":
    SIMD = {}
# pkg-config's name -> the package of packages.txt that has it.
NEEDED = "cord flat_hash_map inlined_vector status statusor str_format strings synchronization time"  # of Abseil
LIBRARIES = {f"absl_{name}": "libabsl-dev" for name in NEEDED.split()}
LIBRARIES["libxxhash"] = "libxxhash-dev"
LIBRARIES["libhwy"] = "libhwy-dev"
OF_CLIENT = {"grpc++": "libgrpc++-dev", "protobuf": "libprotobuf-dev", "nlohmann_json": "nlohmann-json3-dev"}
LIBRARIES.update(OF_CLIENT)
PROGRAMS = {"protoc": "protobuf-compiler", "grpc_cpp_plugin": "protobuf-compiler-grpc"}
# Not the repository's root, setuptools' own choice: nothing of it is to be left in a later wheel.
BUILD_FOLDER = tempfile.mkdtemp(prefix="shardmesh-build-")
atexit.register(shutil.rmtree, BUILD_FOLDER, ignore_errors=True)
GENERATED = os.path.join(BUILD_FOLDER, "generated")


def pkg_config(*arguments: str) -> list[str]:
    return subprocess.run(["pkg-config", *arguments], check=True, capture_output=True, text=True).stdout.split()


def check_libraries() -> None:
    if shutil.which("pkg-config") is None:
        sys.exit("shardmesh: pkg-config is not installed; on Debian: apt-get install pkg-config")
    found = {name: subprocess.run(["pkg-config", "--exists", name]).returncode == 0 for name in LIBRARIES}
    absent = {package for name, package in LIBRARIES.items() if not found[name]}
    absent |= {package for name, package in PROGRAMS.items() if shutil.which(name) is None}
    if absent:
        sys.exit(f"shardmesh: headers or programs are missing; on Debian: apt-get install {' '.join(sorted(absent))}")


def generate_protos() -> list[str]:
    os.makedirs(GENERATED)
    plugin = f"--plugin=protoc-gen-grpc={shutil.which('grpc_cpp_plugin')}"
    files = [f"{proto}.proto" for proto in PROTOS]
    subprocess.run(["protoc", "-I.", f"--cpp_out={GENERATED}", f"--grpc_out={GENERATED}", plugin, *files], check=True)
    sources = [f"{proto}.pb.cc" for proto in PROTOS] + [f"{service}.grpc.pb.cc" for service in SERVICES]
    return [os.path.join(GENERATED, source) for source in sources]


class BuildExtension(build_ext):
    """Generates what comes of .proto files, and adds the flags of SIMD to the files that need them."""

    def build_extensions(self) -> None:
        for extension in self.extensions:
            if extension.name == "shardmesh._client":
                extension.sources += generate_protos()
        compile_one = self.compiler._compile
        simd = {f"kernels/{name}.cc": flags for name, flags in SIMD.items()}

        def compile_with_flags(to, source, extension, arguments, flags, *rest):
            compile_one(to, source, extension, arguments, [*flags, *simd.get(os.path.normpath(source), [])], *rest)

        self.compiler._compile = compile_with_flags
        super().build_extensions()


check_libraries()
# An object that both extensions have is compiled once: the build folder is new, and the flags are the same.
ParallelCompile(needs_recompile=naive_recompile).install()
COMMON = {
    "include_dirs": [".", GENERATED],
    "cxx_std": 17,
    # As .bazelrc: all arithmetic is explicit.
    "extra_compile_args": ["-O2", "-g0", "-ffp-contract=off", *pkg_config("--cflags", *LIBRARIES)],
}
FOLDERS = ["python", "kernels", *CLIENT]
HEADERS = [header for folder in FOLDERS for header in glob.glob(f"{folder}/**/*.h", recursive=True)]
setup(
    ext_modules=[
        Pybind11Extension(
            "shardmesh._core",
            sorted(glob.glob("python/binding/*.cc"))
            + [f"core/{name}.cc" for name in CORE]
            + [f"kernels/{name}.cc" for name in [*KERNELS, *SIMD]],
            depends=sorted(HEADERS),
            extra_link_args=["-Wl,--as-needed", *pkg_config("--libs", *sorted(set(LIBRARIES) - set(OF_CLIENT)))],
            **COMMON,
        ),
        Pybind11Extension(
            "shardmesh._client",
            sorted(glob.glob("python/client_binding/*.cc"))
            + ["python/binding/errors.cc"]
            + [f"{folder}/{name}.cc" for folder, names in CLIENT.items() for name in names.split()],
            depends=sorted(HEADERS),
            extra_link_args=[
                "-Wl,--as-needed", "-Wl,--version-script=python/client_binding/exports.lds",
                *pkg_config("--libs", *LIBRARIES),
            ],
            **COMMON,
        ),
    ],
    cmdclass={"build_ext": BuildExtension},
    options={"build": {"build_base": BUILD_FOLDER}, "egg_info": {"egg_base": BUILD_FOLDER}},
)
