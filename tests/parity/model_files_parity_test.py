#!/usr/bin/env python3
"""Models that the real `transformers` and `safetensors` packages wrote become jobs, and what jobs write is loaded by them,
bit for bit: five architectures with random weights, one file and several, through `shardctl import`, `export` and
`checkpoint`."""
import os
import unittest

import service

os.environ.setdefault("HF_HUB_OFFLINE", "1")

if service.BIN:
    import safetensors.torch
    import shardmesh.checkpoint
    import torch
    import transformers


def configurations():
    small = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
    return {
        "gpt2": transformers.GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=101, n_positions=24),
        "llama": transformers.LlamaConfig(**small, num_key_value_heads=2, vocab_size=97),
        "bert": transformers.BertConfig(**small, vocab_size=103, max_position_embeddings=24),
        "t5": transformers.T5Config(d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, vocab_size=89),
        "mixtral": transformers.MixtralConfig(**small, num_key_value_heads=2, vocab_size=83, num_local_experts=4),
    }


def model_class(name):
    return {
        "gpt2": transformers.GPT2LMHeadModel,
        "llama": transformers.LlamaForCausalLM,
        "bert": transformers.BertForMaskedLM,
        "t5": transformers.T5ForConditionalGeneration,
        "mixtral": transformers.MixtralForCausalLM,
    }[name]


def bits(tensor):
    return tensor.contiguous().view(torch.uint8) if tensor.dim() else tensor.reshape(1).view(torch.uint8)


class ModelFiles(service.ServiceTest):
    def assert_same(self, ours, theirs):
        self.assertEqual(set(ours), set(theirs))
        for name, tensor in theirs.items():
            self.assertEqual(ours[name].dtype, tensor.dtype, name)
            self.assertEqual(ours[name].shape, tensor.shape, name)
            self.assertTrue(torch.equal(bits(ours[name]), bits(tensor)), name)

    def load(self, folder):
        tensors = {}
        for file in sorted(os.listdir(folder)):
            if file.endswith(".safetensors"):
                tensors.update(safetensors.torch.load_file(os.path.join(folder, file)))
        return tensors

    def round_trip(self, name, dtype, shard_size):
        torch.manual_seed(7)
        model = model_class(name)(configurations()[name]).to(dtype)
        job = f"{name}-{str(dtype).split('.')[1]}-{len(shard_size)}"
        saved, exported = self.path(job + "-saved"), self.path(job + "-exported")
        model.save_pretrained(saved, max_shard_size=shard_size)
        several = len([file for file in os.listdir(saved) if file.endswith(".safetensors")]) > 1
        self.assertEqual(several, shard_size != "5GB", os.listdir(saved))
        self.shardctl("import", saved, "--name", job, "--mesh", "fsdp=2")
        gigabytes = 20e-6 if several else 5
        self.shardctl("export", job, exported, "--like", saved, "--file-gigabytes", gigabytes)
        self.assert_same(self.load(exported), self.load(saved))
        again = model_class(name).from_pretrained(exported)
        self.assert_same(again.state_dict(), model_class(name).from_pretrained(saved).state_dict())
        self.assert_same(again.to(dtype).state_dict(), model.state_dict())
        return job, model, saved

    def test_five_architectures_one_file(self):
        for name in configurations():
            with self.subTest(name):
                job, _, saved = self.round_trip(name, torch.float32, "5GB")
                checkpoint = self.shardctl("checkpoint", job, self.path(job + "-checkpoints"))
                self.assert_same(safetensors.torch.load_file(checkpoint["path"] + "/model.safetensors"), self.load(saved))
                self.there_and_back(job, checkpoint, saved)

    def there_and_back(self, job, checkpoint, saved):
        """Through another place, and through torch.distributed.checkpoint."""
        url = "file://" + self.path(job + "-remote")
        shardmesh.checkpoint.upload(checkpoint["path"], url)
        fetched = shardmesh.checkpoint.download(url, self.path(job + "-fetched"))
        restored = self.shardctl("restore", fetched, "--job", job + "-restored", "--mesh", "fsdp=1")
        self.assertEqual(restored["digest"], checkpoint["digest"])
        shardmesh.checkpoint.to_dcp(checkpoint["path"], self.path(job + "-dcp"))
        shardmesh.checkpoint.from_dcp(self.path(job + "-dcp"), self.path(job + "-from-dcp"))
        self.assert_same(self.load(self.path(job + "-from-dcp")), self.load(saved))

    def test_five_architectures_several_files_of_bf16(self):
        for name in configurations():
            with self.subTest(name):
                self.round_trip(name, torch.bfloat16, "20KB")

    def test_half(self):
        self.round_trip("gpt2", torch.float16, "5GB")

    def test_names_of_a_compiled_model_come_back(self):
        torch.manual_seed(3)
        model = torch.compile(transformers.GPT2LMHeadModel(configurations()["gpt2"]))
        state = {name: tensor.clone() for name, tensor in model.state_dict().items() if not name.endswith("lm_head.weight")}
        self.assertTrue(all(name.startswith("_orig_mod.") for name in state))
        os.mkdir(self.path("compiled"))
        safetensors.torch.save_file(state, self.path("compiled/model.safetensors"), metadata={"format": "pt"})
        self.shardctl("import", self.path("compiled"), "--name", "compiled", "--mesh", "fsdp=2",
                      "--tie", "_orig_mod.lm_head.weight=_orig_mod.transformer.wte.weight")
        self.shardctl("export", "compiled", self.path("compiled-like"), "--like", self.path("compiled"))
        self.assert_same(self.load(self.path("compiled-like")), state)
        saved = self.shardctl("checkpoint", "compiled", self.path("compiled-checkpoints"))
        self.shardctl("delete", "compiled")
        self.shardctl("restore", saved["path"], "--mesh", "fsdp=1")
        self.shardctl("export", "compiled", self.path("original"), "--original-names")
        self.assert_same(self.load(self.path("original")), state)
        self.shardctl("export", "compiled", self.path("canonical"), "--every-name")
        plain = {name[len("_orig_mod."):]: tensor for name, tensor in state.items()}
        plain["lm_head.weight"] = plain["transformer.wte.weight"]
        self.assert_same(self.load(self.path("canonical")), plain)


if __name__ == "__main__":
    unittest.main()
