"""A coordinator and workers as real processes, and a job that counts, for tests in Python: see cluster.h.

    with Cluster() as cluster:
        trainer = cluster.train("counting", to=3)   # every element of version 3 is 3
        cluster.kill("w1")

Programs are those below the current folder (a test's runfiles), or below SHARDMESH_BIN_DIR. Children end with the
object. When a test failed, print(cluster.logs()) says what they did.
"""
import os
import signal
import subprocess
import tempfile
import time

START_SECONDS = 60


def program(path):
    return os.path.join(os.environ.get("SHARDMESH_BIN_DIR") or os.getcwd(), path)


def until(condition, seconds=30, what="a condition"):
    """Waits for a condition, and returns what it gave."""
    deadline = time.monotonic() + seconds
    while True:
        found = condition()
        if found:
            return found
        if time.monotonic() > deadline:
            raise AssertionError(f"{what} did not come within {seconds} s")
        time.sleep(0.01)


class Trainer:
    """The process counting_trainer."""

    def __init__(self, address, job, arguments):
        command = [program("tests/testing/counting_trainer"), address, job, *map(str, arguments)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def start(self, step, pause_ms=0):
        self.process.stdin.write(f"{step} {pause_ms}\n")
        self.process.stdin.flush()

    def wait(self):
        line = self.process.stdout.readline()
        if not line.startswith("step "):
            raise AssertionError(f"the trainer said {line!r}")
        return int(line.split()[1])

    def to(self, step):
        self.start(step)
        return self.wait()

    def stop(self):
        self.process.kill()
        self.process.wait()
        self.process.stdin.close()
        self.process.stdout.close()


class Cluster:
    """Workers w0, w1, ...; retained: those of a shardmesh-node, which starts them again, w-0, w-1, ..."""

    def __init__(self, workers=2, retained=False, worker_flags=(), coordinator_flags=(), environment=None, unix=False,
                 hosts=1):
        """environment: a function of the folder: variables of every process, besides this one's. unix: the coordinator
        listens on a UNIX socket. hosts: as which the workers count, one on each in turn."""
        self._folder = tempfile.TemporaryDirectory(prefix="shardmesh-py-")
        self.folder = self._folder.name
        self._processes, self._trainers = {}, []
        self._workers, self._hosts = workers, hosts
        self._coordinator_flags = coordinator_flags
        self._environment = {**os.environ, **(environment(self.folder) if environment else {})}
        self.address = f"unix:{self._file('coordinator.sock')}" if unix else "127.0.0.1:0"
        try:
            self.start_coordinator()
            self._start_workers(retained, list(worker_flags))
        except BaseException:
            self.close()
            raise

    def start_coordinator(self):
        """Again with the same state at the same address, after kill("coordinator")."""
        if "coordinator" in self._processes:
            self._processes["coordinator"].wait(timeout=START_SECONDS)
            os.remove(self._file("coordinator.address"))
        self._start("coordinator", "server/shardmesh-coordinator", "--listen", self.address, "--state",
                    self._file("state.db"), "--address-file", self._file("coordinator.address"),
                    "--heartbeat-interval-ms", "100", "--heartbeat-timeout-ms", "2000", *self._coordinator_flags)
        self.address = self._line("coordinator", "coordinator.address")

    def _start_workers(self, retained, flags):
        common = ["--coordinator", self.address, "--local-dir", self._file("s")]
        if retained:
            self._start("node", "worker/shardmesh-node", *common, "--workers", str(self._workers), "--name", "w",
                        "--worker-binary", program("worker/shardmesh-worker"), "--", *flags)
            return
        for i in range(self._workers):
            host = ["--group-address", "127.0.0.1", "--host-name", f"host{i % self._hosts}"] if self._hosts > 1 else []
            self._start(f"w{i}", "worker/shardmesh-worker", *common, "--name", f"w{i}", "--address-file",
                        self._file(f"w{i}.address"), *host, *flags)
        for name in [f"w{i}" for i in range(self._workers)]:
            self._line(name, name + ".address")

    def _file(self, name):
        return os.path.join(self.folder, name)

    def _start(self, name, path, *arguments):
        with open(self._file(name + ".log"), "a", encoding="utf-8") as log:
            self._processes[name] = subprocess.Popen([program(path), *arguments], stdout=log, stderr=log,
                                                     env=self._environment)

    def _line(self, name, file):
        def read():
            if self._processes[name].poll() is not None:
                raise AssertionError(f"{name} ended:\n{self.logs()}")
            if not os.path.exists(self._file(file)):
                return ""
            with open(self._file(file), encoding="utf-8") as opened:
                text = opened.read()
            return text.strip() if text.endswith("\n") else ""

        return until(read, START_SECONDS, f"the address of {name}")

    def train(self, job, *arguments, to=0):
        """A trainer of a new job, once it has weights."""
        trainer = Trainer(self.address, job, arguments)
        self._trainers.append(trainer)
        trainer.to(to)
        return trainer

    def shardctl(self, *arguments):
        command = [program("client/cli/shardctl"), *map(str, arguments), "--coordinator", self.address]
        return subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout

    def pid(self, name):
        """Of a worker, also of a node's."""
        if name in self._processes:
            return self._processes[name].pid
        for entry in filter(str.isdigit, os.listdir("/proc")):
            try:
                with open(f"/proc/{entry}/cmdline", "rb") as file:
                    words = file.read().split(b"\0")
            except OSError:
                continue
            if name.encode() in words and self._file("s").encode() in words:
                return int(entry)
        return 0

    def kill(self, name):
        pid = until(lambda: self.pid(name), what=name)
        os.kill(pid, signal.SIGKILL)
        return pid

    def logs(self):
        text = ""
        for name in self._processes:
            with open(self._file(name + ".log"), encoding="utf-8") as log:
                text += f"--- {name}\n{log.read()}"
        return text

    def close(self):
        for trainer in self._trainers:
            trainer.stop()
        for process in reversed(list(self._processes.values())):
            process.terminate()
        for process in self._processes.values():
            try:
                process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._folder.cleanup()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()
