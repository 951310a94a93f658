"""shardmesh.torch: PyTorch models trained by the service."""
from .optimizer import Optimizer

__all__ = ["Optimizer"]
