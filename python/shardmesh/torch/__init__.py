"""shardmesh.torch: PyTorch models trained by the service."""
from ._follow import Following, follow
from ._modules._canonical import load_state_dict, state_dict
from .optimizer import Optimizer

__all__ = ["Following", "Optimizer", "follow", "load_state_dict", "state_dict"]
