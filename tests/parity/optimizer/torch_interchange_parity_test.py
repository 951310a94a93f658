#!/usr/bin/env python3
"""States of shardmesh.torch.Optimizer to and from torch.optim, torch.distributed.checkpoint, FSDP2, safetensors and torchao: the next
step is the other's."""
import os
import subprocess
import sys
import unittest
import warnings

import safetensors.torch
import shardmesh.torch
import torch
import torch.distributed.checkpoint as dcp
import torchao.optim
from shardmesh import checkpoint, errors
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
import fsdp_exchange as exchange  # noqa: E402
from service import ServiceTest  # noqa: E402


OPTIONS = {"lr": 1e-2, "weight_decay": 0.1}
NEXT = {"rtol": 0, "atol": 2e-8}  # of torch's own step, weights of at most 0.2; docs/numerics.md


class InterchangeTest(ServiceTest):
    def setUp(self):
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")

    def optimizer(self, model, job=None, **options):
        optimizer = shardmesh.torch.Optimizer(model, "AdamW", service=self.address, job=job or self.id().rpartition(".")[2],
                                              **{**OPTIONS, **options})
        self.addCleanup(optimizer.close)
        return optimizer

    def trained(self, steps=3, **options):
        """Ours after some steps."""
        model = exchange.model_of()
        optimizer = self.optimizer(model, **options)
        for step in range(steps):
            exchange.step_with(model, optimizer, step)
        return model, optimizer

    def theirs(self, steps=0):
        model = exchange.model_of()
        optimizer = torch.optim.AdamW(model.parameters(), **OPTIONS)
        for step in range(steps):
            exchange.step_with(model, optimizer, step)
        return model, optimizer

    def assert_same_step(self, one, other, step=3, **tolerance):
        for model, optimizer in one, other:
            exchange.step_with(model, optimizer, step)
        for ours, theirs in zip(one[0].parameters(), other[0].parameters()):
            torch.testing.assert_close(ours, theirs, **(tolerance or NEXT))
    def test_a_state_dict_of_torch_goes_on_here(self):
        theirs = self.theirs(steps=3)
        model = exchange.model_of()
        ours = model, self.optimizer(model)
        model.load_state_dict(theirs[0].state_dict())
        ours[1].load_state_dict(theirs[1].state_dict())
        self.assertEqual(ours[1].committed_step, 3)
        self.assert_same_step(ours, theirs)
        self.assertEqual(ours[1].committed_step, 4)

    def test_a_state_dict_goes_on_in_torch(self):
        ours = self.trained()
        theirs = self.theirs()
        theirs[0].load_state_dict(ours[0].state_dict())
        theirs[1].load_state_dict(ours[1].state_dict())
        self.assertEqual(theirs[1].state[theirs[0][0].weight]["step"], 3)
        self.assert_same_step(ours, theirs)

    def test_weights_that_were_loaded_through_a_wrapper_before_the_states_are_kept(self):
        theirs, model = self.theirs(steps=3), exchange.model_of()
        optimizer = self.optimizer(model)
        exchange.step_with(model, optimizer, 7)
        wrapped = torch.compile(model, backend="eager")
        wrapped.load_state_dict({"_orig_mod." + name: value for name, value in theirs[0].state_dict().items()})
        optimizer.load_state_dict(theirs[1].state_dict())
        self.assert_same_step((model, optimizer), theirs)

    def test_torch_distributed_checkpoint_saves_and_loads_an_optimizer_itself(self):
        model, optimizer = self.trained()
        weights, states = get_state_dict(model, optimizer)
        self.assertEqual(optimizer.committed_step, 3)  # it makes a step of nothing, on others
        dcp.save({"model": weights, "optim": states}, checkpoint_id=self.path("dcp"), no_dist=True)
        other = exchange.model_of()
        theirs = self.optimizer(other, job="fresh")
        weights, states = get_state_dict(other, theirs)  # before its first step: what to load into
        dcp.load({"model": weights, "optim": states}, checkpoint_id=self.path("dcp"), no_dist=True)
        set_state_dict(other, theirs, model_state_dict=weights, optim_state_dict=states)
        self.assertEqual(theirs.job.digest(), optimizer.job.digest())
        self.assert_same_step((model, optimizer), (other, theirs), rtol=0, atol=0)

    def test_a_saved_checkpoint_goes_on_in_torch(self):
        ours = self.trained(states="dyn8")
        saved = ours[1].save(self.path("ours"))
        checkpoint.to_dcp(saved.path, self.path("of-ours"))
        theirs = self.theirs()
        weights, states = get_state_dict(*theirs)
        dcp.load({"model": weights, "optim": states}, checkpoint_id=self.path("of-ours"), no_dist=True)
        set_state_dict(*theirs, model_state_dict=weights, optim_state_dict=states)
        self.assert_same_step(ours, theirs)

    def test_a_directory_of_torch_is_adopted_and_joined(self):
        theirs = self.theirs(steps=3)
        weights, states = get_state_dict(*theirs)
        dcp.save({"model": weights, "optim": states}, checkpoint_id=self.path("of-theirs"), no_dist=True)
        program = os.environ["SHARDMESH_BIN_DIR"] + "/client/cli/shardctl"
        adopted = checkpoint.adopt_dcp(self.path("of-theirs"), self.path("adopted"), name="adopted", shardctl=program,
                                       job={"gradient_format": "FORMAT_FP32", "publish_every": -1})
        shardmesh.connect(self.address).restore(adopted, mesh="fsdp=2")
        model = torch.nn.Sequential(*exchange.model_of())
        torch.nn.init.zeros_(model[0].weight)
        ours = model, self.optimizer(model, job="adopted")
        self.assertEqual(ours[1].committed_step, 3)
        self.assert_same_step(ours, theirs)

    def test_safetensors_of_a_checkpoint_are_the_models(self):
        model, optimizer = self.trained()
        path = os.path.join(optimizer.save(self.path("files")).path, "model.safetensors")
        plain = exchange.model_of()
        self.assertEqual(safetensors.torch.load_model(plain, path), (set(), []))
        for ours, theirs in zip(model.parameters(), plain.parameters()):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
        safetensors.torch.save_model(plain, self.path("plain.safetensors"))
        other = exchange.model_of()
        reader = self.optimizer(other, job="reader")
        safetensors.torch.load_model(other, self.path("plain.safetensors"))
        reader.upload()
        for ours, theirs in zip(model.parameters(), other.parameters()):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=0)

    def test_states_of_torchao_keep_their_codes(self):
        theirs = exchange.model_of()
        coder = torchao.optim.AdamW8bit(theirs.parameters(), **OPTIONS)
        with torch.compiler.set_stance("force_eager"):
            for step in range(2):
                exchange.step_with(theirs, coder, step)
        model = exchange.model_of()
        optimizer = self.optimizer(model, states="dyn8")
        model.load_state_dict(theirs.state_dict())
        optimizer.load_state_dict(coder.state_dict())
        saved = safetensors.torch.load_file(os.path.join(optimizer.save(self.path("quantized")).path, "states.safetensors"))
        for state in "exp_avg", "exp_avg_sq":
            quantized = coder.state[theirs[0].weight][state]
            torch.testing.assert_close(saved[f"0.weight.{state}"].view(torch.uint8).reshape(-1), quantized.codes.reshape(-1))
            torch.testing.assert_close(saved[f"0.weight.{state}.scales"].reshape(-1), quantized.scale.reshape(-1), rtol=0, atol=0)
    def test_full_state_dicts_of_fsdp2_both_ways(self):
        folder = self.path("fsdp")
        os.mkdir(folder)
        ours = self.trained(steps=2)
        torch.save(get_state_dict(*ours), folder + "/ours.pt")
        subprocess.run([sys.executable, exchange.__file__, folder], check=True, timeout=120)
        exchange.step_with(*ours, 2)
        self.assert_weights(ours[0], folder + "/after.pt")

        weights, states = torch.load(folder + "/theirs.pt", weights_only=True)
        model = exchange.model_of()
        optimizer = self.optimizer(model, job="of-fsdp")
        shardmesh.torch.load_state_dict(model, weights)
        # By names, in whatever order.
        states["param_groups"][0]["params"].reverse()
        optimizer.load_state_dict(states)
        exchange.step_with(model, optimizer, 2)
        self.assert_weights(model, folder + "/next.pt")

    def assert_weights(self, model, path):
        theirs = torch.load(path, weights_only=True)
        for name, value in model.state_dict().items():
            torch.testing.assert_close(value, theirs[name], rtol=0, atol=1e-7)


if __name__ == "__main__":
    unittest.main()
