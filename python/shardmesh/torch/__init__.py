"""shardmesh.torch: PyTorch models trained by the service."""
from ._follow import Following, follow
from .optimizer import Optimizer

__all__ = ["Following", "Optimizer", "follow"]
