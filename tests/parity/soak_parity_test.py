#!/usr/bin/env python3
"""tests/soak.py, for half a minute: what the service has when all jobs are deleted is what it had before."""
import json
import os
import subprocess
import sys
import unittest

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
BIN = os.environ.get("SHARDMESH_BIN_DIR", "")
MINUTES, PATIENCE = 0.5, 400


@unittest.skipUnless(BIN, "SHARDMESH_BIN_DIR is not set to bazel's folder of programs: ./test --lane parity sets it")
class SoakTest(unittest.TestCase):
    def test_nothing_is_left_of_jobs_that_were_deleted(self):
        command = [sys.executable, os.path.join(ROOT, "tests", "soak.py"), "--minutes", str(MINUTES), "--json"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
        self.assertTrue(done.stdout, done.stderr)
        report = json.loads(done.stdout)
        self.assertEqual(report["left"], [], f"seed {report['seed']}")
        self.assertEqual([error for error in report["errors"] if error[0].startswith("BUG ")], [], f"seed {report['seed']}")
        self.assertGreater(report["steps"], 3)
        for what in "trainers", "readers", "checkpoints", "jobs":
            self.assertGreater(report["counts"][what], 0, report["counts"])


if __name__ == "__main__":
    unittest.main()
