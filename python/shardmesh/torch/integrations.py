"""Accelerate and transformers.Trainer with an Optimizer, as they come.

    accelerator = Accelerator()
    optimizer = shardmesh.torch.Optimizer(model, "AdamW", lr=3e-4)
    integrations.attach(accelerator, optimizer)       # before prepare()

    trainer = Trainer(model, args, optimizers=(optimizer, None), ...)
    integrations.attach(trainer.accelerator, optimizer)

Neither is imported here before it is used.
"""
from __future__ import annotations

import importlib
import os
from contextlib import AbstractContextManager
from functools import lru_cache
from typing import Any, Optional

import torch

from .. import errors
from .optimizer import Optimizer

__all__ = ["ShardmeshCallback", "attach"]

_PLAIN = ("NO", "MULTI_CPU", "MULTI_GPU", "MULTI_XPU", "MULTI_HPU", "MULTI_NPU", "MULTI_MLU")
ShardmeshCallback: Any  # a transformers.TrainerCallback; made when it is asked for, see _callback_class()


def attach(accelerator: Any, optimizer: Optimizer) -> None:
    """From now on this accelerator leaves to the service what is the service's: summing gradients up and clipping them.

    Of this accelerator alone, and whatever order prepare() is given things in:
    prepare, prepare_model   do not wrap the model in DistributedDataParallel, whose all-reduce would be for nothing;
                             all else (autocast, compilation) is as ever
    no_sync, accumulate      are the optimizer's no_sync()
    clip_grad_norm_          checks that the norm is the optimizer's clip_norm, and returns the norm of the last step
    InvalidArgument: an accelerator of FSDP, DeepSpeed or Megatron, which shard models themselves.
    """
    kind = accelerator.distributed_type.name
    if kind not in _PLAIN:
        raise errors.InvalidArgument(
            f"this accelerator is of {kind}, which shards models and optimizers itself; launch without it: the service "
            "does both"
        )
    optimizer._guard.take_back()  # a Trainer of several processes has moved the model from "cpu" to "cpu:0"
    prepare_model, prepare_optimizer = accelerator.prepare_model, accelerator.prepare_optimizer

    def model_as_it_is(model: torch.nn.Module, *_: Any, **__: Any) -> torch.nn.Module:
        _check_device(model, accelerator.device)
        prepared: torch.nn.Module = prepare_model(model, device_placement=False, evaluation_mode=True)
        return prepared

    def optimizer_as_it_is(given: Any, device_placement: Optional[bool] = None) -> Any:
        # Placement would save its states and load them again.
        return prepare_optimizer(given, device_placement=False if given is optimizer else device_placement)

    def no_sync(model: Any = None) -> AbstractContextManager[None]:
        return optimizer.no_sync()

    def clip_grad_norm_(parameters: Any, max_norm: float, norm_type: float = 2) -> torch.Tensor:
        return _norm(optimizer, float(max_norm), float(norm_type))

    accelerator.prepare_model, accelerator.prepare_optimizer = model_as_it_is, optimizer_as_it_is
    accelerator.no_sync, accelerator.clip_grad_norm_ = no_sync, clip_grad_norm_


def _check_device(model: torch.nn.Module, device: torch.device) -> None:
    strangers = {parameter.device.type for parameter in model.parameters()} - {device.type}
    if strangers:
        raise errors.FailedPrecondition(
            f"the model is on {', '.join(sorted(strangers))}, the accelerator on {device.type}; move it there before "
            "the optimizer is made: model.to(accelerator.device)"
        )


def _norm(optimizer: Optimizer, max_norm: float, norm_type: float) -> torch.Tensor:
    fixed = optimizer.clip_norm
    if norm_type != 2 or max_norm != (fixed or float("inf")):
        raise errors.InvalidArgument(
            f"clip_grad_norm_({max_norm:g}, norm_type={norm_type:g}) and an optimizer with clip_norm={fixed:g}; the "
            "service clips, by the 2-norm over all ranks: make the optimizer with "
            f"clip_norm={max_norm if max_norm < float('inf') else 0:g}"
        )
    norm = optimizer.last.gradient_norm if optimizer.last is not None else None
    return torch.tensor(float("nan") if norm is None else norm)


@lru_cache(maxsize=None)
def _callback_class() -> Any:
    callbacks: Any = importlib.import_module("transformers").TrainerCallback

    class ShardmeshCallback(callbacks):  # type: ignore[misc]
        """Adds the service's view to a Trainer's logs, at rank 0: the committed step, the norm of the gradients,
        skipped steps; with digests=True also the digest of weights and states. With `checkpoints`, a folder, the
        service writes a checkpoint of its own there whenever the Trainer saves one; keep_last of them stay."""

        def __init__(
            self, optimizer: Optimizer, *, digests: bool = False, checkpoints: Optional[str] = None, keep_last: int = 3
        ) -> None:
            self.optimizer, self.digests, self.checkpoints, self.keep_last = optimizer, digests, checkpoints, keep_last
            self.skipped = 0

        def on_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            self.skipped += bool(self.optimizer.last and self.optimizer.last.skipped)

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            if logs is None or not state.is_world_process_zero:
                return
            more: dict[str, Any] = {"committed_step": self.optimizer.committed_step, "skipped_steps": self.skipped}
            if self.digests:
                more["digest"] = f"{self.optimizer.job.digest().value:016x}"
            logs.update(more)  # for what logs after this
            if state.log_history:
                state.log_history[-1].update(more)

        def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if self.checkpoints is None or not state.is_world_process_zero:
                return
            try:
                self.optimizer.save(os.path.abspath(self.checkpoints), keep_last=self.keep_last)
            except errors.AlreadyExists:
                pass  # of this step

    return ShardmeshCallback


def __getattr__(name: str) -> Any:
    if name == "ShardmeshCallback":
        return _callback_class()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
