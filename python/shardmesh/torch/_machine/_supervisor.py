"""Runs a program until it ends, this is told to, or the trainer that started this is gone, killed or not; then removes
its folder. Run as a script, with the standard library alone: _supervisor.py PARENT FOLDER PROGRAM [ARGUMENT]...

The trainer cannot have this done by the kernel: a parent-death signal comes when the thread ends that started the
child, and removes no folder.
"""
import ctypes
import os
import select
import shutil
import signal
import subprocess
import sys

PR_SET_PDEATHSIG = 1
STOP_SECONDS = 25  # longer than `shardctl up --grace 2` takes to end, at worst


def start(folder: str, command: list[str]) -> "subprocess.Popen[bytes]":
    """The program; it is told to end if this is killed. Its own scratch files are in the folder."""
    prctl, me = ctypes.CDLL(None).prctl, os.getpid()

    def end_with_parent() -> None:
        prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != me:
            os._exit(1)

    return subprocess.Popen(command, stdin=subprocess.DEVNULL, env={**os.environ, "TMPDIR": folder},
                            preexec_fn=end_with_parent)


def wait(parent: int, child: "subprocess.Popen[bytes]") -> None:
    """Returns when one of them has ended."""
    ends = select.poll()
    ends.register(os.pidfd_open(child.pid), select.POLLIN)
    try:
        ends.register(os.pidfd_open(parent), select.POLLIN)
    except ProcessLookupError:
        return
    if os.getppid() == parent:  # else the number may be another process's by now
        ends.poll()


def main() -> int:
    parent, folder = int(sys.argv[1]), sys.argv[2]
    asked = [False]
    signal.signal(signal.SIGTERM, lambda *_: asked.__setitem__(0, True))
    try:
        child = start(folder, sys.argv[3:])
        signal.signal(signal.SIGTERM, lambda *_: child.terminate())
        if not asked[0]:
            wait(parent, child)
        child.terminate()
        try:
            child.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
        return child.returncode
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
