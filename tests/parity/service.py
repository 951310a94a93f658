"""A service of two workers, or WORKERS, for tests in Python: `shardctl up`, and commands to it. Needs the programs:
SHARDMESH_BIN_DIR is bazel's folder of them (`bazel info bazel-bin`)."""
import json
import os
import shutil
import subprocess
import tempfile
import unittest

BIN = os.environ.get("SHARDMESH_BIN_DIR", "")
SHARDCTL = BIN + "/client/cli/shardctl"


@unittest.skipUnless(BIN, "SHARDMESH_BIN_DIR is not set to bazel's folder of programs: ./test --lane parity sets it")
class ServiceTest(unittest.TestCase):
    WORKERS = 2
    OPTIONS = ()  # more of `shardctl up`

    @classmethod
    def setUpClass(cls):
        cls.folder = tempfile.mkdtemp(prefix="shardmesh-parity-")
        cls.addClassCleanup(shutil.rmtree, cls.folder, ignore_errors=True)
        command = [SHARDCTL, "up", "--workers", str(cls.WORKERS), "--listen", "127.0.0.1:0", "--log-level", "error", *cls.OPTIONS]
        cls.up = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        cls.addClassCleanup(cls.stop)
        for line in cls.up.stdout:
            if line.startswith("ready "):
                cls.address = line.split()[1]
                return
        raise RuntimeError("shardctl up ended before it was ready")

    @classmethod
    def stop(cls):
        cls.up.terminate()
        cls.up.wait(timeout=60)
        cls.up.stdout.close()

    def shardctl(self, *arguments):
        done = subprocess.run([SHARDCTL, *map(str, arguments), "--coordinator", self.address, "--json"],
                              capture_output=True, text=True, timeout=300)
        self.assertEqual(done.returncode, 0, done.stderr)
        return json.loads(done.stdout)

    def path(self, *names):
        return os.path.join(self.folder, *names)
