"""The processes of adversity.py: a trainer with DataLoader workers, a follower, and a trainer that comes too late.

    adversity_roles.py assigned|pulled|follower|newcomer SERVICE JOB FILE REST

A trainer trains its job from the step that it finds; batches are of steps and slots alone. It writes the committed step
to FILE after each, rests for REST seconds, and ends at the step that JOB.end beside it has, once that is there. It
begins again by itself where the job does (`shardmesh.errors`). A newcomer asks to train a job of pulled slots, and ends
with status 0 if no thread is left for it.
"""
import os
import sys
import time

os.environ.update(OMP_NUM_THREADS="1", RANK="0", WORLD_SIZE="1")

import shardmesh.torch as sm
import torch
from shardmesh import errors

SLOTS, PATIENCE = 2, 60.0


class Batches(torch.utils.data.Dataset):
    """Batch step * SLOTS + slot."""

    def __len__(self):
        return 1 << 20

    def __getitem__(self, index):
        return torch.randn(4, 16, generator=torch.Generator().manual_seed(index))


def model():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 4))


def say(file, step):
    with open(file + ".new", "w", encoding="ascii") as out:
        out.write(str(step))
    os.replace(file + ".new", file)


def is_over(step, job, file):
    try:
        with open(os.path.join(os.path.dirname(file), f"{job}.end"), encoding="ascii") as end:
            return step >= int(end.read())
    except FileNotFoundError:
        return False


def backward(network, batch):
    network(batch).square().mean().backward()


def join(network, kind, service, job):
    return sm.Optimizer(network, "AdamW", lr=1e-2, slots=SLOTS, pulled=kind == "pulled", service=service, job=job,
                        join=True, timeout=PATIENCE)


def train(kind, service, job, file, rest_seconds):
    network = model()
    optimizer = join(network, kind, service, job)
    rest = torch.utils.data.Subset(Batches(), range(optimizer.committed_step * SLOTS, len(Batches())))
    batches = iter(torch.utils.data.DataLoader(rest, batch_size=None, num_workers=2))
    while not is_over(optimizer.committed_step, job, file):
        of_step = [next(batches) for _ in range(SLOTS)]
        if kind == "pulled":
            for slot in optimizer.slots(range(SLOTS)):
                backward(network, of_step[slot])
        else:
            for batch in of_step:
                backward(network, batch)
        optimizer.step()
        optimizer.zero_grad()
        say(file, optimizer.committed_step)
        time.sleep(rest_seconds)
    optimizer.close()


def follow(service, job, file):
    network = model()
    with sm.follow(network, service=service, job=job, timeout=PATIENCE) as following:
        while not is_over(following.step, job, file):
            try:
                following.wait(timeout=PATIENCE)
            except errors.ResourceExhausted as error:  # no thread is left for a call
                print(f"refused: {error}", flush=True)
                time.sleep(0.1)
            say(file, following.step)


def come_too_late(service, job):
    try:
        join(model(), "pulled", service, job)
    except errors.ResourceExhausted as error:
        print(f"refused: {error}", flush=True)
    else:
        sys.exit("was not refused")


def main():
    role, service, job, file, rest_seconds = sys.argv[1:]
    if role == "follower":
        return follow(service, job, file)
    if role == "newcomer":
        return come_too_late(service, job)
    while True:
        try:
            return train(role, service, job, file, float(rest_seconds))
        except (errors.Unavailable, errors.Aborted) as error:  # the job goes on at another epoch, or will
            print(f"begins again: {error}", flush=True)


if __name__ == "__main__":
    main()
