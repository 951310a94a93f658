#!/usr/bin/env python3
"""The rivals of bench/checkpoint: torch.distributed.checkpoint (DCP) of a model under fully_shard (FSDP2), and its
optimizer. Reads commands from standard input, answers each with one line.

  version                       of the packages
  save WORLD PATH               seconds of get_state_dict and save
  async WORLD PATH              "TOTAL STOPPED": seconds until the checkpoint is there, and until async_save returned
  load WORLD PATH               seconds of get_state_dict, load and set_state_dict, into what held other values
  restore WORLD PATH            the same, and to make the model before, without values, as after a restart
  digest WORLD                  of all weights and states, the same for any number of ranks
  iterations WORLD PATH COUNT MS   "WITH WITHOUT": medians of the seconds of an optimizer's step and MS of sleep before
                                it: COUNT without a checkpoint, and those during an async_save
  end WORLD                     its processes, if there are any
  reshard SHAPE FROM TO         an AdamW8bit state of 768x768, say, saved by FROM ranks and loaded by TO: "same", "differs BY"
                                (at most, from what was saved), or "fails REASON"

WORLD: "adamw 2", "adamw8bit 4": the optimizer, and how many ranks; made when it is first named. Arguments: a file with
a line for each parameter, its name and shape ("transformer.wpe.weight 1024x768"). Times are what passes from the first rank's
begin to the last one's end. Ranks are processes with one thread each, which wait for commands at a pipe.
An answer that starts with "error " says why there is none.
"""
import ctypes
import datetime
import gc
import multiprocessing
import os
import random
import shutil
import statistics
import sys
import tempfile
import time
import warnings

os.environ["OMP_NUM_THREADS"] = "1"
os.environ["GLOO_SOCKET_IFNAME"] = "lo"
warnings.simplefilter("ignore")

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torchao.optim
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

SECONDS = 100  # an answer takes at most
PIECE = 1 << 22  # elements of a digest at a time
STATES = ("exp_avg", "exp_avg_sq")


def plain(tensor):
    """A rank's part as ordinary numbers."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return (local if type(local) is torch.Tensor else local.dequantize()).detach().flatten()


def first_element(tensor, mesh):
    """Of the whole tensor: which one a rank's part begins with. Parts are whole rows."""
    _, offset = compute_local_shape_and_global_offset(tensor.shape, mesh, tensor.placements)
    return offset[0] * (tensor.numel() // tensor.shape[0])


def build(shapes):
    root = torch.nn.Module()
    for name, shape in shapes:
        *path, last = name.split(".")
        module = root
        for part in path:
            if part not in dict(module.named_children()):
                module.add_module(part, torch.nn.Module())
            module = getattr(module, part)
        module.register_parameter(last, torch.nn.Parameter(torch.empty(shape)))
    return root


class Rank:
    """One process of a world."""

    def __init__(self, shapes, optimizer):
        self.mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        self.group = dist.new_group()  # of checkpoints that are written while the others' collectives go on
        self.shapes, self.quantized = shapes, optimizer == "adamw8bit"
        self.make()
        self.fill()

    def make(self):
        with torch.device("meta"):
            self.model = build(self.shapes)
        for layer in self.model.transformer.h.children():
            fully_shard(layer, mesh=self.mesh)
        fully_shard(self.model, mesh=self.mesh)
        self.model.to_empty(device="cpu")
        parameters = list(self.model.parameters())
        if self.quantized:
            self.optimizer = torchao.optim.AdamW8bit(parameters)
        else:
            self.optimizer = torch.optim.AdamW(parameters, fused=True)

    def fill(self):
        """Every weight and state another number; 8-bit states are made as step() does, but without compiling it."""
        for index, parameter in enumerate(self.model.parameters()):
            local, values = parameter.to_local(), self.values(index, parameter)
            with torch.no_grad():
                local.copy_(values)
        if not self.quantized:
            self.give_gradients()
            self.optimizer.step()
            self.optimizer.zero_grad()
            return
        self.make_states()
        for index, parameter in enumerate(self.model.parameters()):
            values = self.values(index, parameter)
            for name, state in zip(STATES, (values / 8, values.square())):
                if values.numel():
                    self.optimizer.state[parameter][name].to_local().copy_(state)

    def make_states(self):
        for parameter in self.model.parameters():
            state = self.optimizer.state[parameter]
            state["step"] = torch.tensor(1.0)
            for name, signed in zip(STATES, (True, False)):
                state[name] = self.optimizer._new_buffer(parameter, signed)

    def values(self, index, parameter):
        local = parameter.to_local()
        at = first_element(parameter, self.mesh) + torch.arange(local.numel())
        return (((at * 2654435761 + index) >> 8) % 65536 - 32768).float().reshape(local.shape) / 2**20

    def give_gradients(self):
        for index, parameter in enumerate(self.model.parameters()):
            parameter.grad = DTensor.from_local(
                self.values(index, parameter) / 8,
                self.mesh,
                parameter.placements,
                shape=parameter.shape,
                stride=parameter.stride(),
            )

    def streams(self):
        for parameter in self.model.parameters():
            yield from (parameter, *(self.optimizer.state[parameter][name] for name in STATES))

    def clear(self):
        with torch.no_grad():
            for stream in self.streams():
                local = stream.to_local()
                if local.numel():
                    local.copy_(torch.zeros(local.shape))

    def digest(self):
        total = 0
        for index, stream in enumerate(self.streams()):
            words, at = plain(stream).view(torch.int32), first_element(stream, self.mesh)
            for begin in range(0, words.numel(), PIECE):
                piece = words[begin : begin + PIECE].long()
                places = torch.arange(at + begin, at + begin + piece.numel()) * 2 + 1
                total += (index * 0x9E3779B97F4A7C15 + 1) * int(((piece ^ (places * 40503)) * places).sum())
        return total % 2**64

    def state_dict(self):
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def save(self, path):
        dcp.save(self.state_dict(), checkpoint_id=path)

    def async_save(self, path):
        """What is to be waited for."""
        return dcp.async_save(self.state_dict(), checkpoint_id=path, process_group=self.group)

    def load(self, path):
        state = self.state_dict()
        dcp.load(state, checkpoint_id=path)
        set_state_dict(
            self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
        )

    def restore(self, path):
        self.make()
        if self.quantized:
            self.make_states()
        self.load(path)

    def iterate(self, path, count, seconds):
        def iteration(act=None):
            begin = time.monotonic()
            result = act() if act else None
            time.sleep(seconds)
            self.optimizer.step()
            dist.barrier()
            return time.monotonic() - begin, result

        self.give_gradients()
        without = [iteration()[0] for _ in range(count)]
        first, future = iteration(lambda: self.async_save(path))
        during = [first]
        while True:
            done = torch.tensor(int(future.done()))
            dist.all_reduce(done, dist.ReduceOp.MIN)
            if done.item():
                break
            during.append(iteration()[0])
        future.result()
        self.optimizer.zero_grad()
        return during, without


class Quantized:
    """AdamW8bit states of single tensors."""

    def __init__(self):
        self.mesh = init_device_mesh("cpu", (dist.get_world_size(),))

    def state(self, shape):
        weights = torch.nn.Parameter(distribute_tensor(torch.zeros(shape), self.mesh, [Shard(0)]))
        return torchao.optim.AdamW8bit([weights])._new_buffer(weights, True)

    def save(self, path, shape):
        values = torch.randn(shape, generator=torch.Generator().manual_seed(1)) * 1e-3
        state = self.state(shape)
        local = state.to_local()
        if local.numel():
            local.copy_(distribute_tensor(values, self.mesh, [Shard(0)]).to_local())
        dcp.save({"exp_avg": state}, checkpoint_id=path)
        return plain(state).tolist()

    def load(self, path, shape):
        state = {"exp_avg": self.state(shape)}
        dcp.load(state, checkpoint_id=path)
        return plain(state["exp_avg"]).tolist()


def rank_main(link, rank, ranks, port, make):
    ctypes.CDLL(None).prctl(1, 9)  # PR_SET_PDEATHSIG: ends with the one that asks
    sys.stdout = open(os.devnull, "w", encoding="utf-8")
    sys.stderr = sys.stdout
    torch.set_num_threads(1)
    held = None
    while True:
        words = link.recv()
        try:
            if held is None:
                address = f"tcp://127.0.0.1:{port}"
                dist.init_process_group(
                    "gloo", address, rank=rank, world_size=ranks, timeout=datetime.timedelta(seconds=SECONDS)
                )
                held = make()
            link.send(("ok", *timed(held, *words)))
        except BaseException as error:  # whatever the packages raise is the answer
            text = " ".join(f"{type(error).__name__}: {error}".split())
            link.send(("error", text if len(text) < 600 else "..." + text[-597:]))


def timed(held, what, *arguments):
    """Begin, end, and the result, which may be one that is waited for. What is cleared before is not measured."""
    if what == "load" and isinstance(held, Rank):
        held.clear()
    if what == "restore":
        held.model = held.optimizer = None
        gc.collect()
    dist.barrier()
    begin = time.monotonic()
    result = getattr(held, what)(*arguments) if what != "start" else None
    stopped = time.monotonic()
    if what == "async_save":
        result.result()
        result = stopped
    return begin, time.monotonic(), result


class World:
    def __init__(self, ranks, make):
        context = multiprocessing.get_context("fork")
        port = random.randrange(20000, 30000)
        pipes = [context.Pipe() for _ in range(ranks)]
        self.links = [mine for mine, _ in pipes]
        self.processes = [
            context.Process(target=rank_main, args=(theirs, rank, ranks, port, make), daemon=True)
            for rank, (_, theirs) in enumerate(pipes)
        ]
        for process in self.processes:
            process.start()
        self.ask("start")

    def ask(self, *words):
        """The ranks' (begin, end, result)."""
        for link in self.links:
            link.send(words)
        answers = []
        for rank, link in enumerate(self.links):
            if not link.poll(SECONDS):
                raise RuntimeError(f"rank {rank} is silent for {SECONDS} s")
            answers.append(link.recv())
            if answers[-1][0] == "error":
                raise RuntimeError(answers[-1][1])
        return [answer[1:] for answer in answers]

    def end(self):
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()


def passed(answers):
    return max(end for _, end, _ in answers) - min(begin for begin, _, _ in answers)


class Rivals:
    def __init__(self, shapes):
        self.shapes, self.worlds = shapes, {}

    def world(self, optimizer, ranks):
        key = optimizer, int(ranks)
        if key not in self.worlds:
            self.worlds[key] = World(key[1], lambda: Rank(self.shapes, optimizer) if optimizer != "single" else Quantized())
        return self.worlds[key]

    def reshard(self, shape, before, after):
        sizes = tuple(int(size) for size in shape.split("x"))
        folder = tempfile.mkdtemp()
        try:
            saved, loaded = (
                [value for _, _, part in self.world("single", ranks).ask(what, folder, sizes) for value in part]
                for ranks, what in ((before, "save"), (after, "load"))
            )
            return "same" if loaded == saved else f"differs {max(abs(a - b) for a, b in zip(loaded, saved)):.1e}"
        except (RuntimeError, EOFError) as error:  # some ranks may be in a collective that the others left
            self.end("single", after)
            return f"fails {error}"
        finally:
            shutil.rmtree(folder)

    def end(self, optimizer, ranks):
        world = self.worlds.pop((optimizer, int(ranks)), None)
        if world is not None:
            world.end()

    def do(self, what, *words):
        if what == "version":
            return f"torch {torch.__version__}, torchao {torchao.__version__}"
        if what == "reshard":
            return self.reshard(*words)
        if what == "end":
            self.end(*words)
            return "ended"
        world, rest = self.world(*words[:2]), words[2:]
        if what == "digest":
            return f"{sum(result for _, _, result in world.ask('digest')) % 2**64:016x}"
        if what == "async":
            answers = world.ask("async_save", *rest)
            return passed(answers), max(stopped for _, _, stopped in answers) - min(begin for begin, _, _ in answers)
        if what == "iterations":
            (during, without), *_ = (
                result for _, _, result in world.ask("iterate", rest[0], int(rest[1]), float(rest[2]) / 1e3)
            )
            return statistics.median(during), statistics.median(without)
        return passed(world.ask(what, *rest))


def main():
    with open(sys.argv[1], encoding="utf-8") as file:
        lines = [line.split() for line in file]
    rivals = Rivals([(name, tuple(int(size) for size in shape.split("x"))) for name, shape in lines])
    for line in sys.stdin:
        try:
            result = rivals.do(*line.split())
            text = " ".join(map(str, result)) if isinstance(result, tuple) else str(result)
        except Exception as error:
            text = f"error {type(error).__name__}: {error}".replace("\n", " ")[:600]
        print(text, flush=True)


if __name__ == "__main__":
    main()
