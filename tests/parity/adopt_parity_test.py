#!/usr/bin/env python3
"""Runs of torch and torchao become jobs with their optimizer states: what torch.distributed.checkpoint saved, by one process
and by two ranks of FSDP2, adopted, restored on two workers, saved, and read by torch again, bit for bit; and three ways to go
on: uninterrupted, with the states, with the weights alone."""
import json
import os
import subprocess
import sys
import unittest

import service

if service.BIN:
    import numpy as np
    import safetensors.torch
    import torch
    import torch.distributed.checkpoint as dcp
    import torchao.optim
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

    from shardmesh import checkpoint, errors, numerics

FSDP = os.path.join(os.path.dirname(os.path.abspath(__file__)), "fsdp_saver.py")


def model_of(seed, dtype=None):
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.LayerNorm(128), torch.nn.Linear(128, 32)).to(dtype)


def adamw(model, **values):
    matrices = [p for p in model.parameters() if p.dim() == 2]
    return torch.optim.AdamW([{"params": matrices, "weight_decay": 0.125}, {"params": [p for p in model.parameters() if p.dim() == 1]}],
                             **{"lr": 0.03125, "betas": (0.75, 0.875), "weight_decay": 0.0, **values})


def train(model, optimizer, steps):
    for step in steps:
        data = torch.randn(16, 64, generator=torch.Generator().manual_seed(step)).to(next(model.parameters()).dtype)
        model(data).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


class Adopt(service.ServiceTest):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        torch.compiler.set_stance("force_eager")  # torchao compiles its step, which takes minutes
        cls.addClassCleanup(torch.compiler.set_stance, "default")

    def at(self, name):
        return self.path(self.id().rpartition(".")[2] + "-" + name)

    def save(self, model, optimizer, name, **options):
        weights, states = get_state_dict(model, optimizer, options=StateDictOptions(**options))
        dcp.save({"model": weights, "optim": states}, checkpoint_id=self.at(name), no_dist=True)
        return self.at(name)

    def adopt(self, directory, name="job", **options):
        return checkpoint.adopt_dcp(directory, self.at(name), name=self.id().rpartition("_")[2] + "-" + name,
                                    shardctl=service.SHARDCTL, **options)

    def restored(self, adopted, mesh="fsdp=2"):
        """The directory for torch of a job that was restored from there, and saved."""
        job = self.shardctl("restore", adopted, "--mesh", mesh)
        saved = self.shardctl("checkpoint", job["job"], adopted + "-saved")
        self.assertEqual(saved["digest"], job["digest"])
        for file in ("model.safetensors", "states.safetensors"):
            with open(f"{adopted}/{file}", "rb") as ours, open(f"{saved['path']}/{file}", "rb") as theirs:
                self.assertEqual(ours.read(), theirs.read(), file)
        self.shardctl("delete", job["job"])
        checkpoint.to_dcp(saved["path"], adopted + "-dcp")
        return adopted + "-dcp"

    def load(self, directory, model, optimizer):
        weights, states = get_state_dict(model, optimizer)
        everything = {"model": weights, "optim": states}
        dcp.load(everything, checkpoint_id=directory, no_dist=True)
        set_state_dict(model, optimizer, model_state_dict=everything["model"], optim_state_dict=everything["optim"])

    def assert_same(self, ours, our_optimizer, theirs, their_optimizer):
        for (name, a), b in zip(ours.named_parameters(), theirs.parameters()):
            self.assertTrue(torch.equal(a, b), name)
            self.assertEqual(set(our_optimizer.state[a]), set(their_optimizer.state[b]))
            for key, value in their_optimizer.state[b].items():
                self.assertTrue(torch.equal(our_optimizer.state[a][key], value), f"{name}.{key}")
        for a, b in zip(our_optimizer.param_groups, their_optimizer.param_groups):
            for key in ("lr", "betas", "eps", "weight_decay", "amsgrad", "momentum", "nesterov", "dampening", "maximize"):
                self.assertEqual(a.get(key), b.get(key), key)

    def there_and_back(self, make, dtype=None, **options):
        model = model_of(1, dtype)
        optimizer = make(model)
        train(model, optimizer, range(3))
        adopted = self.adopt(self.save(model, optimizer, "dcp"), **options)
        self.assertTrue(adopted.endswith("step-0000000000003"), adopted)
        directory = self.restored(adopted)
        again = model_of(2, dtype)
        with_states = make(again)
        self.load(directory, again, with_states)
        self.assert_same(again, with_states, model, optimizer)
        alone = model_of(3, dtype)
        alone.load_state_dict(model.state_dict())
        without_states = make(alone)
        for each, its_optimizer in (model, optimizer), (again, with_states), (alone, without_states):
            train(each, its_optimizer, range(3, 6))
        self.assert_same(again, with_states, model, optimizer)
        self.assertFalse(any(torch.equal(a, b) for a, b in zip(alone.parameters(), model.parameters())))

    def test_adamw(self):
        self.there_and_back(adamw)

    def test_amsgrad_and_adam(self):
        self.there_and_back(lambda model: torch.optim.Adam(model.parameters(), lr=0.03125, amsgrad=True, weight_decay=0.5))

    def test_sgd(self):
        def sgd(model):
            return torch.optim.SGD(model.parameters(), lr=0.03125, momentum=0.875, nesterov=True)

        self.there_and_back(sgd, step=3)
        with self.assertRaisesRegex(errors.InvalidArgument, "say step=N"):
            self.adopt(self.at("dcp"), "no")

    def test_bf16(self):
        self.there_and_back(adamw, torch.bfloat16)

    def test_states_of_two_types(self):
        model = model_of(1)
        optimizer = adamw(model)
        train(model, optimizer, range(3))
        state = optimizer.state[model[0].weight]
        state["exp_avg"] = state["exp_avg"].bfloat16()
        adopted = self.adopt(self.save(model, optimizer, "dcp"))
        stored = safetensors.torch.load_file(adopted + "/states.safetensors")
        self.assertTrue(torch.equal(stored["0.weight.exp_avg"], state["exp_avg"].float()))
        self.assertTrue(torch.equal(stored["0.weight.exp_avg_sq"], state["exp_avg_sq"]))

    def test_the_next_step_is_torchs(self):
        """numerics.Step from what was adopted, beside torch's own next step."""
        model = model_of(1)
        optimizer = adamw(model)
        train(model, optimizer, range(3))
        adopted = self.adopt(self.save(model, optimizer, "dcp"))
        weight = safetensors.torch.load_file(adopted + "/model.safetensors")["2.weight"].numpy()
        states = safetensors.torch.load_file(adopted + "/states.safetensors")
        data = torch.randn(16, 64, generator=torch.Generator().manual_seed(3))
        model(data).square().mean().backward()
        gradient = model[2].weight.grad.clone().numpy()
        optimizer.step()
        results = []
        for with_states in (True, False):
            step = numerics.Step("AdamW", weights="fp32", states="fp32", lr=0.03125, betas=(0.75, 0.875), weight_decay=0.125)
            state = step.init(weight)
            for name in ("exp_avg", "exp_avg_sq") if with_states else ():
                state.parts[name]["codes"] = states[f"2.weight.{name}"].numpy().copy()
            step.apply(state, gradient, step=4)
            results.append(np.abs(state.weights - model[2].weight.detach().numpy()).max())
        self.assertLess(results[0], 1e-7)
        self.assertGreater(results[1], 1e-3)

    def test_other_formats(self):
        model = model_of(1)
        optimizer = adamw(model)
        train(model, optimizer, range(3))
        directory = self.save(model, optimizer, "dcp")
        exact = safetensors.torch.load_file(self.adopt(directory, "exact") + "/states.safetensors")
        for format in ("bf16_sr", "dyn8", "dyn4", "fp8", "fp8x32"):
            with self.subTest(format):
                written = self.restored(self.adopt(directory, format, states=format, weights="bf16+16"))
                values = dcp.FileSystemReader(written).read_metadata().state_dict_metadata
                read = {name: torch.empty(entry.size, dtype=entry.properties.dtype) for name, entry in values.items()
                        if name.endswith((".exp_avg", ".exp_avg_sq"))}
                self.assertEqual(len(read), 12)
                dcp.load(read, checkpoint_id=written, no_dist=True)
                for name, value in read.items():
                    original = exact[name.removeprefix("optim.state.")]
                    self.assertTrue(torch.allclose(value, original, rtol=0.01 if format == "bf16_sr" else 0.3,
                                                   atol=0.1 * original.abs().max()), name)
                    self.assertFalse(torch.equal(value, original), name)

    def assert_codes(self, adopted, state_of, format):
        """`state_of`: a parameter's name to torchao's states of the whole tensor."""
        with open(adopted + "/manifest.json", encoding="utf-8") as file:
            parameters = {p["name"]: p["states"] for p in json.load(file)["job"]["parameters"]}
        stored = safetensors.torch.load_file(adopted + "/states.safetensors")
        for name, states in state_of.items():
            quantized = hasattr(states["exp_avg"], "codes")
            self.assertEqual(parameters[name], "STATE_FORMAT_" + (format.upper() if quantized else "FP32"), name)
            for key in ("exp_avg", "exp_avg_sq"):
                codes = states[key].codes if quantized else states[key]
                self.assertTrue(torch.equal(stored[f"{name}.{key}"].view(torch.uint8), codes.view(torch.uint8)), f"{name}.{key}")
                if quantized:
                    self.assertTrue(torch.equal(stored[f"{name}.{key}.scales"], states[key].scale), f"{name}.{key}")

    def test_torchao(self):
        for format in ("dyn8", "dyn4", "fp8"):
            with self.subTest(format):
                kind = {"dyn8": torchao.optim.AdamW8bit, "dyn4": torchao.optim.AdamW4bit, "fp8": torchao.optim.AdamWFp8}[format]
                model = model_of(1)
                optimizer = kind(model.parameters(), lr=0.03125)
                train(model, optimizer, range(3))
                directory = self.save(model, optimizer, format + "-dcp")
                with self.assertRaisesRegex(errors.InvalidArgument, 'optimizer="adamw"'):
                    self.adopt(directory, "no")
                adopted = self.adopt(directory, format, optimizer="adamw")
                states = {name: optimizer.state[value] for name, value in model.named_parameters()}
                self.assert_codes(adopted, states, format)
                self.assertTrue(hasattr(states["0.weight"]["exp_avg"], "codes"))
                again = model_of(2)
                their = torch.optim.AdamW(again.parameters())
                self.load(self.restored(adopted), again, their)
                for name, value in again.named_parameters():
                    for key in ("exp_avg", "exp_avg_sq"):
                        ours, theirs = their.state[value][key], states[name][key]
                        theirs = theirs.dequantize() if hasattr(theirs, "codes") else theirs
                        self.assertTrue(torch.allclose(ours, theirs, rtol=1e-6, atol=0), f"{name}.{key}")
                decoded = safetensors.torch.load_file(self.adopt(directory, format + "-fp32", optimizer="adamw", states="fp32")
                                                      + "/states.safetensors")
                self.assertTrue(torch.equal(decoded["0.weight.exp_avg"], states["0.weight"]["exp_avg"].dequantize()))

    def test_torchao_that_means_something_else(self):
        model = model_of(1)
        for name, options, words in (("blocks", {"block_size": 128}, "a scale for 128 elements"), ("levels", {}, "other levels")):
            optimizer = torchao.optim.AdamW8bit(model.parameters(), lr=0.03125, weight_decay=0, **options)
            train(model, optimizer, range(3))
            if name == "levels":
                optimizer.state[model[0].weight]["exp_avg"].qmap[3] *= 1.01
            directory = self.save(model, optimizer, name)
            with self.assertRaisesRegex(errors.InvalidArgument, words + '.*states="fp32"'):
                self.adopt(directory, "no-" + name)
            self.restored(self.adopt(directory, name + "-fp32", states="fp32"))

    def fsdp(self, kind, *shapes):
        """Two ranks of FSDP2 that train, and save; with what each had of each state."""
        directory = self.at("-".join(map(str, [kind, *shapes])))
        done = subprocess.run([sys.executable, FSDP, kind, directory, *map(str, shapes)], capture_output=True, text=True, timeout=300)
        self.assertEqual(done.returncode, 0, done.stderr)
        return directory, [torch.load(f"{directory}.rank{rank}", weights_only=False) for rank in range(2)]

    def test_fsdp2_adamw(self):
        directory, ranks = self.fsdp("AdamW", 64, 33, 9)
        adopted = self.adopt(directory)
        written = self.restored(adopted)
        model = safetensors.torch.load_file(adopted + "/model.safetensors")
        states = safetensors.torch.load_file(adopted + "/states.safetensors")
        for name, value in model.items():
            self.assertTrue(torch.equal(value, torch.cat([rank["model"][name] for rank in ranks])), name)
            for key in ("exp_avg", "exp_avg_sq"):
                whole = torch.cat([rank["states"][name][key] for rank in ranks])
                self.assertTrue(torch.equal(states[f"{name}.{key}"], whole), f"{name}.{key}")
                back = {f"optim.state.{name}.{key}": torch.empty_like(whole)}
                dcp.load(back, checkpoint_id=written, no_dist=True)
                self.assertTrue(torch.equal(back.popitem()[1], whole))

    def test_fsdp2_torchao(self):
        directory, ranks = self.fsdp("AdamW8bit", 64, 256, 128)
        adopted = self.adopt(directory, optimizer="adamw")
        self.restored(adopted)
        stored = safetensors.torch.load_file(adopted + "/states.safetensors")
        quantized = 0
        for name in ranks[0]["model"]:
            for key in ("exp_avg", "exp_avg_sq"):
                parts = [rank["states"][name][key] for rank in ranks]
                if not hasattr(parts[0], "codes"):
                    continue
                quantized += 1
                self.assertTrue(torch.equal(stored[f"{name}.{key}"], torch.cat([part.codes for part in parts])), name)
                self.assertTrue(torch.equal(stored[f"{name}.{key}.scales"], torch.cat([part.scale for part in parts])), name)
        self.assertGreaterEqual(quantized, 4)

    def test_fsdp2_torchao_with_shards_of_two_kinds(self):
        directory, ranks = self.fsdp("AdamW8bit", 256, 33, 33)  # of 33 rows one rank has 17, the other 16: 4352 and 4096 elements
        small, _ = self.fsdp("AdamW8bit", 240, 33, 33)  # 4080 elements of one rank, 3840 of the other: not quantized
        self.restored(self.adopt(small, "small", optimizer="adamw"))
        self.restored(self.adopt(directory, "quantized", optimizer="adamw"))
        mixed, ranks = self.fsdp("AdamW8bit", 2176, 7, 7)  # 4 rows are quantized, 3 are no whole blocks
        self.assertNotEqual(*(hasattr(rank["states"]["0.weight"]["exp_avg"], "codes") for rank in ranks))
        with self.assertRaisesRegex(errors.InvalidArgument, 'quantized on some ranks and not on others.*states="fp32"'):
            self.adopt(mixed, "no", optimizer="adamw")
        self.restored(self.adopt(mixed, "mixed", optimizer="adamw", states="fp32"))

    def test_ways_to_save_an_optimizer(self):
        model = model_of(1)
        optimizer = adamw(model)
        train(model, optimizer, range(3))
        wanted = self.adopt(self.save(model, optimizer, "nested"), "a")
        flat = self.adopt(self.save(model, optimizer, "flat", flatten_optimizer_state_dict=True), "b")
        dcp.save({"model": model.state_dict(), "optim": optimizer.state_dict()}, checkpoint_id=self.at("numbers"), no_dist=True)
        with self.assertRaisesRegex(errors.InvalidArgument, r"say parameters=\[...\]"):
            self.adopt(self.at("numbers"), "no")
        order = ["0.weight", "2.weight", "0.bias", "1.weight", "1.bias", "2.bias"]
        numbers = self.adopt(self.at("numbers"), "c", parameters=order)
        wrapped = {"_orig_mod." + name: value for name, value in model.state_dict().items()}
        named = optimizer.state_dict()
        for group in named["param_groups"]:
            group["param_names"] = ["_orig_mod." + order[number] for number in group["params"]]
        dcp.save({"model": wrapped, "optim": named}, checkpoint_id=self.at("named"), no_dist=True)
        names = self.adopt(self.at("named"), "d")
        with open(names + "/manifest.json", encoding="utf-8") as file:
            self.assertEqual(json.load(file)["job"]["parameters"][0]["given"], "_orig_mod.0.weight")
        for other in (flat, numbers, names):
            for file in ("model.safetensors", "states.safetensors"):
                with open(f"{wanted}/{file}", "rb") as ours, open(f"{other}/{file}", "rb") as theirs:
                    self.assertEqual(ours.read(), theirs.read(), other)

    def test_ties(self):
        torch.manual_seed(1)
        model = torch.nn.ModuleDict({"embed": torch.nn.Embedding(32, 16), "head": torch.nn.Linear(16, 32, bias=False)})
        model["head"].weight = model["embed"].weight
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.03125)
        for step in range(3):
            model["head"](model["embed"](torch.arange(32))).square().mean().backward()
            optimizer.step()
        directory = self.save(model, optimizer, "dcp")
        with self.assertRaisesRegex(errors.InvalidArgument, "ties={'head.weight': 'embed.weight'}"):
            self.adopt(directory)
        written = self.restored(self.adopt(directory, ties={"head.weight": "embed.weight"}))
        keys = dcp.FileSystemReader(written).read_metadata().state_dict_metadata
        self.assertIn("model.head.weight", keys)
        self.assertIn("optim.state.embed.weight.exp_avg", keys)

    def test_what_a_job_has_not(self):
        model = model_of(1)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.03125)
        train(model, optimizer, range(3))
        optimizer.state[model[2].bias]["step"] += 1
        with self.assertRaisesRegex(errors.InvalidArgument, "'2.bias' was stepped 4 times, '0.weight' 3"):
            self.adopt(self.save(model, optimizer, "steps"))
        self.restored(self.adopt(self.at("steps"), "frozen", frozen=["2.bias"]))
        model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8))
        other = torch.optim.RMSprop(model.parameters())
        with self.assertRaisesRegex(errors.InvalidArgument, "num_batches_tracked.*skip_others=True"):
            self.adopt(self.save(model, other, "rmsprop"))
        with self.assertRaisesRegex(errors.InvalidArgument, "no optimizer that jobs have"):
            model = torch.nn.Linear(8, 8)
            self.adopt(self.save(model, torch.optim.Adagrad(model.parameters()), "adagrad"))
        dcp.save({"model": model.state_dict()}, checkpoint_id=self.at("weights"), no_dist=True)
        with self.assertRaisesRegex(errors.InvalidArgument, "no optim.param_groups"):
            self.adopt(self.at("weights"))
        with self.assertRaisesRegex(errors.InvalidArgument, "is no directory of torch.distributed.checkpoint"):
            self.adopt(self.at("nothing"))
        with self.assertRaisesRegex(errors.NotFound, "no program"):
            checkpoint.adopt_dcp(self.at("weights"), self.at("job"), name="job", shardctl="/nowhere/shardctl")
        model = model_of(1)
        optimizer = adamw(model)
        train(model, optimizer, range(3))
        adopted = self.adopt(self.save(model, optimizer, "twice"), "twice-job")
        self.assertEqual(self.adopt(self.at("twice"), "twice-job"), adopted)  # the same bits
        self.assertEqual([name for name in os.listdir(self.folder) if name.startswith(".adopt")], [])
        self.assertEqual(sorted(os.listdir(adopted)), ["manifest.json", "model.safetensors", "states.safetensors"])


if __name__ == "__main__":
    unittest.main()
