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
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import lru_cache
from typing import Any, Optional

import torch

from .. import errors
from ._job._session import LOG
from ._modules._locations import listed
from .optimizer import Optimizer

__all__ = ["ShardmeshCallback", "attach"]

_PLAIN = ("NO", "MULTI_CPU", "MULTI_GPU", "MULTI_XPU", "MULTI_HPU", "MULTI_NPU", "MULTI_MLU")
_ATTACHED = "_shardmesh_attached"  # of an accelerator
ShardmeshCallback: Any  # a transformers.TrainerCallback; made when it is asked for, see _callback_class()


def attach(accelerator: Any, optimizer: Optimizer) -> None:
    """From now on this accelerator leaves to the service what is the service's: summing gradients up and clipping them.

    Of this accelerator alone, for the parameters of this optimizer alone (each optimizer is attached by a call of its
    own), and whatever order prepare() is given things in:
    prepare, prepare_model   do not wrap the optimizer's model in DistributedDataParallel, whose all-reduce would be for
                             nothing; all else (autocast, compilation) is as ever
    no_sync, accumulate      are the no_sync() of the optimizers that have parameters of the model
    clip_grad_norm_          checks that the norm is the clip_norm of the optimizer that has these parameters, and
                             returns the norm of its last step
    Of models and parameters that no attached optimizer has, all of these are the accelerator's own.
    InvalidArgument: an accelerator of FSDP, DeepSpeed or Megatron, which shard models themselves.
    """
    kind = accelerator.distributed_type.name
    if kind not in _PLAIN:
        raise errors.InvalidArgument(
            f"this accelerator is of {kind}, which shards models and optimizers itself; launch without it: the service "
            "does both"
        )
    optimizer._guard.take_back()  # a Trainer of several processes has moved the model from "cpu" to "cpu:0"
    attached = getattr(accelerator, _ATTACHED, None)
    if attached is None:
        attached = _Attached(accelerator)
        setattr(accelerator, _ATTACHED, attached)
    attached.add(optimizer)


def _ids(optimizer: Optimizer) -> set[int]:
    """id() of each parameter of its model."""
    return {id(parameter.tensor) for parameter in optimizer._started.facts.parameters}


class _Attached:
    """The optimizers of one accelerator, in place of some of its methods."""

    def __init__(self, accelerator: Any) -> None:
        self._accelerator, self._optimizers = accelerator, list[Optimizer]()
        self._prepare_model, self._prepare_optimizer = accelerator.prepare_model, accelerator.prepare_optimizer
        self._no_sync, self._clip = accelerator.no_sync, accelerator.clip_grad_norm_
        accelerator.prepare_model, accelerator.prepare_optimizer = self.prepare_model, self.prepare_optimizer
        accelerator.no_sync, accelerator.clip_grad_norm_ = self.no_sync, self.clip_grad_norm_

    def add(self, optimizer: Optimizer) -> None:
        others = [one for one in self._optimizers if one._ending.is_open and one is not optimizer]
        self._optimizers = [*others, optimizer]

    def _of(self, parameters: Iterable[Any]) -> list[Optimizer]:
        """Those that have some of these."""
        wanted = {id(parameter) for parameter in parameters}
        return [one for one in self._optimizers if one._ending.is_open and not wanted.isdisjoint(_ids(one))]

    def prepare_model(
        self, model: torch.nn.Module, device_placement: Optional[bool] = None, evaluation_mode: bool = False
    ) -> torch.nn.Module:
        optimizers = self._of(model.parameters())
        if optimizers:
            _check_device(model, self._accelerator.device)
            self._check_whole(model, optimizers)
            device_placement, evaluation_mode = False, True
        prepared: torch.nn.Module = self._prepare_model(
            model, device_placement=device_placement, evaluation_mode=evaluation_mode
        )
        return prepared

    def _check_whole(self, model: torch.nn.Module, optimizers: list[Optimizer]) -> None:
        """Nobody would average the gradients of the rest."""
        own = set[int]().union(*map(_ids, optimizers))
        rest = [name for name, one in model.named_parameters() if one.requires_grad and id(one) not in own]
        if rest and self._accelerator.num_processes > 1:
            raise errors.InvalidArgument(
                f"{listed(rest)} of this model are in no attached optimizer, so that nothing would average their "
                "gradients over the ranks: train them with a shardmesh.torch.Optimizer too, and attach() it, or "
                "prepare them as a model of their own"
            )

    def prepare_optimizer(self, optimizer: Any, device_placement: Optional[bool] = None) -> Any:
        # Placement would save its states and load them again.
        placement = False if any(optimizer is one for one in self._optimizers) else device_placement
        return self._prepare_optimizer(optimizer, device_placement=placement)

    @contextmanager
    def no_sync(self, model: Any) -> Iterator[None]:
        optimizers = self._of(model.parameters())
        with ExitStack() as stack:
            for one in optimizers:
                stack.enter_context(one.no_sync())
            if not optimizers:
                stack.enter_context(self._no_sync(model))
            yield

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> Any:
        parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        optimizers = self._of(parameters)
        if not optimizers:
            return self._clip(parameters, max_norm, norm_type=norm_type)
        if len(optimizers) > 1:
            raise errors.InvalidArgument(
                f"these parameters are of {len(optimizers)} optimizers, and each clips its own: call clip_grad_norm_() "
                "for the parameters of each"
            )
        return _norm(optimizers[0], float(max_norm), float(norm_type))


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
    return torch.tensor(float("nan") if norm is None else norm, dtype=torch.float32, device="cpu")


@lru_cache(maxsize=None)
def _callback_class() -> Any:
    callbacks: Any = importlib.import_module("transformers").TrainerCallback

    class ShardmeshCallback(callbacks):  # type: ignore[misc]
        """Adds the service's view to a Trainer's logs, at rank 0: the committed step and skipped steps; with
        digests=True also the digest of weights and states. `prefix` begins these names, for callbacks of several
        optimizers. With `checkpoints`, a folder, the service writes a checkpoint of its own there whenever the Trainer
        saves one; keep_last of them stay."""

        def __init__(
            self, optimizer: Optimizer, *, digests: bool = False, checkpoints: Optional[str] = None,
            keep_last: int = 3, prefix: str = "",
        ) -> None:
            self.optimizer, self.digests, self.checkpoints, self.keep_last = optimizer, digests, checkpoints, keep_last
            self.prefix, self.skipped = prefix, 0
            self._last: Any = optimizer.last

        def on_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            last = self.optimizer.last
            self.skipped += bool(last is not self._last and last and last.skipped)
            self._last = last

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            if logs is None or not state.is_world_process_zero:
                return
            more: dict[str, Any] = {"committed_step": self.optimizer.committed_step, "skipped_steps": self.skipped}
            if self.digests:
                more["digest"] = f"{self.optimizer.job.digest().value:016x}"
            more = {self.prefix + name: value for name, value in more.items()}
            logs.update(more)  # for what logs after this
            if state.log_history:
                state.log_history[-1].update(more)

        def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if self.checkpoints is None or not state.is_world_process_zero:
                return
            try:
                self.optimizer.save(os.path.abspath(self.checkpoints), keep_last=self.keep_last)
            except errors.AlreadyExists as error:  # of another run: training continues
                LOG.warning("no checkpoint of step %d was written: %s", self.optimizer.committed_step, error)

    return ShardmeshCallback


def __getattr__(name: str) -> Any:
    if name == "ShardmeshCallback":
        return _callback_class()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
