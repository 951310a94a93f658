"""The drop-in optimizer: a torch.optim.Optimizer whose weights and states a service owns.

    optimizer = shardmesh.torch.Optimizer(model, "AdamW", lr=3e-4, states="dyn8")
    for batch in data:
        model(batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

docs/torch.md starts from tasks.
"""
from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Optional, Union

import torch

from .. import errors
from .._tls import Path, Tls
from ..client import Client, Job, SavedCheckpoint
from . import _setup
from ._ending import Ending, weakly
from ._gradients import _scaler
from ._gradients._assigned import AssignedSlots
from ._gradients._pulled import SlotPuller
from ._job import _hyper
from ._job._memory import give_back
from ._job._own_job import OwnJob
from ._job._session import LOG, OVER, GoneBack, Reply
from ._job._specification import Formats
from ._modules._guard import Guard, Owner
from ._modules._locations import listed
from ._modules._model import Parameters
from ._modules._modes import plainly, untraced
from ._no_states import NoStates, refused
from ._state_dict import has_states, load_states, plain, states_are_wanted, states_of, zeros_of
from ._weights._loads import Loads
from ._weights._placed import Placed
from ._weights._quantized import Delivery
from ._weights._residence import Residence, whole

__all__ = ["Optimizer"]


class Optimizer(torch.optim.Optimizer):
    """Every rank makes one, of the same model with the same arguments. For one thread; a forked child cannot use it.

    params: the model; or its named_parameters(); or groups of those; or, with model=, whatever torch.optim takes.
    algorithm, hyperparameters: AdamW, Adam, SGD, Lion or Muon, and torch.optim's own names (lr, betas, eps, ...).
    weights, states, gather, gradients: formats (docs/numerics.md); None: as the model's. weights, states and gather may
    be functions of a parameter's canonical name.
    deliver: "decoded": gathered codes are decoded into the parameters. "quantized": an nn.Linear whose weight is
    gathered as int8_row, fp8_row or fp8_tensor multiplies by codes and scales; its weight has a gradient and a name,
    its elements are NaN, and state_dict() has them decoded. Weights that other modules use, too, are decoded.
    service: "host:port" of a coordinator; None: one of its own, which ends with rank 0. job: its name there.
    tls_cert, tls_key, tls_ca, tls_name: for a service on another host, as shardmesh.connect() takes them (docs/tls.md).
    workers: of a service of its own. mesh: as in "ddp=2,fsdp=2".
    slots: gradient contributions of a step over all ranks, one for each backward; None: one for each rank, in which all
    its backwards add up. pulled: any rank takes any slot, see slots().
    residency: "full", or "bucket": weights are there while they are used, see docs/torch.md.
    init: of parameters and buffers on the meta device, called for each module that has some after its
    reset_parameters(); where there is none, _init_weights() of the model, if it has that (docs/torch-quantized.md).
    clip_norm: of the gradients of all slots together; 0: not clipped. seed: of all random draws.
    publish_every: a version for readers at each multiple; None: when one asks (Job.publish(), follow()).
    on_loss: what if the job loses weights of which no copy is left. "fail"; or "checkpoint": it goes back to the newest
    checkpoint that was saved of it (Optimizer.save(), shardctl checkpoint). Then step() gives this rank the weights of
    that, and (on_went_back) "raise": raises WentBack, which has the step; "continue": returns, with `last` skipped.
    copies: 2, of a job on several hosts: another host keeps each shard's weights and states, too, as they were after one
    of the last steps. If a host is lost, the job goes back to that step by itself, and on_went_back says what step() does.
    resume: a checkpoint, or a folder of them, of which the newest; every rank sees it. The job and the model's buffers
    are as they were then; without mesh= the job gets the saved one, or if that does not fit the workers, one that does.
    join: what if the job has weights already, of an earlier run. None: this run takes them, continues there, and warns;
    True: without the warning; False: AlreadyExists.
    timeout: seconds that each part of the start, and a step, may take. For ranks that are alive step() waits on.

    The first weights are the model's at rank 0, if the job has none. Gradients of slots are averaged.
    InvalidArgument, Unimplemented: what the job cannot have; the message says what it can. AlreadyExists: the job is
    there with another model. Unavailable, DeadlineExceeded: no service, or a rank that does not come.
    """

    @plainly
    def __init__(
        self,
        params: Parameters,
        algorithm: str = "AdamW",
        *,
        model: Optional[torch.nn.Module] = None,
        weights: Formats = None,
        states: Formats = "fp32",
        gather: Formats = "stored",
        deliver: str = "decoded",
        gradients: Optional[str] = None,
        service: Optional[str] = None,
        tls_cert: Path = None,
        tls_key: Path = None,
        tls_ca: Path = None,
        tls_name: Optional[str] = None,
        job: Optional[str] = None,
        workers: int = 1,
        mesh: Optional[str] = None,
        slots: Optional[int] = None,
        pulled: bool = False,
        residency: str = "full",
        init: Optional[Callable[[torch.nn.Module], Any]] = None,
        clip_norm: float = 0.0,
        token_weights: bool = False,
        seed: int = 0,
        publish_every: Optional[int] = None,
        on_loss: str = "fail",
        copies: int = 1,
        on_went_back: str = "raise",
        resume: Optional[str] = None,
        join: Optional[bool] = None,
        timeout: float = 60.0,
        **hyperparameters: Any,
    ) -> None:
        plan = _setup.Plan(
            algorithm=algorithm, hyperparameters=hyperparameters, service=service,
            tls=Tls(tls_cert, tls_key, tls_ca, tls_name), join=join, workers=workers,
            slots=slots, pulled=pulled, token_weights=token_weights, timeout=timeout, deliver=deliver, init=init,
            resume=resume, on_went_back=on_went_back,
            specification={
                "weights": weights, "states": states, "gather": gather, "gradients": gradients,
                "name": "model" if job is None else job, "mesh": mesh, "residency": residency, "clip_norm": clip_norm,
                "seed": seed, "publish_every": -1 if publish_every is None else publish_every, "on_loss": on_loss,
                "copies": copies,
            },
        )
        self._started = _setup.Started(params, model, plan)
        try:
            self._begin()
        except BaseException:
            self._started.close()
            raise
        self._tokens: list[int] = []
        self._zeros = False  # states are wanted before the first step
        self._wanted: Optional[int] = None  # a step that step() was to do, and ended with an error
        self._over: Optional[errors.Error] = None  # why the epoch is over that this rank is at; it has not come back yet
        self.last: Optional[Reply] = None  # how the last step went

    def _begin(self) -> None:
        plan, facts, model = self._started.plan, self._started.facts, self._started.model
        self._no_states = NoStates()
        self._states: Any = self._no_states
        super().__init__(self._started.groups, dict(self._started.defaults))
        self._fixed = [_setup.fixed(group) for group in self.param_groups]
        self._session = self._started.session
        self._no_states.has_states = self._session.committed > 0
        self._trainable = [parameter for parameter in facts.parameters if not parameter.frozen]
        self._placed = Placed(
            facts.parameters, self._session, resides=self._started.bucketed,
            delivery=Delivery(model, facts.parameters) if model is not None and plan.deliver == "quantized" else None,
        )
        self._slots: Union[AssignedSlots, SlotPuller]
        world = self._started.ranks.world
        if plan.pulled:
            self._slots = SlotPuller(self._trainable, int(self._started.spec["slots"]), plan.token_weights, world)
        else:
            self._slots = AssignedSlots(self._trainable, self._session.slots or [], plan.token_weights, world == 1)
        self._slots.attach(self._session)
        self._residence = self._reside()
        self._loads = Loads(model, facts.parameters, weakly(self._loading))
        self._guard = Guard(model, facts.parameters, Owner(self._started.name, self._started.bucketed))
        self._ending = Ending(
            self, self._started, self._guard, self._loads, self._slots, self._placed, self._residence
        )
        give_back()

    def _reside(self) -> Optional[Residence]:
        started = self._started
        if not started.bucketed:
            return None
        assert started.model is not None
        parameters = started.facts.parameters
        begins = weakly(self._check_model if isinstance(self._slots, AssignedSlots) else self._check_guard)
        residence = Residence(started.model, parameters, self._placed, self._session, begins)
        self._slots.reside(residence, [index for index, parameter in enumerate(parameters) if not parameter.frozen])
        return residence

    # -- training ---------------------------------------------------------------------------------------------------

    @untraced
    @torch.no_grad()
    def step(self, closure: Optional[Callable[[], Any]] = None) -> Any:
        """Hands this rank's gradients over, and returns when those of all slots are in the weights, on every rank.

        Without any gradient this rank's slots count as zeros; one rank alone does nothing then. `last` has how it went:
        the step, whether it was skipped for a gradient that is not finite, and with clip_norm the gradient_norm.
        FailedPrecondition: a parameter or hyperparameter was changed by hand, slots had no backward, a rank left the
        job, or this was closed. DeadlineExceeded: ranks that are not known to be alive did not come in time.
        WentBack: the job is at an earlier step (on_loss). Unavailable: a worker is lost. After an error the
        call may be repeated, and no step is done twice (an interrupt in torch's code around it may come when
        the step is done: see `committed_step`).
        """
        self._check_usable()
        self._zeros = states_are_wanted(self.param_groups)
        if self._zeros:
            return None
        with torch.enable_grad():
            loss = closure() if closure is not None else None
        try:
            self._step()
        except BaseException:
            _scaler.forget(self)
            raise
        return loss

    @plainly
    def _step(self) -> None:
        self._guard.check(self._placed.decoded_for_now())
        if not self._slots.begun():
            self._wanted = None
            return
        self._take_changes()
        _setup.check_fixed(self.param_groups, self._fixed)
        self._slots.complete()
        if self._residence is not None:
            self._residence.release_all()
        again = self._wanted is not None
        if self._wanted is None:
            self._wanted = self._session.committed + 1
        scaling = _scaler.scaling(self, isinstance(self._slots, SlotPuller))
        went_back, reply = self._commit(self._wanted, again, self._learning_rates(), scaling.scale if scaling else 1.0)
        self.last = reply if self.clip_norm > 0 and not reply.skipped else reply._replace(gradient_norm=None)
        self._placed.refresh()
        if scaling is not None:
            scaling.tell(self.last.skipped and not went_back)
        self._tokens = []
        self._slots.stepped()
        self._no_states.has_states = True
        self._wanted = None  # until here, a call that was interrupted is repeated as the same step

    def _commit(self, wanted: int, again: bool, learning_rates: list[float], loss_scale: float) -> tuple[bool, Reply]:
        """Whether the job has gone back instead, and how the step went. again: a call for the same step was interrupted."""
        while self._over is not None or self._session.committed < wanted or isinstance(self._slots, SlotPuller):
            if self._over is not None and (gone_back := self._come_back(self._over, wanted - 1)) is not None:
                return True, Reply(gone_back.step, False, True, self._tell(gone_back, wanted - 1), None)
            try:
                if again:
                    self._session.core.await_weights(timeout=self._session.timeout)
                return False, self._slots.commit(self._session, learning_rates, loss_scale, self._tokens)
            except OVER as error:
                if self._residence is not None:
                    raise  # such a job has no other copies
                self._over = error
        return False, Reply(wanted, True, False, "", None)

    def _come_back(self, error: errors.Error, newest: int) -> Optional[GoneBack]:
        """To the job as it is now; to which step it went back, if any is lost. Whatever ends this call, the next one
        begins again.

        newest: the last step that this rank has done."""
        self._over = error
        gone_back = self._session.reopen(error)
        if gone_back is not None and max(gone_back.lost_step, newest) <= gone_back.step:
            gone_back = None  # its weights are those that this rank has: the step is sent again
        self._place_again()
        self._slots.attach(self._session)
        if gone_back is None:
            self._session.came_back()
            self._over = None
        return gone_back

    def _tell(self, gone_back: GoneBack, newest: int) -> str:
        """WentBack, or its text where this rank continues without. The gradients are of weights that are gone.

        newest: the last step that this rank has done."""
        self._slots.clear()
        self._placed.refresh()
        lost = max(gone_back.lost_step, newest)
        place = f"checkpoint {gone_back.checkpoint}" if gone_back.checkpoint else "copies that its workers kept"
        text = (f"job {self._started.name} went back to step {gone_back.step}, of {place}, since {gone_back.cause}; steps "
                f"up to {lost} are lost")
        self._wanted = None
        self._session.came_back()
        self._over = None
        if self._started.plan.on_went_back == "continue":
            return text
        raise errors.WentBack(text, gone_back.step, lost, gone_back.checkpoint)

    def _check_came_back(self) -> None:
        """Before the job is read by its name: that this rank is where the job is. WentBack: it was not."""
        specification = self._started.plan.specification
        if (specification["on_loss"] != "checkpoint" and specification["copies"] == 1) or self._residence is not None:
            return
        newest = self._session.committed
        if self._over is None and not self._session.is_behind():
            return
        gone_back = self._come_back(self._over or errors.Unavailable("it is at a later epoch"), newest)
        if gone_back is not None:
            LOG.warning("%s", self._tell(gone_back, newest))

    @untraced
    def zero_grad(self, set_to_none: bool = True) -> None:
        """As torch.optim. All slots of the step begin again, after a backward that raised, too. FailedPrecondition,
        with bucket residency: gradients were handed over, and the service has summed them up.
        """
        self._check_usable()
        if set_to_none or not self._slots.whole:
            self._slots.clear()
        else:
            super().zero_grad(set_to_none=False)
            self._slots.zeroed()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards within it join the slot of the next one."""
        self._check_usable()
        before = self._slots.join(True)
        try:
            yield
        finally:
            self._slots.join(before)

    def slots(self, batches: Union[Sequence[Any], Callable[[int, int], Any]]) -> Iterator[Any]:
        """With pulled=True: the batches of the slots that this rank takes in one step; whichever rank is free takes the
        next one, and the loop ends when none is left. Then step() says how it went.

        batches: of all slots of the step, or a function of step and slot; the same on every rank."""
        if not isinstance(self._slots, SlotPuller):
            raise errors.FailedPrecondition("the slots of this optimizer are assigned; make it with pulled=True")
        self._check_usable()
        if self._slots.over:
            self.step()
        self._check_model()
        _setup.check_fixed(self.param_groups, self._fixed)
        return self._slots.take(
            batches, self._learning_rates, lambda: (self._tokens or [0])[0])

    def tokens(self, *counts: int) -> None:
        """With token_weights=True, before step(): over how many tokens each slot of this rank has summed up."""
        self._check_usable()
        self._tokens = [int(count) for count in counts]

    def _learning_rates(self) -> list[float]:
        return [_hyper.number(group["lr"], f"group {index}: lr") for index, group in enumerate(self.param_groups)]

    _step_supports_amp_scaling = True  # torch.amp.GradScaler sets grad_scale and found_inf for the time of a step

    # -- weights ----------------------------------------------------------------------------------------------------

    @contextmanager
    def editing(self) -> Iterator[None]:
        """Changes of parameters within it, the same on every rank, are the job's from the next step on; with bucket
        residency, where it takes memory for all weights, from its end on."""
        self._check_usable()
        if self._residence is not None and self._slots.taking:
            raise errors.FailedPrecondition(
                "weights are loaded or edited within a loop over optimizer.slots(), where residency=\"bucket\" cannot "
                "give them to the job; load or edit outside of the loop"
            )
        with torch.no_grad(), self._placed.decoded(), whole(self._residence, self._take_changes, self._place_again):
            with self._loads.editing():
                yield
            self._loads.note(self._placed.changed())

    @plainly
    def revert(self) -> None:
        """Takes the service's weights back, whatever was written to the parameters, and wherever they were moved to.
        Gradients of parameters that were moved are dropped: the step begins again."""
        self._check_usable()
        moved = self._guard.drop_moved(self._placed.decoded_for_now())
        self._place_again()
        self._loads.clear()
        if moved and isinstance(self._slots, AssignedSlots):
            self._slots.attach(self._session)
        if moved and self._residence is None:
            self._slots.clear()

    @plainly
    def upload(self) -> None:
        """Gives what was changed by load_state_dict() or within editing() to the job now; step() does it by itself, as do
        save(), job.publish() and job.digest() on one rank. FailedPrecondition: a parameter was changed by hand."""
        self._check_usable()
        self._guard.check(self._placed.decoded_for_now(), frozen=False)
        self._take_changes()

    @plainly
    def _settle(self, what: str) -> None:
        """Before the job is read in place of the model, which one rank may do alone: the job has what the model has.

        FailedPrecondition: a parameter was changed by hand; or all ranks have to give it changes, or a step is open.
        """
        if not self._ending.is_open:
            return  # a Job outlives its optimizer
        self._check_usable()
        self._guard.check(self._placed.decoded_for_now(), frozen=False)
        changed = self._placed.changed()
        self._loads.check(changed)
        if changed and self._slots.taking:
            raise errors.FailedPrecondition(
                f"{listed([one.name for one in changed])} changed within a loop over optimizer.slots(); call "
                "optimizer.revert(), and load or edit outside of the loop"
            )
        if changed and self._started.ranks.world > 1:
            raise errors.FailedPrecondition(
                f"{listed([one.name for one in changed])} changed by load_state_dict() or within editing(), and the job "
                f"does not have that yet; call optimizer.upload() on every rank, then {what}"
            )
        self._take_changes()

    @contextmanager
    def _loading(self, module: torch.nn.Module) -> Iterator[None]:
        """Around load_state_dict() of a module. The whole model's weights are the job's at once, those of a part with the
        next step. With bucket residency both are at once, where it takes memory for all weights. Where it fails everything
        is as it was."""
        waiting = self._placed.changed()
        put_back, kept = self._loads.begin(module), self._placed.kept(waiting)
        try:
            if self._loads.within_editing:
                yield
            elif self._residence is not None and not waiting:
                with self.editing():
                    yield
                    self._guard.check_replaced()
            else:
                yield
                self._take_loaded(module)
        except Exception:
            put_back()
            if not self._loads.within_editing:
                self._take_back(kept)
                put_back()  # what is known to be changed
            raise

    @plainly
    def _take_loaded(self, module: torch.nn.Module) -> None:
        self._guard.check_replaced()
        if module is self._started.model or self._residence is not None:
            self._take_changes()
        else:
            self._started.check_values(self._placed.changed())

    @plainly
    def _take_back(self, waiting: Sequence[tuple[int, torch.Tensor]]) -> None:
        """The job's weights, but for those that waited for the job to have them."""
        with suppress(errors.Error):  # the job is gone
            self.revert()
            self._placed.put(waiting)

    def _take_changes(self) -> None:
        changed = self._placed.changed()
        if not changed:
            return
        self._loads.check(changed)
        _setup.replace_weights(self._started, changed)
        self._attach_again()
        self._loads.clear()

    def _check_model(self) -> None:
        """Before a forward, whose gradients may be handed over at once, so that they could not be dropped later."""
        self._guard.check(self._placed.decoded_for_now())
        self._take_changes()

    def _check_guard(self) -> None:
        """Before a forward whose gradients are handed over at the end of its slot; changes are taken before the loop."""
        self._guard.check(self._placed.decoded_for_now())

    def _attach_again(self) -> None:
        self._session = self._started.session
        self._place_again()
        self._slots.attach(self._session)
        if self._residence is not None:
            self._residence.attach(self._session)

    def _place_again(self) -> None:
        self._placed.place(self._session)
        self._guard.note()

    # -- the job ----------------------------------------------------------------------------------------------------

    @property
    def service(self) -> str:
        """The coordinator's address."""
        return self._started.address

    @property
    def client(self) -> Client:
        self._check_usable()
        return self._started.client

    @property
    def job(self) -> Job:
        """For readers: versions, leases, digests. Its publish() and digest() are of what the model has, as save()."""
        job = self.client.job(self._started.name, timeout=self._started.plan.timeout)
        return OwnJob(job, weakly(self._settle))

    @property
    def committed_step(self) -> int:
        self._check_usable()
        return int(self._session.committed)

    @property
    def clip_norm(self) -> float:
        """What the gradients of a step are clipped to; 0: they are not."""
        return float(self._started.spec["clip_norm"])

    def save(self, folder: str, **options: Any) -> SavedCheckpoint:
        """Writes a checkpoint of the newest step, with this rank's buffers. One rank calls it. As Client.checkpoint().

        What was loaded or edited since that step is in it. WentBack: the job is at an earlier step.
        FailedPrecondition: a parameter was changed by hand, as step()
        says it; or there are several ranks, and upload() was not called on each after such a change.
        """
        self._check_usable()
        self._check_came_back()
        self._settle("save()")
        return self._started.save(folder, **options)

    def close(self) -> None:
        """Leaves the job. The model keeps its weights, in memory of its own, and no gradients; it can be given to
        another optimizer. A service of its own ends, when the other ranks have closed or ended, too. Also the end of
        `with`, and of an optimizer that nothing refers to. Idempotent; all else then raises FailedPrecondition.
        """
        self._ending.close()

    def __enter__(self) -> Optimizer:
        self._check_usable()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        self._ending.close(at_once=error is not None)

    # -- what torch.optim has ---------------------------------------------------------------------------------------

    @property
    def state(self) -> Any:
        """Empty: states lie in the service. FailedPrecondition: one of a parameter is read, or it is written to."""
        return self._states

    @state.setter
    def state(self, states: Any) -> None:
        if getattr(self, "_fixed", None) is not None and states is not self._states:
            raise refused("optimizer.state was assigned")

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Unimplemented, always: a job has its groups from the start. close() this one and make another, of all."""
        if getattr(self, "_fixed", None) is not None:
            raise errors.Unimplemented(
                "a job has its parameters from the start; give all groups when the optimizer is made, or close() it "
                "and make another"
            )
        plain("add_param_group")(self, param_group)

    @plainly
    def state_dict(self) -> dict[str, Any]:
        """As torch.optim's: states by the index of a parameter, in fp32. The service saves a checkpoint for it.
        WentBack: the job is at an earlier step. FailedPrecondition: a parameter was changed by hand."""
        self._check_usable()
        self._check_came_back()
        self._guard.check(self._placed.decoded_for_now(), frozen=False)
        self._loads.check(self._placed.changed())  # what was loaded or edited has no states
        states = states_of(self._started)
        if self._zeros and not states:
            states = zeros_of(self._started, self._started.optimizers(self.param_groups))
        self._states = states
        try:
            result: dict[str, Any] = plain("state_dict")(self)
            return result
        finally:
            self._states = self._no_states

    @plainly
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Of this class, torch.optim or torchao, on every rank; rank 0's counts. The job goes on at the state's step,
        with the model's weights if they were loaded before. Without states, as before a first step, that is step 0.

        InvalidArgument, all of it at once: states that are missing, or of other shapes; then nothing is changed.
        """
        self._check_usable()
        before = self.param_groups
        plain("load_state_dict")(self, {**state_dict, "state": {}})
        if state_dict["state"] or self._resets():
            changed = self._placed.changed()  # by a load, too: torch.distributed.checkpoint's writes to them in place
            try:
                hyper = self._started.optimizers(self.param_groups)
                load_states(self._started, self.param_groups, state_dict, hyper, changed)
            except errors.InvalidArgument:
                self.param_groups = before
                raise
            self._attach_again()
            self._loads.clear()
        self._fixed = [_setup.fixed(group) for group in self.param_groups]

    def _resets(self) -> bool:
        """Whether loading no states changes something: the job has had a step, or other hyperparameters."""
        if [_setup.fixed(group) for group in self.param_groups] != self._fixed:
            return True
        return self._session.committed > 0 and has_states(self._started.optimizers(self.param_groups))

    def __getstate__(self) -> dict[str, Any]:
        raise errors.Unimplemented("an optimizer of a service cannot be pickled or copied; take state_dict()")

    def _check_usable(self) -> None:
        self._ending.check()
