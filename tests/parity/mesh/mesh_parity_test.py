#!/usr/bin/env python3
"""Random mesh programs, run by torch's DeviceMesh and by shardmesh.Mesh, seen from up to eight ranks each."""
import collections
import math
import os
import random
import sys
import unittest

from shardmesh import Mesh

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
import torch_mesh  # noqa: E402

NUM_PROGRAMS = int(os.environ.get("SHARDMESH_PARITY_PROGRAMS", "100"))


def divisors(n):
    return [d for d in range(1, n + 1) if n % d == 0]


class Program:
    """Steps over a growing list of meshes, number 0 of which is the root. A step names the mesh that it starts from."""

    def __init__(self, rng):
        self.rng = rng
        self.shape = [rng.choice([1, 2, 2, 2, 3, 4]) for _ in range(rng.randint(1, 4))]
        self.names = [f"d{i}" for i in range(len(self.shape))]
        self.ranks = list(range(math.prod(self.shape)))
        if rng.random() < 0.3:
            rng.shuffle(self.ranks)
        self.steps = []
        self.meshes = [Mesh(self.shape, self.names, self.ranks)]

    def grow(self, num_steps):
        while len(self.steps) < num_steps:
            step = self.rng.choice([self.slice, self.slice, self.flatten, self.unflatten, self.concatenate])()
            if step is not None:
                self.meshes.append(apply_ours(self.meshes, step))
                self.steps.append(step)
        return self

    def fresh(self):
        return f"n{len(self.steps)}"

    def pick(self):
        return self.rng.randrange(len(self.meshes))

    def slice(self):
        at = self.pick()
        names = self.meshes[at].names
        kept = [name for name in names if self.rng.random() < 0.6]
        return ("slice", at, tuple(kept)) if kept else None

    def flatten(self):
        return ("flatten", self.pick(), self.fresh())

    def unflatten(self):
        at = self.pick()
        mesh = self.meshes[at]
        if len(mesh.names) > 6:
            return None
        name, size = self.rng.choice(list(zip(mesh.names, mesh.sizes)))
        first = self.rng.choice(divisors(size))
        return ("unflatten", at, name, (first, size // first), (self.fresh() + "a", self.fresh() + "b"))

    def concatenate(self):
        """Of slices of one mesh that have no dimension in common, in any order."""
        at = self.pick()
        names = list(self.meshes[at].names)
        if len(names) < 2:
            return None
        self.rng.shuffle(names)
        cut = self.rng.randint(1, len(names) - 1)
        order = self.meshes[at].names.index
        return ("concatenate", at, tuple(sorted(names[:cut], key=order)), tuple(sorted(names[cut:], key=order)))


def apply_ours(meshes, step):
    verb, at, *rest = step
    mesh = meshes[at]
    if verb == "slice":
        return mesh.slice(rest[0])
    if verb == "flatten":
        return mesh.flatten(mesh.names, rest[0])
    if verb == "unflatten":
        return mesh.unflatten(*rest)
    return Mesh.concatenate([mesh.slice(names) for names in rest])


def apply_torch(meshes, step):
    verb, at, *rest = step
    mesh = meshes[at]
    if verb == "slice":
        return mesh[rest[0]]
    if verb == "flatten":
        return mesh._flatten(rest[0])
    if verb == "unflatten":
        return mesh._unflatten(*rest)
    return type(mesh)._concatenate([mesh[names] for names in rest])


class MeshParityTest(unittest.TestCase):
    def check(self, program, rank, tally):
        """Compares every mesh that torch makes; what it refuses, and what follows from that, is left out."""
        with torch_mesh.as_rank(rank, len(program.ranks)):
            theirs = [torch_mesh.create(program.shape, program.names, program.ranks)]
            for step, ours in zip([None] + program.steps, program.meshes):
                if step is not None:
                    if theirs[step[1]] is None:
                        theirs.append(None)
                        continue
                    try:
                        theirs.append(apply_torch(theirs, step))
                    except (KeyError, NotImplementedError, RuntimeError, ValueError, AssertionError) as error:
                        tally[step[0], type(error).__name__, str(error).strip("'\"")[-52:] or "(no message)"] += 1
                        theirs.append(None)
                        continue
                tally["compared"] += 1
                self.assertEqual(torch_mesh.seen_of_ours(ours, rank), torch_mesh.seen(theirs[-1]),
                                 f"rank {rank}, root {program.shape} {program.ranks}, steps {program.steps}, at {step}")

    def test_random_programs_see_equal_ranks(self):
        seed = int(os.environ.get("SHARDMESH_PARITY_SEED", random.randrange(2**32)))
        print(f"\nmesh programs: seed {seed} (SHARDMESH_PARITY_SEED)")
        rng = random.Random(seed)
        tally = collections.Counter()
        for _ in range(NUM_PROGRAMS):
            program = Program(rng).grow(8)
            for rank in rng.sample(program.ranks, min(8, len(program.ranks))):
                self.check(program, rank, tally)
        compared = tally.pop("compared")
        refused = sum(tally.values())
        print(f"mesh programs: {compared} meshes of {NUM_PROGRAMS} programs are equal; torch refused {refused} more:")
        for (verb, error, message), count in tally.most_common():
            print(f"  {count:6} {verb:12} {error}: ...{message}")
        self.assertGreater(compared, 3 * refused, "the programs should mostly be ones that torch runs")


if __name__ == "__main__":
    sys.exit(unittest.main())
