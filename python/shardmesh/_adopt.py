"""A directory of torch.distributed.checkpoint with optimizer states becomes a checkpoint that `shardctl restore` takes (see
checkpoint.py). Here tensors and the job's specification are read; `shardctl adopt` lays them out and adds up the digest."""
from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Optional

from . import _groups, _programs, _states, errors, names
from ._dcp_read import Directory

_ENUMS = {"bf16+16": "BF16_PLUS_16", "bf16+8sr": "BF16_PLUS_8SR"}


def _enum(prefix: str, format: str) -> str:
    return f"{prefix}_{_ENUMS.get(format, format.upper())}"


class _Model:
    """The parameters of a directory: which there are, what they are called, which share a storage."""

    def __init__(self, directory: Directory, prefix: str, optimizer_prefix: str, ties: Mapping[str, str],
                 root_wrappers: Sequence[str], skip_others: bool) -> None:
        self.table = names.AliasTable(root_wrappers)
        self._root_wrappers = root_wrappers
        self.keys: dict[str, str] = {}  # canonical name of each storage -> key in the directory
        self.given: dict[str, str] = {}  # canonical name -> as it is there
        self.tied: dict[str, str] = {}
        found = {key[len(prefix):]: key for key in directory.entries
                 if key.startswith(prefix) and not (optimizer_prefix and key.startswith(optimizer_prefix))}
        others = [name for name, key in found.items() if not directory.is_tensor(key) or not _is_float(directory.entries[key])]
        if others and not skip_others:
            raise errors.InvalidArgument(f"{directory.path}: {', '.join(others[:8])} are neither float32, bfloat16 nor float16, "
                                         "and so no parameters; skip_others=True leaves them out")
        for name in [name for name in found if name not in ties and name not in others]:
            canonical = self.table.add(name)
            self.keys[canonical], self.given[canonical] = found[name], name
        for name, owner in ties.items():
            canonical = self.table.add(name, owner)
            if canonical not in self.keys:
                self.tied[canonical], self.given[canonical] = self.table.storage(canonical), name
        if not self.keys:
            raise errors.InvalidArgument(f"{directory.path} has no tensors whose names begin with {prefix!r}")

    def storage(self, raw: str) -> str:
        """NotFound: no such parameter."""
        return self.table.storage(names.canonical(raw, self._root_wrappers))


def _is_float(entry: Any) -> bool:
    return str(entry.properties.dtype).rpartition(".")[2] in ("float32", "bfloat16", "float16")


def _refuse_undeclared_ties(torch: Any, tensors: Mapping[str, Any]) -> None:
    """Two parameters with the same values would be trained apart from now on."""
    seen: dict[Any, str] = {}
    for name, tensor in tensors.items():
        if tensor.numel() < 2 or bool((tensor == tensor.reshape(-1)[0]).all()):
            continue  # of ones or zeros
        key = (tuple(tensor.shape), tensor.double().sum().item())
        if key in seen and torch.equal(tensors[seen[key]], tensor):
            raise errors.InvalidArgument(f"{name!r} has the values of {seen[key]!r}: if they are tied, say ties={{{name!r}: "
                                         f"{seen[key]!r}}}; if they are not, ties={{}}")
        seen.setdefault(key, name)


class _Adoption:
    """One call of adopt_dcp."""

    def __init__(self, torch: Any, directory: Directory, model: _Model, optimizer: _groups.Optimizer, kind: Optional[str],
                 frozen: Iterable[str], weights: Optional[str], states: Optional[str]) -> None:
        self.torch, self.directory, self.model = torch, directory, model
        self.wanted_weights, self.wanted_states = weights, states
        self.optimizers = [_groups.job_optimizer(group, kind) for group in optimizer.groups]
        self.group = {model.storage(name): g for g, group in enumerate(optimizer.groups) for name in group.names}
        for name in frozen:
            self.group.pop(model.storage(name), None)
        self.states = {model.storage(name): keys for name, keys in optimizer.states.items()}

    def step(self, given: Optional[int]) -> int:
        keys = {name: self.states[name]["step"] for name in self.group if "step" in self.states.get(name, {})}
        values = self.directory.values(keys.values())
        steps = {name: values[key] for name, key in keys.items()}
        first = next(iter(steps.items()), None)
        if first is None:
            if given is None:
                raise errors.InvalidArgument(f"{self.directory.path} does not say how many steps its states are of, as SGD's do "
                                             "not; say step=N")
            return given
        for name, value in steps.items():
            if value != first[1] or value != int(value) or (given is not None and value != given):
                raise errors.InvalidArgument(f"{name!r} was stepped {value:g} times, {first[0]!r} {first[1]:g}"
                                             f"{'' if given is None else f', and step is {given}'}; a job steps all of its "
                                             "parameters together; name what is not trained in frozen=[...]")
        return int(first[1])

    def state_keys(self, name: str) -> dict[str, str]:
        """Of a parameter's states, in a job's order. InvalidArgument: others than its optimizer has."""
        if name not in self.group:
            return {}
        optimizer, there = self.optimizers[self.group[name]], self.states.get(name, {})
        needed = _groups.states_of(optimizer)
        missing, more = [s for s in needed if s not in there], [s for s in there if s not in needed and s != "step"]
        if missing:
            raise errors.InvalidArgument(f"{name!r} has no {missing[0]} in {self.directory.path}; if it is not trained, name it in "
                                         "frozen=[...]")
        if more and not (more == ["momentum_buffer"] and not self.directory.is_tensor(there[more[0]])):
            kind = optimizer["kind"].rpartition("_")[2].lower()
            raise errors.InvalidArgument(f"{name!r} has a state {more[0]}, which the {kind} of a job has not")
        return {state: there[state] for state in needed}

    def read_states(self, name: str, shape: tuple[int, ...]) -> dict[str, _states.Stored]:
        keys = self.state_keys(name)
        chunks = self.directory.tensors(keys.values())
        wanted = self.wanted_states

        def read(wanted: Optional[str]) -> dict[str, _states.Stored]:
            return {state: _states.state(self.torch, f"{name}.{state}", shape, chunks[key], _states.SIGNED[state], wanted)
                    for state, key in keys.items()}

        for state, key in keys.items():
            if self.directory.sizes(key) != shape:
                sizes = list(self.directory.sizes(key))
                raise errors.InvalidArgument(f"{name}.{state} has the shape {sizes}; its parameter {list(shape)}")
        found = read(wanted)
        formats = {stored.format for stored in found.values()}
        if len(formats) > 1 and formats != {"fp32", "bf16_sr"}:
            raise errors.InvalidArgument(f"{name!r} has states in {' and '.join(sorted(formats))}; a job has all of a parameter's "
                                         'in one format; say states="fp32", or another')
        return read("fp32") if len(formats) > 1 else found


def _given(model: _Model, name: str) -> str:
    """The original name, where it is another one."""
    return "" if model.given[name] == name else model.given[name]


def _write(adoption: _Adoption, folder: str, detect_ties: bool) -> list[dict[str, Any]]:
    """Writes the tensors; returns the job's parameters."""
    import safetensors.torch

    model: dict[str, Any] = {}
    states: dict[str, Any] = {}
    plain: dict[str, Any] = {}
    parameters: list[dict[str, Any]] = []
    chunks = adoption.directory.tensors(adoption.model.keys.values())
    for name, key in adoption.model.keys.items():
        shape = adoption.directory.sizes(key)
        values = _states.floats(adoption.torch, name, shape, chunks.pop(key))
        plain[name] = values
        weights = adoption.wanted_weights or ("bf16_sr" if values.dtype == adoption.torch.bfloat16 else "fp32")
        stored = _states.weights(adoption.torch, values, weights)
        model[name] = stored.codes
        if stored.extra is not None and values.numel():
            tensors, extra = (model, "scales") if weights == "int8_row" else (states, "remainder")
            tensors[f"{name}.{extra}"] = stored.extra
        of_states = adoption.read_states(name, shape)
        for state, of_state in of_states.items():
            states[f"{name}.{state}"] = of_state.codes
            if of_state.extra is not None and values.numel():
                states[f"{name}.{state}.scales"] = of_state.extra
        formats = {of_state.format for of_state in of_states.values()} or {"fp32"}
        parameters.append({"name": name, "given": _given(adoption.model, name), "shape": list(shape),
                           "format": _enum("FORMAT", weights), "states": _enum("STATE_FORMAT", formats.pop()),
                           "group": adoption.group.get(name, 0), "frozen": name not in adoption.group})
    if detect_ties:
        _refuse_undeclared_ties(adoption.torch, plain)
    by_name = {parameter["name"]: parameter for parameter in parameters}
    parameters += [{**by_name[owner], "name": name, "given": _given(adoption.model, name), "tied_to": owner}
                   for name, owner in adoption.model.tied.items()]
    os.mkdir(os.path.join(folder, "states"))
    for tensors, where in ((model, folder), (states, os.path.join(folder, "states"))):
        contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
        safetensors.torch.save_file(contiguous, os.path.join(where, "model.safetensors"), metadata={"format": "pt"})
    return parameters


def _find_shardctl(shardctl: str) -> str:
    if shardctl == "shardctl":
        return _programs.find(shardctl)
    found = shutil.which(shardctl)
    if found is None:
        raise errors.NotFound(f"there is no program {shardctl}; say shardctl=, its path: it lays out the files")
    return found


def _run_adopt(shardctl: str, folder: str, root: str) -> str:
    done = subprocess.run([shardctl, "adopt", folder, root, "--json"], capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return str(json.loads(done.stdout)["path"])
    code, _, message = done.stderr.removeprefix("shardctl: ").partition(": ")
    raise errors.BY_CODE.get(code, errors.Internal)((message or done.stderr).strip())


def _check_formats(weights: Optional[str], states: Optional[str], optimizer: Optional[str]) -> None:
    for what, value, known in (("weights", weights, _states.WEIGHTS), ("states", states, _states.FORMATS),
                               ("optimizer", optimizer, ("adamw", "adam"))):
        if value is not None and value not in known:
            raise errors.InvalidArgument(f"{what}={value!r}; one of {', '.join(known)}, or None")


def adopt(torch: Any, directory: str, root: str, *, name: str, step: Optional[int], weights: Optional[str], states: Optional[str],
          optimizer: Optional[str], frozen: Iterable[str], ties: Optional[Mapping[str, str]], parameters: Optional[Sequence[str]],
          job: Optional[Mapping[str, Any]], prefix: str, optimizer_prefix: str, root_wrappers: Sequence[str], skip_others: bool,
          shardctl: str) -> str:
    _check_formats(weights, states, optimizer)
    program = _find_shardctl(shardctl)
    source = Directory(torch, directory)
    model = _Model(source, prefix, optimizer_prefix, ties or {}, root_wrappers, skip_others)
    found = _groups.read(source, optimizer_prefix, parameters)
    if not found.groups:
        raise errors.InvalidArgument(f"{directory} has no {optimizer_prefix}param_groups, and so no optimizer; from_dcp reads weights "
                                     "alone")
    adoption = _Adoption(torch, source, model, found, optimizer, frozen, weights, states)
    steps = adoption.step(step)
    root = os.path.abspath(root)
    folder = tempfile.mkdtemp(prefix=".adopt-", dir=os.path.dirname(root))
    try:
        specification = {"name": name, "mesh": [{"name": "fsdp", "size": 1}], "slots": 1, "optimizer": adoption.optimizers[0],
                         "more_groups": adoption.optimizers[1:], **(job or {}),
                         "parameters": _write(adoption, folder, detect_ties=ties is None)}
        with open(os.path.join(folder, "job.json"), "w", encoding="utf-8") as file:
            json.dump({"step": steps, "job": specification}, file)
        return _run_adopt(program, folder, root)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
