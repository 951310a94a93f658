"""shardmesh.torch: PyTorch models trained by the service."""
