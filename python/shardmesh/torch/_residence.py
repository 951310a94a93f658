"""Bucket residency: the weights of a unit are gathered before it is used and dropped after it, forward and backward,
and its gradients are handed over as soon as they are there.

Addresses stay as they are when a bucket is dropped, so tensors, compiled blocks and what autograd saved stay valid.
"""
from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, Optional

import torch

from .. import errors
from ._backward import Backwards, hooked
from ._hooks import Hook, refuse_copies
from ._model import Parameter
from ._placed import Placed
from ._session import LOG, Session
from ._units import Unit, units


class _Use:
    """One forward of a unit that will have a backward."""

    def __init__(self, residence: Residence, unit: int) -> None:
        self._residence, self._unit = residence, unit
        self._open = False
        self.inputs = 0  # whose gradients are still to come

    def begin(self, gradient: torch.Tensor) -> None:
        if torch.is_grad_enabled():
            raise errors.Unimplemented(
                'create_graph=True with residency="bucket": the weights would be gone when the gradients have their '
                'backward; take residency="full"'
            )
        if not self._open:
            self._open = True
            self._residence.backward_begins(self, self._unit)

    def input_done(self, gradient: torch.Tensor) -> None:
        self.inputs -= 1
        if self.inputs == 0:
            self.end()

    def end(self) -> None:
        if self._open:
            self._open = False
            self._residence.release(self._unit)


class Residence:
    """Of one session. Unit 0 is the root."""

    def __init__(
        self, model: torch.nn.Module, parameters: Sequence[Parameter], placed: Placed, session: Session,
        begins: Callable[[], None],
    ) -> None:
        """begins: called before a forward of the whole model."""
        found, root = units(model, parameters)
        self._units = [Unit(model, root), *found]
        self._parameters, self._placed, self._begins = parameters, placed, begins
        self._handles: list[Any] = []
        self._allow_copies = refuse_copies(model)
        self._backwards = Backwards(self._backward_ended)
        self.attach(session)
        if not found:
            LOG.warning("all weights are held from the forward to the end of the backward: the model has no list of "
                        "blocks, or was compiled as a whole; compile its blocks, before the optimizer is made")
        for number, unit in enumerate(self._units):
            self._handles += _call_around(unit.module, partial(self._before, number), partial(self._after, number))
            if number > 0 and not _is_compiled(unit.module):
                tensors = {id(parameters[index].tensor) for index in unit.parameters}
                check = Hook(partial(self._check_present, number))
                self._handles += [
                    inner.register_forward_pre_hook(check) for inner in unit.module.modules()
                    if inner is not unit.module and any(id(one) in tensors for one in inner.parameters(recurse=False))
                ]
        self._unit_of = {index: number for number, unit in enumerate(self._units) for index in unit.parameters}
        place_of = {
            id(parameters[index].tensor): (number, index)
            for number, unit in enumerate(self._units) for index in unit.parameters
        }
        for module in model.modules():
            own = [
                (name, *place_of[id(tensor)]) for name, tensor in module._parameters.items() if id(tensor) in place_of
            ]
            if own:
                hook = partial(self._put_into_state_dict, own)
                self._handles.append(hooked(module)._register_state_dict_hook(Hook(hook)))

    def attach(self, session: Session) -> None:
        """At first, or when the job has other weights: nothing is in use."""
        self._session = session
        self._bucket = [session.core.bucket(parameter.name) for parameter in self._parameters]
        self._buckets = [sorted({self._bucket[index] for index in unit.parameters}) for unit in self._units]
        self._uses = [0] * len(self._units)
        self._root_held = False  # its buckets: from the first use to close(), so that steps write them where they are
        self._prefetched: set[int] = set()
        self._backward: list[_Use] = []  # that have begun
        self._backwards.forget()
        self._missing: dict[int, set[int]] = {}  # by bucket: trainable parameters without a gradient yet
        self._declared: set[int] = set()
        self._called: set[int] = set()  # units, since the last step
        self.stepped()
        self._placed.reside()

    # -- weights ----------------------------------------------------------------------------------------------------

    def _before(self, unit: int, module: Any, args: Any, kwargs: Any) -> None:
        if unit == 0 and self._uses[0] == 0:
            self._begins()
        self._called.add(unit)
        self.acquire(unit)
        if unit > 0:
            self._prefetch(unit + 1)

    def _check_present(self, unit: int, module: Any, args: Any) -> None:
        """FailedPrecondition: a module within a block is called outside of the block's call, and reads zeros."""
        if not torch.compiler.is_compiling() and self._uses[unit] == 0:
            names = sorted(self._parameters[index].name for index in self._units[unit].parameters)
            raise errors.FailedPrecondition(
                f"a {type(module).__name__} of the block of {names[0]} was called without the block, so that its "
                "weights are not there: residency=\"bucket\" needs calls of the modules in a list, not of what is in "
                "them"
            )

    def _after(self, unit: int, module: Any, args: Any, kwargs: Any, output: Any) -> None:
        if torch.is_grad_enabled() and (outputs := _needing_gradients(output)):
            use = _Use(self, unit)
            for tensor in outputs:
                hooked(tensor).register_hook(use.begin)
            if unit == 0:
                return  # it has what it needs until the backward has ended
            inputs = [tensor for tensor in _needing_gradients((args, kwargs)) if not tensor.is_leaf]
            use.inputs = len(inputs)
            for tensor in inputs:
                hooked(tensor).register_hook(use.input_done)
        self.release(unit)

    def _put_into_state_dict(
        self, names: Sequence[tuple[str, int, int]], module: torch.nn.Module, state_dict: dict[str, Any], prefix: str,
        _: Any,
    ) -> None:
        """A module's state_dict() has copies: its parameters are not there all the time."""
        for name, unit, index in names:
            if prefix + name in state_dict:
                self.acquire(unit)
                state_dict[prefix + name] = self._placed.value(index)
                self.release(unit)

    def backward_begins(self, use: _Use, unit: int) -> None:
        self._backwards.begun()
        self._backward.append(use)
        if unit > 0:  # the root has its own since its forward
            self.acquire(unit)
            self._prefetch(unit - 1)

    def _backward_ended(self) -> None:
        for use in self._backward:
            use.end()
        self._backward.clear()
        self._drop_prefetched()

    def acquire(self, unit: int) -> None:
        self._uses[unit] += 1
        if self._uses[unit] > 1:
            return
        for bucket in () if unit == 0 and self._root_held else self._buckets[unit]:
            self._session.core.acquire(bucket, self._session.timeout)
            self._prefetched.discard(bucket)
        self._root_held = self._root_held or unit == 0
        self._placed.fill(self._units[unit].parameters)

    def release(self, unit: int) -> None:
        if self._uses[unit] == 0:
            return
        self._uses[unit] -= 1
        if self._uses[unit] > 0:
            return
        self._placed.empty(self._units[unit].parameters)
        for bucket in self._buckets[unit] if unit > 0 else ():
            self._session.core.release(bucket)

    def _prefetch(self, unit: int) -> None:
        if not 0 < unit < len(self._units) or self._uses[unit] > 0:
            return
        for bucket in self._buckets[unit]:
            if bucket not in self._prefetched and not self._in_use(bucket):
                self._session.core.prefetch(bucket)
                self._prefetched.add(bucket)

    def _in_use(self, bucket: int) -> bool:
        held = (uses > 0 or (unit == 0 and self._root_held) for unit, uses in enumerate(self._uses))
        return any(bucket in of_unit for of_unit, is_held in zip(self._buckets, held) if is_held)

    def _drop_prefetched(self) -> None:
        for bucket in self._prefetched:
            if not self._in_use(bucket):
                self._session.core.release(bucket)
        self._prefetched.clear()

    def release_all(self) -> None:
        """Before a step: whatever forwards without a backward have left."""
        self._backward.clear()
        for unit in range(len(self._units)):
            if self._uses[unit] > 0:
                self._uses[unit] = 1
                self.release(unit)
        self._drop_prefetched()

    # -- gradients --------------------------------------------------------------------------------------------------

    def arrived(self, index: int) -> list[int]:
        """A gradient of the rank's last slot is in its window. Returns the parameters whose gradients are handed over
        now."""
        bucket = self._bucket[index]
        missing = self._missing[bucket]
        missing.discard(index)
        if missing:
            return []
        self._session.core.declare(bucket, self._session.timeout)
        self._declared.add(bucket)
        return [
            other for other, of_other in enumerate(self._bucket)
            if of_other == bucket and not self._parameters[other].frozen
        ]

    def check_open(self, index: int) -> bool:
        """Whether its gradient is wanted: what was handed over before a backward raised stays. FailedPrecondition: its
        weights were not there, or it is too late."""
        if self._unit_of[index] not in self._called:
            raise errors.FailedPrecondition(
                f"{self._parameters[index].name} was used without a call of its block, so that its weights were not "
                "there: residency=\"bucket\" needs calls of the modules in a list, not of what is in them"
            )
        if self._bucket[index] in self._declared:
            if self._again:
                return False
            raise errors.FailedPrecondition(
                f"gradients of {self._parameters[index].name} were handed over already: with residency=\"bucket\" a "
                "slot has one backward. Accumulate with slots=, or within no_sync() up to the last one"
            )
        return True

    def writer(self, slot: int, name: str) -> Callable[[Any], None]:
        """Puts bytes where a gradient is."""
        return partial(self._session.core.write_gradient, slot, name)

    @property
    def handed_over(self) -> bool:
        return bool(self._declared)

    def begin_again(self) -> None:
        """The slots of the step, after a backward that raised."""
        self._backwards.forget()
        self.release_all()
        self._await_gradients()
        self._again = bool(self._declared)
        if self._again:
            LOG.warning("a backward raised; gradients of this step that were handed over before stay: take the same "
                        "batches again")

    def stepped(self) -> None:
        self._declared.clear()
        self._again = False
        self._called.clear()
        self._await_gradients()

    def _await_gradients(self) -> None:
        self._missing = {}
        for index, parameter in enumerate(self._parameters):
            if not parameter.frozen:
                self._missing.setdefault(self._bucket[index], set()).add(index)

    def own_all(self) -> None:
        """All weights become tensors of their own, until they are placed again."""
        for number, unit in enumerate(self._units):
            self.acquire(number)
            self._placed.own(unit.parameters)
            self.release(number)

    def close(self) -> None:
        """All weights become memory of this process; NaN, where the service is gone."""
        for handle in self._handles:
            handle.remove()
        self._allow_copies()
        lost: Optional[errors.Error] = None
        for number, unit in enumerate(self._units):
            try:
                self.release_all()
                self.acquire(number)
            except errors.Error as error:
                lost = lost or error
                self._placed.lose(unit.parameters)
                continue
            self._placed.release(unit.parameters)
            with suppress(errors.Error):  # it is gone since then
                self.release(number)
        if lost is not None:
            LOG.warning("the model's weights could not be fetched, and are NaN now: go on from a checkpoint. %s", lost)


@contextmanager
def whole(residence: Optional[Residence], take: Callable[[], None], again: Callable[[], None]) -> Iterator[None]:
    """Within it all weights are there and can be written. take: what was changed, at the end; again: they are placed
    as they were. None: all are there anyhow."""
    if residence is None:
        yield
        return
    residence.own_all()
    try:
        yield
        take()
    finally:
        again()


def _is_compiled(module: torch.nn.Module) -> bool:
    return module._compiled_call_impl is not None or any(
        type(inner).__name__ == "OptimizedModule" for inner in module.modules())


class _Unwrap:
    """Takes the wrapper of a module's compiled call off."""

    def __init__(self, module: torch.nn.Module, call: Any) -> None:
        self._module, self._call = module, call

    def remove(self) -> None:
        self._module._compiled_call_impl = self._call


def _call_around(module: torch.nn.Module, before: Any, after: Any) -> list[Any]:
    """Calls them around the module's forward, out of any compiled code: hooks of a module that module.compile()
    compiled would be traced."""
    compiled = module._compiled_call_impl
    if compiled is None:
        disable: Any = torch._dynamo.disable if hasattr(torch, "_dynamo") else lambda call: call
        return [
            module.register_forward_pre_hook(Hook(disable(before)), with_kwargs=True, prepend=True),
            module.register_forward_hook(Hook(disable(after)), with_kwargs=True),
        ]

    def call(*args: Any, **kwargs: Any) -> Any:
        before(module, args, kwargs)
        output = compiled(*args, **kwargs)
        after(module, args, kwargs, output)
        return output

    module._compiled_call_impl = call
    return [_Unwrap(module, compiled)]


def _needing_gradients(tree: Any) -> list[torch.Tensor]:
    leaves, _ = torch.utils._pytree.tree_flatten(tree)
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
