#!/usr/bin/env python3
"""Errors before anything starts: what each says is right does start."""
import importlib
import math
import os
import sys
import tempfile
import unittest
import weakref
from unittest import mock

import torch
from shardmesh import _programs, errors
from shardmesh.torch import Optimizer
from shardmesh.torch._machine import _service
from torch import nn

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
import torch_mesh  # noqa: E402

def of(**parameters):
    """A module with these, beside a trained one."""
    module = nn.Linear(2, 2)
    for name, value in parameters.items():
        module.register_parameter(name, value)
    return module


def meta(fill=True):
    with torch.device("meta"):
        module = nn.Module()
        module.w = nn.Parameter(torch.empty(2))
        module.reset_parameters = (lambda: nn.init.ones_(module.w)) if fill else None
    return module


def with_attribute(register):
    module = nn.Linear(2, 2)
    register(module, torch.empty(2, device="meta"))
    return module


def fixed(dtype):
    return nn.Parameter(torch.ones(2, 2).to(dtype), requires_grad=False)


class Quantized(torch.Tensor):
    """Of no memory of plain elements, as torchao's."""

    @staticmethod
    def __new__(cls, values):
        return torch.Tensor._make_wrapper_subclass(cls, values.shape, dtype=values.dtype)

    def __init__(self, values):
        self.values = values

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return args[0] if func is torch.ops.aten.detach.default else NotImplemented


def flat():
    """As FullyShardedDataParallel makes them."""
    importlib.import_module("torch.distributed.fsdp._flat_param")
    made = nn.Parameter(torch.zeros(2))
    made._is_flat_param = True
    return made


def cut_up():
    """By fully_shard()."""
    tensors = importlib.import_module("torch.distributed.tensor")
    with torch_mesh.as_rank(0, 1):
        mesh = torch_mesh.create((1,), ("fsdp",), [0])
        return of(w=nn.Parameter(tensors.distribute_tensor(torch.zeros(2, 2), mesh, [tensors.Shard(0)])))


def fully_sharded(module):
    """Its constructor needs a device."""
    kind = importlib.import_module("torch.distributed.fsdp").FullyShardedDataParallel
    wrapper = kind.__new__(kind)
    nn.Module.__init__(wrapper)
    wrapper._modules["_fsdp_wrapped_module"], wrapper._handle = module, object()
    return wrapper


def two_of_one_name(name):
    """A wrapper with a parameter of its own."""
    wrapper = torch.compile(nn.Linear(2, 2))
    wrapper._parameters[name] = nn.Parameter(torch.zeros(2))
    return wrapper


def user_named(name="_orig_mod"):
    """With a module that is called like a wrapper."""
    module = of(w=nn.Parameter(torch.zeros(2)))
    module.add_module(name, of(w=nn.Parameter(torch.zeros(2))))
    return module


def used(model):
    model.register_buffer("extra", torch.empty(2, device="meta"))
    model.reset_parameters = lambda: [nn.init.ones_(tensor) for tensor in (model.w, model.extra)]
    model.known = weakref.ref(model.w)
    return model


def unfilled(fill=None):
    """With a buffer that nothing gives values."""
    module = nn.Module()
    module.w = nn.Parameter(torch.zeros(2))
    module.register_buffer("extra", torch.empty(2, device="meta"))
    if fill is not None:
        module.reset_parameters = lambda: fill(module)
    return module


SHARED = torch.zeros(4)
TIE = nn.Parameter(torch.zeros(2))
LINEAR = nn.Linear(2, 2)
NAN = torch.full((2, 2), math.nan)
RANKS = {"RANK": "0", "WORLD_SIZE": "2"}

# What the error says; what is wrong; what is right then.
START = (
    ("give parameters of a module", lambda: Optimizer([("w", torch.zeros(2))]), lambda: Optimizer(LINEAR.named_parameters())),
    ("to_dense()", lambda: Optimizer(of(w=nn.Parameter(torch.eye(2).to_sparse()))),
     lambda: Optimizer(of(w=nn.Parameter(torch.eye(2).to_sparse().to_dense())))),
    ("model.float()", lambda: Optimizer(nn.Linear(2, 2).double()), lambda: Optimizer(nn.Linear(2, 2).double().float())),
    ("model.to(torch.bfloat16)", lambda: Optimizer(nn.Linear(2, 2).half()), lambda: Optimizer(nn.Linear(2, 2).half().to(torch.bfloat16))),
    ("torch.view_as_real()", lambda: Optimizer(of(w=nn.Parameter(torch.zeros(2, dtype=torch.complex64)))),
     lambda: Optimizer(of(w=nn.Parameter(torch.view_as_real(torch.zeros(2, dtype=torch.complex64)))))),
    ("remove it from the model", lambda: Optimizer(of(w=nn.Parameter(torch.zeros(0)))), lambda: Optimizer(of(w=None))),
    ("contiguous() or clone()", lambda: Optimizer(of(w=nn.Parameter(torch.zeros(1).expand(3)))),
     lambda: Optimizer(of(w=nn.Parameter(torch.zeros(1).expand(3).contiguous())))),
    ("run one batch through the lazy module", lambda: Optimizer(nn.LazyLinear(2)), lambda: Optimizer(ran(nn.LazyLinear(2)))),
    ("assign the same Parameter object to both", lambda: Optimizer(of(a=nn.Parameter(SHARED), b=nn.Parameter(SHARED))),
     lambda: Optimizer(of(a=TIE, b=TIE))),
    ("else clone() one", lambda: Optimizer(of(a=nn.Parameter(SHARED), b=nn.Parameter(SHARED))),
     lambda: Optimizer(of(a=nn.Parameter(SHARED), b=nn.Parameter(SHARED.clone())))),
    ("requires_grad_(False)", lambda: Optimizer(of(w=nn.Parameter(NAN))), lambda: Optimizer(of(w=nn.Parameter(NAN, requires_grad=False)))),
    ("returns None for this one", lambda: Optimizer(of(w=nn.Parameter(NAN, requires_grad=False)), gather="int8_row"),
     lambda: Optimizer(of(w=nn.Parameter(NAN, requires_grad=False)), gather=lambda name: None if name == "w" else "stored")),
    ("give the model, or model=", lambda: Optimizer(meta().named_parameters()),
     lambda: Optimizer((model := meta()).named_parameters(), model=model)),
    ("make it a buffer", lambda: Optimizer(with_attribute(lambda m, t: setattr(m, "extra", t)), init=lambda m: None),
     lambda: Optimizer(with_attribute(lambda m, t: m.register_buffer("extra", t)), init=lambda m: hasattr(m, "extra") and m.extra.zero_())),
    ("named_parameters()", lambda: Optimizer(LINEAR.parameters()), lambda: Optimizer(LINEAR.named_parameters())),
    ("pass the model (model=)", lambda: Optimizer(LINEAR.parameters()), lambda: Optimizer(LINEAR.parameters(), model=LINEAR)),
    ("give a module, its named_parameters()", lambda: Optimizer("model"),
     lambda: Optimizer([{"params": LINEAR.named_parameters(), "lr": 0.1}])),
    ("give the one, or parameters of it and model=", lambda: Optimizer(LINEAR, model=nn.Linear(2, 2)),
     lambda: Optimizer(LINEAR.parameters(), model=LINEAR)),
    ("give each group as one, or none", lambda: Optimizer([{"params": LINEAR.parameters()}, 3], model=LINEAR),
     lambda: Optimizer([{"params": LINEAR.parameters()}], model=LINEAR)),
    ("give a list of (name, parameter)", lambda: Optimizer([{"params": {}}]),
     lambda: Optimizer([{"params": list(LINEAR.named_parameters())}])),
    ("it can be in it once", lambda: Optimizer([LINEAR.weight, LINEAR.weight], model=LINEAR),
     lambda: Optimizer([LINEAR.weight], model=LINEAR)),
    ("it can be in one", lambda: Optimizer([{"params": [LINEAR.weight]}, {"params": [LINEAR.weight]}], model=LINEAR),
     lambda: Optimizer([{"params": [LINEAR.weight]}], model=LINEAR)),
    ("requires_grad is False", lambda: Optimizer(nn.Linear(2, 2).requires_grad_(False)),
     lambda: Optimizer(nn.Linear(2, 2).requires_grad_(True))),
    ("pass the module that was scripted", lambda: Optimizer(nn.Sequential(torch.jit.script(LINEAR))),
     lambda: Optimizer(nn.Sequential(LINEAR))),
    ("give it, or model=", lambda: Optimizer(LINEAR.named_parameters(), residency="bucket"),
     lambda: Optimizer(LINEAR.named_parameters(), model=LINEAR, residency="bucket")),
    ("give it, or model=", lambda: Optimizer(LINEAR.named_parameters(), deliver="quantized"),
     lambda: Optimizer(LINEAR.named_parameters(), model=LINEAR, deliver="quantized")),
    ("say workers=3", lambda: Optimizer(LINEAR, mesh="ddp=3"), lambda: Optimizer(LINEAR, mesh="ddp=3", workers=3)),
    ('write "ddp=2,fsdp=4"', lambda: Optimizer(LINEAR, mesh="2"), lambda: Optimizer(LINEAR, mesh="ddp=2,fsdp=4", workers=8)),
    ("it needs a momentum and no dampening", lambda: Optimizer(LINEAR, "SGD", nesterov=True),
     lambda: Optimizer(LINEAR, "SGD", nesterov=True, momentum=0.9)),
    ("SGD, Adam, AdamW, Lion and Muon", lambda: Optimizer(LINEAR, "Adagrad"), lambda: [Optimizer(LINEAR, name) for name in ("SGD",)]),
    ("give a multiple of 2", lambda: with_ranks(RANKS, slots=3), lambda: with_ranks(RANKS, slots=4)),
    ("set both, as torchrun does, or none", lambda: with_ranks({"RANK": "0"}), lambda: with_ranks(RANKS)),
    ("like \"10.0.0.1:7000\"", lambda: Optimizer(LINEAR, service=3), lambda: Optimizer(LINEAR, service="10.0.0.1:7000")),
    ('Optimizer(model, "AdamW", lr=0.1)', lambda: Optimizer(LINEAR, 0.1), lambda: Optimizer(LINEAR, "AdamW", lr=0.1)),
    ("it has lr, betas", lambda: Optimizer(LINEAR, "Lion", momentum=0.9), lambda: Optimizer(LINEAR, "Lion", betas=(0.9, 0.99))),
    ("of adam it is False", lambda: Optimizer(LINEAR, "Adam", decoupled_weight_decay=True),
     lambda: Optimizer(LINEAR, "Adam", decoupled_weight_decay=False)),
    ("it must lie in [0, 1]", lambda: Optimizer(LINEAR, "SGD", momentum=2), lambda: Optimizer(LINEAR, "SGD", momentum=1)),
    ("a pair of numbers", lambda: Optimizer(LINEAR, betas=0.9), lambda: Optimizer(LINEAR, betas=(0.9, 0.9))),
    ("both must lie in [0, 1)", lambda: Optimizer(LINEAR, betas=(0.9, 1)), lambda: Optimizer(LINEAR, betas=(0.9, 0))),
    ("it must be True or False", lambda: Optimizer(LINEAR, amsgrad="yes"), lambda: Optimizer(LINEAR, amsgrad=True)),
    ("it must be a number", lambda: Optimizer(LINEAR, lr="1e-3"), lambda: Optimizer(LINEAR, lr=1e-3)),
    ("None: one for each rank", lambda: Optimizer(LINEAR, slots=0), lambda: Optimizer(LINEAR, slots=None)),
    ("None: when a reader asks", lambda: Optimizer(LINEAR, publish_every=0), lambda: Optimizer(LINEAR, publish_every=None)),
    ("0 (no clipping)", lambda: Optimizer(LINEAR, clip_norm=None), lambda: Optimizer(LINEAR, clip_norm=0)),
    ("decoded or quantized", lambda: Optimizer(LINEAR, deliver="codes"), lambda: Optimizer(LINEAR, deliver="quantized")),
    ("a function of a module, or None", lambda: Optimizer(LINEAR, init="normal"), lambda: Optimizer(LINEAR, init=lambda module: None)),
    ("True, False or None", lambda: Optimizer(LINEAR, join="yes"), lambda: Optimizer(LINEAR, join=True)),
    ("a path, or None", lambda: Optimizer(LINEAR, resume=True), lambda: Optimizer(LINEAR, resume="checkpoints")),
    ("a number of seconds above 0", lambda: Optimizer(LINEAR, timeout=0), lambda: Optimizer(LINEAR, timeout=0.5)),
    ("1 to 128 characters of A-Z", lambda: Optimizer(LINEAR, job="my job"), lambda: Optimizer(LINEAR, job="my_job")),
    ('a text like "ddp=2,fsdp=4"', lambda: Optimizer(LINEAR, mesh=8), lambda: Optimizer(LINEAR, mesh="ddp=2,fsdp=4", workers=8)),
    ("like 10.0.0.1:7000", lambda: Optimizer(LINEAR, service="10.0.0.1"), lambda: Optimizer(LINEAR, service="10.0.0.1:7000")),
    ("a torch.nn.Module, or None", lambda: Optimizer(LINEAR.named_parameters(), model="model"),
     lambda: Optimizer(LINEAR.named_parameters(), model=None)),
    ("a function from the name", lambda: Optimizer(LINEAR, weights=3), lambda: Optimizer(LINEAR, weights=lambda name: "bf16")),
    ("int8_row or nf4, or None", lambda: Optimizer(LINEAR, weights=lambda name: "fp64"),
     lambda: Optimizer(LINEAR, weights=lambda name: None)),
    ("fp32, bf16_sr, dyn8", lambda: Optimizer(LINEAR, states="dyn2"), lambda: Optimizer(LINEAR, states="dyn8")),
    ("fp32 or bf16", lambda: Optimizer(LINEAR, gradients="fp8"), lambda: Optimizer(LINEAR, gradients="bf16")),
    ("full or bucket", lambda: Optimizer(LINEAR, residency="none"), lambda: Optimizer(LINEAR, residency="bucket")),
    ('gather="fp8_row"', lambda: Optimizer(of(w=fixed(torch.float8_e4m3fn))),
     lambda: Optimizer(of(w=fixed(torch.float32)), gather="fp8_row")),
    ("register what is not trained as a buffer", lambda: Optimizer(of(w=fixed(torch.int8))),
     lambda: Optimizer(with_attribute(lambda m, _: m.register_buffer("w", torch.ones(2, dtype=torch.int8))))),
    ("quantized weights are asked for with weights=", lambda: Optimizer(of(w=fixed(torch.int8))),
     lambda: Optimizer(of(w=fixed(torch.float32)), weights="int8_row")),
    ("it must be a torch.nn.Parameter", lambda: Optimizer([("w", 3)]), lambda: Optimizer([("w", nn.Parameter(torch.zeros(2)))])),
    ('such as weights="int8_row"', lambda: Optimizer(of(w=nn.Parameter(Quantized(torch.ones(2, 2))))),
     lambda: Optimizer(of(w=nn.Parameter(torch.ones(2, 2))), weights="int8_row")),
    ("before fully_shard()", lambda: Optimizer(cut_up()), lambda: Optimizer(LINEAR)),
    ("before FullyShardedDataParallel", lambda: Optimizer(of(w=flat())),
     lambda: Optimizer(LINEAR)),
    ("pass the model before it is wrapped", lambda: Optimizer(fully_sharded(LINEAR)), lambda: Optimizer(LINEAR)),
    ("without wrappers; rename one", lambda: Optimizer(two_of_one_name("weight")), lambda: Optimizer(two_of_one_name("other"))),
    ("pass the model (model=)", lambda: Optimizer(user_named().named_parameters()),
     lambda: Optimizer((model := user_named()).named_parameters(), model=model)),
    ("or rename one", lambda: Optimizer(user_named().named_parameters()), lambda: Optimizer(user_named("other").named_parameters())),
    ("it must be (name, parameter)", lambda: Optimizer([("w", LINEAR.weight), 3]), lambda: Optimizer([("w", LINEAR.weight)])),
    ('2 "params" and 1 "param_names"', lambda: Optimizer([{"params": LINEAR.parameters(), "param_names": ["weight"]}]),
     lambda: Optimizer([{"params": LINEAR.parameters(), "param_names": ["weight", "bias"]}])),
    ("was it made anew after the groups were?", lambda: Optimizer(LINEAR.parameters(), model=nn.Linear(2, 2)),
     lambda: Optimizer(LINEAR.parameters(), model=LINEAR)),
    ("before anything is done with it", lambda: Optimizer(used(meta())), lambda: Optimizer(meta())),
    ("give it reset_parameters()", lambda: Optimizer(unfilled()), lambda: Optimizer(unfilled(lambda m: m.extra.zero_()))),
    ("or the optimizer init=, a function", lambda: Optimizer(unfilled()), lambda: Optimizer(unfilled(), init=lambda m: m.extra.zero_())),
)


MEETING = {**RANKS, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}

# The same of a service that is to be found.
SERVICE = (
    ("start them with torchrun", lambda: with_ranks(RANKS), lambda: with_ranks(MEETING)),
    ('or say service="host:port"', lambda: with_ranks(RANKS), lambda: with_ranks(RANKS, service="10.0.0.1:7000")),
    ('start the service, and say service="host:port"', lambda: with_ranks({**MEETING, "LOCAL_WORLD_SIZE": "1"}),
     lambda: with_ranks({**MEETING, "LOCAL_WORLD_SIZE": "1"}, service="10.0.0.1:7000")),
)


def ran(module):
    module(torch.ones(1, 2))
    return module


def with_ranks(environment, **options):
    with mock.patch.dict(os.environ, environment):
        return Optimizer(LINEAR, **options)


class StartTest(unittest.TestCase):
    def follow_all(self, table):
        for number, (said, wrong, right) in enumerate(table):
            with self.subTest(f"{number}: {said}"):
                with self.assertRaises(errors.Error) as raised:
                    wrong()
                self.assertIn(said, str(raised.exception))
                with self.assertRaisesRegex(AssertionError, "started"):
                    right()

    def test_advice_that_errors_before_the_start_give(self):
        with mock.patch.object(_service, "find", side_effect=AssertionError("started")):
            self.follow_all(START)

    def test_advice_on_where_the_service_is(self):
        started = AssertionError("started")
        with mock.patch.object(_service, "Embedded", side_effect=started), mock.patch.object(_service, "Remote", side_effect=started):
            self.follow_all(SERVICE)

    def test_advice_on_where_the_programs_are(self):
        with tempfile.TemporaryDirectory() as empty, tempfile.TemporaryDirectory() as folder:
            program = os.path.join(folder, "shardctl")
            os.close(os.open(program, os.O_CREAT, 0o755))
            for said, wrong, right in (
                ("unset it", {"SHARDMESH_BIN_DIR": empty}, {"SHARDMESH_BIN_DIR": "", "PATH": folder}),
                ("or build the program there", {"SHARDMESH_BIN_DIR": empty}, {"SHARDMESH_BIN_DIR": folder}),
                ("set SHARDMESH_BIN_DIR to", {"SHARDMESH_BIN_DIR": "", "PATH": empty}, {"SHARDMESH_BIN_DIR": folder, "PATH": empty}),
            ):
                with self.subTest(said), mock.patch.object(_programs, "PACKAGED", empty):
                    with mock.patch.dict(os.environ, wrong), self.assertRaises(errors.NotFound) as raised:
                        Optimizer(LINEAR)
                    self.assertIn(said, str(raised.exception))
                    with mock.patch.dict(os.environ, right):
                        self.assertEqual(_programs.find("shardctl"), program)


if __name__ == "__main__":
    unittest.main()
