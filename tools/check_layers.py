#!/usr/bin/env python3
"""Fails if a folder includes a folder, or an outside library, that it may not; and on a few other slips of the sources.

Usage: check_layers.py [--table] [ROOT].  Prints one `file:line: reason` per violation; exits 1 if there is any. With --table: the rooms instead, with
their files and which rooms each includes.

Looked at: #include lines (ALLOWED, ROOMS, CONFINED), who names a number of hosts or a device (HOST_COUNT, DEVICE), how many source files a folder has, threads (NO_THREADS), sleeping in tests, the wall clock (WALL_CLOCK), paths of one machine. Comments count as text: an include
or a sleep that is commented out is still reported. The build's own visibility rules repeat the folders, and go deeper.
"""
import os
import re
import sys

import class_sizes

# folder -> the folders that it may include from, each with the rooms in it; itself is always allowed. A folder in another one is one of its own.
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
# The rooms of a folder, bottom up: each may include those before it, and what the folder may. Tests, and what is in testing/, may include all rooms.
# "" stands for the files that lie in the folder itself.
ROOMS = {
    "bench": ("harness", "bulk", "checkpoint", "collectives", "coordinator", "imbalance", "moves", "optimizer", "plan", "step", "versions"),
    "core": ("base", "format", "mesh", "names", "view", "layout", "job"),
    "client": ("cpp/transport", "cpp", "cpp/checkpoint", "cli/base", "cli/files", "cli/plan", "cli/top", "cli/up", "cli/commands", "cli"),
    "kernels": ("cpu", "rules", "", "tile", "encode", "step", "sum", "muon", "cuda"),
    "local": ("descriptor", "process", "memory", "socket", "device"),
    "rpc": ("base", "tls", "connections", "calls", ""),
    "server": ("store", "jobs", "seats", "coordinator", "service", ""),
    "worker": ("control", "memory", "versions", "transport", "transport/nccl", "transport/secure", "step", "pass", "pass/device", "lead", "lead/hosts", "job", "move", "relay", "node", "process",
               "doors"),
}
# Source files at most that lie in one folder, whichever it is; public functions at most of a class, but for tables of a foreign library's functions.
MAX_FILES = 40
MAX_FUNCTIONS = 25
FOREIGN_TABLES = ("CudaDriverApi", "StandInNccl")
# prefix of an outside header -> where it may be included (all prefixes that fit count): patterns of the file's path, matched from its start to its end.
CONFINED = {
    "grpcpp/":      ("rpc/.*", "proto/.*", r".*_service\.(h|cc)", r".*_service_test\.cc", r"worker/doors/[^/]*_call\.(h|cc)", r".*_transport\.(h|cc)", r".*_main\.cc",
                     r"client/cpp/.*transport.*", "tests/.*", "bench/.*"),
    "grpc/":        ("rpc/.*",),
    "sqlite3.h":    (r"server/store/sqlite[^/]*", r"server/([^/]*/)?[^/]*_test\.cc"),
    "gloo/":        (r"worker/transport/gloo_(group\.cc|connections\.(cc|h))",),
    "openssl/":     ("worker/transport/secure/.*", "rpc/tls/.*"),
    "hwy/":         (r"kernels/([^/]*/)?[^/]*simd[^/]*",),
    "cuda_runtime": (r".*cuda[^/]*",),
    "cuda.h":       (r".*cuda[^/]*",),
    "CLI/":         ("client/cli/.*", "core/base/decimal_flags_test.cc", r".*_main\.cc", "bench/.*", "examples/.*"),
    "pybind11/":    ("python/binding/.*", "python/client_binding/.*"),
    "Python.h":     ("python/binding/.*", "python/client_binding/.*"),
    "nlohmann/":    ("checkpoint/.*", "client/cli/.*", "bench/.*", "tests/.*", "examples/.*"),
}
# Who may ask for the wall clock's time, which anybody may set: patterns of paths, and what it is for. Everything else
# waits and measures by MonotonicNow() (core/base/clock.h), DeadlineIn() (rpc/base/deadline.h) or, in Python, time.monotonic().
WALL_CLOCK = {
    r"core/base/clock\.h": "makes wall times monotonic",
    r"core/base/sync\.h": "the build for the thread sanitizer, which does not know waits on the other clock",
    r"worker/run_worker_main\.cc|worker/node/testing/fake_worker_main\.cc": "a worker's incarnation (core/base/incarnation.h)",
    r"rpc/(server|tls/tls)\.cc": "the times of certificates",
    r"server/service/coordinator_service\.h": "how far ahead an incarnation may be",
    r"client/cli/(commands/lease|top/top)_command\.cc": "times that people read",
    r"rpc/(.*_test|testing/.*)\.cc|server/service/coordinator_service_test\.cc|tests/contract/.*_test\.cc":
        "deadlines of gRPC calls in tests, which gRPC makes monotonic at once, and incarnations",
    r"tests/testing/system/altered_system_preload\.cc": "moves the wall clock",
}
# Where the number of a job's hosts may be named: patterns of paths. Everything else asks HostRanks::alone() or CheckSupported, or does the same on one
# host and on several.
HOST_COUNT = (r"core/job/support.*", r"worker/(lead|transport|memory)/.*", r"worker/control/host_ranks\.h", "server/seats/.*",
              r"(.*/)?(testing/.*|[^/]*_test\.cc)", "(bench|tests|examples|rpc|kernels|local|checkpoint)/.*")
# Where a worker's code may name a device, beside comments. The rooms in the second line do until windows are buffers and passes executors: a new name there is
# no violation, one in any other room is.
DEVICE = (r"worker/(memory|transport|pass/device)/.*", r"worker/pass/step_pass\.h", r"worker/control/(control_block|host_ranks)\.h", r"worker/step/step_members\..*",
          r"worker/(doors|job|process|node)/.*", r"worker/lead/(engine|hosts/several_hosts)\.cc", r"worker/[^/]*",
          r"(.*/)?(testing/.*|[^/]*_test\.cc)")
# Who starts no thread: their tests are left out under the thread sanitizer (tsan_lane of ./test).
NO_THREADS = (r"checkpoint/.*", r"core/(?!base/).*", r"proto/.*")
SOURCES = (".h", ".cc", ".cu", ".cuh", ".inc")
TEXTS = SOURCES + (".py", ".sh", ".md", ".txt", ".proto", ".yaml", ".yml", ".bzl", ".sbatch", ".cuda", ".BUILD", ".bazelrc")
TEXT_NAMES = ("BUILD", "WORKSPACE", "Containerfile", "demo", "test", "run")

INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]+["<]([^">]+)[">]', re.M)
NUM_HOSTS = re.compile(r"\bnum_ho" r"sts\b")
NAMES_DEVICE = re.compile(r"\w*[dD]evi" r"ce\w*")
COMMENT = re.compile(r"//.*|#\s*include.*")  # which rooms may include which is a rule of its own
THREADS = re.compile(r"\b(std::thr" r"ead\b|pthread_cre" r"ate\b|std::as" r"ync\b|StartThr" r"ead\b|core/base/thr" r"ead\.h)")
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


def room_of(path):
    """(folder, room) of a path: the innermost room of ROOMS that has it. The room is None outside of all."""
    folder = path.split("/")[0]
    rooms = [room for room in ROOMS.get(folder, ()) if (path.startswith(f"{folder}/{room}/") if room else path.count("/") == 1)]
    return folder, max(rooms, key=len, default=None)


def is_test(path):
    return re.search(r"(^|/)testing/|_(test|fixture|model)\.", path) is not None


def room_violation(path, target):
    """Why `path` may not include `target` of the same folder; None: it may."""
    (folder, room), (other_folder, other) = room_of(path), room_of(target)
    if folder != other_folder or room is None or is_test(path) or is_test(target) or room == other:
        return None
    order = ROOMS[folder]
    if other is not None and order.index(other) < order.index(room):
        return None
    home = os.path.join(folder, room).rstrip("/")
    below = ", ".join(order[:order.index(room)]) or "no other room"
    return f"{home}/ may not include {target} (allowed of {folder}/: {below})"


def include_violations(path, text):
    top = folder_of(path)
    for match in INCLUDE.finditer(text):
        target, line = match.group(1), text.count("\n", 0, match.start(1)) + 1
        folder = folder_of(target)
        if top in ALLOWED and folder in ALLOWED and folder != top and folder not in ALLOWED[top]:
            allowed = ", ".join(sorted(ALLOWED[top])) or "nothing of ours"
            yield line, f"{top}/ may not include {target} (allowed: {allowed})"
        upwards = room_violation(path, target)
        if upwards:
            yield line, upwards
        homes = [home for prefix, places in CONFINED.items() if target.startswith(prefix) for home in places]
        if homes and not any(re.fullmatch(home, path) for home in homes):
            yield line, f"{target} belongs only in files like {', '.join(homes)}"


def room_sizes(root):
    """{room: source files} of all rooms, without testing/."""
    sizes = {f"{folder}/{room}": 0 for folder, rooms in ROOMS.items() for room in rooms}
    for path in files(root):
        folder, room = room_of(path)
        if room is not None and path.endswith(SOURCES) and "/testing/" not in path:
            sizes[f"{folder}/{room}"] += 1
    return sizes


def size_violations(root):
    sizes = {}
    for path in files(root):
        if path.endswith(SOURCES + (".py",)):
            folder = os.path.dirname(path)
            sizes[folder] = sizes.get(folder, 0) + 1
    for folder, size in sizes.items():
        if size > MAX_FILES:
            yield f"{folder}:1: has {size} source files; split it, at most {MAX_FILES} are readable"


def table(root):
    """A line for each room: its files, those that are tests, and the rooms of its folder that it includes."""
    sizes, tests, arrows = room_sizes(root), {}, {}
    for path in files(root):
        folder, room = room_of(path)
        if room is None or not path.endswith(SOURCES) or "/testing/" in path:
            continue
        name = f"{folder}/{room}"
        if is_test(path):
            tests[name] = tests.get(name, 0) + 1
            continue
        with open(os.path.join(root, path), encoding="utf-8", errors="replace") as source:
            targets = {room_of(target) for target in INCLUDE.findall(source.read())}
        arrows.setdefault(name, set()).update(other or "." for top, other in targets if top == folder and other not in (None, room))
    yield f"{'room':24} {'files':>5} {'tests':>5}  includes"
    for name, size in sizes.items():
        yield f"{name:24} {size:5} {tests.get(name, 0):5}  {', '.join(sorted(arrows.get(name, ())))}"
    yield f"{len(sizes)} rooms, {sum(len(to) for to in arrows.values())} arrows"


def pattern_violations(text, pattern, reason):
    for match in pattern.finditer(text):
        yield text.count("\n", 0, match.start()) + 1, f"{match.group(0).strip()} {reason}"


def label_violations(root):
    """Tests that the table of support names, and that no BUILD file has."""
    path = "core/job/support_table.h"
    if not os.path.exists(os.path.join(root, path)):
        return
    with open(os.path.join(root, path), encoding="utf-8") as source:
        text = source.read()
    for match in re.finditer(r'"//([^":]*):([^"]*)"', text):
        build = os.path.join(root, match.group(1), "BUILD")
        if os.path.exists(build):
            with open(build, encoding="utf-8") as targets:
                if f'name = "{match.group(2)}"' in targets.read():
                    continue
        yield f"{path}:{text.count(chr(10), 0, match.start()) + 1}: there is no test {match.group(0)[1:-1]}"


def violations(root):
    """`file:line: reason` of each, in the order of the files."""
    for path in files(root):
        with open(os.path.join(root, path), encoding="utf-8", errors="replace") as source:
            text = source.read()
        found = []
        if path.endswith(SOURCES):
            found += include_violations(path, text)
        if path.endswith(SOURCES) and not any(re.fullmatch(home, path) for home in HOST_COUNT):
            found += pattern_violations(text, NUM_HOSTS, "is for who moves bytes between hosts: ask HostRanks::alone(), or CheckSupported "
                                                         "(HOST_COUNT of tools/check_layers.py)")
        if path.startswith("worker/") and path.endswith(SOURCES) and not any(re.fullmatch(home, path) for home in DEVICE):
            found += pattern_violations(COMMENT.sub("", text), NAMES_DEVICE, "is of memory/, transport/ and pass/device/: ask StepPass or HostMemory "
                                                                             "(DEVICE of tools/check_layers.py)")
        if path.endswith(".h"):
            found += [(line, f"{name} has {size} public functions, at most {MAX_FUNCTIONS} are readable: split it by its subjects")
                      for line, name, size in class_sizes.classes(text) if size > MAX_FUNCTIONS and name not in FOREIGN_TABLES]
        if path.endswith(SOURCES) and any(re.fullmatch(home, path) for home in NO_THREADS):
            found += pattern_violations(text, THREADS, "is for folders whose tests are run under the thread sanitizer (NO_THREADS of tools/check_layers.py)")
        if path.endswith("_test.cc"):
            found += pattern_violations(text, SLEEP, "in a test: wait on a condition with a deadline, or move a ManualClock")
        if path.endswith(SOURCES + (".py",)) and not any(re.fullmatch(home, path) for home in WALL_CLOCK):
            found += pattern_violations(text, WALL_TIME, "is the wall clock, which anybody may set: take MonotonicNow(), DeadlineIn() or time.monotonic(), or say in "
                                                         "WALL_CLOCK of tools/check_layers.py why not")
        found += pattern_violations(text, MACHINE_PATH, "is a path of one machine")
        for line, reason in sorted(found):
            yield f"{path}:{line}: {reason}"
    yield from size_violations(root)
    yield from label_violations(root)


def main():
    arguments = [argument for argument in sys.argv[1:] if argument != "--table"]
    root = arguments[0] if arguments else os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    if "--table" in sys.argv[1:]:
        print("\n".join(table(root)))
        return
    bad = list(violations(root))
    print("\n".join(bad) if bad else f"layers ok ({sum(1 for _ in files(root))} files, {len(ALLOWED)} folders)")
    sys.exit(bool(bad))


if __name__ == "__main__":
    main()
