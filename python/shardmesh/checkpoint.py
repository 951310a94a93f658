"""Checkpoints that `shardctl checkpoint` wrote, elsewhere: on any file system of fsspec, and as directories of
torch.distributed.checkpoint. docs/python.md, "Checkpoints elsewhere", says what for.

At a remote place a checkpoint is a folder step-NNNNNNNNNNNNN like a local one. Its manifest is written last and removed
first, and what has no manifest, or a file that is not as long as the manifest says, is no checkpoint: so an upload or a
removal that ends anywhere leaves every other checkpoint as it was. One writer at a time for a place.
"""
from __future__ import annotations

import fcntl
import importlib
import json
import os
import re
import shutil
import tempfile
from dataclasses import dataclass
from typing import Any, Callable, Optional

from . import _dcp, errors

__all__ = ["RemoteCheckpoint", "adopt_dcp", "checkpoints", "download", "from_dcp", "to_dcp", "upload"]

MANIFEST = "manifest.json"
_FORMAT = "shardmesh checkpoint"
_STEP = re.compile(r"step-(\d{13})")
_FILE = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,199}")
Progress = Callable[[int, int], None]

to_dcp = _dcp.to_dcp
from_dcp = _dcp.from_dcp
adopt_dcp = _dcp.adopt_dcp


@dataclass(frozen=True)
class RemoteCheckpoint:
    """One that is there whole."""

    step: int
    path: str
    files: dict[str, int]  # name to bytes, without the manifest
    saved: int = 0  # the how-manieth that was saved into its folder: the greatest is the newest; 0: of before they were counted


def _open(url: str, options: dict[str, Any]) -> tuple[Any, str]:
    try:
        core: Any = importlib.import_module("fsspec.core")
    except ImportError as error:
        raise ImportError("shardmesh.checkpoint needs fsspec for remote places: pip install 'shardmesh[fsspec]'") from error
    system, path = core.url_to_fs(url, **options)
    return system, path.rstrip("/")


def _parsed(text: bytes) -> Optional[tuple[dict[str, int], int]]:
    """A manifest's files, and its count of saves; None: it is none, or was cut."""
    try:
        manifest = json.loads(text)
        files = {file["name"]: file["bytes"] for file in manifest["files"]}
        saved = int(manifest.get("saved", 0))
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
    plain = all(isinstance(name, str) and _FILE.fullmatch(name) and isinstance(size, int) for name, size in files.items())
    return (files, saved) if manifest.get("format") == _FORMAT and plain else None


def _folders(system: Any, path: str) -> dict[int, str]:
    system.invalidate_cache()
    if not system.exists(path):
        return {}
    found = {}
    for entry in system.ls(path, detail=False):
        match = _STEP.fullmatch(entry.rstrip("/").rsplit("/", 1)[-1])
        if match:
            found[int(match.group(1))] = entry.rstrip("/")
    return dict(sorted(found.items()))


def _whole(system: Any, step: int, folder: str) -> Optional[RemoteCheckpoint]:
    sizes = {e["name"].rstrip("/").rsplit("/", 1)[-1]: e["size"] for e in system.ls(folder, detail=True) if e["type"] == "file"}
    if MANIFEST not in sizes:
        return None
    parsed = _parsed(system.cat_file(f"{folder}/{MANIFEST}"))
    if parsed is None or any(sizes.get(name) != size for name, size in parsed[0].items()):
        return None
    return RemoteCheckpoint(step, folder, *parsed)


def _all(system: Any, path: str) -> list[RemoteCheckpoint]:
    found = (_whole(system, step, folder) for step, folder in _folders(system, path).items())
    return sorted((one for one in found if one is not None), key=lambda one: (one.saved, one.step))


def checkpoints(url: str, **options: Any) -> list[RemoteCheckpoint]:
    """Those that are whole, oldest first. `options` are fsspec's, of the file system."""
    return _all(*_open(url, options))


def _remove(system: Any, folder: str) -> None:
    if system.exists(f"{folder}/{MANIFEST}"):
        system.rm_file(f"{folder}/{MANIFEST}")
    system.rm(folder, recursive=True)


def _tidy(system: Any, path: str, keep_last: int, keep_every: int) -> None:
    """Removes what is not whole, and what the rule does not keep; the newest always stays."""
    whole = [checkpoint.step for checkpoint in _all(system, path)]
    kept = set(whole[-keep_last:])  # of 0: all
    kept |= {step for step in whole if keep_every > 0 and step % keep_every == 0}
    for step, folder in _folders(system, path).items():
        if step not in kept:
            _remove(system, folder)


def upload(checkpoint: str, url: str, *, keep_last: int = 0, keep_every: int = 0, progress: Optional[Progress] = None,
           **options: Any) -> str:
    """Copies the local folder of a checkpoint to `url`/step-...; returns its path there.

    keep_last: how many stay, beside those whose step is a multiple of keep_every; 0: all. progress(done, total) in bytes.
    AlreadyExists: it is there already, whole. InvalidArgument: `checkpoint` is none, or a file is not as long as it was
    saved. Errors of the file system as they come; then it is not there, and the others are as they were.
    """
    checkpoint = os.path.abspath(checkpoint)
    name = os.path.basename(checkpoint)
    match = _STEP.fullmatch(name)
    manifest = b""  # as of the folder of all checkpoints, which has none
    if os.path.exists(os.path.join(checkpoint, MANIFEST)):
        with open(os.path.join(checkpoint, MANIFEST), "rb") as file:
            manifest = file.read()
    parsed = _parsed(manifest)
    if match is None or parsed is None:
        raise errors.InvalidArgument(f"{checkpoint} is no checkpoint; name a folder like step-0000000001200 that has a {MANIFEST}")
    files, _ = parsed
    for file_name, size in files.items():
        if os.path.getsize(os.path.join(checkpoint, file_name)) != size:
            raise errors.InvalidArgument(f"{checkpoint}/{file_name} has another size than when it was saved, {size} bytes")
    system, path = _open(url, options)
    folder = f"{path}/{name}"
    step = int(match.group(1))
    if step in {found.step for found in _all(system, path)}:
        raise errors.AlreadyExists(f"{folder} is there already")
    if step in _folders(system, path):
        _remove(system, folder)  # of an upload that was cut off
    system.makedirs(folder, exist_ok=True)
    done, total = 0, sum(files.values())
    for file_name, size in files.items():
        system.put_file(os.path.join(checkpoint, file_name), f"{folder}/{file_name}")
        done += size
        if progress:
            progress(done, total)
    system.pipe_file(f"{folder}/{MANIFEST}", manifest)
    system.invalidate_cache()
    if _whole(system, step, folder) is None:
        raise errors.Unavailable(f"{folder} is not whole after it was uploaded; does somebody else write there?")
    _tidy(system, path, keep_last, keep_every)
    return folder


def _sync(path: str) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def download(url: str, root: str, *, step: Optional[int] = None, progress: Optional[Progress] = None, **options: Any) -> str:
    """Copies the newest checkpoint at `url`, or that of `step`, into the local folder `root`, where it appears whole or not
    at all; returns its path. It is there already: nothing is copied. NotFound: there is none."""
    system, path = _open(url, options)
    found = [c for c in _all(system, path) if step is None or c.step == step]
    if not found:
        raise errors.NotFound(f"{url} has no whole checkpoint" + ("" if step is None else f" of step {step}"))
    newest = found[-1]
    final = os.path.join(os.path.abspath(root), f"step-{newest.step:013d}")
    if os.path.exists(os.path.join(final, MANIFEST)):
        return final
    os.makedirs(root, exist_ok=True)
    part = tempfile.mkdtemp(prefix=".step-", dir=root)
    lock = os.open(part, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)  # so that nobody takes it for a leftover
        done, total = 0, sum(newest.files.values())
        for name, size in {**newest.files, MANIFEST: -1}.items():
            local = os.path.join(part, name)
            system.get_file(f"{newest.path}/{name}", local)
            if size >= 0 and os.path.getsize(local) != size:
                raise errors.Unavailable(f"{newest.path}/{name} was copied with {os.path.getsize(local)} bytes; it has {size}")
            _sync(local)
            done += max(size, 0)
            if progress:
                progress(done, total)
        _sync(part)
        os.chmod(part, 0o755)
        os.rename(part, final)
        _sync(os.path.dirname(final))
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise
    finally:
        os.close(lock)
    return final
