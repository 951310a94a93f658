"""The windows of one slot: the service's memory for a gradient of each parameter, and what `.grad` shows of it."""
from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Optional

import torch

from .._job._memory import put_gradient
from .._modules._model import Parameter


class Windows:
    """A program may give the tensor in `.grad` other memory (`p.grad.data = ...`, `p.grad.set_(...)`). So it is never
    the window's own tensor, and whatever it shows is brought into the window before that is handed over."""

    def __init__(self, parameters: Sequence[Parameter], windows: Sequence[torch.Tensor]) -> None:
        self._parameters, self._windows = parameters, windows
        self._shown = [window.detach() for window in windows]
        self._addresses: Optional[set[int]] = None  # of the windows

    def shown(self, index: int) -> torch.Tensor:
        """What `.grad` is, if it is no other tensor."""
        return self._shown[index]

    def window(self, index: int) -> torch.Tensor:
        """The same, and it has the memory of the window. Values that it had elsewhere are there now.

        FailedPrecondition: those have another shape.
        """
        if not self._in_place(index):
            self._bring([one for one in range(len(self._shown)) if not self._in_place(one)], by_hand=False)
        return self._shown[index]

    def take(self) -> list[bool]:
        """All that `.grad` shows goes into the windows, whoever put it there; returns which parameters have something.

        FailedPrecondition, Unimplemented: as put_gradient().
        """
        gradients = [parameter.tensor.grad for parameter in self._parameters]
        self._bring([
            index for index, gradient in enumerate(gradients)
            if gradient is not None and (gradient is not self._shown[index] or not self._in_place(index))
        ], by_hand=True)
        return [gradient is not None for gradient in gradients]

    def zero(self, index: int) -> None:
        self._windows[index].zero_()

    def _in_place(self, index: int) -> bool:
        shown, window = self._shown[index], self._windows[index]
        return shown.is_set_to(window) and shown.dtype is window.dtype

    def _bring(self, indices: Iterable[int], by_hand: bool) -> None:
        """by_hand: other tensors in `.grad`, too. Those that show a window are copied first: gradients may have been
        exchanged."""
        found = []
        for index in indices:
            tensor, shown = self._parameters[index].tensor, self._shown[index]
            self._shown[index] = self._windows[index].detach()
            gradient = tensor.grad
            if gradient is not None and (by_hand or gradient is shown):
                found.append(index)
                if gradient.shape == tensor.shape and self._is_a_window(gradient):
                    tensor.grad = gradient.clone()
        for index in found:
            parameter = self._parameters[index]
            put_gradient(parameter.name, parameter.tensor, self._shown[index])

    def _is_a_window(self, gradient: torch.Tensor) -> bool:
        if gradient.device.type != "cpu" or gradient.layout != torch.strided:
            return False
        if self._addresses is None:
            self._addresses = {window.untyped_storage().data_ptr() for window in self._windows}
        return gradient.untyped_storage().data_ptr() in self._addresses
