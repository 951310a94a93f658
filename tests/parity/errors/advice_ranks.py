#!/usr/bin/env python3
"""Two ranks of torch_advice_ranks_parity_test.py: advice_ranks.py SERVICE FOLDER. Reports the advice that was followed."""
import os
import sys

import torch
from shardmesh import connect, errors
from shardmesh.torch import Optimizer

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
import ranks  # noqa: E402
from advice import IDS, Net  # noqa: E402


class Counting(Net):
    """With a buffer."""

    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.zeros(2))


def optimizer(model, job, **options):
    return Optimizer(model, "SGD", **{"lr": 0.1, "service": sys.argv[1], "job": job, "timeout": 10, **options})


def backward(model):
    model(IDS).square().mean().backward()


def train(model, trained):
    """A step of both ranks."""
    before, step = model.embed.weight.detach().clone(), trained.committed_step
    backward(model)
    trained.step()
    trained.zero_grad()
    assert trained.committed_step == step + 1 and not torch.equal(model.embed.weight, before)


def told(advice, error, call):
    """The advice that the call's error gives."""
    try:
        call()
    except error as raised:
        assert advice in str(raised), raised
        return advice
    raise AssertionError(f"no error says: {advice}")


def each_makes_one_after_the_fork(rank):
    """As these ranks do."""
    model = Net()
    trained = optimizer(model, "forked")
    advice = "fork before the first optimizer is made"
    if rank == 0 and os.fork() == 0:
        code = 1
        try:
            told(advice, errors.FailedPrecondition, lambda: backward(model))
            told("fork before the first connection", errors.FailedPrecondition, lambda: connect(sys.argv[1]))
            code = 0
        finally:
            os._exit(code)
    if rank == 0:
        assert os.wait()[1] == 0
    train(model, trained)
    return trained, advice


def a_rank_that_left_is_started_again(rank):
    model, advice = Net(), "is started again, this call can be repeated"
    trained = optimizer(model, "left")
    train(model, trained)
    if rank == 1:
        trained.close()
        torch.distributed.barrier()
        model = Net()
        trained = optimizer(model, "left", join=True)
        backward(model)
    else:
        backward(model)
        told(advice, errors.FailedPrecondition, trained.step)
        torch.distributed.barrier()
    trained.step()
    trained.zero_grad()
    train(model, trained)
    return trained, advice


def ranks_have_as_many_batches(rank):
    model, advice = Net(), "give each rank as many batches"
    trained = optimizer(model, "uneven")
    if rank == 0:
        backward(model)
        told(advice, errors.FailedPrecondition, trained.step)
    trained.close()
    model = Net()
    torch.distributed.barrier()
    trained = optimizer(model, "even")
    train(model, trained)
    return trained, advice


def all_loop_over_slots(rank):
    model, advice = Net(), "loop over optimizer.slots(batches) for each step"
    trained = optimizer(model, "pulled", pulled=True, slots=2)
    told(advice, errors.FailedPrecondition, trained.step)
    torch.distributed.barrier()  # both have come: else one may do the step alone, and the other one the next
    for _ in trained.slots([0, 0]):
        backward(model)
    trained.step()
    assert trained.last.step == 1, trained.last
    return trained, advice


def all_make_the_same_changes(rank):
    model, advice = Net(), "every rank makes the same changes"
    trained = optimizer(model, "changes", timeout=1)

    def edit():
        with trained.editing():
            model.layers[0].bias.fill_(0.5)

    backward(model)
    if rank == 1:
        edit()
        told(advice, errors.DeadlineExceeded, trained.step)
    torch.distributed.barrier()
    if rank == 0:
        edit()
    trained.step()
    trained.zero_grad()
    train(model, trained)
    return trained, advice


def all_see_the_checkpoint(rank):
    folder, advice = sys.argv[2], "put the checkpoint where every rank sees it"
    model = Counting()
    trained = optimizer(model, "saved")
    train(model, trained)
    if rank == 0:
        trained.save(folder)
    torch.distributed.barrier()
    trained.close()
    if rank == 0:
        trained = optimizer(Counting(), "resumed", resume=folder)
    else:
        told(advice, errors.NotFound, lambda: optimizer(Counting(), "resumed", resume=folder + "-of-another-host"))
    torch.distributed.barrier()
    trained.close()
    model = Counting()
    trained = optimizer(model, "resumed-again", resume=folder)
    train(model, trained)
    return trained, advice


def run(rank, world):
    ranks.process_group(sys.argv[2] + ".store")
    followed = []
    for scenario in (each_makes_one_after_the_fork, a_rank_that_left_is_started_again, ranks_have_as_many_batches, all_loop_over_slots,
                     all_make_the_same_changes, all_see_the_checkpoint):
        trained, advice = scenario(rank)
        torch.distributed.barrier()
        trained.close()
        followed.append(advice)
    return followed


if __name__ == "__main__":
    ranks.report(ranks.fork(2, run, seconds=60))
