#!/usr/bin/env python3
"""Weights and states of few bits on sharded, compiled models, and float8 gathers on a mesh of three dimensions: results do not
depend on ranks and workers. Beside torchao under FSDP2, as it is today."""
import os
import sys
import unittest

HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, HERE)
import ranks
from service import ServiceTest


class LowBitTest(ServiceTest):
    WORKERS = 8

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.said = ranks.program(cls(), os.path.join(HERE, "numerics", "low_bit_ranks.py"), cls.address, cls.folder, seconds=240)

    def test_low_bit_training_does_not_depend_on_ranks_and_workers(self):
        digests = set()
        for states in "fp32", "dyn8", "dyn4":
            with self.subTest(states):
                runs = [rank[states] for world in "124" for rank in self.said["ours"][world]]
                self.assertEqual(len(runs), 7)
                self.assertEqual(len({run["digest"] for run in runs}), 1)
                self.assertEqual({run["graph_breaks"] for run in runs}, {0})
                losses = runs[0]["losses"]
                self.assertLess(sum(losses[-4:]), 0.9 * sum(losses[:4]))
                digests.add(runs[0]["digest"])
        self.assertEqual(len(digests), 3)

    def test_torchao_under_fsdp2_does(self):
        # Prints what they do today: a release in which they do better fails here, and docs/ are to be changed.
        print(f"\ntorchao AdamW8bit under FSDP2, bf16: {self.said['crash'][:160]}\n"
              f"_AdamW with stochastic rounding: {self.said['differ']:.0%} other weights on 2 ranks than on 1")
        self.assertRegex(self.said["crash"], "expected dtype|unimplemented operator")
        self.assertGreater(self.said["differ"], 0.1)

    def test_a_mesh_of_three_dimensions_gathers_float8(self):
        runs = [rank["cube"] for world in "124" for rank in self.said["ours"][world]]
        self.assertEqual(len({run["digest"] for run in runs}), 1)
        losses = runs[0]["losses"]
        self.assertLess(sum(losses[-4:]), sum(losses[:4]))

    def test_gathered_codes_and_scales_are_torchaos(self):
        self.assertEqual(list(self.said["cube"]), ["0.weight", "2.weight"])
        for name, said in self.said["cube"].items():
            with self.subTest(name):
                self.assertTrue(said["codes"])
                (_, (scale,)), = said["scale"]
                self.assertEqual(scale, said["torchao_scale"])
                self.assertTrue(said["decoded"])


if __name__ == "__main__":
    unittest.main()
