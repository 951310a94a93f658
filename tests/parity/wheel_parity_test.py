#!/usr/bin/env python3
"""The wheel in an empty virtual environment: with PyTorch and nothing else it runs the service, and trains the GPT of
docs/torch.md. Needs the wheel's path,
SHARDMESH_WHEEL, which ./test --lane parity sets (tools/wheel.sh prints it)."""
import os
import subprocess
import sys
import unittest

import torch

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, HERE)
from processes import Leftovers

WHEEL = os.environ.get("SHARDMESH_WHEEL", "")
USE = """
import glob, os, sys, tempfile
import shardmesh
assert "torch" not in sys.modules
from shardmesh import _programs
from shardmesh.torch._machine import _service
assert shardmesh.__file__.startswith(sys.prefix), shardmesh.__file__
assert _programs.find("shardctl").startswith(sys.prefix)
service = _service.find(None, 0, 1, 2, 60)
assert shardmesh.connect(service.address).jobs() == []
assert glob.glob(os.path.join(tempfile.gettempdir(), "shardmesh-*"))
service.close()
print("used")
"""


@unittest.skipUnless(WHEEL, "SHARDMESH_WHEEL is not set to the wheel's path: ./test --lane parity sets it")
class WheelTest(Leftovers):
    def run_program(self, *command):
        done = subprocess.run(command, env=self.environment, cwd=self.venv, capture_output=True, text=True, timeout=120)
        self.assertEqual((done.returncode, done.stderr), (0, ""), done.stdout)
        return done.stdout

    def test_in_an_empty_environment_it_runs_the_service_and_leaves_nothing(self):
        self.venv = os.path.join(self.scratch, "venv")
        self.environment["PATH"] = "/usr/bin:/bin"
        self.environment.pop("SHARDMESH_BIN_DIR", None)
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", self.venv], check=True, timeout=120)
        python = os.path.join(self.venv, "bin", "python")
        pip = [sys.executable, "-m", "pip", "--python", python, "--disable-pip-version-check", "install", "--quiet"]
        subprocess.run([*pip, "--no-index", "--no-deps", WHEEL], check=True, timeout=120)
        site = self.run_program(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip()
        with open(os.path.join(site, "torch.pth"), "w", encoding="utf-8") as path:  # after what is installed here
            path.write(os.path.dirname(os.path.dirname(torch.__file__)) + "\n")
        self.environment["TMPDIR"] = self.scratch = os.path.join(self.scratch, "used")
        os.mkdir(self.scratch)
        self.assertEqual(self.run_program(python, "-c", USE), "used\n")
        shardctl = os.path.join(self.venv, "bin", "shardctl")
        tutorial = os.path.join(os.path.dirname(os.path.dirname(HERE)), "examples", "gpt", "train.py")
        compiled = {"TORCHINDUCTOR_CACHE_DIR": os.path.join(self.venv, "inductor")}
        done = subprocess.run([python, tutorial, "--size", "tiny", "--steps", "4"], env={**self.environment, **compiled},
                              cwd=self.venv, capture_output=True, text=True, timeout=120)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn("held-out loss", done.stdout + done.stderr)
        self.assertIn("ddp=2", self.run_program(shardctl, "mesh", "--shape", "2,2", "--names", "ddp,fsdp"))
        self.assert_nothing_left()


if __name__ == "__main__":
    unittest.main()
