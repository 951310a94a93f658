"""Ranks of a test: forked children of a program that has imported what they need, which costs seconds but once.

    if __name__ == "__main__":
        ranks.report({world: ranks.fork(world, train, seconds=60) for world in (1, 2, 4)})

and the test calls ranks.program(path, arguments). A program that forks has no threads: it starts none before.
"""
import json
import os
import pickle
import selectors
import signal
import subprocess
import sys
import time
import traceback


def _child(rank, world, run, pipe):
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world))
    try:
        said = True, run(rank, world)
    except BaseException:
        said = False, f"rank {rank} of {world}:\n{traceback.format_exc()}"
    with os.fdopen(pipe, "wb") as file:
        pickle.dump(said, file)
    os._exit(0)


def fork(world, run, seconds):
    """What run(rank, world) returned on each rank. RuntimeError: what it raised on one, or that time is over; no child is
    left."""
    children = {}
    for rank in range(world):
        reads, writes = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(reads)
            _child(rank, world, run, writes)
        os.close(writes)
        children[reads] = rank, child
    try:
        return _results(children, time.monotonic() + seconds)
    finally:
        for _, child in children.values():
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


def _results(children, deadline):
    said = {}
    data = {reads: b"" for reads in children}
    with selectors.DefaultSelector() as selector:
        for reads in children:
            selector.register(reads, selectors.EVENT_READ)
        while selector.get_map():
            ready = selector.select(max(0.0, deadline - time.monotonic()))
            if not ready:
                late = [children[reads][0] for reads in selector.get_map()]
                raise RuntimeError(f"ranks {late} of {len(children)} did not end in time")
            for key, _ in ready:
                part = os.read(key.fd, 1 << 20)
                data[key.fd] += part
                if part:
                    continue
                selector.unregister(key.fd)
                os.close(key.fd)
                rank = children[key.fd][0]
                if not data[key.fd]:
                    raise RuntimeError(f"rank {rank} was killed")
                right, said[rank] = pickle.loads(data[key.fd])
                if not right:
                    raise RuntimeError(said[rank])
    return [said[rank] for rank in range(len(children))]


def process_group(file):
    """Of gloo over these ranks, which meet in `file`."""
    import torch

    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = torch.distributed.FileStore(file, world)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=world)


def report(result):
    """Of the program, to its test."""
    json.dump(result, sys.stdout)


def program(test, path, *arguments, seconds, environment=None):
    """What the program reports; fails `test`, a TestCase, when it fails."""
    command = [sys.executable, path, *map(str, arguments)]
    variables = {**(environment or os.environ), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=seconds)
    test.assertEqual(done.returncode, 0, done.stderr)
    return json.loads(done.stdout)
