#!/usr/bin/env python3
"""A job's specification from a torch model and an optimizer's arguments: torch's names and defaults, job.proto's."""
import inspect
import json
import pathlib
import re
import sys
import unittest

import torch
from shardmesh import errors
from shardmesh.torch._job import _hyper
from shardmesh.torch._modules._model import facts
from shardmesh.torch._job._specification import specification
from torch import nn

PROTO = pathlib.Path(__file__).parents[3] / "proto/shardmesh/v1/job.proto"
ALGORITHMS = {"SGD": torch.optim.SGD, "Adam": torch.optim.Adam, "AdamW": torch.optim.AdamW, "Muon": torch.optim.Muon}


def proto_fields():
    """Message -> its fields with their types, and enumeration -> its values."""
    blocks = re.findall(r"^(message|enum) (\w+) \{$(.*?)^\}", PROTO.read_text(encoding="utf-8"), re.M | re.S)
    messages = {name: {field: kind for kind, field in re.findall(r"^\s*(?:repeated )?(\w+) (\w+) = \d+;", body, re.M)}
                for what, name, body in blocks if what == "message"}
    enums = {name: re.findall(r"^\s*(\w+) = \d+;", body, re.M) for what, name, body in blocks if what == "enum"}
    return messages, enums


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(64, 48)
        self.conv = nn.Conv2d(1, 1, 3)
        self.norm = nn.LayerNorm(48, dtype=torch.bfloat16)
        self.head = nn.Linear(48, 64, bias=False)
        self.head.weight = self.embed.weight
        self.frozen = nn.Linear(32, 64).requires_grad_(False)


class SpecificationTest(unittest.TestCase):
    def check_proto(self, message, value):
        messages, enums = self.proto
        for field, inside in value.items():
            self.assertIn(field, messages[message])
            kind = messages[message][field]
            for one in inside if isinstance(inside, list) else [inside]:
                if kind in messages:
                    self.check_proto(kind, one)
                elif kind in enums:
                    self.assertIn(one, enums[kind])
                else:
                    types = {"string": str, "bool": bool, "double": float}
                    self.assertIs(type(one), types.get(kind, int), field)

    @classmethod
    def setUpClass(cls):
        cls.proto = proto_fields()

    def test_fields_and_values_are_those_of_the_proto_and_all_of_them_are_known(self):
        formats = {
            "weights": ("Format", "fp32 bf16 bf16_sr bf16+16 bf16+8sr int8_row nf4"),
            "states": ("StateFormat", "fp32 bf16_sr dyn8 dyn4 fp8 fp8x32"),
            "gather": ("GatherFormat", "stored fp8_tensor fp8_row fp8_block mx8 int8_row nf4"),
        }
        of_field = {"weights": "format", "states": "states", "gather": "gather"}
        model = facts(nn.Linear(32, 32, bias=False))
        base, head = nn.Linear(32, 32, bias=False).requires_grad_(False), nn.Linear(32, 32, bias=False)
        frozen = facts(nn.Sequential(base, head))
        for field, (enum, known) in formats.items():
            said = []
            for name in known.split():
                only_frozen = field == "weights" and name == "nf4"
                spec = specification(frozen if only_frozen else model, name="a", **{field: name})
                self.check_proto("JobSpec", spec)
                said.append(spec["parameters"][0][of_field[field]])
                if only_frozen:
                    self.assertEqual(spec["parameters"][1]["format"], "FORMAT_FP32", "it is trained")
            self.assertEqual(said, self.proto[1][enum][1:])
        for algorithm in [*ALGORITHMS, "Lion"]:
            spec = specification(model, algorithm, name="a", mesh="ddp=2,x:replicate=3", trainers=2, residency="bucket")
            self.check_proto("JobSpec", json.loads(json.dumps(spec)))
        self.assertEqual(spec["mesh"][1], {"name": "x", "size": 3, "role": "DIMENSION_ROLE_REPLICATE"})

    def test_defaults_are_torch_s_and_every_argument_of_torch_is_known(self):
        for algorithm, kind in ALGORITHMS.items():
            kind_name = _hyper.algorithm_name(algorithm)
            optional = {name: one.default for name, one in inspect.signature(kind).parameters.items()}
            optional.pop("params")
            with self.subTest(algorithm):
                _hyper.check_known(kind_name, optional, "torch")
                self.assertEqual(_hyper.optimizers(algorithm, optional, [{}]), _hyper.optimizers(algorithm, {}, [{}]))
                options = {**kind([torch.zeros(2, 2)]).defaults}
                self.assertEqual(_hyper.optimizers(algorithm, options, [{}]), _hyper.optimizers(algorithm, {}, [{}]))
                for name in _hyper._KNOWN[kind_name]:
                    self.assertIn(name, optional)
        lion = _hyper.optimizers("lion", {}, [{}])[0]
        self.assertEqual((lion["learning_rate"], lion["beta1"], lion["beta2"]), (1e-4, 0.9, 0.99))

    def test_parameters_have_their_dtype_ties_groups_and_given_names(self):
        model = Model()
        groups = [{"params": [model.embed.weight, model.conv.weight]}, {"params": model.norm.parameters(), "lr": 1.0}]
        spec = specification(facts(groups, torch.compile(model, backend="eager")), name="a", states="dyn8")
        self.check_proto("JobSpec", spec)
        of = {p["name"]: p for p in spec["parameters"]}
        self.assertEqual(list(of)[:3], ["embed.weight", "head.weight", "conv.weight"])
        self.assertEqual(of["embed.weight"]["given"], "_orig_mod.embed.weight")
        self.assertEqual(of["head.weight"], {
            "name": "head.weight", "shape": [64, 48], "format": "FORMAT_FP32", "group": 0, "frozen": False,
            "states": "STATE_FORMAT_DYN8", "gather": "GATHER_FORMAT_STORED", "tied_to": "embed.weight",
            "given": "_orig_mod.head.weight"})
        self.assertNotIn("given", specification(facts(model), name="a")["parameters"][0])
        self.assertEqual((of["norm.bias"]["format"], of["norm.bias"]["group"]), ("FORMAT_BF16", 1))
        for name in "conv.bias", "frozen.weight":
            self.assertEqual((of[name]["frozen"], of[name]["states"]), (True, "STATE_FORMAT_FP32"))
        self.assertEqual(spec["gradient_format"], "FORMAT_FP32")  # of both dtypes
        self.assertEqual(spec["more_groups"][0]["learning_rate"], 1.0)
        half = specification(facts(Model().to(torch.bfloat16)), name="a")
        self.assertEqual(half["gradient_format"], "FORMAT_BF16")

    def test_a_single_format_is_for_what_it_fits_and_a_function_s_word_is_taken(self):
        model = facts(Model())
        fitting = {"fp8_block": ["embed.weight", "head.weight", "frozen.weight"], "mx8": ["frozen.weight"],
                   "fp8_row": ["embed.weight", "head.weight", "conv.weight", "frozen.weight"]}
        for name, fits in fitting.items():
            spec = specification(model, name="a", gather=name)
            quantized = [p["name"] for p in spec["parameters"] if p["gather"] != "GATHER_FORMAT_STORED"]
            self.assertEqual(quantized, fits)
        spec = specification(model, name="a", weights=lambda name: "bf16_sr" if "norm" in name else None)
        self.assertEqual({p["format"] for p in spec["parameters"] if "norm" in p["name"]}, {"FORMAT_BF16_SR"})
        self.assertEqual({p["format"] for p in spec["parameters"] if "norm" not in p["name"]}, {"FORMAT_FP32"})
        spec = specification(model, name="a", weights=lambda name: None)
        self.assertEqual({p["format"] for p in spec["parameters"] if "norm" in p["name"]}, {"FORMAT_BF16"})
        rows = specification(model, name="a", weights="int8_row")
        self.assertEqual([p["format"] for p in rows["parameters"] if "norm" in p["name"]], ["FORMAT_BF16"] * 2)

    def test_groups_have_algorithms_and_hyperparameters_of_their_own(self):
        groups = [{"lr": torch.tensor(0.5), "name": "matrices", "algorithm": "Muon"}, {"betas": [0.5, 0.25]}, {}]
        given = {"lr": 3.0, "betas": (0.8, 0.7), "weight_decay": 0.25, "fused": True}
        muon, own, shared = _hyper.optimizers("AdamW", given, groups)
        self.assertEqual(muon, {"kind": "OPTIMIZER_KIND_MUON", "learning_rate": 0.5, "weight_decay": 0.25,
                                "momentum": 0.95, "nesterov": True, "epsilon": 1e-7})
        self.assertEqual((own["beta1"], own["beta2"], own["learning_rate"]), (0.5, 0.25, 3.0))
        self.assertEqual((shared["beta1"], shared["kind"]), (0.8, "OPTIMIZER_KIND_ADAMW"))

    def test_words_that_are_none_are_refused_with_those_that_there_are(self):
        model = facts(nn.Linear(2, 2))
        for says, arguments in (
            ("AdamW, Lion and Muon", {"algorithm": "Adagrad"}),
            ("no hyperparameter 'momentum'; it has lr, betas, eps", {"hyperparameters": {"momentum": 0.9}}),
            ("no hyperparameter 'eps'; it has lr, momentum", {"algorithm": "SGD", "hyperparameters": {"eps": 1}}),
            ("betas are 0.9; they must be a pair", {"hyperparameters": {"betas": 0.9}}),
            ("lr is '1'; it must be a number", {"hyperparameters": {"lr": "1"}}),
            (r"lr is tensor\(\[1., 1.\]\); it must be a number", {"hyperparameters": {"lr": torch.ones(2)}}),
            ("amsgrad is 1; it must be True or False", {"hyperparameters": {"amsgrad": 1}}),
            ("differentiable is True; of adamw it is False", {"hyperparameters": {"differentiable": True}}),
            ("ns_steps is 6; of muon it is 5", {"algorithm": "muon", "hyperparameters": {"ns_steps": 6}}),
            ("weights is 'fp16'; it must be fp32, bf16, bf16_sr", {"weights": "fp16"}),
            ("states is None; it must be a name|states is 3; it must be fp32", {"states": 3}),
            ('gather of parameter "weight" is \'fp8\'; it must be stored', {"gather": lambda name: "fp8"}),
            ("gradients is 'fp16'; it must be fp32 or bf16", {"gradients": "fp16"}),
            ("residency is 'some'; it must be full or bucket", {"residency": "some"}),
            ("'fsdp' is no dimension", {"mesh": "ddp=2,fsdp"}), ("slots is 1.5; it must be an integer", {"slots": 1.5}),
        ):
            with self.subTest(says), self.assertRaisesRegex(errors.InvalidArgument, says):
                specification(model, **{"name": "a", **arguments})


if __name__ == "__main__":
    sys.exit(unittest.main())
