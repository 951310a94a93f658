#!/usr/bin/env python3
"""What the tests of FSDP2 in torch train (scenarios.py), on the service, beside torch alone: on 1, 2 and 4 ranks, with both kinds
of residency, on meshes of 1 to 4 workers."""
import os
import sys
import unittest

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, HERE)
import ranks
from service import ServiceTest

RUNS = ["1 full", "2 full", "4 full", "2 bucket"]
STEPS, SLOTS, ULP = 10, 4, 2.0**-23
# Of a weight, after 10 steps of SGD at a learning rate of 0.05 with momentum 0.9. Both sides round the weight once a step, to half
# an ULP; and the velocity, whose gradient is a sum over 4 slots in another order: 2 ULP of it, of which the learning rate times
# the sum of momentum's powers, 0.5, arrives in the weight, where gradients are no larger than weights.
WEIGHT_ULPS = STEPS * (1 + 0.5 * SLOTS / 2 + 1)
# Of a loss, which is a mean of squares of outputs: twice the relative difference of weights, through 8 matrices at most.
LOSS_ULPS = 2 * 8 * WEIGHT_ULPS


class ScenariosTest(ServiceTest):
    WORKERS = 4

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.scenarios = ranks.program(cls(), os.path.join(HERE, "scenarios_ranks.py"), cls.address, seconds=240)

    def each(self, check):
        self.assertGreater(len(self.scenarios), 20)
        for name, scenario in self.scenarios.items():
            self.assertEqual(list(scenario["ours"]), RUNS)
            for run, said in scenario["ours"].items():
                with self.subTest(name, run=run):
                    check(name, scenario, said)

    def test_weights_are_torchs(self):
        def check(_name, _scenario, said):
            for rank in said:
                self.assertLessEqual(rank["apart"], WEIGHT_ULPS)

        self.each(check)

    def test_losses_are_torchs(self):
        def check(name, scenario, said):
            losses, _ = scenario["torch"]
            allowed = max(losses) * (LOSS_ULPS * ULP if name != "mixed" else 2 * WEIGHT_ULPS * 2.0**-7)
            each = SLOTS // len(said)
            for index, loss in enumerate(losses):
                step, slot = divmod(index, SLOTS)
                mine = said[slot // each]["losses"][step * each + slot % each]
                self.assertLessEqual(abs(mine - loss), allowed, f"step {step}, slot {slot}")

        self.each(check)

    def test_all_runs_have_the_same_bits(self):
        def check(_name, scenario, said):
            digests = {rank["digest"] for rank in said} | {scenario["ours"]["1 full"][0]["digest"]}
            self.assertEqual(len(digests), 1, digests)
            self.assertIn(f"step {STEPS} ", *digests)

        self.each(check)

    def test_meshes_have_the_same_bits(self):
        sizes = {self.scenarios[f"sizes_{workers}"]["ours"]["1 full"][0]["digest"] for workers in (1, 2, 3, 4)}
        self.assertEqual(len(sizes), 1)

    def test_recomputed_blocks_have_the_same_bits(self):
        of = {name: scenario["ours"]["1 full"][0]["digest"] for name, scenario in self.scenarios.items()}
        self.assertEqual(of["checkpoint"], of["multi_group"])
        self.assertEqual(of["checkpoint_reentrant"], of["multi_group"])
        self.assertEqual(of["shared_checkpoint"], of["shared"])
        self.assertEqual(of["scaler"], of["multi_group"])

    def test_norms_are_those_of_clip_grad_norm(self):
        def check(name, scenario, said):
            if not name.startswith("clip"):
                return
            _, norms = scenario["torch"]
            self.assertGreater(min(norms), 0.05)  # it is clipped
            for rank in said:
                for mine, norm in zip(rank["norms"], norms, strict=True):
                    self.assertLessEqual(abs(mine - norm), LOSS_ULPS * ULP * norm)

        self.each(check)


if __name__ == "__main__":
    unittest.main()
