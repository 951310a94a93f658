#!/usr/bin/env python3
"""examples/gpt: the same losses, bit for bit, on one rank and on two; batches that depend on step and slot alone."""
import json
import os
import subprocess
import sys
import unittest

from service import ServiceTest

FOLDER = os.path.join(os.path.dirname(os.path.abspath(__file__)), "../../examples/gpt")
sys.path.append(FOLDER)  # last: both folders have a service.py
import model  # noqa: E402
import text  # noqa: E402
import torch  # noqa: E402

SECONDS = 120


class BatchesTest(unittest.TestCase):
    def test_batches_are_of_step_and_slot(self):
        found = text.Text.load()
        tokens, targets = found.batch(3, 1, sequences=2, length=16)
        self.assertEqual((tuple(tokens.shape), tuple(targets.shape)), ((2, 16), (2, 16)))
        self.assertTrue(torch.equal(tokens[:, 1:], targets[:, :-1]))
        self.assertTrue(torch.equal(tokens, text.Text.load().batch(3, 1, 2, 16)[0]))
        for step, slot in (3, 2), (4, 1), (1, 3):
            self.assertFalse(torch.equal(tokens, found.batch(step, slot, 2, 16)[0]))

    def test_text_comes_back(self):
        self.assertEqual(text.decode(text.encode("Exit, é.".encode())), "Exit, é.")

    def test_sizes_are_what_they_are_called(self):
        with torch.device("meta"):
            for name, millions in (("tiny", 0.22), ("10m", 10.8), ("30m", 30.06), ("124m", 124.4)):
                count = sum(parameter.numel() for parameter in model.GPT(model.SIZES[name]).parameters())
                self.assertAlmostEqual(count / 1e6, millions, delta=millions * 0.01, msg=name)


class TrainTest(ServiceTest):
    def losses(self, ranks, *options):
        """Of each slot, step by step."""
        job = f"ranks-{ranks}"
        records = self.path(job)
        os.mkdir(records)
        processes = []
        for rank in range(ranks):
            environment = {**os.environ, "RANK": str(rank), "WORLD_SIZE": str(ranks), "OMP_NUM_THREADS": "1"}
            command = [sys.executable, os.path.join(FOLDER, "train.py"), "--size", "tiny", "--steps", "5",
                       "--slots", "2", "--length", "32", "--record", records, "--service", self.address,
                       "--job", job, *options]
            processes.append(subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True))
        for process in processes:
            self.addCleanup(process.kill)
        for process in processes:
            said = process.communicate(timeout=SECONDS)[1]
            self.assertEqual(process.returncode, 0, said)
        found = []
        for rank in range(ranks):
            with open(os.path.join(records, f"rank-{rank}.jsonl"), encoding="utf-8") as file:
                events = [json.loads(line) for line in file]
            found.append([event["losses"] for event in events if event["event"] == "step"])
        return [sum(slots, []) for slots in zip(*found)]

    def test_two_ranks_have_the_losses_of_one(self):
        formats = ["--weights", "bf16_sr", "--states", "dyn8", "--gather", "fp8_tensor"]
        alone = self.losses(1, *formats)
        self.assertEqual([len(losses) for losses in alone], [2] * 5)
        self.assertLess(sum(alone[-1]), sum(alone[0]))
        self.assertEqual(self.losses(2, *formats), alone)


if __name__ == "__main__":
    unittest.main()
