#!/usr/bin/env python3
"""What shardmesh.torch reads off real modules: names in every order of wrapping, ties, groups, and what it refuses."""
import os
import random
import sys
import types
import unittest
import unittest.mock

import torch
import transformers
from accelerate.utils.fsdp_utils import fsdp2_canonicalize_names
from shardmesh import errors, names
from shardmesh.torch._modules import _model
from shardmesh.torch._modules._model import facts
from shardmesh.torch._modules._wrappers import walk
from torch import nn
from torch._dynamo.eval_frame import OptimizedModule
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper, offload_wrapper
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DataParallel, DistributedDataParallel

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
import torch_mesh  # noqa: E402

SEED = 20260814
ORDERS = 60


class Block(nn.Module):
    """Children and parameters that are called like wrappers, or nearly."""

    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(2, 2)
        self._orig_module = nn.Linear(2, 2)
        self.my_orig_mod = nn.Linear(2, 2)
        self.add_module("_orig_mod", nn.Linear(2, 2))
        self.add_module("module", nn.Linear(2, 2))
        self.x = nn.Linear(2, 2)
        self.x_checkpoint_wrapped_module = nn.Linear(2, 2)
        self._checkpoint_wrapped_module = nn.Linear(2, 2)
        self._orig_mod_scale = nn.Parameter(torch.ones(1))
        self.register_parameter("_scale", nn.Parameter(torch.ones(())))


class Parameterized(nn.Module):
    """A parameter called `_orig_mod`."""

    def __init__(self):
        super().__init__()
        self.register_parameter("_orig_mod", nn.Parameter(torch.ones(2)))
        self.register_parameter("module", nn.Parameter(torch.ones(2)))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(4, 2)
        self.layers = nn.ModuleList([Block(), Block()])
        self.module = Parameterized()
        self.head = nn.Linear(2, 4, bias=False)
        self.head.weight = self.embed.weight
        self.again = self.layers[0].lin


def compiled(module):
    if isinstance(module, OptimizedModule):
        return module  # a second time torch makes a function of it
    return torch.compile(module, backend="eager")


WRAPPERS = {
    "compile": compiled, "checkpoint": checkpoint_wrapper, "offload": offload_wrapper,
    "ddp": DistributedDataParallel, "dp": DataParallel,
}


def summary(found):
    return [(p.name, p.ties, tuple(p.tensor.shape), p.frozen, p.group) for p in found.parameters]


def wrap_at_random(model, random_):
    """Wraps some modules, also one several times, children before parents or after. Returns it, and what was done."""
    done = []
    places = [(path, module, key) for path, module in model.named_modules() for key in module._modules]
    for path, parent, key in random_.choices(places, k=random_.randrange(8)):
        done.append((f"{path}.{key}", random_.choice(list(WRAPPERS))))
        parent._modules[key] = WRAPPERS[done[-1][1]](parent._modules[key])
    for _ in range(random_.randrange(4)):
        done.append(("", random_.choice(list(WRAPPERS))))
        model = WRAPPERS[done[-1][1]](model)
    return model, done


class NamesTest(unittest.TestCase):
    def test_facts_under_any_order_of_wrapping_are_those_of_the_bare_model(self):
        print(f"\nseed {SEED}", end="")
        bare = summary(facts(Model()))
        self.assertEqual([name for name, *_ in bare], [name for name, _ in Model().named_parameters()])
        self.assertEqual(bare[0][:2], ("embed.weight", ("head.weight",)))
        random_ = random.Random(SEED)
        with torch_mesh.as_rank(0, 2):
            for _ in range(ORDERS):
                model, done = wrap_at_random(Model(), random_)
                with self.subTest(done):
                    found = facts(model)
                    self.assertEqual(summary(found), bare)
                    raw = dict(nn.Module.named_parameters(model, remove_duplicate=False))
                    for p in found.parameters:
                        given = [p.given, *p.ties_given]
                        self.assertTrue(all(raw[name] is p.tensor for name in given))
                        canonical = names.canonical_many(given, **found.rules._asdict())
                        self.assertEqual(canonical, [p.name, *p.ties])
                        again = names.canonical_many([p.name, *p.ties], **_model.canonical_rules(found)._asdict())
                        self.assertEqual(again, [p.name, *p.ties])

    def test_a_wrapper_s_own_parameter_with_the_name_of_a_wrapped_one_is_refused_naming_both(self):
        wrapper = checkpoint_wrapper(nn.Linear(2, 2))
        wrapper._parameters["weight"] = nn.Parameter(torch.ones(2))
        with self.assertRaisesRegex(errors.AlreadyExists, '"weight" and "_checkpoint_wrapped_module.weight"'):
            facts(wrapper)

    def test_names_that_accelerate_makes_one_stay_apart(self):
        model = Model()
        raw = [one.given for one in walk(compiled(model)).found]
        theirs = fsdp2_canonicalize_names(dict.fromkeys(raw, 0))
        ours = {one.name for one in walk(compiled(model)).found}
        self.assertEqual(len(ours), len(raw))
        self.assertLess(len(theirs), len(raw))
        print(f"\n{len(raw)} names, accelerate has {len(theirs)}, wrong {len(set(theirs) - ours)}", end="")

    def test_a_module_that_contains_itself_is_walked_once(self):
        model = nn.Linear(2, 2)
        model._modules["self"] = model
        self.assertEqual([p.name for p in facts(model).parameters], ["weight", "bias"])


class TiesTest(unittest.TestCase):
    def ties(self, model):
        return {p.name: p.ties for p in facts(model).parameters if p.ties}

    def test_ties_of_transformers_are_one_parameter_under_all_names(self):
        small = {"vocab_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "hidden_size": 8}
        t5 = transformers.T5ForConditionalGeneration(transformers.T5Config(
            vocab_size=32, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2, tie_word_embeddings=True))
        bert = transformers.BertForMaskedLM(transformers.BertConfig(**small, intermediate_size=8))
        gpt2 = transformers.GPT2LMHeadModel(transformers.GPT2Config(
            vocab_size=32, n_positions=8, n_embd=8, n_layer=1, n_head=2))
        for model in t5, bert, gpt2:
            with self.subTest(type(model).__name__):
                bare = [name for name, _ in model.named_parameters()]
                every = [name for name, _ in model.named_parameters(remove_duplicate=False)]
                for wrapped in model, compiled(model), compiled(checkpoint_wrapper(model)):
                    found = facts(wrapped).parameters
                    self.assertEqual([p.name for p in found], bare)
                    self.assertEqual(sorted(n for p in found for n in (p.name, *p.ties)), sorted(every))
        self.assertEqual(self.ties(t5), {"shared.weight": (
            "encoder.embed_tokens.weight", "decoder.embed_tokens.weight", "lm_head.weight")})
        self.assertEqual(self.ties(gpt2), {"transformer.wte.weight": ("lm_head.weight",)})
        self.assertIn("bert.embeddings.word_embeddings.weight", self.ties(bert))

    def test_two_parameters_that_share_memory_are_refused_naming_both(self):
        for device in "cpu", "meta":
            whole = torch.zeros(4, 4, device=device)
            for a, b in (whole, whole), (whole, whole[1:]), (whole[:, :3], whole[:, 2:]), (whole, whole.t()):
                says = r'"[ab]" and "[ab]" are two objects that share'
                with self.subTest(device, shapes=(a.shape, b.shape)):
                    model = nn.ParameterDict({"a": nn.Parameter(a), "b": nn.Parameter(b)})
                    with self.assertRaisesRegex(errors.InvalidArgument, says):
                        facts(model)
            for a, b in (
                (whole[:, :2], whole[:, 2:]), (whole[:2], whole[2:]), (whole[::2], whole[1::2]),
                (whole[:, :2], whole[0, 2:]),
            ):
                with self.subTest(device, apart=(a.shape, b.shape)):
                    model = nn.ParameterDict({"a": nn.Parameter(a), "b": nn.Parameter(b)})
                    self.assertEqual([p.name for p in facts(model).parameters], ["a", "b"])
    def test_shared_memory_is_found_across_one_that_lies_between(self):
        whole = torch.zeros(4, 4)
        model = nn.ParameterList([nn.Parameter(one) for one in (whole[:, :2], whole[0, 2:], whole[2, 1:3])])
        with self.assertRaisesRegex(errors.InvalidArgument, '"0" and "2" are two objects that share'):
            facts(model)


class GroupsTest(unittest.TestCase):
    def setUp(self):
        self.model = Model()
        self.decay = [p for p in self.model.parameters() if p.ndim >= 2]
        self.rest = [p for p in self.model.parameters() if p.ndim < 2]
        self.bare = [name for name, _ in self.model.named_parameters()]

    def test_groups_of_plain_parameters_have_the_model_s_names_and_order(self):
        groups = [{"params": self.decay, "weight_decay": 0.1}, {"params": iter(self.rest), "lr": 2.0}]
        found = facts(groups, model=compiled(self.model))
        self.assertEqual([p.name for p in found.parameters], self.bare)
        self.assertEqual(found.groups, [{"weight_decay": 0.1}, {"lr": 2.0}])
        self.assertEqual([p.group for p in found.parameters], [int(p.tensor.ndim < 2) for p in found.parameters])

    def test_every_form_of_all_parameters_is_the_same(self):
        whole = summary(facts(self.model))
        named = list(self.model.named_parameters())
        torch_groups = torch.optim.SGD(self.model.named_parameters()).param_groups
        for what, given, model in (
            ("plain", self.model.parameters(), self.model), ("pairs", iter(named), self.model),
            ("group of pairs", [{"params": iter(named)}], self.model), ("tuple", tuple(named), self.model),
            ("torch's", [{key: torch_groups[0][key] for key in ("params", "param_names")}], self.model),
        ):
            with self.subTest(what):
                found = facts(given, model)
                self.assertEqual((summary(found), found.groups), (whole, [{}]))
        alone = facts(self.model.layers[0].lin.named_parameters())
        self.assertEqual([p.name for p in alone.parameters], ["weight", "bias"])
        both = facts(self.model.named_parameters(remove_duplicate=False), self.model)
        self.assertEqual(summary(both), whole)

    def test_a_parameter_in_no_group_is_frozen(self):
        self.decay[1].requires_grad_(False)
        found = facts(self.decay, model=self.model)
        self.assertEqual([p.name for p in found.parameters], self.bare)
        for p in found.parameters:
            in_group = any(p.tensor is one for one in self.decay)
            expected = (0, not p.tensor.requires_grad) if in_group else (_model.NO_GROUP, True)
            self.assertEqual((p.group, p.frozen), expected)

    def test_what_is_no_set_of_parameters_is_refused(self):
        lin, other = nn.Linear(2, 2), nn.Parameter(torch.zeros(3))
        pair = {"params": [("a", lin.weight)]}
        for says, given, model in (
            ("has no name; pass the model", lin.parameters(), None),
            ("has no name; pass the model", [{"params": [lin.weight]}], None),
            ('"a" is in group 0 and in group 1', [pair, pair], None),
            ('"weight" is in group 0 and in group 1', [{"params": [lin.weight]}, {"params": [lin.weight]}], lin),
            ('"weight" is in group 0 twice', [lin.weight, lin.weight], lin),
            (r"parameter 1 of group 0, of shape \[3\], is no parameter", [lin.weight, other], lin),
            ("is a dict", dict(lin.named_parameters()), None), ("is a Parameter", lin.weight, None),
            ("is a function", lin.forward.__func__, None), ('no dict with "params"', [{"lr": 1}], lin),
            ("it must be \\(name, parameter\\)", [3], lin), ("no parameters", [], None),
            ("is a set", [{"params": {1}}], lin),
            ("none of 2 parameters is to be trained", [], lin),
            ("none of 2 parameters is to be trained", nn.Linear(2, 2).requires_grad_(False), None),
            ("two models", lin, nn.Linear(2, 2)), ("model is a str", [], "lin"),
            ('2 "params" and 1 "param_names"', [{"params": [lin.weight, lin.bias], "param_names": ["a"]}], None),
        ):
            with self.subTest(says), self.assertRaisesRegex(errors.InvalidArgument, says):
                facts(given, model)
        with self.assertRaisesRegex(errors.AlreadyExists, '"a._orig_mod.w" and "a.w" are two parameters'):
            facts([("a._orig_mod.w", lin.weight), ("a.w", lin.bias)])


class RefusedTest(unittest.TestCase):
    def refused(self, kind, says, tensor):
        model = nn.Module()
        model.bad = tensor if isinstance(tensor, nn.Parameter) else nn.Parameter(tensor, tensor.is_floating_point())
        with self.subTest(says), self.assertRaisesRegex(kind, f'parameter "bad".*{says}'):
            facts(model)

    def test_kinds_that_jobs_do_not_have_are_refused_naming_the_parameter(self):
        for dtype in "float16", "float64", "complex64", "int8", "bool", "float8_e4m3fn":
            tensor = torch.zeros(2, dtype=getattr(torch, dtype))
            self.refused(errors.Unimplemented, f"dtype torch.{dtype}; it is", tensor)
        self.refused(errors.Unimplemented, "layout torch.sparse_coo", torch.zeros(2, 2).to_sparse())
        self.refused(errors.InvalidArgument, r"no elements, shape \[0, 3\]", torch.zeros(0, 3))
        self.refused(errors.InvalidArgument, "share memory", torch.zeros(1).expand(4))
        self.refused(errors.InvalidArgument, "share memory", torch.zeros(9).as_strided((3, 3), (2, 1)))
        self.refused(errors.InvalidArgument, "not initialized", nn.LazyLinear(2).weight)

    def test_classes_of_tensors_are_refused_saying_what_to_do(self):
        from torchao.prototype.quantized_training.int8 import Int8QuantizedTrainingLinearWeight
        weight = Int8QuantizedTrainingLinearWeight.from_float(torch.ones(4, 4))
        self.assertEqual(weight.data_ptr(), 0)
        model = nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(4, 4)})
        for child in model.values():
            child.weight = nn.Parameter(Int8QuantizedTrainingLinearWeight.from_float(child.weight.detach()))
        with self.assertRaisesRegex(errors.Unimplemented, '"a.weight" is a torchao.*before it is converted'):
            facts(model)
        with torch_mesh.as_rank(0, 2):
            mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (2,))
            sharded = nn.Linear(4, 4)
            fully_shard(sharded, mesh=mesh)
            with self.assertRaisesRegex(errors.Unimplemented, "pass the model before fully_shard"):
                facts(sharded)
        with self.assertRaisesRegex(errors.Unimplemented, "ScriptModule"):
            facts(nn.Sequential(torch.jit.script(nn.Linear(2, 2))))

    def test_what_fsdp_cut_up_is_refused_and_an_engine_is_a_wrapper(self):
        wrapper = FullyShardedDataParallel.__new__(FullyShardedDataParallel)  # its constructor needs a device
        nn.Module.__init__(wrapper)
        wrapper._handle = object()
        wrapper._modules["_fsdp_wrapped_module"] = nn.Linear(2, 2)
        with self.assertRaisesRegex(errors.Unimplemented, '"0" is under FullyShardedDataParallel.*before it is w'):
            facts(nn.Sequential(wrapper))

        class DeepSpeedEngine(nn.Module):
            def __init__(self, module):
                super().__init__()
                self.module = module

        engine = DeepSpeedEngine(nn.Linear(2, 2))
        self.assertEqual([p.name for p in facts(engine).parameters], ["module.weight", "module.bias"])
        loaded = types.ModuleType("deepspeed.runtime.engine")
        loaded.DeepSpeedEngine = DeepSpeedEngine
        with unittest.mock.patch.dict(sys.modules, {loaded.__name__: loaded}):
            self.assertEqual([p.name for p in facts(engine).parameters], ["weight", "bias"])

    def test_what_is_unusual_and_works(self):
        conv = facts(nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)).parameters
        self.assertEqual([p.contiguous for p in conv], [False, True])
        self.assertEqual([p.tensor.is_meta for p in facts(nn.Linear(2, 2, device="meta")).parameters], [True, True])
        scalar = facts(nn.ParameterList([torch.tensor(1.0)])).parameters[0]
        self.assertEqual((scalar.name, scalar.tensor.shape), ("0", ()))

        class Named(nn.Parameter):
            """As some packages have, for attributes of their own."""

        self.assertEqual(len(facts(nn.ParameterList([Named(torch.ones(2))])).parameters), 1)


if __name__ == "__main__":
    sys.exit(unittest.main())
