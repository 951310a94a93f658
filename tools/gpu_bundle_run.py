#!/usr/bin/env python3
"""Runs the GPU tests and then the benchmarks that lie beside this file, and writes what they found as files.

  run                    every test, then every benchmark with --quick
  run --full NAME...     these alone; benchmarks at their whole size
  run --check            starts every program without using a GPU: lists tests, prints help

Results go to $OUT, or ./out: NAME.json (GoogleTest's report, or a benchmark's rows) and NAME.log (all it printed). Ends with 1
when a test failed or was skipped (there is no GPU, no NCCL of 2.28 or newer, or the driver is too old: CUDA 13 needs 580), or
a program could not finish. Goals that are not met are printed, and end nothing. The Python that runs this file measures the
benchmarks' rivals: with torch, and torchao if it is there.
"""
import argparse
import json
import os
import subprocess
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
# The programs load NCCL where it is: also from packages of the Python that runs this file (torch's, nvidia-nccl-cu13).
NCCL = [p for p in (os.path.join(folder, "nvidia", "nccl", "lib") for folder in sys.path) if os.path.isdir(p)]
LIBRARIES = ":".join([p for p in os.environ.get("LD_LIBRARY_PATH", "").split(":") if p] + NCCL)
SECONDS = 1800  # that one program may take; rivals are compiled when they are first used


def programs(directory):
    path = os.path.join(HERE, directory)
    found = [os.path.join(path, name) for name in sorted(os.listdir(path))] if os.path.isdir(path) else []
    return [program for program in found if os.path.isfile(program)]  # rivals lie in folders


def run(command, log):
    """The exit status, or None where it took too long."""
    with open(log, "wb") as output:
        try:
            return subprocess.run(command, cwd=HERE, env=dict(os.environ, LD_LIBRARY_PATH=LIBRARIES), stdin=subprocess.DEVNULL,
                                  stdout=output, stderr=output, timeout=SECONDS).returncode
        except subprocess.TimeoutExpired:
            return None


def ended(name, status, log):
    """Prints how a program ended; whether well."""
    if status == 0:
        return True
    with open(log, encoding="utf-8", errors="replace") as text:
        print("".join(text.readlines()[-15:]), end="")
    print(f"FAILED {name}: " + (f"exit status {status}" if status is not None else f"not done after {SECONDS} s"), flush=True)
    return False


def test(program, out):
    name = os.path.basename(program)
    report, log = os.path.join(out, name + ".json"), os.path.join(out, name + ".log")
    if not ended(name, run([program, f"--gtest_output=json:{report}"], log), log):
        return False
    with open(report, encoding="utf-8") as text:
        cases = [case for suite in json.load(text)["testsuites"] for case in suite["testsuite"]]
    skipped = [case["name"] for case in cases if case.get("result") == "SKIPPED"]
    print(f"{name}: {len(cases) - len(skipped)} passed" + (f", SKIPPED: {' '.join(skipped)} (see {log})" if skipped else ""), flush=True)
    return not skipped


def benchmark(program, out, full):
    name = os.path.basename(program)
    report, log = os.path.join(out, name + ".json"), os.path.join(out, name + ".log")
    command = [program, "--json", report, "--python", sys.executable] + ([] if full else ["--quick"])
    if not ended(name, run(command, log), log):
        return False
    with open(log, encoding="utf-8", errors="replace") as text:
        print(text.read(), flush=True)
    return True


def check():
    well = True
    for program in programs("tests") + programs("bench"):
        option = "--gtest_list_tests" if os.path.basename(os.path.dirname(program)) == "tests" else "--help"
        status = subprocess.run([program, option], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, timeout=60).returncode
        print(f"{os.path.basename(program)} {option}: {'ok' if status == 0 else f'FAILED, exit status {status}'}", flush=True)
        well = well and status == 0
    return well


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="tests and benchmarks; default: all")
    parser.add_argument("--full", action="store_true", help="benchmarks without --quick")
    parser.add_argument("--check", action="store_true", help="only start every program")
    flags = parser.parse_args()
    if flags.check:
        sys.exit(not check())
    known = {os.path.basename(p): p for p in programs("tests") + programs("bench")}
    unknown = [name for name in flags.names if name not in known]
    if unknown:
        sys.exit(f"run: no {', '.join(unknown)}; there are {', '.join(known)}")
    out = os.path.abspath(os.environ.get("OUT") or "out")
    os.makedirs(out, exist_ok=True)
    failed = []
    for name, program in known.items():
        if flags.names and name not in flags.names:
            continue
        is_test = os.path.basename(os.path.dirname(program)) == "tests"
        if not (test(program, out) if is_test else benchmark(program, out, flags.full)):
            failed.append(name)
    print(f"results in {out}" + (f"; not well: {', '.join(failed)}" if failed else ""))
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
