#!/usr/bin/env python3
"""shardmesh.views: that real elements, moved by the copies, arrive where the views say."""
import itertools
import math
import sys
import unittest

from shardmesh import Mesh, errors, layout, views
from shardmesh.layout import Flat, Owned, Replicate, Shard
from shardmesh.views import Box, Copy, LocalBox

HSDP = Mesh([2, 3], ["ddp", "fsdp"])
TP = Mesh([2], ["tp"])


def elements(local):
    """Every element of a box, and its place in memory."""
    for index in itertools.product(*map(range, local.box.sizes)):
        place = local.offset + sum(i * stride for i, stride in zip(index, local.strides))
        yield tuple(offset + i for offset, i in zip(local.box.offsets, index)), place


def filled(view, ranks):
    """Every rank's memory of a tensor whose elements are their own coordinates: by rank, place -> element."""
    return {rank: {place: element for box in view.boxes(rank) for element, place in elements(box)} for rank in ranks}


class MovesTest(unittest.TestCase):
    def move(self, source, destination, givers, takers):
        """Moves all elements between two mappings of views and checks every one."""
        memory = {name: filled(view, givers) for name, view in source.items()}
        for rank in takers:
            moved = views.reshard(source, destination, rank)
            self.assertEqual(list(moved), list(destination))
            for name, view in destination.items():
                arrived = {}
                for copy in moved[name]:
                    for i in range(copy.num_elements):
                        self.assertNotIn(copy.destination_offset + i, arrived)
                        arrived[copy.destination_offset + i] = memory[name][copy.source][copy.source_offset + i]
                self.assertEqual(arrived, filled(view, [rank])[rank], (name, rank))

    PARAMETERS = {
        "flat": (33, 17), "rows": ((21, 5), "fp32", "rows:2"), "block": ((37, 20), "fp32", "block:8"),
        "stack": ((3, 9, 20), "fp32", "block:8"), "whole": ((9, 11), "fp32", "whole"),
        "tied": layout.Parameter((33, 17), tied_to="flat"), "scalar": (), "none": (0, 4),
    }

    def test_plan_to_placements_and_back(self):
        plan = layout.plan(self.PARAMETERS, HSDP)
        stored = {name: plan.view(name) for name in plan.shapes}
        for mesh, placements in (
            (Mesh([4], ["fsdp"]), {"fsdp": Shard(0)}), (Mesh([3], ["tp"], [7, 1, 5]), {"tp": Shard(1)}),
            (HSDP, {"fsdp": Shard(0)}), (Mesh([2, 2], ["a", "b"]), [Shard(0), Shard(1)]),
        ):
            torch = {name: views.placed(shape, mesh, placements if shape else {})
                     for name, shape in plan.shapes.items()}
            self.move(stored, torch, HSDP.ranks, mesh.ranks)
            self.move(torch, stored, mesh.ranks, HSDP.ranks)

    def test_plan_to_a_plan_of_other_granules(self):
        plan = layout.plan({"w": ((37, 20), "fp32", "block:8")}, HSDP)
        other = layout.plan({"w": (37, 20)}, Mesh([2], ["x"], [4, 9]))
        self.move({"w": plan.view("w")}, {"w": other.view("w")}, HSDP.ranks, [4, 9])
        self.move({"w": other.view("w")}, {"w": plan.view("w")}, [4, 9], HSDP.ranks)

    def test_parts_of_a_packed_tensor(self):
        qkv = {"q": Box((0, 0), (8, 6)), "k": Box((8, 0), (4, 6)), "v": Box((12, 0), (4, 6))}
        plan = layout.plan({"qkv": (16, 6)}, HSDP)
        stored = {"q": plan.view("qkv"), "joined": plan.view("qkv")}
        wanted = {"q": views.part((16, 6), qkv["q"], TP, [Shard(1)]),
                  "joined": views.packed((16, 6), qkv, TP, {"tp": Shard(0)})}
        self.move(stored, wanted, HSDP.ranks, TP.ranks)
        self.assertEqual(wanted["q"].boxes(1), [LocalBox(Box((0, 3), (8, 3)), 0, (3, 1))])
        self.assertEqual([(box.box.offsets, box.offset) for box in wanted["joined"].boxes(1)],
                         [((4, 0), 0), ((10, 0), 24), ((14, 0), 36)])

    def test_packed_along_another_dimension_and_by_name(self):
        gate_up = {"up": ((0, 5), (4, 5)), "gate": ((0, 0), (4, 5))}
        for placements in ([Shard(1)], {"tp": Shard(1)}, lambda name: {"tp": Shard(1)}):
            view = views.packed((4, 10), gate_up, TP, placements, join_dim=1)
            self.assertEqual(view.boxes(0), [(((0, 5), (4, 3)), 0, (6, 1)), (((0, 0), (4, 3)), 3, (6, 1))])
            self.move({"w": views.placed((4, 10), TP, [Shard(0)])}, {"w": view}, [0, 1], [0, 1])
            self.move({"w": view}, {"w": views.placed((4, 10), TP, [Flat(3)])}, [0, 1], [0, 1])
        with_gap = views.packed((4, 12), gate_up, TP, [Shard(1)], 1, gaps=True)
        self.assertEqual(sum(math.prod(box.box.sizes) for box in with_gap.boxes(0)), 4 * 6)

    def test_listed_boxes(self):
        right = LocalBox(Box((0, 2), (4, 2)), 0, (1, 4))
        view = views.listed((4, 4), {7: [(((0, 0), (4, 2)), 100, (2, 1))], 3: [right], 5: []})
        self.assertEqual(view.shape, (4, 4))
        self.assertEqual((view.boxes(7), view.boxes(5)), ([(((0, 0), (4, 2)), 100, (2, 1))], []))
        self.move({"w": view}, {"w": views.placed((4, 4), TP, [Shard(0)])}, [3, 5, 7], [0, 1])
        self.assertEqual(views.reshard(view, view, 5), [])


class ReshardTest(unittest.TestCase):
    def test_one_view_gives_one_list(self):
        four, two = views.placed((12,), Mesh([4], ["a"]), [Shard(0)]), views.placed((12,), TP, [Shard(0)])
        copies = views.reshard(four, two, 1)
        second = Copy(source=3, source_offset=0, destination_offset=3, num_elements=3)
        self.assertEqual(copies, [Copy(2, 0, 0, 3), second])
        self.assertEqual(views.reshard({"w": four}, {"w": two}, 1), {"w": copies})

    def test_rank_of_replicas_reads_itself(self):
        plan = layout.plan({"w": (100, 64)}, HSDP)
        for rank in HSDP.ranks:
            self.assertEqual({copy.source for copy in views.reshard(plan.view("w"), plan.view("w"), rank)}, {rank})

    def test_tensors_that_the_destination_lacks_are_left(self):
        view, away = views.placed((4,), TP, [Shard(0)]), views.placed((4,), Mesh([1], ["a"], [9]), [Shard(0)])
        moved = views.reshard({"v": view, "w": view}, {"w": view, "v": away}, 0)
        self.assertEqual(moved, {"w": [(0, 0, 0, 2)], "v": []})
        self.assertEqual(views.reshard({"w": view}, {}, 0), {})
        self.assertEqual(views.reshard({"w": view}, {"w": views.placed((4,), TP, [Owned(0)])}, 1), {"w": []})


class ErrorsTest(unittest.TestCase):
    def expect(self, error, call, text=""):
        with self.assertRaisesRegex(error, text):
            call()

    def test_bad_values_have_their_kind(self):
        whole = Box((0, 0), (4, 4))
        left, right = Box((0, 0), (4, 2)), Box((0, 2), (4, 2))
        for call, text in (
            (lambda: views.placed((4,), HSDP, [Shard(0)]), "give one for each"),
            (lambda: views.placed((4,), TP, [Shard(1)]), r"Shard\(1\)"),
            (lambda: views.placed((-4,), TP, [Shard(0)]), "-4"),
            (lambda: views.placed((2**70,), TP, [Shard(0)]), str(2**70)),
            (lambda: views.part((4, 4), ((0, 0), (4, 5)), TP, [Shard(0)]), "0:5"),
            (lambda: views.packed((4, 4), {}, TP, [Shard(0)]), "part"),
            (lambda: views.packed((4, 4), {"a": whole, "b": left}, TP, [Shard(0)]), '"a".*"b"'),
            (lambda: views.packed((4, 4), {"a": left}, TP, [Shard(0)]), "8"),
            (lambda: views.packed((4, 4), {"a": left, "b": right}, TP, [Shard(0)], join_dim=2), "dimension 2"),
            (lambda: views.packed((4, 4), {"a": left, "b": right}, TP, [Shard(0)], join_dim=2**31), str(2**31)),
            (lambda: views.packed((4, 4), {"a": left, "b": right}, TP, [Flat(2)], join_dim=1), "flat"),
            (lambda: views.packed((4, 4), {"a": left, "b": right}, TP, [Shard(3)], join_dim=1), 'part "a"'),
            (lambda: views.packed((4, 4), {"a\ud800": whole}, TP, [Shard(0)]), r"a\\ud800"),
            (lambda: views.listed((4, 4), {-1: []}), "-1"),
            (lambda: views.listed((4, 4), {0: [(whole, 0, (4,))]}), "rank 0"),
            (lambda: views.listed((4, 4), {0: [(whole, -1, (4, 1))]}), "-1"),
            (lambda: views.listed((4, 4), {0: [(whole, 0, (4, 1)), (left, 16, (2, 1))]}), "overlap"),
            (lambda: views.listed((4, 4), {0: [(left, 0, (2, 1)), (right, 7, (2, 1))]}), "0:2.*2:4.*share places"),
            (lambda: views.listed((4,), {0: [(((0,), (-1,)), 0, (1,))]}), "negative size -1"),
            (lambda: views.part((4,), ((-2,), (1,)), TP, [Shard(0)]), "negative offset -2"),
        ):
            self.expect(errors.InvalidArgument, call, text)
        self.expect(errors.ResourceExhausted, lambda: views.placed((2**62, 4), TP, [Shard(0)]))
        self.expect(errors.NotFound, lambda: views.placed((4,), TP, {"dp": Shard(0)}), '"dp"')
        self.expect(errors.NotFound, lambda: views.placed((4,), TP, [Shard(0)]).boxes(2), "2")

    def test_reshard_names_the_tensor(self):
        view, other = views.placed((4,), TP, [Shard(0)]), views.placed((5,), TP, [Replicate()])
        columns = views.placed((64, 64), TP, [Shard(1)])
        half = views.listed((4,), {0: [(((0,), (2,)), 0, (1,))]})
        twisted = views.listed((4,), {0: [(((0,), (4,)), 0, (1,))], 1: [(((1,), (2,)), 0, (1,))]})
        two = {"a": view, "b": view}
        self.expect(errors.InvalidArgument, lambda: views.reshard(two, {"a": view, "b": other}, 0), '"b"')
        self.expect(errors.InvalidArgument, lambda: views.reshard({"a": half}, {"a": view}, 1), '"a"')
        self.expect(errors.InvalidArgument, lambda: views.reshard({"a": twisted}, {"a": view}, 1), "overlap")
        self.expect(errors.NotFound, lambda: views.reshard({"a": view}, {"b": view}, 0), "'b'.*it has a")
        self.expect(errors.NotFound, lambda: views.reshard({"a": view}, {"a": view}, 2), "rank 2")
        self.expect(errors.InvalidArgument, lambda: views.reshard(view, view, 2**40), str(2**40))
        rows = views.placed((64, 64), TP, [Shard(0)])
        self.assertEqual(len(views.reshard(rows, columns, 0)), 64)
        self.expect(errors.ResourceExhausted, lambda: views.reshard(rows, columns, 0, max_copies=63), "63")
        self.expect(errors.ResourceExhausted, lambda: views.reshard(rows, columns, 0, max_copies=0), "is 0")
        self.assertEqual(len(views.reshard(rows, columns, 0, max_copies=2**22)), 64)
        for bad in (-1, 2**22 + 1, 2**63 - 1):
            self.expect(errors.InvalidArgument, lambda: views.reshard(rows, columns, 0, bad), f"is {bad}; give 0 to 4194304")
        self.expect(errors.InvalidArgument, lambda: views.reshard(view, other, 0), r"the tensor is \[4\]")

    def test_packed_parts_have_a_limit(self):
        boxes = {str(p): ((p,), (1,)) for p in range(4097)}
        self.expect(errors.ResourceExhausted, lambda: views.packed((4097,), boxes, TP, [Shard(0)]), "4096")

    def test_plan_has_no_view_of_what_it_lacks_or_of_too_many_boxes(self):
        plan = layout.plan({"w": ((2**14, 2**13), "fp8", "block:8")}, HSDP)
        self.expect(errors.NotFound, lambda: plan.view("v"), '"v"')
        self.expect(errors.InvalidArgument, lambda: plan.view("\ud800"))
        self.expect(errors.ResourceExhausted, lambda: plan.view("w"), "1048576")

    def test_wrong_types_are_type_errors(self):
        view = views.placed((4,), TP, [Shard(0)])
        for bad in (None, 3, {"w": 3}, [view], "w"):
            self.expect(TypeError, lambda: views.reshard(bad, {"w": view}, 0))
            self.expect(TypeError, lambda: views.reshard(view, bad, 0))
            self.expect(TypeError, lambda: views.reshard({"w": view}, {"w": bad}, 0))
        self.expect(TypeError, lambda: views.reshard(view, {"w": view}, 0))
        for bad in (None, 3, "ab", [None], [[4]]):
            self.expect(TypeError, lambda: views.placed(bad, TP, [Shard(0)]))
            self.expect(TypeError, lambda: views.part((4,), bad, TP, [Shard(0)]))
            self.expect(TypeError, lambda: views.listed((4,), {0: [bad]}))
        self.expect(TypeError, lambda: views.placed(4, TP, [Shard(0)]), "shape is 4; give a sequence of integers")
        self.expect(TypeError, lambda: views.placed((4,), TP, Shard(0)), r"placements is Shard\(0\); give a list")
        self.expect(TypeError, lambda: views.packed((4,), [((0,), (4,))], TP, [Shard(0)]), "give a mapping from names")
        self.expect(TypeError, lambda: views.listed((4,), [[]]), "give a mapping from ranks")
        for bad in (None, 3, [3], [layout.Placement.__new__(layout.Placement)]):
            self.expect(TypeError, lambda: views.placed((4,), TP, bad))
        self.expect(TypeError, lambda: type(view._core).__new__(type(view._core)).boxes(0))


if __name__ == "__main__":
    sys.exit(unittest.main())
