"""shardmesh: the mesh, names and layout of a model that is trained in shards. See docs/python.md."""
from . import errors, layout, mesh, names, views
from ._core import Mesh
from .errors import Error

__all__ = ["Error", "Mesh", "errors", "layout", "mesh", "names", "views"]
