"""A coordinator and workers on this machine, by `shardctl up`, until the object is closed or this process ends."""
from __future__ import annotations

import ctypes
import json
import os
import pathlib
import select
import signal
import subprocess
import time
from types import TracebackType
from typing import IO, Optional, Type, Union

PR_SET_PDEATHSIG = 1
START_SECONDS = 60


def program(bin_dir: Union[str, pathlib.Path], path: str) -> pathlib.Path:
    """`path` as the build lays programs out, "client/cli/shardctl", say. FileNotFoundError: it is not built."""
    found = pathlib.Path(bin_dir).resolve() / path
    if not found.exists():
        raise FileNotFoundError(f"{found} is missing; bazel build //{pathlib.Path(path).parent}:{found.name}")
    return found


def end_with_parent() -> None:
    """Of a child, before it becomes another program: it ends with the thread that made it."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


class Service:
    """`address` is the coordinator's, `pid` shardctl's, whose children the others are."""

    def __init__(self, bin_dir: Union[str, pathlib.Path], workers: int, log_dir: Optional[pathlib.Path] = None) -> None:
        """RuntimeError: it did not start; the message has what it said last."""
        command = [program(bin_dir, "client/cli/shardctl"), "up", "--listen", "127.0.0.1:0", "--workers", str(workers),
                   "--json", "--log-level", "error", "--bin-dir", pathlib.Path(bin_dir).resolve()]
        command += ["--log-dir", log_dir] if log_dir else []
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, preexec_fn=end_with_parent)
        self.pid = self._process.pid
        try:
            self.address = self._await_ready()
        except BaseException:
            self.close()
            raise

    def _await_ready(self) -> str:
        stdout: IO[bytes] = self._process.stdout  # type: ignore[assignment]
        deadline, said = time.monotonic() + START_SECONDS, b""
        while time.monotonic() < deadline:
            if not select.select([stdout], [], [], 1)[0]:
                continue
            piece = os.read(stdout.fileno(), 65536)
            if not piece:
                break
            said += piece
            for line in said.split(b"\n")[:-1]:
                event = json.loads(line)
                if event["event"] == "ready":
                    return str(event["coordinator"])
        raise RuntimeError(f"shardctl up did not get ready; it said {said[-500:]!r}")

    def close(self) -> None:
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(timeout=20)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        if self._process.stdout:
            self._process.stdout.close()

    def __enter__(self) -> Service:
        return self

    def __exit__(self, kind: Optional[Type[BaseException]], error: Optional[BaseException],
                 trace: Optional[TracebackType]) -> None:
        self.close()
