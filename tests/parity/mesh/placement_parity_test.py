#!/usr/bin/env python3
"""Boxes of placements beside torch.distributed.tensor's, on random shapes and meshes, at every coordinate."""
import collections
import itertools
import math
import os
import random
import sys
import unittest

import torch
from shardmesh import Mesh, layout
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard


def theirs(shape, mesh_shape, placements, coordinate):
    sizes, offsets = _compute_local_shape_and_global_offset(shape, mesh_shape, list(coordinate), placements)
    return tuple(offsets), tuple(sizes)


def ours_of(placement):
    if isinstance(placement, _StridedShard):
        return layout.StridedShard(placement.dim, placement.split_factor)
    return layout.Shard(placement.dim) if isinstance(placement, Shard) else layout.Replicate()


class Case:
    """One tensor over one mesh, as both libraries place it."""

    def __init__(self, shape, mesh_shape, placements):
        self.shape, self.mesh_shape, self.placements = shape, mesh_shape, placements
        mesh = Mesh(mesh_shape, [f"d{i}" for i in range(len(mesh_shape))])
        self.plan = layout.plan({"w": shape}, mesh)

    def ours(self, coordinate):
        (box,) = self.plan.boxes([ours_of(placement) for placement in self.placements], coordinate)["w"]
        return tuple(box)

    def __str__(self):
        return f"{self.shape} on {self.mesh_shape} as {self.placements}"


class PlacementParityTest(unittest.TestCase):
    def test_shard_and_replicate_are_equal(self):
        seed = int(os.environ.get("SHARDMESH_PARITY_SEED", random.randrange(2**32)))
        print(f"\nplacements: seed {seed} (SHARDMESH_PARITY_SEED)")
        rng, compared = random.Random(seed), 0
        for _ in range(400):
            shape = tuple(rng.choice([0, 1, 2, 3, 5, 8, 9, 17, 33]) for _ in range(rng.randint(1, 3)))
            mesh_shape = tuple(rng.randint(1, 5) for _ in range(rng.randint(1, 3)))
            placements = [rng.choice([Replicate(), Shard(rng.randrange(len(shape)))]) for _ in mesh_shape]
            case = Case(shape, mesh_shape, placements)
            for coordinate in itertools.product(*map(range, mesh_shape)):
                expected = theirs(shape, mesh_shape, placements, coordinate)
                self.assertEqual(case.ours(coordinate), expected, f"{case} at {coordinate}")
                compared += 1
        print(f"placements: {compared} boxes equal")

    def test_strided_shards_are_what_is_stored(self):
        """fully_shard cuts what tensor parallelism left: so does StridedShard. torch's own boxes are counted beside."""
        wrong, compared = collections.Counter(), 0
        for rows, dp, tp in itertools.product([*range(0, 40), 50257, 51865], (2, 3, 4), (2, 4)):
            case = Case((rows, 4), (dp, tp), [_StridedShard(0, split_factor=tp), Shard(0)])
            for t, d in itertools.product(range(tp), range(dp)):
                stored = chunk(range(rows), tp, t)
                stored = chunk(stored, dp, d)
                offsets, sizes = case.ours((d, t))
                self.assertEqual(sizes, (len(stored), 4), f"{case} at {(d, t)}")
                if len(stored) > 0:
                    self.assertEqual(offsets, (stored[0], 0), f"{case} at {(d, t)}")
                their_offsets, their_sizes = theirs(case.shape, case.mesh_shape, case.placements, (d, t))
                differs = their_sizes != sizes or (len(stored) > 0 and their_offsets != offsets)
                wrong[rows, dp, tp] += differs
                compared += 1
        cases = [case for case, count in wrong.items() if count]
        print(f"\nstrided placements: {compared} boxes are the rows that are stored; torch's differ for (rows, dp, tp)")
        print(" ", *cases)

    def test_chunks_of_a_tensor_are_the_boxes(self):
        """Against torch.chunk itself, on data."""
        for rows, ranks in itertools.product(range(1, 40), range(1, 9)):
            tensor = torch.arange(rows * 3).reshape(rows, 3)
            case = Case((rows, 3), (ranks,), [Shard(0)])
            chunks = torch.chunk(tensor, ranks)
            for rank in range(ranks):
                (offset, _), (size, _) = case.ours((rank,))
                expected = chunks[rank] if rank < len(chunks) else tensor[:0]
                self.assertTrue(torch.equal(tensor[offset:offset + size], expected), f"{case} at {rank}")


def chunk(elements, ways, index):
    """torch.chunk of a range."""
    each = math.ceil(len(elements) / ways)
    return elements[min(each * index, len(elements)):min(each * (index + 1), len(elements))]


if __name__ == "__main__":
    sys.exit(unittest.main())
