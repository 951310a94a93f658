"""torch's DeviceMesh as one rank of a world sees it, without processes (torch's fake process group)."""
import contextlib
import warnings

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.testing._internal.distributed.fake_pg import FakeStore


@contextlib.contextmanager
def as_rank(rank, world_size):
    """Inside, this process is `rank` of a world; everything made inside ends with it."""
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        dist.destroy_process_group()


def create(shape, names, ranks):
    return DeviceMesh("cpu", torch.tensor(ranks).reshape(tuple(shape)), mesh_dim_names=tuple(names))


def seen(mesh):
    """What this rank sees of a mesh: names, ranks, its coordinate, and the ranks of its group along each dimension."""
    groups = {name: sorted(dist.get_process_group_ranks(mesh.get_group(name))) for name in mesh.mesh_dim_names}
    return mesh.mesh_dim_names, mesh.mesh.tolist(), tuple(mesh.get_coordinate()), groups


def seen_of_ours(mesh, rank):
    """The same of a shardmesh.Mesh. torch sorts the ranks of its groups, whatever the mesh says."""
    groups = {name: sorted(mesh.group(rank, name)) for name in mesh.names}
    return mesh.names, mesh.instances[mesh.instance(rank)], mesh.coordinate(rank), groups
