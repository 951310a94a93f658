"""Processes of tests/soak.py that use the service: forked children of one program that has imported PyTorch already.

Reads lines of JSON, {"role": ..., "service": ..., "job": ..., ...}, and answers each with the pid of a child that does
that until it is killed or its job is gone. Ends with its input. A child that ends by an error writes it to `errors`.
"""
import json
import os
import signal
import sys
import time

os.environ["OMP_NUM_THREADS"] = "1"

import torch

import shardmesh
import shardmesh.torch as sm
from shardmesh import errors

PATIENCE = 60.0
# What a process may meet: its job is gone, or killed readers hold every version until their leases end.
GONE = (errors.NotFound, errors.Unavailable, errors.Aborted, errors.FailedPrecondition, errors.DeadlineExceeded,
        errors.ResourceExhausted)


class Batches(torch.utils.data.Dataset):
    def __len__(self):
        return 1 << 20

    def __getitem__(self, index):
        return torch.randn(8, 128, generator=torch.Generator().manual_seed(index))


def model():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(128, 512), torch.nn.ReLU(), torch.nn.Linear(512, 128))


def loader():
    """Two processes make the batches, which a killed trainer leaves behind."""
    return iter(torch.utils.data.DataLoader(Batches(), batch_size=None, num_workers=2, persistent_workers=True))


def loss(network, batch):
    return network(batch).square().mean()


def assigned(service, job, rank=0, ranks=1):
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks))
    network, batches = model(), loader()
    optimizer = sm.Optimizer(network, "AdamW", lr=1e-4, service=service, job=job, join=True, timeout=PATIENCE)
    while True:
        loss(network, next(batches)).backward()
        optimizer.step()
        optimizer.zero_grad()


def pulled(service, job, rank=0, ranks=1):
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks))
    network, batches = model(), loader()
    optimizer = sm.Optimizer(network, "AdamW", lr=1e-4, slots=4, pulled=True, service=service, job=job, join=True,
                             timeout=PATIENCE)
    while True:
        for _ in optimizer.slots(range(4)):
            loss(network, next(batches)).backward()
        optimizer.step()
        optimizer.zero_grad()


def follower(service, job, copy=False):
    network = model()
    with sm.follow(network, service=service, job=job, copy=copy, timeout=PATIENCE) as following:
        while True:
            following.wait(timeout=PATIENCE)
            network(torch.ones(1, 128)).sum().item()


def reader(service, job):
    """Holds, pulls and leases, one after the other."""
    opened = shardmesh.connect(service).job(job, timeout=PATIENCE)
    while True:
        with opened.hold() as version:
            version.step
        opened.pull()
        with opened.lease(ttl=5):
            time.sleep(0.05)


ROLES = {role.__name__: role for role in (assigned, pulled, follower, reader)}


def run(command):
    file = command.pop("errors")
    try:
        ROLES[command.pop("role")](**command)
    except GONE as error:
        with open(file, "a", encoding="utf-8") as said:
            print(json.dumps([type(error).__name__, str(error)[:300]]), file=said)
    except BaseException as error:
        with open(file, "a", encoding="utf-8") as said:
            print(json.dumps(["BUG " + type(error).__name__, str(error)[:300]]), file=said)


def main():
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for children
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            os.setsid()
            run(json.loads(line))
            os._exit(0)
        print(child, flush=True)


if __name__ == "__main__":
    main()
