#!/usr/bin/env python3
"""The package's types: mypy --strict over it and over a program that uses it, and its stubs beside the extension."""
import os
import subprocess
import sys
import tempfile
import unittest

HERE = os.path.dirname(os.path.abspath(__file__))


class TypesTest(unittest.TestCase):
    def mypy(self, module, *arguments):
        with tempfile.TemporaryDirectory() as folder:  # not the repository: only what is installed is looked at
            command = [sys.executable, "-m", module, *arguments]
            return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)

    def test_package_and_its_user_are_strictly_typed(self):
        run = self.mypy("mypy", "--strict", "-p", "shardmesh")
        self.assertEqual(run.returncode, 0, run.stdout + run.stderr)
        run = self.mypy("mypy", "--strict", os.path.join(HERE, "consumer.py"))
        self.assertEqual(run.returncode, 0, run.stdout + run.stderr)

    def test_wrong_use_is_found(self):
        wrong = "from shardmesh import Mesh\nMesh(2, 'a').slice(3)\n"
        run = self.mypy("mypy", "--strict", "-c", wrong)
        # Two: to a type checker the string is a sequence of strings.
        self.assertEqual(run.stdout.count("error:"), 2, run.stdout)

    def test_stubs_are_those_of_the_extension(self):
        with tempfile.NamedTemporaryFile("w", suffix=".txt") as allowed:
            allowed.write("shardmesh\\._(core|client)\\.[A-Z]\\w*\n")  # the classes' metaclass, which is pybind11's
            allowed.write("shardmesh\\._core\\.(Placement|View)\\.__init__\n")  # they have none
            allowed.write("shardmesh\\._client\\.(Job|Lease|Bytes|Version)\\.__init__\n")  # nor do these
            # Classes that are made when a package is there that shardmesh does without.
            allowed.write("shardmesh\\.torch\\.(_?\\w+\\.)+\\w+@\\d+\n")
            allowed.write("shardmesh\\.torch\\.integrations\\.(__all__|ShardmeshCallback|_callback_class)\n")
            allowed.flush()
            run = self.mypy("mypy.stubtest", "shardmesh", "--allowlist", allowed.name, "--ignore-unused-allowlist")
        self.assertEqual(run.returncode, 0, run.stdout + run.stderr)

    def test_reference_is_made_of_the_docstrings(self):
        root = os.path.dirname(os.path.dirname(HERE))
        run = subprocess.run([sys.executable, os.path.join(root, "tools/torch_api.py")], capture_output=True, text=True, check=False)
        self.assertEqual(run.returncode, 0, run.stderr)
        with open(os.path.join(root, "docs/torch-api.md"), encoding="utf-8") as reference:
            self.assertEqual(reference.read(), run.stdout, "make it again: tools/torch_api.py > docs/torch-api.md")


if __name__ == "__main__":
    sys.exit(unittest.main())
