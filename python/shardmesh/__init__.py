"""shardmesh: the mesh, names, layout and numerics of a model that is trained in shards, and the client of the service
that trains it. See docs/python.md."""
from __future__ import annotations

from typing import TYPE_CHECKING, Any

from . import errors, layout, mesh, names, views
from ._core import Mesh
from .errors import Error

if TYPE_CHECKING:
    from . import checkpoint as checkpoint
    from . import client as client
    from . import numerics as numerics
    from .client import connect as connect

__all__ = ["Error", "Mesh", "errors", "layout", "mesh", "names", "views"]


def __getattr__(name: str) -> Any:
    """numerics, which needs NumPy, checkpoint and client, which loads gRPC, are imported when they are used."""
    if name not in ("checkpoint", "client", "connect", "numerics"):
        raise AttributeError(f"module 'shardmesh' has no attribute {name!r}")
    import importlib

    if name == "connect":
        return importlib.import_module(".client", __name__).connect
    return importlib.import_module("." + name, __name__)
