#!/usr/bin/env python3
"""shardmesh.client without a service: what it loads and exports, arguments. With one: tests/e2e/python_*_test.py."""
import importlib.util
import os
import subprocess
import sys
import unittest

import shardmesh
from shardmesh import errors

NOTHING = "127.0.0.1:1"  # nobody listens there


class Loading(unittest.TestCase):
    def run_python(self, text):
        done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=120)
        self.assertEqual(done.returncode, 0, done.stderr)
        return done.stdout.strip()

    def test_package_does_not_load_the_client(self):
        loaded = self.run_python("import shardmesh, sys; print([m for m in sys.modules if m.endswith('client')])")
        self.assertEqual(loaded, "[]")

    def test_client_needs_no_numpy(self):
        text = "import sys; sys.modules['numpy'] = None; import shardmesh; print(shardmesh.connect('127.0.0.1:1'))"
        self.assertIn("Client", self.run_python(text))

    def test_extension_exports_its_init_function_alone(self):
        file = importlib.util.find_spec("shardmesh._client").origin
        listed = subprocess.run(["nm", "--dynamic", "--defined-only", file], capture_output=True, text=True, check=True)
        self.assertEqual([line.split()[-1] for line in listed.stdout.splitlines()], ["PyInit__client"])

    def test_fork_before_the_first_connection_is_fine(self):
        text = """
import os, shardmesh.client
if os.fork():
    os._exit(os.waitstatus_to_exitcode(os.wait()[1]))
try:
    shardmesh.connect("127.0.0.1:1", call_timeout=2).jobs()
except shardmesh.errors.Unavailable:
    os._exit(0)
os._exit(1)
"""
        self.run_python(text)


class Arguments(unittest.TestCase):
    def test_of_connect(self):
        for wrong, kind in (
            ({"coordinator": 5}, TypeError),
            ({"coordinator": "no port"}, errors.InvalidArgument),
            ({"coordinator": NOTHING, "call_timeout": -1}, errors.InvalidArgument),
            ({"coordinator": NOTHING, "call_timeout": float("inf")}, errors.InvalidArgument),
            ({"coordinator": NOTHING, "call_timeout": "1"}, TypeError),
            ({"coordinator": NOTHING, "tls_cert": "nowhere.pem"}, errors.NotFound),
            ({"coordinator": NOTHING, "tls_key": __file__}, errors.InvalidArgument),
        ):
            with self.subTest(wrong), self.assertRaises(kind):
                shardmesh.connect(**wrong)

    def test_nobody_there(self):
        client = shardmesh.connect(NOTHING, call_timeout=2)
        for call in (client.jobs, lambda: client.job("gpt", timeout=1), lambda: client.checkpoint("gpt", "folder")):
            with self.assertRaisesRegex(errors.Unavailable, NOTHING):
                call()

    def test_of_a_job(self):
        client = shardmesh.connect(NOTHING, call_timeout=2)
        for wrong in ({"timeout": -1}, {"root_wrappers": ["not.one"]}, {"literal": [""]}):
            with self.subTest(wrong), self.assertRaises(errors.InvalidArgument):
                client.job("gpt", **wrong)
        with self.assertRaises(errors.NotFound):
            client.restore(os.path.join(os.getcwd(), "no checkpoints"))

    def test_objects_that_no_constructor_made(self):
        from shardmesh import _client

        for kind in (_client.Job, _client.Version, _client.Lease, _client.Bytes):
            with self.subTest(kind), self.assertRaises(TypeError):
                kind()
        with self.assertRaises(TypeError):
            _client.Client.jobs(_client.Client.__new__(_client.Client))

    def test_the_old_name_of_quantized_warns_and_says_the_same(self):
        from shardmesh._version import Tensor

        for format, quantized in ("fp32", False), ("nf4", True):
            tensor = Tensor("w", (4,), format, {})
            self.assertIs(tensor.quantized, quantized)
            with self.assertWarnsRegex(DeprecationWarning, "called Tensor.quantized now"):
                self.assertIs(tensor.coded, quantized)


if __name__ == "__main__":
    sys.exit(unittest.main())
