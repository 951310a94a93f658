#!/usr/bin/env python3
"""Mesh.describe() is the object that `shardctl mesh ... --json` prints."""
import json
import subprocess
import sys
import unittest

from shardmesh import Mesh

SHARDCTL = "client/cli/shardctl"
CASES = [
    ([], lambda mesh: mesh),
    (["--slice", "ddp,fsdp", "--slice", "fsdp"], lambda mesh: mesh.slice(["ddp", "fsdp"]).slice("fsdp")),
    (["--slice", "tp,ddp"], lambda mesh: mesh.slice(["tp", "ddp"])),
    (["--concatenate", "tp,ddp/fsdp"], lambda mesh: Mesh.concatenate([mesh.slice(["tp", "ddp"]), mesh.slice("fsdp")])),
    (["--transpose", "tp,fsdp,ddp"], lambda mesh: mesh.transpose(["tp", "fsdp", "ddp"])),
    (["--flatten", "tp,ddp=x", "--slice", "x"], lambda mesh: mesh.flatten(["tp", "ddp"], "x").slice("x")),
]


class MeshJsonTest(unittest.TestCase):
    def test_description_is_what_shardctl_prints(self):
        ranks = [3, 1, 4, 15, 9, 2, 6, 5, 35, 8, 97, 93]
        for flags, change in CASES:
            command = [SHARDCTL, "mesh", "--shape", "2,3,2", "--names", "ddp,fsdp,tp", "--json",
                       "--ranks", ",".join(map(str, ranks)), *flags]
            printed = subprocess.run(command, check=True, capture_output=True, timeout=60)
            described = change(Mesh([2, 3, 2], ["ddp", "fsdp", "tp"], ranks)).describe()
            # As text, so that the keys have the same order.
            self.assertEqual(json.dumps(described), json.dumps(json.loads(printed.stdout)), flags)


if __name__ == "__main__":
    sys.exit(unittest.main())
