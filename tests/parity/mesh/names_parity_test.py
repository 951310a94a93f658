#!/usr/bin/env python3
"""Canonical names beside torch's and Accelerate's: on a table of hard names, and on modules under real wrappers."""
import os
import sys
import unittest

import torch
import torch.distributed as dist
from accelerate.utils.fsdp_utils import fsdp2_canonicalize_names
from shardmesh import errors, names
from torch import nn
from torch._dynamo.eval_frame import OptimizedModule
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper, checkpoint_wrapper
from torch.distributed.fsdp._common_utils import clean_tensor_name
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
import torch_mesh  # noqa: E402

# raw name, rules, what is right
TABLE = [
    ("_orig_mod.layers.0._orig_mod.w", {}, "layers.0.w"),
    ("layers.0._checkpoint_wrapped_module.w", {}, "layers.0.w"),
    ("layers.0._orig_module.w", {}, "layers.0._orig_module.w"),
    ("layers.0._orig_models.w", {}, "layers.0._orig_models.w"),
    ("layers.0._orig_mod_scale", {}, "layers.0._orig_mod_scale"),
    ("layers.0._checkpoint_wrapped_module_x.w", {}, "layers.0._checkpoint_wrapped_module_x.w"),
    ("_orig_mod.my_orig_mod.w", {}, "my_orig_mod.w"),
    ("_orig_mod.a_orig_mod.b_orig_mod.w", {}, "a_orig_mod.b_orig_mod.w"),
    ("_checkpoint_wrapped_module.w", {}, "w"),
    ("_checkpoint_wrapped_module._orig_mod.w", {}, "w"),
    ("_fsdp_wrapped_module.a.w", {}, "a.w"),
    ("a._fsdp_wrapped_module.w", {}, "a.w"),
    ("_orig_mod.a._fsdp_wrapped_module.w", {}, "a.w"),
    ("module._orig_mod.w", {"root_wrappers": ["module", "_orig_mod"]}, "w"),
    ("module.w", {"root_wrappers": ["module"]}, "w"),
    ("module.w", {}, "module.w"),
    ("a.module.w", {"wrapped_at": ["a"]}, "a.w"),
    ("x._orig_mod", {}, "x._orig_mod"),
    ("_orig_mod.w", {"literal": ["_orig_mod"]}, "_orig_mod.w"),
    ("x_checkpoint_wrapped_module.w", {}, "x_checkpoint_wrapped_module.w"),
    ("lin.parametrizations.weight.original0", {}, "lin.parametrizations.weight.original0"),
    ("base_model.model.q.lora_A.default.weight", {}, "base_model.model.q.lora_A.default.weight"),
]

# raw names that are different tensors, which a replacement of substrings makes one
COLLISIONS = [
    ("a._orig_mod_b", "a_b"),
    ("x._checkpoint_wrapped_module_w", "x_w"),
]

WRAPPERS = {
    "_orig_mod": OptimizedModule,
    "_checkpoint_wrapped_module": CheckpointWrapper,
    "module": DistributedDataParallel,
}


def accelerate_name(raw):
    return next(iter(fsdp2_canonicalize_names({raw: 0})))


def facts(model):
    """What names alone cannot tell, read off the module tree."""
    modules = dict(model.named_modules(remove_duplicate=False))
    root, at = [], model
    while (segment := next((s for s, kind in WRAPPERS.items() if isinstance(at, kind)), None)) is not None:
        root.append(segment)
        at = getattr(at, segment)
    literal, wrapped_at = [], []
    for name, module in modules.items():
        parent, _, segment = name.rpartition(".")
        wraps = segment in WRAPPERS and isinstance(modules[parent], WRAPPERS[segment])
        if segment in ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module") and name and not wraps:
            literal.append(name)
        if isinstance(module, DistributedDataParallel) and name:
            wrapped_at.append(name)
    return {"root_wrappers": root, "literal": literal, "wrapped_at": wrapped_at}


class Block(nn.Module):
    """A child that is called like a wrapper, and one that is nearly."""

    def __init__(self):
        super().__init__()
        self.my_orig_mod = nn.Linear(2, 2)
        self.layers = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
        self.add_module("_orig_mod", nn.Linear(2, 2))
        self.add_module("module", nn.Linear(2, 2))
        self._orig_mod_scale = nn.Parameter(torch.ones(1))


class NamesParityTest(unittest.TestCase):
    def test_table_is_right_where_others_differ(self):
        print("\nnames that others leave or make otherwise (given: right; theirs):")
        for raw, rules, right in TABLE:
            with self.subTest(raw):
                self.assertEqual(names.canonical(raw, **rules), right)
            for what, theirs in ("torch", clean_tensor_name(raw)), ("accelerate", accelerate_name(raw)):
                if theirs != right:
                    print(f"  {raw}: {right}; {what} {theirs}")

    def test_different_tensors_keep_different_names(self):
        for raw in COLLISIONS:
            self.assertEqual(len(set(names.canonical_many(raw))), 2)
            merged = len(fsdp2_canonicalize_names(dict.fromkeys(raw, 0)))
            cleaned = len(set(map(clean_tensor_name, raw)))
            print(f"\n  {raw}: shardmesh 2 names, accelerate {merged}, torch {cleaned}", end="")
        with self.assertRaises(errors.AlreadyExists):
            table = names.AliasTable()
            for raw in ("layers.0.w", "layers.0._orig_mod.w", "_orig_mod.layers.0.w"):
                table.add(raw)

    def test_names_under_real_wrappers_are_those_without(self):
        plain = [name for name, _ in Block().named_parameters()]

        def compiled(model):
            return torch.compile(model, backend="eager")

        def blocks(model):
            model.layers[0] = checkpoint_wrapper(compiled(model.layers[0]))
            model.layers[1] = compiled(checkpoint_wrapper(model.layers[1]))
            return model

        def inner(model):
            model.layers[1] = DistributedDataParallel(model.layers[1])
            return model

        ways = {
            "compiled": compiled, "data parallel": DistributedDataParallel, "checkpointed": checkpoint_wrapper,
            "compiled data parallel": lambda m: compiled(DistributedDataParallel(m)),
            "data parallel compiled": lambda m: DistributedDataParallel(compiled(m)),
            "blocks": blocks, "compiled blocks": lambda m: compiled(blocks(m)), "data parallel inside": inner,
            "all, data parallel": lambda m: compiled(DistributedDataParallel(blocks(m))),
        }
        with torch_mesh.as_rank(0, 2):
            for what, wrap in ways.items():
                with self.subTest(what):
                    model = wrap(Block())
                    raw = [name for name, _ in nn.Module.named_parameters(model)]
                    canonical = names.canonical_many(raw, **facts(model))
                    self.assertEqual(canonical, plain)
                    if "data parallel" not in what:  # `module` is not for Accelerate's function to take off
                        wrong = sum(accelerate_name(r) != p for r, p in zip(raw, plain))
                        print(f"\n  {what}: {len(raw)} names right; accelerate {wrong} wrong", end="")


if __name__ == "__main__":
    sys.exit(unittest.main())
