"""When the weights of a unit are there: while it is called, and while a backward needs them; and to the end of the step
once they were used outside of its calls.

A backward needs a unit when one of its nodes takes out a tensor that was saved within a call of the unit, or that lies
in the unit's weights. Nodes run one after the other, those of later calls first. So a unit's part of a backward is over
when a node needs another unit.
"""
from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Optional

import torch

from ... import errors
from .._modules._backward import Backwards, hooked
from .._modules._hooks import Hook, check_not_traced
from .._modules._leaves import tensors
from .._modules._units import Unit
from ._buckets import Buckets
from ._outside import Outside
from ._saved import Memory, Saving, Weight, innermost, saving


class _Call:
    """One that has begun."""

    def __init__(self, unit: int, module: torch.nn.Module, hooks: Optional[Saving]) -> None:
        self.unit, self.module, self.hooks = unit, module, hooks


class Calls:
    """Of one model, whose unit 0 is the root. It has its weights from its first call in a step to the end of the step.
    """

    def __init__(self, units: Sequence[Unit], buckets: Buckets, begins: Callable[[], None]) -> None:
        """begins: called before a call of the whole model that is within no other, while no backward is due."""
        self._buckets, self._begins, self._has_blocks = buckets, begins, len(units) > 1
        self._backwards = Backwards(self._backward_ended)
        self._outside = Outside(self._used_outside)
        self._handles: list[Any] = []
        for number, unit in enumerate(units):
            self._handles += _call_around(unit.module, partial(self._before, number), partial(self._after, number))

    def watch(self, unit: int, modules: Sequence[torch.nn.Module]) -> None:
        """Modules within a unit that have weights of it: they can be called without the unit, too."""
        hook = Hook(partial(self._before_inner, unit))
        self._handles += [module.register_forward_pre_hook(hook, prepend=True) for module in modules]

    def attach(self, memory: Memory, weights: Iterable[tuple[int, torch.Tensor]]) -> None:
        """At first, or when the job has other weights: nothing is in use. weights: parameters by units."""
        self._memory = memory
        self._outside.watch(weights)
        if self._has_blocks:
            self._outside.enter()
        self._open: list[_Call] = []
        self._held: dict[tuple[int, int], Any] = {}  # by unit and backward: the node that needs it; None: done, or next
        self._due = False  # a backward may be
        self.called: set[int] = set()  # units, since the last step
        self._backwards.forget()

    # -- forward ----------------------------------------------------------------------------------------------------

    def _before(self, unit: int, module: torch.nn.Module, args: Any, kwargs: Any) -> None:
        check_not_traced()
        if unit == 0 and not self._due and not any(call.unit == 0 for call in self._open):
            self._begins()
        self._enter(unit, module)

    def _enter(self, unit: int, module: torch.nn.Module) -> _Call:
        backward = torch._C._current_graph_task_id()
        hooks = saving(unit, self._memory, self._read, self._needed) if self._has_blocks else None
        if hooks is None and unit > 0:
            raise errors.Unimplemented(
                'torch.func.grad, vjp, jacrev or hessian of a model with residency="bucket": torch does not say then '
                'when a backward needs which weights; take torch.autograd.grad, or residency="full"'
            )
        if unit == 0:
            self._enter_root()
        else:
            self.called.add(unit)
            if backward >= 0:  # of a checkpoint: its nodes need the unit next
                self._hold(unit, backward, None)
            self._buckets.acquire(unit)
            if backward < 0:
                self._buckets.prefetch(unit + 1)
        call = _Call(unit, module, hooks)
        if not self._open and self._has_blocks:
            self._outside.enter()  # of another thread
        self._open.append(call)
        if hooks is not None:
            hooks.enter()
        return call

    def _used_outside(self, units: set[int]) -> None:
        """FailedPrecondition: of more units than a rank may hold."""
        self.called |= units
        if all(map(self._buckets.there, units)):
            return
        try:
            for unit in units:
                self._buckets.lend(unit)
            if all(map(self._buckets.there, units)):
                return
        except errors.ResourceExhausted:
            pass
        raise errors.FailedPrecondition(
            f"weights of {len(units)} blocks are used at once outside of calls of their blocks, which is more than "
            'residency="bucket" holds. Use them one after the other, or take residency="full"'
        )

    def suspend(self) -> None:
        """Until attach(): the model's weights are tensors of its own."""
        self._outside.watch(())

    def _read(self, weight: Weight) -> None:
        """FailedPrecondition: by what is no call of its unit, and was not seen before, so that it was not there."""
        if not self._buckets.there(weight.unit):
            raise errors.FailedPrecondition(
                f"{weight.name} was used outside of a call of its block, where it is NaN: residency=\"bucket\" "
                "has the weights of a block while the block, or a module in it, is called. Call the module, or take "
                "residency=\"full\""
            )

    def _enter_root(self) -> None:
        self.called.add(0)
        self._buckets.acquire_root()

    def _after(self, unit: int, module: torch.nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """Also of a call that raised; then there is no output."""
        entered = next((one for one in reversed(self._open) if one.unit == unit and one.module is module), None)
        if entered is None:
            return  # refused before it began, so that no backward is due
        self._leave(entered)
        if unit == 0:
            self._due = self._due or torch.is_grad_enabled()
            return
        outputs = list(tensors(output))
        if any(weight is not None and weight.unit == unit for weight in map(self._memory.find, outputs)):
            self._used_outside({unit})
        if torch.is_grad_enabled():
            self._watch_outputs(unit, (args, kwargs), outputs)

    def _leave(self, call: _Call) -> None:
        """And those within it that an interrupt has left."""
        while self._open:
            last = self._open.pop()
            if last.hooks is not None:
                last.hooks.leave()
            if last.unit > 0:
                self._buckets.release(last.unit)
            if last is call:
                return

    def _before_inner(self, unit: int, module: torch.nn.Module, args: Any) -> None:
        """Within a call of its unit there is nothing to do, unless other hooks of saved tensors hide those of it."""
        if torch.compiler.is_compiling() and not torch.compiler.is_exporting():
            return
        check_not_traced()
        if unit == 0:
            if 0 not in self.called:  # a part of the model is called alone
                self._begins()
                self._enter_root()
            return
        hooks = innermost()
        if hooks is not None and hooks.unit == unit and self._buckets.there(unit):
            return
        call = self._enter(unit, module)

        def after(*_: Any) -> None:
            handle.remove()
            if call in self._open:
                self._leave(call)

        handle = module.register_forward_hook(Hook(after), always_call=True)

    def _watch_outputs(self, unit: int, inputs: Any, outputs: Iterable[torch.Tensor]) -> None:
        """For weights that a node has in a way that torch does not know of, such as an attribute of its context."""
        watched = [tensor for tensor in outputs if tensor.requires_grad and not tensor.is_leaf]
        known = {id(tensor) for tensor in tensors(inputs)} if watched else ()
        for tensor in watched:
            if id(tensor) not in known:
                hooked(tensor).register_hook(partial(self._output_has_gradient, unit))

    # -- backward ---------------------------------------------------------------------------------------------------

    def _output_has_gradient(self, unit: int, _: torch.Tensor) -> None:
        if torch.is_grad_enabled():
            raise _second_order()
        self._hold(unit, torch._C._current_graph_task_id(), None)

    def _needed(self, unit: int) -> None:
        """By a node that takes out what it has saved."""
        if unit == 0:
            return  # it has its own
        backward = torch._C._current_graph_task_id()
        if backward < 0:
            return  # somebody looks at it
        node = torch._C._current_autograd_node()
        if torch.is_grad_enabled() and not isinstance(node, torch.autograd.function.BackwardCFunction):
            raise _second_order()
        self._hold(unit, backward, node)

    def _hold(self, unit: int, backward: int, node: Any) -> None:
        """Backwards within this one have larger numbers; a node of the one around it is at work still."""
        self._backwards.begun()
        mine = (unit, backward)
        for other, needs in list(self._held.items()):
            if other[0] != unit and (needs is None or (other[1] >= backward and needs is not node)):
                self._let_go(other)
        if mine not in self._held:
            self._buckets.acquire(unit)
            self._buckets.prefetch(unit - 1)
            for other, needs in list(self._held.items()):
                if other[0] == unit and needs is None:  # held for this
                    self._let_go(other)
        self._held[mine] = node or self._held.get(mine)

    def _let_go(self, held: tuple[int, int]) -> None:
        del self._held[held]
        self._buckets.release(held[0])

    def _backward_ended(self) -> None:
        self._due = False
        for held in list(self._held):
            self._let_go(held)
        self._buckets.drop_prefetched()

    # -- steps ------------------------------------------------------------------------------------------------------

    def end(self) -> None:
        """Before a step: whatever calls without a backward, interrupted calls and backwards that raised have left."""
        while (hooks := innermost()) is not None:
            hooks.leave()
        self._open.clear()
        self._held.clear()
        self._due = False
        self._backwards.forget()
        self._buckets.release_all()

    def close(self) -> None:
        self._outside.leave()
        for handle in self._handles:
            handle.remove()


def _second_order() -> errors.Unimplemented:
    return errors.Unimplemented(
        'create_graph=True with residency="bucket": the weights would be gone when the gradients have their backward; '
        'take residency="full"'
    )


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
            module.register_forward_hook(Hook(disable(after)), with_kwargs=True, always_call=True),
        ]

    def call(*args: Any, **kwargs: Any) -> Any:
        before(module, args, kwargs)
        output = None
        try:
            output = compiled(*args, **kwargs)
        finally:
            after(module, args, kwargs, output)
        return output

    module._compiled_call_impl = call
    return [_Unwrap(module, compiled)]
