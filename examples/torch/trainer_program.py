#!/usr/bin/env python3
"""A program of transformers.Trainer: a tiny GPT-2 with random weights, accumulation, clipping, a schedule, checkpoints, and a second
run that goes on from one. The three lines that are not the Trainer's own are marked; without them it is what it was (--plain).

    python examples/torch/trainer_program.py
    torchrun --nproc-per-node 2 examples/torch/trainer_program.py
"""
import argparse
import json
import os
import shutil
import tempfile

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

import shardmesh.torch                                                                          # 1
from shardmesh.torch import integrations


TLS = "cert", "key", "ca", "name"


def tls_of(options):
    return {f"tls_{what}": getattr(options, f"tls_{what}") for what in TLS}


def dataset():
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(0, 64, (64, 1), generator=generator)
    lines = (tokens + torch.arange(16)) % 64
    return [{"input_ids": line, "labels": line} for line in lines]


def trainer_of(folder, steps, options, job):
    args = TrainingArguments(
        folder, max_steps=steps, per_device_train_batch_size=options.batch // options.processes, gradient_accumulation_steps=2,
        learning_rate=3e-3, weight_decay=0.1, lr_scheduler_type="cosine", warmup_steps=2, max_grad_norm=0.5, save_steps=4, logging_steps=4,
        seed=3, report_to=[], use_cpu=True, disable_tqdm=True, torch_compile=options.compile,
        torch_compile_backend="eager" if options.compile else None)
    torch.manual_seed(3)
    config = GPT2Config(vocab_size=64, n_positions=16, n_embd=32, n_layer=2, n_head=2, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0)
    model = GPT2LMHeadModel(config)
    if options.plain:
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1)
        return Trainer(model, args, train_dataset=dataset(), optimizers=(optimizer, None)), None
    optimizer = shardmesh.torch.Optimizer(model, "AdamW", lr=3e-3, weight_decay=0.1, clip_norm=0.5, states=options.states,     # 2
                                          service=options.service, job=options.job + job, **tls_of(options))
    trainer = Trainer(model, args, train_dataset=dataset(), optimizers=(optimizer, None),
                      callbacks=[integrations.ShardmeshCallback(optimizer, digests=True)])
    integrations.attach(trainer.accelerator, optimizer)                                         # 3
    return trainer, optimizer


def run(folder, steps, options, resume=None):
    """Its report, when the model has been trained for `steps`."""
    trainer, optimizer = trainer_of(folder, steps, options, job="resumed" if resume else "whole")
    trainer.train(resume_from_checkpoint=resume)
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    report = {"wrapped": type(trainer.model_wrapped).__name__, "losses": [entry["loss"] for entry in logs],
              "rates": [entry["learning_rate"] for entry in logs],
              "weights": [parameter.double().sum().item() for parameter in trainer.model.parameters()]}
    if optimizer is not None:
        report["digests"] = [entry.get("digest") for entry in logs]
        trainer.accelerator.wait_for_everyone()
        optimizer.close()
    return report


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--plain", action="store_true", help="torch.optim.AdamW instead")
    parser.add_argument("--states", default="fp32")
    parser.add_argument("--batch", type=int, default=8, help="of one backward, over all ranks")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--service", help="host:port of a coordinator; one of its own")
    for what in TLS:
        parser.add_argument(f"--tls-{what}", help=f"for a service on another host; SHARDMESH_TLS_{what.upper()} (docs/tls.md)")
    parser.add_argument("--folder", help="of checkpoints; a temporary one")
    parser.add_argument("--job", default="", help="what the jobs' names begin with")
    options = parser.parse_args(arguments)
    options.processes = int(os.environ.get("WORLD_SIZE", "1"))
    run_id = os.environ.get("TORCHELASTIC_RUN_ID", str(os.getpid()))
    shared = options.folder or os.path.join(tempfile.gettempdir(), f"trainer-{run_id}")
    try:
        whole = run(shared, 8, options)
        resumed = run(shared, 8, options, resume=os.path.join(shared, "checkpoint-4"))
    finally:
        if os.environ.get("RANK", "0") == "0":
            shutil.rmtree(shared, ignore_errors=True)
    report = {"whole": whole, "resumed": resumed}
    if os.environ.get("RANK", "0") == "0":
        print(json.dumps(report))
    return report


if __name__ == "__main__":
    main()
