"""TLS of clients: the arguments tls_*, below them the variables SHARDMESH_TLS_*, and the services that need neither."""
from __future__ import annotations

import os
from typing import NamedTuple, Optional, TypedDict, Union

from . import _arguments
from .errors import InvalidArgument

__all__ = ["Path", "Tls", "begins", "ends", "environment_without", "given", "options"]

Path = Union[str, "os.PathLike[str]", None]
_VARIABLES = ("SHARDMESH_TLS_CERT", "SHARDMESH_TLS_KEY", "SHARDMESH_TLS_CA", "SHARDMESH_TLS_NAME")
_own: set[str] = set()  # addresses of services that ranks of this process's training started: on this machine, without TLS


class Tls(NamedTuple):
    """As they were given; None: the variable counts."""

    tls_cert: Path = None  # own certificate chain, PEM
    tls_key: Path = None  # its private key, PEM
    tls_ca: Path = None  # the authority that signed the servers' certificates, PEM
    tls_name: Optional[str] = None  # the name in them, where it is not the one dialled


class Options(TypedDict):
    """Of _client.Client."""

    tls_cert: str
    tls_key: str
    tls_ca: str
    tls_name: str
    environment: bool  # what is empty comes from the variables


def given(tls: Tls) -> list[str]:
    """The names of the arguments that are."""
    return [f"{name}=" for name, value in tls._asdict().items() if value is not None]


def options(address: str, tls: Tls) -> Options:
    """For _client.Client. TypeError: an argument is no path. InvalidArgument: the service at `address` has no TLS."""
    own = address in _own
    if own and (arguments := given(tls)):
        raise InvalidArgument(
            f"{', '.join(arguments)} with the service at {address}, which this training started for itself, on this "
            "machine and without TLS; leave the arguments out"
        )
    return {
        "tls_cert": _file("tls_cert", tls.tls_cert), "tls_key": _file("tls_key", tls.tls_key),
        "tls_ca": _file("tls_ca", tls.tls_ca),
        "tls_name": "" if tls.tls_name is None else _arguments.text("tls_name", tls.tls_name), "environment": not own,
    }


def _file(what: str, value: Path) -> str:
    if value is None:
        return ""
    return _arguments.text(what, os.fsdecode(value) if isinstance(value, os.PathLike) else value)


def begins(address: str) -> None:
    """A service of this training is there."""
    _own.add(address)


def ends(address: str) -> None:
    _own.discard(address)


def environment_without() -> dict[str, str]:
    """Of a process that is to use no TLS."""
    return {name: value for name, value in os.environ.items() if name not in _VARIABLES}
