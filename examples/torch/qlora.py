#!/usr/bin/env python3
"""QLoRA on sharded workers: a frozen base that is gathered as nf4, adapters of peft that are trained.

    python examples/torch/qlora.py [--original]

A tiny Llama of transformers stands for a large one; its weights are made from its configuration, nothing is downloaded.
--original shows what torchao's NF4 does under FSDP2 today.
"""
import argparse
import tempfile

import peft
import torch
import transformers
import shardmesh.torch as sm
from original import show

SLOTS, STEPS = 4, 6


def model(seed=0):
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(vocab_size=96, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
                                      num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64)
    lora = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "down_proj"], task_type="CAUSAL_LM")
    return peft.get_peft_model(transformers.LlamaForCausalLM(config), lora)


def gather(name):
    """The matrices of the base, of which codes fit: all that is large."""
    return "nf4" if "layers" in name and "norm" not in name and "lora_" not in name else None


def train(net, optimizer, steps, slots=range(SLOTS)):
    for _ in range(steps):
        for slot in slots:
            generator = torch.Generator().manual_seed(SLOTS * optimizer.committed_step + slot)
            start = torch.randint(0, 96, (4, 1), generator=generator)
            tokens = (start + torch.arange(24)) % 96  # what is to be learnt: to count
            loss = net(input_ids=tokens, labels=tokens).loss
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return loss.item()


def options(**more):
    return dict(lr=2e-2, gather=gather, states="dyn8", slots=SLOTS, workers=2, **more)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--original", action="store_true")
    if parser.parse_args().original:
        show("nf4")
    for mesh, residency in ("fsdp=2", "full"), ("ddp=2", "full"), ("fsdp=2", "bucket"):
        net = model()
        optimizer = sm.Optimizer(net, "AdamW", mesh=mesh, residency=residency, **options())
        loss = train(net, optimizer, STEPS)
        print(f"shardmesh QLoRA on {mesh}, residency {residency}: loss {loss:.4f}, {optimizer.job.digest()}", flush=True)
        optimizer.close()
    net = model()
    optimizer = sm.Optimizer(net, "AdamW", mesh="fsdp=2", job="qlora", **options())
    train(net, optimizer, STEPS // 2)
    with tempfile.TemporaryDirectory() as folder:
        optimizer.client.restore(optimizer.save(folder).path, name="other", mesh="ddp=2")
        net = model(seed=1)  # other weights: the job's count
        resumed = sm.Optimizer(net, "AdamW", mesh="ddp=2", job="other", service=optimizer.service, **options())
        loss = train(net, resumed, STEPS - STEPS // 2)
        print(f"shardmesh QLoRA saved after {STEPS // 2} steps on fsdp=2, resumed on ddp=2: loss {loss:.4f}, {resumed.job.digest()}")
        resumed.close()
    optimizer.close()


if __name__ == "__main__":
    main()
