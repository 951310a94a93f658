"""One whole version of a job's weights, and its tensors as arrays over the same memory."""
from __future__ import annotations

import importlib
import warnings
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType, TracebackType
from typing import TYPE_CHECKING, Any

from . import _client
from .errors import InvalidArgument, NotFound

if TYPE_CHECKING:
    import numpy as np

__all__ = ["Tensor", "Version"]


class Tensor:
    """A tensor of a version: its arrays are read-only views, each of which keeps the version's memory as it is."""

    def __init__(
        self, name: str, shape: tuple[int, ...], format: str, parts: Mapping[str, np.ndarray[Any, Any]]
    ) -> None:
        self.name, self.shape, self.format = name, shape, format
        self.parts = MappingProxyType(dict(parts))

    def __repr__(self) -> str:
        return f"<Tensor {self.name} {self.shape} in {self.format}>"

    @property
    def quantized(self) -> bool:
        """Whether the job gathers it in codes (fp8_row, nf4, ...), with scales beside them; else it is fp32 or bf16."""
        return self.format not in ("fp32", "bf16")

    @property
    def coded(self) -> bool:
        """The old name of `quantized`."""
        warnings.warn("Tensor.coded is called Tensor.quantized now", DeprecationWarning, stacklevel=2)
        return self.quantized

    @property
    def array(self) -> np.ndarray[Any, Any]:
        """fp32, or bf16 as its uint16 codes. InvalidArgument: it is quantized."""
        if self.quantized:
            parts = ", ".join(self.parts)
            raise InvalidArgument(f"{self.name} is gathered as {self.format}; take decode(), or its parts {parts}")
        return self.parts["codes"]

    def decode(self) -> np.ndarray[Any, Any]:
        """Its values as fp32, in an array of their own."""
        from . import numerics

        return numerics.decode(self.parts, self.format, self.shape)


class Version:
    """A version that stays as it is until it is closed, by close() or at the end of a `with` block; what was taken of
    it by then, arrays and tensors, stays as it is for longer: it keeps the memory. That memory is the job's, where the
    version is attached, and one of few (Job.publications): copy what is to be kept for long.

    Names are as the caller's model has them, under the rules that the job was opened with. NotFound: it has no such
    parameter. FailedPrecondition: it is closed.
    """

    def __init__(self, core: _client.Version) -> None:
        self._core = core

    def __repr__(self) -> str:
        way = "mapped" if self._core.attached else "pulled"
        return f"<Version {self.step}, {way if self._core.held else 'closed'}>"

    @property
    def step(self) -> int:
        return self._core.step

    @property
    def epoch(self) -> int:
        """Of the job, when it made the version. Each load, restore, re-form and reshard begins a later one. A version of
        a later epoch is the newer one, whatever the steps are."""
        return self._core.epoch

    @property
    def attached(self) -> bool:
        """Whether it is memory of the job's workers, mapped read-only; else a copy."""
        return self._core.attached

    @property
    def names(self) -> list[str]:
        """The canonical names, tied ones too, in the order of the job."""
        return [name for name, _, _ in self._core.parameters]

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: shape for name, shape, _ in self._core.parameters}

    @property
    def ties(self) -> dict[str, str]:
        """Of names that share the storage of another one: which."""
        return {name: owner for name, _, owner in self._core.parameters if name != owner}

    def __len__(self) -> int:
        return len(self._core.parameters)

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __contains__(self, name: object) -> bool:
        try:
            return isinstance(name, str) and bool(self._core.tensor(name))
        except (NotFound, InvalidArgument):
            return False

    def tensor(self, name: str) -> Tensor:
        """With its format, and its scales where it is quantized."""
        from ._arrays import np

        canonical, shape, format, parts = self._core.tensor(name)
        arrays = {part: np.ndarray(of, dtype, buffer=memory) for part, dtype, of, memory in parts}
        return Tensor(canonical, shape, format, arrays)

    def __getitem__(self, name: str) -> np.ndarray[Any, Any]:
        """A read-only view: fp32, or bf16 as its uint16 codes. InvalidArgument: it is quantized; see decode(), tensor()."""
        return self.tensor(name).array

    def decode(self, name: str) -> np.ndarray[Any, Any]:
        """The values as fp32, of any format, in an array of their own."""
        return self.tensor(name).decode()

    def bf16(self, name: str) -> np.ndarray[Any, Any]:
        """As version[name], in ml_dtypes.bfloat16. InvalidArgument: it is not stored as bf16."""
        ml_dtypes: Any = importlib.import_module("ml_dtypes")
        tensor = self.tensor(name)
        if tensor.format != "bf16":
            raise InvalidArgument(f"{tensor.name} is gathered as {tensor.format}, not as bf16")
        return tensor.array.view(ml_dtypes.bfloat16)

    def torch(self, name: str, *, copy: bool = False) -> Any:
        """A tensor of PyTorch on the CPU, float32 or bfloat16, over the same memory unless it is to be a copy; of quantized
        weights, their values as float32, in memory of its own.

        The memory is read-only, which PyTorch cannot know: writing to the tensor in place ends the process.
        """
        from ._load import to_torch

        return to_torch(self.tensor(name), copy)

    def load_into(
        self,
        module: Any,
        *,
        root_wrappers: Sequence[str] = (),
        literal: Sequence[str] = (),
        wrapped_at: Sequence[str] = (),
    ) -> None:
        """Copies all weights into a torch.nn.Module, in place, whatever device and floating type its parameters have.

        Names are compared as canonical ones, so that wrappers (torch.compile's _orig_mod, ...) do not count; the rules
        are names.canonical()'s, for the module. Buffers of the module are written where the version has them.
        LoadMismatch: names that one of both lacks, or tensors of other shapes; nothing was written.
        """
        from ._load import load_into

        load_into(module, self, root_wrappers=root_wrappers, literal=literal, wrapped_at=wrapped_at)

    def close(self) -> None:
        self._core.close()

    def __enter__(self) -> Version:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
