#!/usr/bin/env python3
"""Packs what tools/gpu_bundle built, and checks it. Arguments: the folder of the programs, and where the bundle goes; or
--targets, which prints what is to be built.

Exits with 1 where a program needs a shared library but glibc's, one does not start here (without a GPU: lists its tests, or
prints its help), or the archive is not smaller than 60 MB.
"""
import os
import re
import shutil
import stat
import subprocess
import sys
import tarfile

NAME = "shardmesh-gpu"
TESTS = ["kernels/cuda/warp_numbers_cuda_test", "kernels/cuda/optimizer_step_cuda_test", "kernels/sum/slot_sum_cuda_test",
         "worker/transport/nccl/nccl_gpu_test", "worker/pass/device/device_pass_gpu_test"]
BENCHMARKS = ["bench/optimizer/optimizer_cuda", "bench/optimizer/device_pass"]
FILES = ["bench/optimizer/optimizer_rivals.py"]  # that the benchmarks open, at the same path below the folder
LIMIT_BYTES = 60_000_000
GLIBC = re.compile(r"(linux-vdso|ld-linux-[\w-]+|lib(c|m|dl|rt|pthread))\.so\.\d")


def put(source, target):
    os.makedirs(os.path.dirname(target), exist_ok=True)
    shutil.copyfile(source, target)
    os.chmod(target, os.stat(source).st_mode | stat.S_IWUSR)


def fill(folder, bin_folder):
    shutil.rmtree(folder, ignore_errors=True)
    for program in TESTS:
        put(os.path.join(bin_folder, program), os.path.join(folder, "tests", os.path.basename(program)))
    for program in BENCHMARKS:
        put(os.path.join(bin_folder, program), os.path.join(folder, "bench", os.path.basename(program)))
    for path in FILES:
        put(path, os.path.join(folder, path))
    put("tools/gpu_bundle_run.py", os.path.join(folder, "run"))


def other_libraries(program):
    """Names of the shared libraries that a program needs and that are not glibc's."""
    listed = subprocess.run(["ldd", program], capture_output=True, text=True, check=True).stdout
    names = [os.path.basename(line.split()[0]) for line in listed.splitlines()]
    return [name for name in names if not GLIBC.fullmatch(name)]


def problems(folder, archive):
    """What is wrong with a bundle, a line each."""
    for directory in ("tests", "bench"):
        for name in sorted(os.listdir(os.path.join(folder, directory)) if os.path.isdir(os.path.join(folder, directory)) else []):
            program = os.path.join(folder, directory, name)
            if os.path.isfile(program) and other_libraries(program):
                yield f"{name} needs {', '.join(other_libraries(program))}; it may need glibc's libraries alone"
    if subprocess.run([os.path.join(folder, "run"), "--check"], stdin=subprocess.DEVNULL).returncode != 0:
        yield "not every program starts"
    size = os.path.getsize(archive)
    if size >= LIMIT_BYTES:
        yield f"{archive} has {size / 1e6:.1f} MB; the limit is {LIMIT_BYTES / 1e6:.0f} MB"


def main():
    if sys.argv[1:] == ["--targets"]:
        print(*("//" + ":".join(program.rsplit("/", 1)) for program in TESTS + BENCHMARKS))
        return
    programs, output = map(os.path.abspath, sys.argv[1:])
    os.chdir(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    folder, archive = os.path.join(output, NAME), os.path.join(output, NAME + ".tar.gz")
    fill(folder, programs)
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(folder, NAME)
    found = list(problems(folder, archive))
    for problem in found:
        print(f"gpu_bundle: {problem}", file=sys.stderr)
    print(f"{archive}: {os.path.getsize(archive) / 1e6:.1f} MB, {len(TESTS)} tests, {len(BENCHMARKS)} benchmarks")
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
