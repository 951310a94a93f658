#!/usr/bin/env python3
"""Errors of checkpoints and versions that say what to do: each is provoked, and its advice followed."""
import json
import os
import sys
import unittest

import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
import torch.distributed.checkpoint.state_dict
from shardmesh import checkpoint, connect, errors
from shardmesh.torch import follow
from torch import nn
from torch.distributed.tensor import Shard, distribute_tensor

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
import service  # noqa: E402
import torch_mesh  # noqa: E402
from advice import NUMBERS, AdviceTest, Net, Run  # noqa: E402


class Counting(Net):
    """With a buffer."""

    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.zeros(2))


class FilesTest(AdviceTest):
    def setUp(self):
        self.run_of = Run(self, Counting(), {"momentum": 0.5})
        self.run_of.backward_and_step()

    def follow_table(self, *table):
        for number, (said, error, wrong, right) in enumerate(table):
            with self.subTest(f"{number}: {said}"):
                with self.assertRaises(error) as raised:
                    wrong()
                self.assertIn(said, str(raised.exception))
                right()

    def test_resuming(self):
        r, folder = self.run_of, self.path(self.id())

        def resumed(of=None, params=None, **options):
            Run(self, of or Counting(), {"momentum": 0.5, "resume": folder, **options}, params).train()

        def save():
            r.optimizer.save(folder)
            resumed()

        self.follow_table(
            ("optimizer.save() writes one there", errors.NotFound, resumed, save),
            ("make it as that job's was", errors.InvalidArgument, lambda: resumed(momentum=0.25), resumed),
            ("make it with the model", errors.InvalidArgument, lambda: resumed(params=list(Counting().named_parameters())), resumed),
            ("or with model=", errors.InvalidArgument, lambda: resumed(params=list(Counting().named_parameters())),
             lambda: resumed(model := Counting(), list(model.named_parameters()), model=model)),
            ("not in the checkpoint: more.weight", errors.InvalidArgument, lambda: resumed(with_more(Counting())), resumed),
            ("not in the checkpoint: other", errors.InvalidArgument, lambda: resumed(with_buffer(Counting(), "other")), resumed),
        )

    def test_saving(self):
        r, folder = self.run_of, self.path(self.id())

        def another(buffer):
            model = Counting()
            model.register_buffer("strange", torch.ones(2, 2).to_sparse())
            r.model = model
            r.again()
            buffer(model)
            r.backward_and_step()
            r.optimizer.save(folder + buffer.__name__)

        def without(model):
            model.register_buffer("strange", model.strange, persistent=False)

        def converted(model):
            model.strange = model.strange.to_dense()

        def as_it_is(model):
            pass

        self.follow_table(
            ("register them with persistent=False", errors.InvalidArgument, lambda: another(as_it_is), lambda: another(without)),
            ("or convert them", errors.InvalidArgument, lambda: another(as_it_is), lambda: another(converted)),
        )

    def test_checkpoints_elsewhere(self):
        r, folder, place = self.run_of, self.path(self.id()), self.path(self.id() + "-remote")
        saved = r.optimizer.save(folder).path
        full = self.path(self.id() + "-full")
        os.mkdir(full)
        with open(os.path.join(full, "x"), "w", encoding="utf-8"):
            pass
        self.follow_table(
            ("name a folder like step-", errors.InvalidArgument, lambda: checkpoint.upload(folder, place),
             lambda: checkpoint.upload(saved, place)),
            ("a folder that is not there", errors.AlreadyExists, lambda: checkpoint.to_dcp(saved, full),
             lambda: checkpoint.to_dcp(saved, os.path.join(full, "dcp"))),
            ("or is empty", errors.AlreadyExists, lambda: checkpoint.to_dcp(saved, full),
             lambda: (os.remove(os.path.join(full, "x")), os.rename(os.path.join(full, "dcp"), full + "-dcp"),
             checkpoint.to_dcp(saved, full))),
            ('"float", "stored" or "none"', errors.InvalidArgument, lambda: checkpoint.to_dcp(saved, full + "-none", states="no"),
             lambda: checkpoint.to_dcp(saved, full + "-none", states="none")),
            ("its names begin with: model, optim", errors.InvalidArgument,
             lambda: checkpoint.from_dcp(full, full + "-weights", prefix="module."),
             lambda: checkpoint.from_dcp(full, full + "-weights", prefix="model.")),
        )
        manifest = os.path.join(saved, "manifest.json")
        with open(manifest, encoding="utf-8") as file:
            told = json.load(file)
        del told["job"]["parameters"]
        with open(manifest, "w", encoding="utf-8") as file:
            json.dump(told, file)
        states = os.path.join(saved, "states.safetensors")
        safetensors.torch.save_file({name: tensor.to(torch.uint8) for name, tensor in safetensors.torch.load_file(states).items()}, states)
        self.follow_table(*(
            (f'states="{states}"', errors.InvalidArgument, lambda: checkpoint.to_dcp(saved, full + "-quantized"),
             lambda states=states: checkpoint.to_dcp(saved, full + "-quantized-" + states, states=states)) for states in ("stored", "none")))

    def adopt(self, everything, **options):
        """What torch saved, as a job."""
        directory = f"{self.path(self.id())}-{next(NUMBERS)}"
        dcp.save(everything, checkpoint_id=directory, no_dist=True)
        options = {"shardctl": service.SHARDCTL, "ties": {}, **options}
        checkpoint.adopt_dcp(directory, directory + "-job", name="job", **options)

    def test_adopting(self):
        model, optimizer = trained(torch.optim.AdamW)
        names = list(model.state_dict())
        weights, states = dcp.state_dict.get_state_dict(model, optimizer)
        whole = {"model": weights, "optim": states}
        more = {"model": {**weights, "ids": torch.arange(3)}, "optim": states}
        numbered = {"model": weights, "optim": optimizer.state_dict()}
        undecided = {"model": weights, "optim": {**states, "param_groups": [
            {**group, "decoupled_weight_decay": None} for group in states["param_groups"]]}}
        for group in undecided["optim"]["param_groups"]:
            del group["decoupled_weight_decay"]
        without = {"model": weights, "optim": {**states, "state": {name: states["state"][name] for name in names[:-1]}}}
        uneven = {"model": weights, "optim": {**states, "state": {
            name: {**of, "step": of["step"] + (name == names[0])} for name, of in states["state"].items()}}}
        sgd, its_optimizer = trained(torch.optim.SGD, lr=0.1, momentum=0.5)
        of_sgd = dict(zip(("model", "optim"), dcp.state_dict.get_state_dict(sgd, its_optimizer)))
        alone = self.path(self.id())
        dcp.save({"model": weights}, checkpoint_id=alone, no_dist=True)
        wrong = errors.InvalidArgument
        self.follow_table(
            ("from_dcp reads weights alone", wrong, lambda: self.adopt({"model": weights}),
             lambda: checkpoint.from_dcp(alone, alone + "-weights")),
            ("skip_others=True leaves them out", wrong, lambda: self.adopt(more), lambda: self.adopt(more, skip_others=True)),
            ("say shardctl=, its path", errors.NotFound, lambda: self.adopt(whole, shardctl="/nowhere/shardctl"),
             lambda: self.adopt(whole)),
            ("say ties={", wrong, lambda: self.adopt(whole, ties=None),
             lambda: self.adopt({"model": weights, "optim": states}, ties=dict(zip(names[2:], names)))),
            ("if they are not, ties={}", wrong, lambda: self.adopt(whole, ties=None), lambda: self.adopt(whole, ties={})),
            ("one of adamw, adam, or None", wrong, lambda: self.adopt(whole, optimizer="sgd"), lambda: self.adopt(whole, optimizer=None)),
            ("if it is not trained, name it in frozen", wrong, lambda: self.adopt(without), lambda: self.adopt(without, frozen=names[-1:])),
            ("name what is not trained in frozen", wrong, lambda: self.adopt(uneven), lambda: self.adopt(uneven, frozen=names[:1])),
            ("say step=N", wrong, lambda: self.adopt(of_sgd), lambda: self.adopt(of_sgd, step=1)),
            ("say parameters=[...]", wrong, lambda: self.adopt(numbered), lambda: self.adopt(numbered, parameters=names)),
            ("or save what get_state_dict returns", wrong, lambda: self.adopt(numbered), lambda: self.adopt(whole)),
            ('say optimizer="adamw" or "adam"', wrong, lambda: self.adopt(undecided), lambda: self.adopt(undecided, optimizer="adamw")),
            ('or "adam"', wrong, lambda: self.adopt(undecided), lambda: self.adopt(undecided, optimizer="adam")),
        )

    def test_versions(self):
        r = self.run_of
        r.again(gather="int8_row")
        r.backward_and_step()
        job = connect(self.address).job(r.optimizer._started.name)
        job.publish()
        version = job.pull()
        bias = version["layers.0.bias"]
        kept, old = job.hold(), job.hold()
        old.close()
        with torch.device("meta"):
            empty = Counting()
        sharded = Counting()
        with torch_mesh.as_rank(0, 1):
            mesh = torch_mesh.create((1,), ("fsdp",), [0])
            sharded.embed.weight = nn.Parameter(distribute_tensor(sharded.embed.weight.detach(), mesh, [Shard(0)]))

        def followed(model):
            follow(model, service=self.address, job=r.optimizer._started.name).close()

        self.follow_table(
            ("take decode()", errors.InvalidArgument, lambda: version["embed.weight"], lambda: version.decode("embed.weight")),
            ("or its parts codes, scales", errors.InvalidArgument, lambda: version["embed.weight"],
             lambda: self.assertEqual(set(version.tensor("embed.weight").parts), {"codes", "scales"})),
            ("take arrays of it, which keep it, while it is held", errors.FailedPrecondition, lambda: old["layers.0.bias"],
             lambda: self.kept(kept, bias)),
            ("give it memory first", errors.InvalidArgument, lambda: version.load_into(empty),
             lambda: version.load_into(empty.to_empty(device="cpu"))),
            ("load into a module that is not sharded", errors.InvalidArgument, lambda: version.load_into(sharded),
             lambda: version.load_into(Counting())),
            ("follow a module that is not sharded", errors.InvalidArgument, lambda: followed(sharded), lambda: followed(Counting())),
            ("one of any, attached, pulled", errors.InvalidArgument, lambda: job.hold(way="mapped"),
             lambda: job.hold(way="attached").close()),
            ("chosen by one of them", errors.InvalidArgument, lambda: job.pull(exact=1, latest=True), lambda: job.pull(exact=version.step)),
        )
        for name, parameter in empty.named_parameters():
            self.assertTrue(torch.equal(parameter, torch.from_numpy(version.decode(name))), name)

    def kept(self, version, wanted):
        array = version["layers.0.bias"]
        version.close()
        self.assertEqual(array.tolist(), wanted.tolist())


def trained(kind, **options):
    """Two layers of the same weights, and torch's optimizer of them after a step."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    optimizer = kind(model.parameters(), **options)
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    with torch.no_grad():
        model[0].bias.copy_(torch.arange(4))
    model[1].load_state_dict(model[0].state_dict())
    return model, optimizer


def with_more(model):
    model.more = nn.Linear(8, 8)
    return model


def with_buffer(model, name):
    model.register_buffer(name, torch.zeros(2))
    return model


if __name__ == "__main__":
    unittest.main()
