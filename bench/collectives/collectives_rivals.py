#!/usr/bin/env python3
"""The rivals of bench/collectives: reads commands from standard input, answers each with one line.

  version                 of the package
  check NAME              the largest difference of a rank's result from ours, over all ranks
  time NAME [COUNT]       seconds of NAME, or of one of COUNT in a row

Arguments: gloo|mpi RANKS elapsed|processor FILE BYTES RESULT,SLOT,SLOT,...: the time is what passes from the first rank's
begin to the last one's end, or the processor time of all ranks and their threads. A vector of fp32 has BYTES; our result and
the ranks' inputs lie at these places of FILE, which is shared memory (or, where a place is PATH:PLACE, of that file). Each rank is a process of its own with one thread (MPI: under mpirun),
which waits for commands at a UNIX socket, so that it uses no processor while others are measured.
NAME: gloo has reduce_gather, all_reduce, buckets, barrier and small_gather; mpi has all_reduce.
An answer that starts with "error " says why there is none.
"""
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time

SECONDS_TO_START = 120
BUCKET_ELEMENTS = (25 << 20) // 4  # as DistributedDataParallel has them
SMALL_BYTES = 64


class Gloo:
    def __init__(self, rank, ranks, folder):
        import torch
        import torch.distributed as dist

        torch.set_num_threads(1)
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
        self.torch, self.dist = torch, dist
        self.rank, self.ranks = rank, ranks

    def version(self):
        return f"torch {self.torch.__version__} with gloo"

    def load(self, slot, _):
        self.input = self.torch.from_numpy(slot).clone()
        self.result = self.torch.zeros_like(self.input)
        self.piece = self.torch.zeros(self.input.numel() // self.ranks)
        self.small = self.torch.zeros(SMALL_BYTES // 4)
        self.smalls = self.torch.zeros(SMALL_BYTES // 4 * self.ranks)

    def prepare(self, name):
        if name in ("all_reduce", "buckets"):  # they sum in place
            self.result.copy_(self.input)

    def reduce_gather(self):
        self.dist.reduce_scatter_tensor(self.piece, self.input)
        self.dist.all_gather_into_tensor(self.result, self.piece)

    def all_reduce(self):
        self.dist.all_reduce(self.result)

    def buckets(self):
        for work in [self.dist.all_reduce(part, async_op=True) for part in self.result.split(BUCKET_ELEMENTS)]:
            work.wait()

    def barrier(self):
        self.dist.barrier()

    def small_gather(self):
        self.dist.all_gather_into_tensor(self.smalls, self.small)

    def difference(self, ours):
        return (self.result - self.torch.from_numpy(ours)).abs().max().item()


class Mpi:
    def __init__(self, *_):
        from mpi4py import MPI

        self.mpi, self.comm = MPI, MPI.COMM_WORLD
        self.rank = self.comm.rank

    def version(self):
        return self.mpi.Get_library_version().split(",")[0]

    def load(self, slot, _):
        self.input, self.result = slot.copy(), slot * 0

    def prepare(self, name):
        pass

    def all_reduce(self):
        self.comm.Allreduce(self.input, self.result)

    def barrier(self):
        self.comm.Barrier()

    def difference(self, ours):
        return abs(self.result - ours).max()


def rank_main(kinds, kind, folder, ranks, rank, file, num_bytes, places):
    """One rank: connects at once, so that what goes wrong later is told."""
    link = socket.socket(socket.AF_UNIX)
    link.connect(f"{folder}/socket")
    lines = link.makefile("rw")

    def tell(**answer):
        print(json.dumps(answer), file=lines, flush=True)

    try:
        import numpy as np

        rival = kinds[kind](int(rank), int(ranks), folder)

        def vector(place):
            path, _, at = place.rpartition(":")
            return np.memmap(path or file, np.float32, "r", int(at), int(num_bytes) // 4)

        result, *slots = places.split(",")
        rival.load(vector(slots[rival.rank]), vector(result))
        tell(version=rival.version())
        for line in lines:
            what, name, *count = line.split()
            work = getattr(rival, name)
            rival.prepare(name)
            rival.barrier()
            used, begin = -time.process_time(), time.monotonic()
            for _ in range(int((count or ["1"])[0])):
                work()
            end, used = time.monotonic(), used + time.process_time()
            difference = float(rival.difference(vector(result))) if what == "check" else None
            tell(begin=begin, end=end, used=used, difference=difference)
    except Exception as error:  # whatever the packages raise is the answer
        tell(error=f"{type(error).__name__}: {error}".replace("\n", " ")[:500])


class Ranks:
    """The processes of all ranks; they end with this one, whose sockets they hear closing."""

    def __init__(self, kind, ranks, clock, rest):
        self.clock = clock
        with tempfile.TemporaryDirectory() as folder:  # nobody needs it once all have started
            server = socket.socket(socket.AF_UNIX)
            server.bind(f"{folder}/socket")
            server.listen()
            server.settimeout(0.5)
            with open(f"{folder}/errors", "w+", encoding="utf-8", errors="replace") as errors:
                started = self.start(kind, ranks, folder, rest, errors)
                self.links = []
                deadline = time.monotonic() + SECONDS_TO_START
                while len(self.links) < ranks:
                    try:
                        self.links.append(server.accept()[0].makefile("rw"))
                    except TimeoutError:
                        if any(process.poll() is not None for process in started) or time.monotonic() > deadline:
                            errors.seek(0)
                            said = " ".join(errors.read().split())[-300:]
                            raise RuntimeError(f"the ranks do not start: {said}") from None
            self.version = self.gather()[0]["version"]

    def start(self, kind, ranks, folder, rest, errors):
        def command(rank):
            return [sys.executable, os.path.abspath(sys.argv[0]), "rank", kind, folder, str(ranks), str(rank), *rest]

        if kind == "gloo":
            commands = [command(rank) for rank in range(ranks)]
        else:
            mpirun = shutil.which("mpirun")
            if mpirun is None:
                raise RuntimeError("mpirun is not there")
            commands = [[mpirun, "--oversubscribe", "-n", str(ranks), *command(0)]]
        environment = os.environ | {
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
            "OMPI_ALLOW_RUN_AS_ROOT": "1",
            "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        }
        quiet = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": errors}
        return [subprocess.Popen(words, env=environment, **quiet) for words in commands]

    def gather(self):
        answers = [json.loads(link.readline() or '{"error": "a rank ended"}') for link in self.links]
        errors = [answer["error"] for answer in answers if "error" in answer]
        if errors:
            raise RuntimeError(errors[0])
        return answers

    def do(self, words):
        if words == ["version"]:
            return self.version
        for link in self.links:
            print(*words, file=link, flush=True)
        answers = self.gather()
        if words[0] == "check":
            return max(answer["difference"] for answer in answers)
        if self.clock == "processor":
            seconds = sum(answer["used"] for answer in answers)
        else:
            seconds = max(answer["end"] for answer in answers) - min(answer["begin"] for answer in answers)
        return seconds / int((words[2:] or ["1"])[0])


def main():
    ranks = None
    for line in sys.stdin:
        try:
            ranks = ranks or Ranks(sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4:])
            text = str(ranks.do(line.split()))
        except Exception as error:
            text = f"error {error}".replace("\n", " ")[:500]
        print(text, flush=True)


def run(kinds):
    rank_main(kinds, *sys.argv[2:]) if sys.argv[1] == "rank" else main()


if __name__ == "__main__":
    run({"gloo": Gloo, "mpi": Mpi})
