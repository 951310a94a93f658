#!/usr/bin/env python3
"""The extension modules in one process with others that have gRPC, Protobuf and Abseil of their own."""
import concurrent.futures
import importlib
import itertools
import os
import subprocess
import sys
import unittest

from shardmesh.torch._machine import _service

BIN = os.environ.get("SHARDMESH_BIN_DIR", "")
SENTENCEPIECE = """
import io, sentencepiece
model = io.BytesIO()
text = ["weights are trained in shards", "gradients are sums", "an optimizer steps", "shards of weights"] * 4
sentencepiece.SentencePieceTrainer.train(sentence_iterator=iter(text), model_writer=model, vocab_size=64, minloglevel=2,
                                              hard_vocab_limit=False)
pieces = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
assert pieces.decode(pieces.encode("shards are trained")) == "shards are trained"
"""


def uses(address):
    return {
        "shardmesh": f"import shardmesh.torch\nassert shardmesh.connect({address!r}).jobs() == []",
        "torch": "import torch\nassert float(torch.ones(3) @ torch.ones(3)) == 3",
        "grpc": f"import grpc\nwith grpc.insecure_channel({address!r}) as channel:\n"
                "    grpc.channel_ready_future(channel).result(timeout=60)",
        "sentencepiece": SENTENCEPIECE,
    }


class SymbolsTest(unittest.TestCase):
    def test_extension_modules_export_their_init_function_alone(self):
        for name in "_core", "_client":
            path = importlib.import_module(f"shardmesh.{name}").__file__
            symbols = subprocess.run(["nm", "-D", "--defined-only", path], check=True, capture_output=True, text=True)
            self.assertEqual([line.split()[-1] for line in symbols.stdout.splitlines()], [f"PyInit_{name}"])


class CostTest(unittest.TestCase):
    def test_nothing_of_torch_is_imported_that_torch_does_not_import_itself(self):
        script = ("import sys, torch\nbefore = set(sys.modules)\nimport shardmesh.torch\n"
                  "print(*(name for name in set(sys.modules) - before if name.split('.')[0] in ('torch', 'sympy')))")
        done = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
        self.assertEqual(done.stdout.split(), [])

    @unittest.skipUnless(BIN, "SHARDMESH_BIN_DIR is not set to bazel's folder of programs: ./test --lane parity sets it")
    def test_an_optimizer_does_not_need_the_compiler_of_torch(self):
        script = ("import sys, torch, shardmesh.torch\nmodel = torch.nn.Linear(2, 2)\n"
                  "with shardmesh.torch.Optimizer(model) as optimizer:\n"
                  "    model(torch.ones(1, 2)).sum().backward()\n    optimizer.step()\n    optimizer.zero_grad()\n"
                  "print('torch._dynamo' in sys.modules)")
        done = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
        self.assertEqual(done.stdout.split(), ["False"])


@unittest.skipUnless(BIN, "SHARDMESH_BIN_DIR is not set to bazel's folder of programs: ./test --lane parity sets it")
class ImportsTest(unittest.TestCase):
    def test_imported_and_used_before_and_after_any_of_the_others(self):
        service = _service.find(None, 0, 1, 1, 60)
        self.addCleanup(service.close)
        use, others = uses(service.address), ["torch", "grpc", "sentencepiece"]
        orders = [("shardmesh", *others)] + [
            (*first, "shardmesh", *(name for name in others if name not in first))
            for count in (1, 2, 3) for first in itertools.combinations(others, count)]
        if os.environ.get("SHARDMESH_PARITY_ORDERS") == "all":
            orders = list(itertools.permutations(use))
        scripts = ["\n".join([use[name] for name in order] * 2) for order in orders]
        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            for order, done in zip(orders, pool.map(self.run_python, scripts)):
                with self.subTest(order):
                    self.assertEqual((done.returncode, done.stderr), (0, ""))

    @staticmethod
    def run_python(script):
        return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)


if __name__ == "__main__":
    unittest.main()
