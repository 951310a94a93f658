#!/usr/bin/env python3
"""Fails if a folder includes a folder, or an outside library, that it may not; and on a few other slips of the sources.

Usage: check_layers.py [ROOT].  Prints one `file:line: reason` per violation; exits 1 if there is any.

Looked at: #include lines (ALLOWED, CONFINED), sleeping in tests, the wall clock (WALL_CLOCK), paths of one machine. Comments count as text: an include
or a sleep that is commented out is still reported. The build's own visibility rules repeat the folders, and go deeper.
"""
import os
import re
import sys

# folder -> the folders that it may include from; itself is always allowed. A folder in another one is one of its own.
ALLOWED = {
    "core":     set(),
    "proto":    {"core"},
    "rpc":      {"core", "local"},
    "kernels":  {"core"},
    "local":    {"core"},
    "checkpoint": {"core", "proto", "local"},
    "client":   {"core", "proto", "rpc", "local", "checkpoint"},
    "server":   {"core", "proto", "rpc"},
    "worker":   {"core", "proto", "rpc", "kernels", "local", "client", "checkpoint"},
    "python":   {"core", "kernels"},
    "python/client_binding": {"core", "proto", "checkpoint", "client", "python"},
    "examples": {"core", "proto", "client"},
    "tests":    {"core", "proto", "checkpoint", "rpc", "kernels", "local", "client", "server", "worker", "python", "examples", "bench"},
    "bench":    {"core", "proto", "checkpoint", "rpc", "kernels", "local", "client", "server", "worker", "python", "examples"},
}
# prefix of an outside header -> where it may be included (all prefixes that fit count): patterns of the file's path, matched from its start to its end.
CONFINED = {
    "grpcpp/":      ("rpc/.*", "proto/.*", r".*_service\.(h|cc)", r".*_service_test\.cc", r"worker/[^/]*_call\.(h|cc)", r".*_transport\.(h|cc)", r".*_main\.cc",
                     r"client/cpp/.*transport.*", "tests/.*", "bench/.*"),
    "grpc/":        ("rpc/.*",),
    "sqlite3.h":    (r"server/sqlite[^/]*", r"server/[^/]*_test\.cc"),
    "gloo/":        (r"worker/collectives/gloo_(group\.cc|connections\.(cc|h))",),
    "hwy/":         (r"kernels/[^/]*simd[^/]*",),
    "cuda_runtime": (r".*cuda[^/]*",),
    "cuda.h":       (r".*cuda[^/]*",),
    "CLI/":         ("client/cli/.*", "core/decimal_flags_test.cc", r".*_main\.cc", "bench/.*", "examples/.*"),
    "pybind11/":    ("python/binding/.*", "python/client_binding/.*"),
    "Python.h":     ("python/binding/.*", "python/client_binding/.*"),
    "nlohmann/":    ("checkpoint/.*", "client/cli/.*", "bench/.*", "tests/.*", "examples/.*"),
}
# Who may ask for the wall clock's time, which anybody may set: patterns of paths, and what it is for. Everything else
# waits and measures by MonotonicNow() (core/clock.h), DeadlineIn() (rpc/deadline.h) or, in Python, time.monotonic().
WALL_CLOCK = {
    r"core/clock\.h": "makes wall times monotonic",
    r"core/sync\.h": "the build for the thread sanitizer, which does not know waits on the other clock",
    r"worker/run_worker_main\.cc|worker/node/testing/fake_worker_main\.cc": "a worker's incarnation (core/incarnation.h)",
    r"rpc/(server|tls)\.cc": "the times of certificates",
    r"server/coordinator_service\.h": "how far ahead an incarnation may be",
    r"client/cli/(lease|top)_command\.cc": "times that people read",
    r"rpc/(.*_test|testing/.*)\.cc|server/coordinator_service_test\.cc|tests/contract/.*_test\.cc":
        "deadlines of gRPC calls in tests, which gRPC makes monotonic at once, and incarnations",
    r"tests/testing/altered_system_preload\.cc": "moves the wall clock",
}
SOURCES = (".h", ".cc", ".cu", ".cuh", ".inc")
TEXTS = SOURCES + (".py", ".sh", ".md", ".txt", ".proto", ".yaml", ".yml", ".bzl", ".sbatch", ".cuda", ".BUILD", ".bazelrc")
TEXT_NAMES = ("BUILD", "WORKSPACE", "Containerfile", "demo", "test", "run")

INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]+["<]([^">]+)[">]', re.M)
SLEEP = re.compile(r"\b(sleep_for|sleep_until|SleepFor|usleep|nanosleep|sleep)\s*\(")
# Split, so that this file does not match itself; so are the next ones.
WALL_TIME = re.compile(r"\b(absl::No" r"w\(|system_cl" r"ock\b|gettimeof" r"day\b|CLOCK_REAL" r"TIME\b|std::ti" r"me\(|time\.ti" r"me\(|"
                       r"datetime\.(now|utcnow|to" r"day)\()")
MACHINE_PATH = re.compile("(?<![\\w.])(/ho" + "me/\\w|/ro" + "ot/\\w|/wo" + "rk/|/Us" + "ers/|/opt/py" + "pi|/tmp/bash" + "_jobs)")


def files(root):
    """Paths of the text files, relative to `root`, sorted; hidden and generated folders left out, but .ci kept."""
    for directory, folders, names in os.walk(root):
        folders[:] = sorted(f for f in folders if f == ".ci" or not f.startswith((".", "bazel-", "__pycache__")))
        for name in sorted(names):
            path = os.path.join(directory, name)
            if (name.endswith(TEXTS) or name in TEXT_NAMES) and not os.path.islink(path):
                yield os.path.relpath(path, root)


def folder_of(path):
    """The innermost folder of ALLOWED that has `path`; of others the first part."""
    parts = path.split("/")
    prefixes = ["/".join(parts[:n]) for n in range(len(parts), 0, -1)]
    return next((prefix for prefix in prefixes if prefix in ALLOWED), parts[0])


def include_violations(path, text):
    top = folder_of(path)
    for match in INCLUDE.finditer(text):
        target, line = match.group(1), text.count("\n", 0, match.start(1)) + 1
        folder = folder_of(target)
        if top in ALLOWED and folder in ALLOWED and folder != top and folder not in ALLOWED[top]:
            allowed = ", ".join(sorted(ALLOWED[top])) or "nothing of ours"
            yield line, f"{top}/ may not include {target} (allowed: {allowed})"
        homes = [home for prefix, places in CONFINED.items() if target.startswith(prefix) for home in places]
        if homes and not any(re.fullmatch(home, path) for home in homes):
            yield line, f"{target} belongs only in files like {', '.join(homes)}"


def pattern_violations(text, pattern, reason):
    for match in pattern.finditer(text):
        yield text.count("\n", 0, match.start()) + 1, f"{match.group(0).strip()} {reason}"


def violations(root):
    """`file:line: reason` of each, in the order of the files."""
    for path in files(root):
        with open(os.path.join(root, path), encoding="utf-8", errors="replace") as source:
            text = source.read()
        found = []
        if path.endswith(SOURCES):
            found += include_violations(path, text)
        if path.endswith("_test.cc"):
            found += pattern_violations(text, SLEEP, "in a test: wait on a condition with a deadline, or move a ManualClock")
        if path.endswith(SOURCES + (".py",)) and not any(re.fullmatch(home, path) for home in WALL_CLOCK):
            found += pattern_violations(text, WALL_TIME, "is the wall clock, which anybody may set: take MonotonicNow(), DeadlineIn() or time.monotonic(), or say in "
                                                         "WALL_CLOCK of tools/check_layers.py why not")
        found += pattern_violations(text, MACHINE_PATH, "is a path of one machine")
        for line, reason in sorted(found):
            yield f"{path}:{line}: {reason}"


def main():
    root = sys.argv[1] if len(sys.argv) > 1 else os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    bad = list(violations(root))
    print("\n".join(bad) if bad else f"layers ok ({sum(1 for _ in files(root))} files, {len(ALLOWED)} folders)")
    sys.exit(bool(bad))


if __name__ == "__main__":
    main()
