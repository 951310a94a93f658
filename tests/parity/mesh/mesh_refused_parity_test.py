#!/usr/bin/env python3
"""Mesh operations that torch refuses and shardmesh answers; wrong meshes that torch accepts and shardmesh refuses."""
import itertools
import os
import sys
import unittest

import torch
from shardmesh import Mesh, errors
from torch.distributed.device_mesh import DeviceMesh

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
import torch_mesh  # noqa: E402

RANK = 5  # whose view it is, of 8
NAMES = ("ddp", "fsdp", "abcd")


def cube():
    return Mesh([2, 2, 2], NAMES)


def beside_flattened(mesh):
    mesh["ddp", "abcd"]._flatten("da")
    return mesh["fsdp", "da"]


def flattened_from_submesh(mesh):
    submesh = mesh["ddp", "fsdp"]
    submesh._flatten("df")
    return submesh["df"]


def flatten_twice(mesh):
    mesh["ddp", "fsdp"]._flatten("x")
    return mesh["fsdp", "abcd"]._flatten("x")


def transposed(mesh, *names):
    return DeviceMesh._concatenate([mesh[name] for name in names])


def transposed_flattened(mesh):
    transposed(mesh, "abcd", "ddp")._flatten("ad")
    return mesh["ad"]


# What: torch's way, ours, and what rank 5 must see.
ANSWERED = {
    "transposed slice": (
        lambda mesh: mesh["abcd", "ddp"], lambda mesh: mesh.slice(["abcd", "ddp"]), [[0, 4], [1, 5]]),
    "transposed slice of a slice": (
        lambda mesh: mesh["ddp", "fsdp"]["fsdp", "ddp"],
        lambda mesh: mesh.slice(["ddp", "fsdp"]).slice(["fsdp", "ddp"]), [[1, 5], [3, 7]]),
    "slice that turns every dimension": (
        lambda mesh: mesh["abcd", "fsdp", "ddp"], lambda mesh: mesh.slice(["abcd", "fsdp", "ddp"]),
        [[[0, 4], [2, 6]], [[1, 5], [3, 7]]]),
    "slice of a transposed mesh, in its order": (
        lambda mesh: transposed(mesh, "abcd", "ddp", "fsdp")["abcd", "ddp"],
        lambda mesh: mesh.transpose(["abcd", "ddp", "fsdp"]).slice(["abcd", "ddp"]), [[0, 4], [1, 5]]),
    "flattened transposed slice by its name": (
        transposed_flattened, lambda mesh: mesh.flatten(["abcd", "ddp"], "ad").slice("ad"), [0, 4, 1, 5]),
    "flattened non-adjacent dimension beside the one between": (
        beside_flattened, lambda mesh: mesh.flatten(["ddp", "abcd"], "da"), [[0, 2], [1, 3], [4, 6], [5, 7]]),
    "flattened dimension from a submesh": (
        flattened_from_submesh,
        lambda mesh: mesh.slice(["ddp", "fsdp"]).flatten(["ddp", "fsdp"], "df").slice("df"), [1, 3, 5, 7]),
    "one name for two flattened dimensions": (
        flatten_twice, lambda mesh: mesh.flatten(["fsdp", "abcd"], "x", keep_rest=False), [4, 5, 6, 7]),
    "flatten into the name of a dimension that goes": (
        lambda mesh: mesh["ddp", "fsdp"]._flatten("fsdp"),
        lambda mesh: mesh.flatten(["ddp", "fsdp"], "fsdp", keep_rest=False), [1, 3, 5, 7]),
}

# What: torch's way (accepted), ours.
ACCEPTED = {
    "a dimension's name twice": (
        lambda: DeviceMesh("cpu", [[0, 1], [4, 5]], mesh_dim_names=("a", "a")), lambda: Mesh([2, 2], ["a", "a"])),
    "an empty name": (lambda: DeviceMesh("cpu", [4, 5], mesh_dim_names=("",)), lambda: Mesh([2], [""], [4, 5])),
    "a NUL in a name": (lambda: DeviceMesh("cpu", [4, 5], mesh_dim_names=("a\0",)), lambda: Mesh([2], ["a\0"], [4, 5])),
    "ranks that are no whole numbers": (
        lambda: DeviceMesh("cpu", [0.5, 5.5], mesh_dim_names=("a",)), lambda: Mesh([2], ["a"], [0.5, 5.5])),
    "rank 2^32, taken for rank 0": (
        lambda: DeviceMesh("cpu", torch.tensor([5, 2**32]), mesh_dim_names=("a",)),
        lambda: Mesh([2], ["a"], [5, 2**32])),
    "unflatten into a name that is taken": (
        lambda: torch_mesh.create([2, 4], ["fsdp", "x"], range(8))._unflatten("x", (2, 2), ("fsdp", "y")),
        lambda: Mesh([2, 4], ["fsdp", "x"]).unflatten("x", [2, 2], ["fsdp", "y"])),
    "a slice without dimensions": (
        lambda: torch_mesh.create([2, 4], ["a", "b"], range(8))[()], lambda: Mesh([2, 4], ["a", "b"]).slice([])),
}


class MeshRefusedTest(unittest.TestCase):
    def test_what_torch_refuses_is_answered(self):
        print("\ntorch refuses, shardmesh answers:")
        for what, (theirs, ours, expected) in ANSWERED.items():
            with self.subTest(what), torch_mesh.as_rank(RANK, 8):
                with self.assertRaises(Exception) as caught:
                    theirs(torch_mesh.create([2, 2, 2], NAMES, range(8)))
                mesh = ours(cube())
                self.assertEqual(mesh.instances[mesh.instance(RANK)], expected)
                print(f"  {what}: {expected}; torch: {type(caught.exception).__name__}: {str(caught.exception)[:90]}")

    def test_what_torch_accepts_wrongly_is_refused(self):
        print("\ntorch accepts, shardmesh refuses:")
        for what, (theirs, ours) in ACCEPTED.items():
            with self.subTest(what), torch_mesh.as_rank(RANK, 8):
                theirs()
                with self.assertRaises((errors.Error, TypeError)) as caught:
                    ours()
                print(f"  {what}: {type(caught.exception).__name__}: {str(caught.exception).splitlines()[0][:100]}")

    def test_slice_has_the_order_that_torch_gives_a_mesh_of_its_own(self):
        """Where torch slices a mesh that has the order already, both see the same."""
        for names in itertools.permutations(NAMES, 2):
            rest = next(name for name in NAMES if name not in names)
            with self.subTest(names), torch_mesh.as_rank(RANK, 8):
                theirs = transposed(torch_mesh.create([2, 2, 2], NAMES, range(8)), *names, rest)
                parts = DeviceMesh._concatenate([theirs[name] for name in names])
                self.assertEqual(torch_mesh.seen_of_ours(cube().slice(names), RANK), torch_mesh.seen(parts))

    def test_order_of_ranks_is_that_of_the_mesh(self):
        """torch's groups are sorted, so that a rank's place in its group is not its coordinate."""
        with torch_mesh.as_rank(0, 2):
            theirs = DeviceMesh("cpu", [1, 0], mesh_dim_names=("a",))
            ours = Mesh([2], ["a"], [1, 0])
            self.assertEqual((tuple(theirs.get_coordinate()), theirs.get_local_rank()), ((1,), 0))
            self.assertEqual((ours.coordinate(0), ours.group(0, "a").index(0)), ((1,), 1))


if __name__ == "__main__":
    sys.exit(unittest.main())
