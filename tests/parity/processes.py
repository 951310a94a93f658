"""What a test's programs leave behind: processes are known by a mark in their environment, files by their TMPDIR."""
import os
import tempfile
import time
import unittest
import uuid

MARK = "SHARDMESH_TEST_MARK"


class Leftovers(unittest.TestCase):
    """self.environment is for programs that are to leave nothing; self.scratch their folder for temporary files."""

    def setUp(self):
        self.mark = uuid.uuid4().hex
        scratch = tempfile.TemporaryDirectory(prefix="sm-")
        self.addCleanup(scratch.cleanup)
        self.scratch = scratch.name
        self.environment = {**os.environ, MARK: self.mark, "TMPDIR": self.scratch}

    def processes(self):
        """The command lines of those that run, but for zombies, which have none."""
        found = []
        for pid in filter(str.isdigit, os.listdir("/proc")):
            try:
                with open(f"/proc/{pid}/environ", "rb") as environ, open(f"/proc/{pid}/cmdline", "rb") as command:
                    if f"{MARK}={self.mark}".encode() in environ.read().split(b"\0"):
                        found.append(command.read().replace(b"\0", b" ").decode())
            except OSError:
                continue  # it ended meanwhile
        return found

    def left(self):
        own = "torchelastic_", "torchinductor_"
        return self.processes() + [name for name in os.listdir(self.scratch) if not name.startswith(own)]

    def assert_nothing_left(self, seconds=30):
        """Within that time no process runs, and no file or folder is there, but torch's own."""
        deadline = time.monotonic() + seconds
        while (left := self.left()) and time.monotonic() < deadline:
            time.sleep(0.01)
        self.assertEqual(left, [])
