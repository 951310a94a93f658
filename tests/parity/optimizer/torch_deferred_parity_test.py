#!/usr/bin/env python3
"""Models of the meta device: first weights that depend on neither ranks, mesh nor wrappers, and no memory for them."""
import hashlib
import os
import subprocess
import sys
import unittest

import shardmesh.torch as sm
import torch
from shardmesh import errors
from shardmesh.torch._modules import _model
from shardmesh.torch._weights import _deferred
from torch import nn

HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, HERE)
from service import ServiceTest


class Positions(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("angles", torch.arange(16.0))
        self.register_buffer("ids", torch.arange(4))

    def reset_parameters(self):
        self.angles.copy_(torch.arange(16.0))
        self.ids.copy_(torch.arange(4))

    def forward(self, x):
        return x + self.angles / 64


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.line = nn.LayerNorm(16), nn.Linear(16, 16)

    def forward(self, x):
        return x + self.line(self.norm(x))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.positions = nn.Embedding(24, 16), Positions()
        self.layers = nn.ModuleList([Block(), Block()])
        self.batch, self.attention = nn.BatchNorm1d(16), nn.MultiheadAttention(16, 2, batch_first=True)
        self.head = nn.Linear(16, 24)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        x = self.positions(self.embed(tokens))
        for layer in self.layers:
            x = layer(x)
        x = self.attention(x, x, x, need_weights=False)[0]
        return self.head(self.batch(x.transpose(1, 2)).transpose(1, 2))


def meta(kind=Model):
    with torch.device("meta"):
        return kind()


def train(net, optimizer, slots):
    for _ in range(2):
        for slot in slots:
            tokens = torch.randint(0, 24, (2, 5), generator=torch.Generator().manual_seed(slot))
            nn.functional.cross_entropy(net(tokens).flatten(0, 1), tokens.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer.job.digest().value


def initialized(net, seed=0, init=None):
    """By name, as rank 0 gives them."""
    facts = _model.facts(net)
    deferred = _deferred.Deferred(net, facts, seed, init)
    deferred.make_buffers()
    deferred.check()
    deferred.initialize()
    return {one.name: one.tensor.detach() for one in facts.parameters}


class FirstWeightsTest(unittest.TestCase):
    def assert_same(self, a, b):
        self.assertEqual(list(a), list(b))
        for name, value in a.items():
            self.assertTrue(torch.equal(value, b[name]), name)

    def test_they_are_those_of_reset_parameters_under_the_seed_of_job_and_name(self):
        net = meta()
        before = torch.random.get_rng_state()
        found = initialized(net, seed=5)
        self.assertTrue(torch.equal(torch.random.get_rng_state(), before))
        plain = nn.Linear(16, 16)
        digest = hashlib.sha256(b"5/layers.1.line").digest()
        torch.manual_seed(int.from_bytes(digest[:8], "little") >> 1)
        plain.reset_parameters()
        torch.random.set_rng_state(before)
        self.assertTrue(torch.equal(found["layers.1.line.weight"], plain.weight))
        self.assertTrue(torch.equal(found["layers.1.line.bias"], plain.bias))
        self.assertEqual(found["layers.0.norm.weight"].tolist(), [1.0] * 16)
        self.assertEqual(found["attention.in_proj_bias"].count_nonzero(), 0)  # of _reset_parameters()
        self.assertAlmostEqual(found["embed.weight"].std().item(), 1.0, delta=0.2)  # a Linear's would be 0.14
        self.assertIs(net.head.weight, net.embed.weight)
        self.assertEqual(net.positions.angles[3], 3)
        self.assertEqual(net.batch.running_var.tolist(), [1.0] * 16)
        self.assertFalse(torch.equal(found["layers.0.line.weight"], found["layers.1.line.weight"]))
        self.assertFalse(torch.equal(initialized(meta(), seed=6)["embed.weight"], found["embed.weight"]))

    def test_wrappers_and_the_order_of_modules_change_nothing(self):
        wanted = initialized(meta())
        wrapped = meta()
        wrapped.layers[0] = torch.compile(wrapped.layers[0], backend="eager")
        self.assert_same(wanted, initialized(torch.compile(wrapped, backend="eager")))
        other = meta()
        other._modules = dict(reversed(other._modules.items()))
        found = initialized(other)
        self.assertTrue(torch.equal(found["attention.in_proj_weight"], wanted["attention.in_proj_weight"]))
        self.assertTrue(torch.equal(found["layers.0.line.weight"], wanted["layers.0.line.weight"]))

    def test_a_model_s_init_weights_and_init_come_after_reset_parameters(self):
        class Own(Model):
            def _init_weights(self, module):
                if isinstance(module, nn.Linear):
                    nn.init.constant_(module.weight, 0.5)

        found = initialized(meta(Own))
        self.assertEqual(found["layers.0.line.weight"].unique().tolist(), [0.5])
        self.assertEqual(found["layers.0.norm.weight"].unique().tolist(), [1.0])

        def init(module):
            if isinstance(module, nn.Linear):
                nn.init.constant_(module.weight, 0.25)

        self.assertEqual(initialized(meta(Own), init=init)["layers.0.line.weight"].unique().tolist(), [0.25])

    def test_models_of_transformers_have_the_buffers_and_spreads_of_theirs(self):
        import transformers
        llama = transformers.LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
                                         num_attention_heads=2, num_key_value_heads=1)
        gpt2 = transformers.GPT2Config(vocab_size=64, n_embd=32, n_layer=8, n_head=2, n_positions=16)
        for kind, config in (transformers.LlamaForCausalLM, llama), (transformers.GPT2LMHeadModel, gpt2):
            with self.subTest(kind.__name__):
                net, eager = meta(lambda: kind(config)), kind(config)
                found = initialized(net)
                for name, parameter in eager.named_parameters():
                    scale = max(parameter.std().item(), 1e-3)
                    self.assertAlmostEqual(
                        found[name].std().item(), parameter.std().item(), delta=0.2 * scale, msg=name)
                for name, buffer in eager.named_buffers():
                    self.assertTrue(torch.equal(net.get_buffer(name), buffer), name)

    def test_given_values_stay_and_tensors_stay_the_same_objects(self):
        net = meta()
        given = torch.arange(16.0)
        net.layers[0].line.bias = nn.Parameter(given.clone())
        before = [id(parameter) for parameter in net.parameters()]
        net.embed.weight.marked = True
        found = initialized(net)
        self.assertEqual([id(parameter) for parameter in net.parameters()], before)
        self.assertTrue(net.embed.weight.marked)
        self.assertTrue(torch.equal(found["layers.0.line.bias"], given))
        self.assertTrue(torch.isfinite(found["layers.0.line.weight"]).all())

    def test_a_rank_that_gives_no_weights_has_no_memory_for_them(self):
        net = meta()
        facts = _model.facts(net)
        deferred = _deferred.Deferred(net, facts, 0, None)
        deferred.make_buffers()
        deferred.finish()
        self.assertEqual({one.tensor.untyped_storage().nbytes() for one in facts.parameters}, {4})
        self.assertEqual({buffer.device.type for buffer in net.buffers()}, {"cpu"})

    def test_what_nothing_gives_values_is_named(self):
        class Raw(nn.Module):
            def __init__(self):
                super().__init__()
                self.inner = nn.Module()
                self.inner.scale = nn.Parameter(torch.ones(4))

        class Table(nn.Module):
            def __init__(self):
                super().__init__()
                self.line = nn.Linear(2, 2)
                self.register_buffer("table", torch.arange(4))

        class Hidden(nn.Linear):
            def __init__(self):
                super().__init__(2, 2)
                self.table = torch.arange(4)

        class Half(Raw):
            def _init_weights(self, module):
                pass

        for says, kind in (
            (r'module "inner" \(Module\) has parameters on the meta device, scale, and nothing gives', Raw),
            (r'module "inner" \(Module\) has parameters on the meta device, scale, and nothing gives', Half),
            (r'module "" \(Table\) has buffers on the meta device, table, and nothing gives', Table),
            (r'attribute table of module "" is a tensor on the meta device', Hidden),
        ):
            with self.subTest(kind.__name__), self.assertRaisesRegex(errors.InvalidArgument, says):
                initialized(meta(kind))
        with self.assertRaisesRegex(errors.InvalidArgument, "on the meta device; give the model"):
            _deferred.Deferred(None, _model.facts(list(meta().named_parameters())), 0, None)

        def ones(module):
            for parameter in module.parameters(recurse=False):
                nn.init.ones_(parameter)

        self.assertEqual(initialized(meta(Raw), init=ones)["inner.scale"].tolist(), [1.0] * 4)


class JobsTest(ServiceTest):
    def start(self, job, net, **options):
        optimizer = sm.Optimizer(net, "AdamW", service=self.address, job=job, slots=2, **options)
        self.addCleanup(optimizer.close)
        return optimizer

    def test_jobs_have_one_result_on_ranks_meshes_and_residencies(self):
        ranks = [subprocess.Popen([sys.executable, __file__, self.address, str(rank)], stdout=subprocess.PIPE, text=True)
                 for rank in range(2)]
        for rank in ranks:
            self.addCleanup(rank.communicate)
            self.addCleanup(rank.kill)
        digests = []
        for mesh, residency in ("fsdp=2", "full"), ("ddp=2", "bucket"):
            net = meta()
            optimizer = self.start(f"job-{residency}", net, mesh=mesh, residency=residency)
            digests.append(train(net, optimizer, range(2)))
        said = [rank.communicate(timeout=120)[0] for rank in ranks]
        self.assertEqual({int(text.splitlines()[-1]) for text in said} | set(digests), {digests[0]})

    def test_a_job_that_has_weights_draws_none_and_groups_hold_what_the_model_has(self):
        first = Model()
        optimizer = self.start("given", first, lr=0.5)
        wanted = {name: value.clone() for name, value in first.state_dict().items()}
        optimizer.close()

        def never(module):
            if any(True for _ in module.parameters(recurse=False)):
                raise AssertionError("it was initialised")

        net = meta()
        net.positions, net.batch = first.positions, first.batch  # whose buffers are there
        groups = [{"params": list(net.named_parameters()), "lr": 0.5}]
        optimizer = sm.Optimizer(groups, "AdamW", model=net, service=self.address, job="given", slots=2, init=never)
        self.addCleanup(optimizer.close)
        for name, value in net.state_dict().items():
            self.assertTrue(torch.equal(value, wanted[name]), name)
        held = {id(tensor) for group in optimizer.param_groups for tensor in group["params"]}
        self.assertEqual(held, {id(parameter) for parameter in net.parameters()})

    def test_what_cannot_be_initialised_is_refused_but_takes_weights_that_are_there(self):
        def raw():
            net = nn.Module()
            net.scale = nn.Parameter(torch.full((4,), 2.0))
            return net

        with self.assertRaisesRegex(errors.InvalidArgument, 'module "" .Module. has parameters on the meta device, scale'):
            self.start("raw", meta(raw))
        self.start("ready", raw()).close()
        net = meta(raw)
        self.start("ready", net)
        self.assertEqual(net.scale.tolist(), [2.0] * 4)


def train_rank(address, rank):
    os.environ.update(RANK=str(rank), WORLD_SIZE="2")
    net = meta()
    optimizer = sm.Optimizer(net, "AdamW", service=address, job="ranks", slots=2, mesh="fsdp=2")
    print(train(net, optimizer, [rank]))
    optimizer.close()


if __name__ == "__main__":
    if len(sys.argv) == 3 and ":" in sys.argv[1]:
        train_rank(sys.argv[1], int(sys.argv[2]))
    else:
        sys.exit(unittest.main())
