"""The service that a trainer uses: one that is named, or one that this process starts on its machine and ends."""
from __future__ import annotations

import atexit
import datetime
import json
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from typing import Any, Optional

import torch

from ... import _programs, _tls, errors
from . import _uses as uses
from ._board import Board, Store
from ._uses import Running

LOG = logging.getLogger("shardmesh.torch")

_SUPERVISOR = os.path.join(os.path.dirname(os.path.abspath(__file__)), "_supervisor.py")
_POLL_SECONDS = 0.02
_STOP_SECONDS = 30.0  # a little longer than _supervisor.py waits
_GRACE_SECONDS = 2.0  # `shardctl up --grace`
_LOOK_SECONDS = 0.05  # between two looks at the other ranks, which are waited for
_OPENS_LATER = 30.0  # a store that is given up goes on for so long: not just while this process ends
_LOG_LINES, _LOG_BYTES = 8, 4096  # of its log, in errors
_PUBLISHED, _FAILED = "+", "-"  # how what rank 0 says begins
_CAUSE = "/cause"  # of its end
# What a rank is told of its own call, and not since rank 0 ended.
_OWN = (errors.InvalidArgument, errors.AlreadyExists, errors.FailedPrecondition, errors.Unimplemented)

_finds = 0  # how often this process has looked for a service of its own: equal on all ranks
_stores: list[Any] = []  # rank 0 may hold the server that the others ask, as long as it lives


class Remote:
    """Somebody else's service."""

    board: Optional[Board] = None

    def __init__(self, address: str) -> None:
        self.address = address

    def close(self, at_once: bool = False) -> None:
        """Nothing: its owner ends it."""

    def failed(self, error: BaseException) -> BaseException:
        return error


class Embedded:
    """`shardctl up` on this machine, for this process alone to end: at close(), at exit, or however it ends, kill -9
    included. A forked child of this process changes nothing of it."""

    board: Optional[Board] = None

    def __init__(self, workers: int, timeout: float) -> None:
        """Unavailable: it ended before it was ready (the message has the end of its log). DeadlineExceeded. NotFound:
        no programs (_programs.find)."""
        command = _command(workers, timeout)
        self.folder = tempfile.mkdtemp(prefix="shardmesh-")
        self._owner = os.getpid()
        # Open here: it can be read after the supervisor has removed the folder.
        self._log = open(os.path.join(self.folder, "service.log"), "w+b")
        try:
            self._supervisor = subprocess.Popen(
                [sys.executable, "-I", "-S", _SUPERVISOR, str(self._owner), self.folder, *command],
                stdin=subprocess.DEVNULL, stdout=self._log, stderr=self._log, env=_tls.environment_without(),
                start_new_session=True)  # Ctrl-C is the trainer's to answer
        except OSError as error:
            self._remove()
            raise errors.Unavailable(f"cannot start {sys.executable}: {error.strerror}") from None
        atexit.register(self.close)
        try:
            self.address = self._await_ready(time.monotonic() + timeout, timeout)
        except BaseException:
            self.close()
            raise

    @property
    def owned(self) -> bool:
        """By this process, which can close it."""
        return not self._log.closed and os.getpid() == self._owner

    def close(self, at_once: bool = False) -> None:
        """Ends the service; jobs that it had are gone. Again: nothing."""
        self._stop(_STOP_SECONDS)

    def kill(self) -> None:
        """The same, without the time that its processes take to hear from trainers."""
        self._stop(0.0)

    def _stop(self, seconds: float) -> None:
        if not self.owned:
            return
        atexit.unregister(self.close)
        self._supervisor.terminate()
        try:
            self._supervisor.wait(seconds)
        except subprocess.TimeoutExpired:
            os.killpg(self._supervisor.pid, signal.SIGKILL)  # the supervisor and shardctl, whose children end with it
            self._supervisor.wait()
        self._remove()

    def failed(self, error: BaseException) -> BaseException:
        self.close()
        return error

    def _remove(self) -> None:
        self._log.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _await_ready(self, deadline: float, timeout: float) -> str:
        while True:
            ended = self._ended(_POLL_SECONDS)  # before the log is read: then all of it is there
            address = _ready_address(self._read_log())
            if address is not None and not ended:
                return address
            if ended:
                raise errors.Unavailable("the embedded service ended before it was ready" + self._log_end())
            if time.monotonic() >= deadline:
                raise errors.DeadlineExceeded(f"the embedded service was not ready in {timeout:g} s{self._log_end()}")

    def _ended(self, seconds: float) -> bool:
        try:
            self._supervisor.wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        return True

    def _read_log(self) -> bytes:
        size = os.fstat(self._log.fileno()).st_size
        return os.pread(self._log.fileno(), size, 0)

    def _log_end(self) -> str:
        lines = self._read_log()[-_LOG_BYTES:].decode(errors="replace").splitlines()
        return "; the end of its log:\n" + "\n".join("  " + line for line in lines[-_LOG_LINES:] or ["(empty)"])


class _Host:
    """The service of rank 0, which the other ranks use until they leave it."""

    def __init__(self, service: Embedded, store: Store, board: Board, key: str, world: int, timeout: float) -> None:
        self._service, self._store, self.board = service, store, board
        self._key, self._timeout = key, timeout
        self._others = range(1, world)
        self.address = service.address
        atexit.register(self._end)  # before the service's own

    def close(self, at_once: bool = False) -> None:
        """When the others have left, or at once. Those that are alive are waited for without end, others up to the
        timeout."""
        all_left = True
        if self._service.owned and not at_once:
            try:
                all_left = self._await_others()
            except RuntimeError:  # the store is gone, too
                pass
        atexit.unregister(self._end)
        if all_left:
            self._service.close()
        else:
            self._service.kill()  # its workers would wait for trainers that are stopped

    def _await_others(self) -> bool:
        """Whether all have left."""
        begin = time.monotonic()
        deadline, warning = begin + self._timeout, begin + self._timeout
        while others := [rank for rank in self._others if not self._has_left(rank)]:
            now = time.monotonic()
            if all(self._is_alive(rank) for rank in others):
                deadline = now + self._timeout
            if now >= deadline:
                return False
            if now >= warning:
                LOG.warning("rank 0 has closed its optimizer %.0f s ago, and lets the service run for ranks that still "
                            "use it: %s", now - begin, ", ".join(map(str, others)))
                warning = now + 2 * (now - begin)
            time.sleep(_LOOK_SECONDS)
        return True

    def _has_left(self, rank: int) -> bool:
        process = self.board.process(rank)
        return (process is not None and process.ended) or self._store.get(f"{self._key}/left/{rank}") is not None

    def _is_alive(self, rank: int) -> bool:
        """Whether it can leave while this process waits: one in this very process cannot."""
        process = self.board.process(rank)
        return process is not None and process.pid != os.getpid() and not process.stopped

    def failed(self, error: BaseException) -> BaseException:
        try:
            self._store.set(self._key + _CAUSE, str(error) or type(error).__name__)
        except RuntimeError:  # the store is gone
            pass
        self.close(at_once=True)
        return error

    def _end(self) -> None:
        self.close(at_once=hasattr(sys, "last_type"))  # this process ends with an exception


class _Guest:
    """Another rank's use of it."""

    def __init__(self, address: str, store: Store, board: Board, key: str, rank: int) -> None:
        self.address, self._store, self.board, self._key, self._rank = address, store, board, key, rank
        self._owner: Optional[int] = os.getpid()
        atexit.register(self.close)

    def close(self, at_once: bool = False) -> None:
        if self._owner != os.getpid():
            return
        self._owner = None
        atexit.unregister(self.close)
        try:
            self._store.set(f"{self._key}/left/{self._rank}", "")
        except RuntimeError:
            pass

    def failed(self, error: BaseException) -> BaseException:
        its_own = not isinstance(error, errors.Error) or isinstance(error, _OWN)
        cause = None if its_own else self._cause()
        self.close()
        if cause is None:
            return error
        return errors.Unavailable(f"rank {self._rank}: rank 0 ended before the job began: {cause}")

    def _cause(self) -> Optional[str]:
        try:
            said = self._store.get(self._key + _CAUSE)
        except RuntimeError:
            said = None
        if said is not None:
            return said.decode()
        process = self.board.process(0)
        return f"process {process.pid} of rank 0 is gone" if process is not None and process.ended else None


def find(service: Optional[str], rank: int, world: int, workers: Optional[int], timeout: float) -> Running:
    """The service at `service`, "host:port". None: one on this machine, which rank 0 starts with `workers` workers
    (None: 1) and ends, and of which the other ranks learn through torchrun's store, or torch.distributed's where it is
    initialised. Ranks must make these calls in the same order. The workers' steps share the cores that this process
    may use: one worker has a thread for each.

    InvalidArgument: `service`, `rank`, `world` or `workers` is none. FailedPrecondition: the ranks are on several
    machines, or have no store. DeadlineExceeded: `timeout` seconds passed. NotFound, Unavailable: as Embedded (on the
    other ranks Unavailable), or the store cannot be served."""
    if not 0 <= rank < world:
        raise errors.InvalidArgument(f"rank is {rank} of {world}; it is one of 0..{world - 1}")
    if service is not None:
        return uses.again(checked_address(service)) or Remote(service)
    if workers is not None and not 1 <= workers <= 1024:
        raise errors.InvalidArgument(f"workers is {workers}; an embedded service has 1 to 1024")
    return uses.first(_own(rank, world, workers or 1, timeout))


def _own(rank: int, world: int, workers: int, timeout: float) -> Running:
    """Of the ranks of this training, which rank 0 starts."""
    global _finds
    _finds += 1
    if world == 1:
        return Embedded(workers, timeout)
    _check_one_machine(world)
    key = f"shardmesh/service/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/{_finds}"
    if rank == 0:
        embedded, store, board = _publish(key, workers, timeout)
        return _Host(embedded, store, board, key, world, timeout)
    address, store, board = _read(key, rank, timeout)
    return _Guest(address, store, board, key, rank)


def checked_address(address: str) -> str:
    """InvalidArgument: it is none."""
    scheme, _, path = address.partition(":")
    if scheme == "unix" and path.startswith("/"):
        return address
    host, _, port = address.rpartition(":")
    if not host or re.search(r"[\s/]", host) or not port.isdecimal() or not 0 < int(port) < 65536:
        raise errors.InvalidArgument(f"service is {address!r}; it is the address of a coordinator, like 10.0.0.1:7000 or unix:/path")
    return address


def _command(workers: int, timeout: float) -> list[str]:
    threads = max(1, len(os.sched_getaffinity(0)) // workers)
    command = [_programs.find("shardctl"), "up", "--workers", str(workers), "--threads", str(min(threads, 1024)),
               "--listen", "127.0.0.1:0", "--start-timeout", f"{max(timeout, 0.1):.3f}",
               "--grace", f"{_GRACE_SECONDS:g}", "--log-level", "warn", "--json"]
    folder = os.environ.get("SHARDMESH_BIN_DIR")
    return command + (["--bin-dir", folder] if folder else [])


def _ready_address(log: bytes) -> Optional[str]:
    """What the event "ready" among the lines of `shardctl up --json`, and of its children's logs, says."""
    for line in log.splitlines(keepends=True):
        if line.startswith(b"{") and line.endswith(b"\n"):
            try:
                event = json.loads(line)
            except ValueError:
                continue
            if event.get("event") == "ready":
                return str(event["coordinator"])
    return None


def _check_one_machine(world: int) -> None:
    local = os.environ.get("LOCAL_WORLD_SIZE", str(world))
    if local != str(world):
        raise errors.FailedPrecondition(f"{local} of {world} ranks are on this machine, and an embedded service is "
                                        "reached from one only; start the service, and say service=\"host:port\"")


def _store(rank: int, timeout: float) -> Store:
    """Where ranks tell each other: the process group's store, or that of MASTER_ADDR and MASTER_PORT, which rank 0
    serves unless torchrun does. RuntimeError: there is none within the timeout."""
    distributed: Any = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        return Store(distributed.distributed_c10d._get_default_store, timeout)
    try:
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    except (KeyError, ValueError):
        raise errors.FailedPrecondition(
            "several ranks, and neither is torch.distributed initialised nor are MASTER_ADDR and MASTER_PORT set; "
            "start them with torchrun, or say service=\"host:port\"") from None
    serves = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"

    def opens() -> Any:
        # Multi-tenant: init_process_group may want to serve there too, later.
        store = distributed.TCPStore(host, port, is_master=serves, wait_for_workers=False, multi_tenant=True,
                                     timeout=datetime.timedelta(seconds=timeout + _OPENS_LATER))
        if serves:
            _stores.append(store)
        return store

    return Store(opens, timeout)


def _publish(key: str, workers: int, timeout: float) -> tuple[Embedded, Store, Board]:
    try:
        store = _store(0, timeout)
        board = Board(store, key, 0, timeout)
    except RuntimeError as error:
        if isinstance(error, errors.Error):
            raise
        place = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        raise errors.Unavailable(f"rank 0 cannot tell the others of the service through {place}: {error}") from None
    try:
        service = Embedded(workers, timeout)
    except errors.Error as error:
        store.set(key, _FAILED + str(error))
        raise
    store.set(key, _PUBLISHED + service.address)
    return service, store, board


def _read(key: str, rank: int, timeout: float) -> tuple[str, Store, Board]:
    """DeadlineExceeded: rank 0 did not come, or is stopped. Unavailable: it ended, or could not start the service."""
    deadline = time.monotonic() + timeout
    late = f"rank {rank}: rank 0 did not start the service within {timeout:g} s"
    try:
        store = _store(rank, timeout)
        board = Board(store, key, rank, timeout)
        while True:
            host = board.process(0)  # known from then on, should the store end with it
            if (said := store.get(key, deadline - time.monotonic())) is not None:
                break
            if host is not None and host.ended:
                raise errors.Unavailable(f"rank {rank}: process {host.pid} of rank 0 ended before it started the service")
            if time.monotonic() >= deadline:
                raise errors.DeadlineExceeded(late)
            time.sleep(_LOOK_SECONDS)
    except RuntimeError as error:  # torch's DistNetworkError and DistStoreError among them
        if isinstance(error, errors.Error):
            raise
        raise errors.DeadlineExceeded(late) from error
    text = said.decode()
    if text.startswith(_FAILED):
        raise errors.Unavailable(f"rank {rank}: rank 0 could not start the service: {text[1:]}")
    return text[1:], store, board
