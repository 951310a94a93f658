#!/usr/bin/env python3
"""100 steps of twelve architectures of transformers, beside DDP with torch's fused AdamW, on 1, 2 and 4 ranks."""
import os
import sys
import unittest

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, HERE)
import ranks
from service import ServiceTest

ULP = 2.0**-23


class TransformersTest(ServiceTest):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.runs = ranks.program(cls(), os.path.join(HERE, "transformers_ranks.py"), cls.address, cls.folder, seconds=300)
        print(f"\n{'architecture':12}{'first loss':>11}{'last':>8}{'spread of torch':>17}{'ours to torch':>15}{'allowed':>9}")

    def test_ours_is_bit_equal_on_1_2_and_4_ranks(self):
        self.assertEqual(len(self.runs), 12)
        for name, run in self.runs.items():
            with self.subTest(name):
                one, two, four = (run["digests"][world] for world in "124")
                self.assertEqual(len(one), 1)
                self.assertIn("step 100 ", one[0])
                self.assertEqual(one, two)
                self.assertEqual(one, four)
                self.assertEqual(run["ours"]["1"], run["ours"]["2"])
                self.assertEqual(run["ours"]["1"], run["ours"]["4"])

    def test_ours_is_no_further_from_torch_than_twice_torchs_own_spread(self):
        for name, run in self.runs.items():
            with self.subTest(name):
                torch1, torch2, ours = run["torch"]["1"], run["torch"]["2"], run["ours"]["1"]
                spread = max(abs(one - two) for one, two in zip(torch1, torch2))
                apart = max(max(abs(mine - one), abs(mine - two)) for one, two, mine in zip(torch1, torch2, ours))
                # Losses are fp32, each a mean over some 8 to 64 logarithms of sums of 67 (ViT: 5) exponentials: what one
                # forward pass loses is at least the rounding of the last operations, 4 ULP of the largest loss.
                floor = 4 * ULP * max(ours)
                print(f"{name:12}{ours[0]:11.4f}{ours[-1]:8.4f}{spread:17.2e}{apart:15.2e}{2 * spread + floor:9.1e}")
                self.assertLessEqual(apart, 2 * spread + floor)
                self.assertLess(ours[-1], 0.8 * ours[0])  # it learns


if __name__ == "__main__":
    unittest.main()
