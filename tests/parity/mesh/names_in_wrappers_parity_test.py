#!/usr/bin/env python3
"""Names under real wrappers, as shardmesh.torch reads them off the tree and as Accelerate makes them of strings."""
import os
import sys
import unittest

import torch
from accelerate.utils.fsdp_utils import fsdp2_canonicalize_names
from shardmesh.torch._modules._model import facts
from shardmesh.torch._modules._wrappers import walk
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
import torch_mesh  # noqa: E402


def tree(*names):
    """A module with parameters of these names."""
    root = nn.Module()
    for name in names:
        at = root
        *path, last = name.split(".")
        for key in path:
            if key not in at._modules:
                at.add_module(key, nn.Module())
            at = at._modules[key]
        at.register_parameter(last, nn.Parameter(torch.ones(1)))
    return root


def compiled(module):
    return torch.compile(module, backend="eager")


def fsdp(module):
    """As FullyShardedDataParallel around a module without parameters of its own to manage; else it needs a device."""
    wrapper = FullyShardedDataParallel.__new__(FullyShardedDataParallel)
    nn.Module.__init__(wrapper)
    wrapper._handle = None
    wrapper._modules["_fsdp_wrapped_module"] = module
    return wrapper


def inside(model, path, wrap):
    """`model`, with the child at `path` wrapped."""
    parent, _, key = path.rpartition(".")
    at = model.get_submodule(parent)
    at._modules[key] = wrap(at._modules[key])
    return model


# what, names of the bare model, how it is wrapped
TABLE = [
    ("a child _orig_module", ["layers.0._orig_module.w"], None),
    ("a child _orig_models", ["layers.0._orig_models.w"], None),
    ("a parameter _orig_mod_scale", ["layers.0._orig_mod_scale"], None),
    ("a child _checkpoint_wrapped_module_x", ["layers.0._checkpoint_wrapped_module_x.w"], None),
    ("compiled, a child my_orig_mod", ["my_orig_mod.w"], compiled),
    ("compiled, a_orig_mod and b_orig_mod", ["a_orig_mod.b_orig_mod.w"], compiled),
    ("checkpointed", ["w"], checkpoint_wrapper),
    ("checkpointed compiled", ["w"], lambda model: checkpoint_wrapper(compiled(model))),
    ("FSDP", ["a.w"], fsdp),
    ("FSDP inside", ["a.w"], lambda model: inside(model, "a", fsdp)),
    ("compiled FSDP inside", ["a.w"], lambda model: inside(model, "a", lambda child: compiled(fsdp(child)))),
    ("data parallel compiled", ["w"], lambda model: DistributedDataParallel(compiled(model))),
    ("compiled data parallel", ["w"], lambda model: compiled(DistributedDataParallel(model))),
    ("a parameter _orig_mod", ["x._orig_mod"], None),
    ("compiled, a parameter _orig_mod", ["x._orig_mod"], compiled),
    ("a real child _orig_mod", ["_orig_mod.w", "lin.w"], None),
    ("compiled, a real child _orig_mod", ["_orig_mod.w", "lin.w"], compiled),
    ("compiled inside, a real child _orig_mod", ["l._orig_mod.w", "l.w"], lambda model: inside(model, "l", compiled)),
    ("compiled, a real child module", ["module.w", "w"], compiled),
    ("data parallel, a real child module", ["module.w", "w"], DistributedDataParallel),
    ("a._orig_mod_b beside a_b", ["a._orig_mod_b", "a_b"], None),
    ("x._checkpoint_wrapped_module_w beside x_w", ["x._checkpoint_wrapped_module_w", "x_w"], None),
    ("l._orig_mod_scale beside l_scale", ["l._orig_mod_scale", "l_scale"], compiled),
    ("x_checkpoint_wrapped_module beside x", ["x.w", "x_checkpoint_wrapped_module.w"], checkpoint_wrapper),
]


class NamesInWrappersTest(unittest.TestCase):
    def test_names_are_the_bare_model_s_where_those_of_strings_are_not(self):
        wrong = 0
        with torch_mesh.as_rank(0, 2):
            print("\nnames under real wrappers (all right here), and Accelerate's where they are not:")
            for what, bare, wrap in TABLE:
                with self.subTest(what):
                    model = tree(*bare) if wrap is None else wrap(tree(*bare))
                    self.assertEqual(sorted(p.name for p in facts(model).parameters), sorted(bare))
                    theirs = list(fsdp2_canonicalize_names({one.given: 0 for one in walk(model).found}))
                    if "data parallel" in what:
                        continue  # `module` is not for Accelerate's function to take off
                    if sorted(theirs) != sorted(bare):
                        wrong += 1
                        print(f"  {what}: {', '.join(bare)}; accelerate {', '.join(theirs)}")
        print(f"  {len(TABLE)} models, of which accelerate has {wrong} otherwise (without data parallel ones)", end="")

    def test_a_hand_made_tie_is_two_entries_of_one_name_in_a_map_by_address_and_refused_here(self):
        model = tree("emb", "head")
        model.head = nn.Parameter(model.emb.data)
        by_address = {p.data_ptr(): name for name, p in model.named_parameters()}
        self.assertEqual([by_address[p.data_ptr()] for p in model.parameters()], ["head", "head"])
        with self.assertRaisesRegex(ValueError, '"emb" and "head" are two objects that share memory'):
            facts(model)


if __name__ == "__main__":
    sys.exit(unittest.main())
