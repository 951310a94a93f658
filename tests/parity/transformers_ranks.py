"""The program of transformers_parity_test.py: trains tiny models of transformers with DDP and with the service.

Usage: transformers_ranks.py COORDINATOR FOLDER. Reports for each architecture the losses of each run, which are means over the
slots of a step, and the job's digests.
"""
import functools
import os
import sys

import torch
import transformers

import shardmesh.torch

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import ranks

SLOTS, STEPS, LENGTH, WORDS = 4, 100, 8, 67
ADAMW = {"lr": 1e-2, "weight_decay": 0.1, "betas": (0.9, 0.95), "eps": 1e-8}
SIZES = {
    "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": WORDS,
    "max_position_embeddings": 40,
}
ENCODER = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "initializer_range": 0.1}
GPT2 = {
    "vocab_size": WORDS, "n_positions": 32, "n_embd": 16, "n_layer": 1, "n_head": 2, "resid_pdrop": 0.0, "embd_pdrop": 0.0,
    "attn_pdrop": 0.0, "bos_token_id": 0, "eos_token_id": 0,
}
OPT = {
    "vocab_size": WORDS, "hidden_size": 16, "ffn_dim": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
    "max_position_embeddings": 32, "dropout": 0.0, "word_embed_proj_dim": 16,
}
T5 = {
    "vocab_size": WORDS, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2, "dropout_rate": 0.0,
    "decoder_start_token_id": 0,
}
VIT = {
    "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 16, "patch_size": 4,
    "num_labels": 5, **ENCODER,
}
ARCHITECTURES = {
    "GPT-2": ("GPT2LMHeadModel", "GPT2Config", GPT2),
    "Llama": ("LlamaForCausalLM", "LlamaConfig", {**SIZES, "num_key_value_heads": 1}),
    "Qwen2": ("Qwen2ForCausalLM", "Qwen2Config", {**SIZES, "num_key_value_heads": 1, "tie_word_embeddings": True}),
    "Mistral": ("MistralForCausalLM", "MistralConfig", {**SIZES, "num_key_value_heads": 1}),
    "Gemma": ("GemmaForCausalLM", "GemmaConfig", {**SIZES, "num_key_value_heads": 1, "head_dim": 8}),
    "Phi": ("PhiForCausalLM", "PhiConfig", SIZES),
    "BERT": ("BertForMaskedLM", "BertConfig", {**SIZES, **ENCODER}),
    "RoBERTa": ("RobertaForMaskedLM", "RobertaConfig", {**SIZES, **ENCODER}),
    "T5": ("T5ForConditionalGeneration", "T5Config", T5),
    "ViT": ("ViTForImageClassification", "ViTConfig", VIT),
    "GPT-NeoX": ("GPTNeoXForCausalLM", "GPTNeoXConfig", {**SIZES, "hidden_dropout": 0.0, "attention_dropout": 0.0}),
    "OPT": ("OPTForCausalLM", "OPTConfig", OPT),
}


def model(architecture):
    torch.manual_seed(1)
    kind, config, options = ARCHITECTURES[architecture]
    return getattr(transformers, kind)(getattr(transformers, config)(**options)).train()


def batch(architecture, step, slots):
    """Of those slots of the step; of each it is the same whatever it is beside. Labels are as many in each slot."""
    kind = architecture if architecture in ("ViT", "BERT", "RoBERTa") else "text"
    parts = [_slot(kind, step, slot) for slot in slots]
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


@functools.cache
def _slot(kind, step, slot):
    generator = torch.Generator().manual_seed(1000 * step + slot)
    if kind == "ViT":
        labels = torch.randint(5, (2,), generator=generator)
        pixels = 0.2 * torch.randn(2, 3, 16, 16, generator=generator) + labels.view(2, 1, 1, 1) - 2
        return {"pixel_values": pixels, "labels": labels}
    first = torch.randint(3, WORDS, (2, 1), generator=generator)
    words = 3 + (first + 7 * torch.arange(LENGTH)) % (WORDS - 3)  # something to learn
    if kind != "text":
        masked = words.clone()
        masked[:, 3::4] = 2
        return {"input_ids": masked, "labels": words, "attention_mask": torch.ones_like(words)}
    return {"input_ids": words, "labels": words, "attention_mask": torch.ones_like(words)}


def ours(architecture, address, rank, world):
    """The losses of this rank's slots, step by step, and the job's digest."""
    trained = model(architecture)
    optimizer = shardmesh.torch.Optimizer(
        trained, "AdamW", service=address, job=f"{architecture.lower()}-{world}", slots=SLOTS, **ADAMW)
    losses = []
    for step in range(STEPS):
        for slot in range(rank * SLOTS // world, (rank + 1) * SLOTS // world):
            loss = trained(**batch(architecture, step, [slot])).loss
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    digest = str(optimizer.job.digest())
    optimizer.close()
    return losses, digest


def torchs(architecture, rank, world):
    trained = torch.nn.parallel.DistributedDataParallel(model(architecture))
    optimizer = torch.optim.AdamW(trained.parameters(), fused=True, **ADAMW)
    slots = range(rank * SLOTS // world, (rank + 1) * SLOTS // world)
    losses = []
    for step in range(STEPS):
        loss = trained(**batch(architecture, step, slots)).loss
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def run(address, folder, rank, world):
    torch.set_num_threads(1)
    result = {"ours": {name: ours(name, address, rank, world) for name in ARCHITECTURES}}
    if world < 4:
        ranks.process_group(os.path.join(folder, f"store{world}"))
        result["torch"] = {name: torchs(name, rank, world) for name in ARCHITECTURES}
    return result


def mean(of_ranks):
    """The loss of each step, over ranks that each have as many losses of it."""
    steps = [[losses[len(losses) // STEPS * step:len(losses) // STEPS * (step + 1)] for losses in of_ranks] for step in range(STEPS)]
    return [sum(map(sum, step)) / sum(map(len, step)) for step in steps]


def main(address, folder):
    for kind in "ViT", "BERT", "RoBERTa", "text":
        for step in range(STEPS):
            batch(kind, step, range(SLOTS))  # once, for all ranks
    result = {name: {"ours": {}, "torch": {}, "digests": {}} for name in ARCHITECTURES}
    for world in 1, 2, 4:
        said = ranks.fork(world, lambda rank, world: run(address, folder, rank, world), seconds=120)
        for name, of in result.items():
            of["ours"][world] = mean([rank["ours"][name][0] for rank in said])
            of["digests"][world] = sorted({rank["ours"][name][1] for rank in said})
            if world < 4:
                of["torch"][world] = mean([rank["torch"][name] for rank in said])
    ranks.report(result)


if __name__ == "__main__":
    main(*sys.argv[1:])
