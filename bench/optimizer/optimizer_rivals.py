#!/usr/bin/env python3
"""The rivals of bench/optimizer: reads commands from standard input, answers each with one line.

  versions              of the packages that are installed
  tensors SHAPES        the parameters of what is made from now on, as in 50257x768,768; what was made before is dropped
  make RIVAL            makes an optimizer and takes two steps, in which it is compiled; answers "ok"
  step RIVAL            seconds of a step
  adamw FILE N STEPS    writes the N fp32 weights after so many steps of torch's AdamW to FILE; answers "ok"

Arguments: THREADS elapsed|processor [cpu|cuda]. Run by bench/optimizer, one process for each number of threads, because
OpenMP and torch.compile fix it when they start; the second is the time that is measured, processor time being that of all
threads. Run by bench/optimizer_cuda with cuda: everything is on the GPU, and "step" takes several and answers their mean.
An answer that starts with "error " says why there is none.
"""
import importlib.metadata
import logging
import os
import sys
import time
import warnings

THREADS, TIME = sys.argv[1:3]
DEVICE = (sys.argv[3:] or ["cpu"])[0]
STEPS = 1 if DEVICE == "cpu" else 4  # in a row, so that what the processor does for one lies behind the one before
CLOCK = time.process_time if TIME == "processor" else time.perf_counter
os.environ["OMP_NUM_THREADS"] = THREADS  # before torch is loaded
os.environ["DS_ACCELERATOR"] = DEVICE
logging.disable(logging.WARNING)
warnings.filterwarnings("ignore")

import numpy as np  # noqa: E402
import torch  # noqa: E402

WEIGHT, GRADIENT = (2654435761, 2.0**-20), (2246822519, 2.0**-25)  # as StartWeight, StartGradient in optimizer_job.cc
HYPER = {"lr": 1e-3, "weight_decay": 1e-2}


def values(kind, first, n):
    factor, unit = kind
    hashed = np.arange(first, first + n, dtype=np.uint64).astype(np.uint32) * np.uint32(factor) >> np.uint32(16)
    return torch.from_numpy((hashed.astype(np.int32) - 32768).astype(np.float32) * np.float32(unit))


def now():
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    return CLOCK()


def torch_fused(parameters):
    return torch.optim.AdamW(parameters, fused=True, **HYPER)


def torchao(name):
    def make(parameters):
        from torchao.optim import adam

        return getattr(adam, name)(parameters, bf16_stochastic_round=True, **HYPER)

    return make


def bitsandbytes_8bit(parameters):
    import bitsandbytes

    return bitsandbytes.optim.AdamW8bit(parameters, **HYPER)


def deepspeed(parameters):
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    return DeepSpeedCPUAdam(parameters, adamw_mode=True, fp32_optimizer_states=True, **HYPER)


RIVALS = {
    "torch_fused": (torch.float32, torch_fused),
    "deepspeed": (torch.float32, deepspeed),
    "deepspeed_bf16": (torch.bfloat16, deepspeed),
    "torchao_bf16": (torch.bfloat16, torchao("_AdamW")),
    "torchao_8bit": (torch.bfloat16, torchao("AdamW8bit")),
    "torchao_4bit": (torch.bfloat16, torchao("AdamW4bit")),
    "torchao_fp8": (torch.bfloat16, torchao("AdamWFp8")),
    "bitsandbytes_8bit": (torch.bfloat16, bitsandbytes_8bit),
}


class Rivals:
    def __init__(self):
        self.shapes = []
        self.parameters = {}  # by type; the optimizers of a type share them
        self.optimizers = {}

    def tensors(self, shapes):
        self.__init__()
        self.shapes = [tuple(map(int, shape.split("x"))) for shape in shapes.split(",")]
        return "ok"

    def parameters_of(self, dtype):
        if dtype not in self.parameters:
            made, first = [], 0
            for shape in self.shapes:
                n = int(np.prod(shape))
                parameter = torch.nn.Parameter(values(WEIGHT, first, n).to(DEVICE, dtype).reshape(shape))
                parameter.grad = values(GRADIENT, first, n).to(DEVICE, dtype).reshape(shape)
                made.append(parameter)
                first += n
            self.parameters[dtype] = made
        return self.parameters[dtype]

    def make(self, name):
        dtype, make = RIVALS[name]
        self.optimizers[name] = make(self.parameters_of(dtype))
        for _ in range(2):
            self.optimizers[name].step()
        return "ok"

    def step(self, name):
        start = now()
        for _ in range(STEPS):
            self.optimizers[name].step()
        seconds = (now() - start) / STEPS
        time.sleep(0.02)  # for this long OpenMP's threads may look for more work; who is next has the cores alone
        return seconds


def adamw(path, n, steps):
    parameter = torch.nn.Parameter(values(WEIGHT, 0, n))
    optimizer = torch.optim.AdamW([parameter], **HYPER)
    for step in range(steps):
        parameter.grad = values(GRADIENT, step, n)
        optimizer.step()
    parameter.detach().numpy().tofile(path)
    return "ok"


def versions():
    found = []
    for package in ("torch", "torchao", "bitsandbytes", "deepspeed"):
        try:
            found.append(f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            found.append(f"no {package}")
    return ", ".join(found)


def answer(rivals, words):
    if words[0] in ("tensors", "make", "step") and len(words) == 2:
        return getattr(rivals, words[0])(words[1])
    if words[0] == "adamw" and len(words) == 4:
        return adamw(words[1], int(words[2]), int(words[3]))
    if words[0] == "versions":
        return versions()
    return "error unknown command"


def main():
    # What the packages print, their builds too, must not be taken for answers.
    answers = os.fdopen(os.dup(1), "w")
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 1)
    os.dup2(quiet, 2)
    torch.set_num_threads(int(THREADS))
    rivals = Rivals()
    for line in sys.stdin:
        try:
            text = str(answer(rivals, line.split()))
        except Exception as error:  # whatever the rival's packages raise is the answer
            text = f"error {type(error).__name__}: {error}".replace("\n", " ")[:500]
        print(text, file=answers, flush=True)


if __name__ == "__main__":
    main()
