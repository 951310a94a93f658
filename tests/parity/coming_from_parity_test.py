#!/usr/bin/env python3
"""The programs of docs/coming-from.md, run one after the other in this process, and their losses compared."""
import os
import pathlib
import re
import unittest
from unittest import mock

import accelerate
import torch

BIN = os.environ.get("SHARDMESH_BIN_DIR", "")
PAGE = pathlib.Path(__file__).parents[2] / "docs/coming-from.md"
ALONE = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}


@unittest.skipUnless(BIN, "SHARDMESH_BIN_DIR is not set to bazel's folder of programs: ./test --lane parity sets it")
class ComingFromTest(unittest.TestCase):
    def test_the_programs_of_the_page_learn_the_same(self):
        accelerate.state.AcceleratorState._reset_state(True)
        common, *programs = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
        self.assertEqual(len(programs), 5)
        losses = []
        for program in programs:
            names = {}
            # What torchao compiles for each shape takes longer than all the rest.
            with mock.patch.dict(os.environ, ALONE), torch.compiler.set_stance("force_eager"):
                exec(common + program, names)
            losses.append(names["losses"])
        ours, ddp, fsdp2, torchao, quantized = losses
        self.assertLess(ours[-1], ours[0])
        for theirs in ddp, fsdp2:
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=0)
        for eight_bits in torchao, quantized:
            torch.testing.assert_close(ours, eight_bits, rtol=2e-3, atol=0)


if __name__ == "__main__":
    unittest.main()
