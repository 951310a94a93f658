"""What benchmarks with PyTorch have beside their own files."""

PYTORCH = [
    "//bench/harness:plot.py",
    "//bench/harness:report.py",
    "//bench/pytorch:pytorch_arms.py",
    "//bench/pytorch:torch_start.py",
    "//bench/pytorch:torch_world.py",
    "//client/cli:shardctl",
    "//examples/gpt:gpt",
    "//python:package",
    "//server:shardmesh-coordinator",
    "//worker:shardmesh-node",
    "//worker:shardmesh-worker",
]
