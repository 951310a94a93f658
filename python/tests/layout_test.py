#!/usr/bin/env python3
"""shardmesh.layout: that a plan says who holds what, for every form in which parameters are given."""
import copy
import math
import pickle
import random
import sys
import unittest

from shardmesh import Mesh, errors, layout

HSDP = Mesh([2, 4], ["ddp", "fsdp"])


class FormsTest(unittest.TestCase):
    def test_mapping_is_taken_in_natural_order_whatever_its_own(self):
        items = [(f"layers.{i}.w", (100 + i, 64)) for i in range(20)]
        items += [("b", (7,)), ("layers.3.a2", ()), ("layers.3.a10", ())]
        random.Random(1).shuffle(items)
        plan = layout.plan(dict(items), HSDP)
        names = list(plan.buckets[0].names)
        self.assertEqual(names[:3], ["b", "layers.0.w", "layers.1.w"])
        self.assertEqual(names[4:8], ["layers.3.a2", "layers.3.a10", "layers.3.w", "layers.4.w"])
        self.assertEqual(plan.hash, layout.plan(dict(sorted(items)), HSDP).hash)

    def test_list_keeps_its_order(self):
        items = [("layers.10.w", (64, 64)), ("layers.2.w", (64, 64))]
        self.assertEqual(layout.plan(items, HSDP).buckets[0].names, ("layers.10.w", "layers.2.w"))
        self.assertEqual(layout.plan(iter(items), HSDP).hash, layout.plan(items, HSDP).hash)
        self.assertNotEqual(layout.plan(items[::-1], HSDP).hash, layout.plan(items, HSDP).hash)

    def test_all_forms_of_a_parameter_are_one(self):
        class Tensor:
            shape = (64, 64)

        expected = layout.plan({"w": layout.Parameter((64, 64), "bf16", "rows:1")}, HSDP).hash
        self.assertEqual(layout.plan({"w": ((64, 64), "bf16", "rows:1")}, HSDP).hash, expected)
        self.assertEqual(layout.plan([("w", (64, 64), "bf16", "rows:1")], HSDP).hash, expected)
        self.assertEqual(layout.plan({"w": ([64, 64], "bf16")}, HSDP, granule="rows:1").hash, expected)
        for entry in ((64, 64), [64, 64], Tensor()):
            self.assertEqual(layout.plan({"w": entry}, HSDP, format="bf16", granule="rows:1").hash, expected)
        self.assertNotEqual(layout.plan({"w": (64, 64)}, HSDP).hash, expected)

    def test_digits_that_no_int_has_are_sorted(self):
        layout.plan({"a" + "9" * 4000: (2,), "a1": (2,), "a٣": (2,), "a01": (2,)}, HSDP)

    def test_wrong_types_are_type_errors(self):
        for bad in (3, None, "ab", {"a"}, (2.5,), (None,), ("ab",), ((4, 4), 3), ((4, 4), "fp32", "flat:256", "", "")):
            with self.assertRaises(TypeError):
                layout.plan({"w": bad}, HSDP)
        for bad in (3, None, ["w"], [("w",)], [(3, (2,))], {3: (2,)}, "ab"):
            with self.assertRaises(TypeError):
                layout.plan(bad, HSDP)
        with self.assertRaises(TypeError):
            layout.plan({"w": (2,)}, 4)

    def test_bad_values_have_their_kind(self):
        for bad in ((-1,), (1,) * 9, ((4, 4), "fp32", "flat:100"), ((4,), "fp32", "rows:1")):
            with self.assertRaisesRegex(errors.InvalidArgument, "."):
                layout.plan({"weight": bad}, HSDP)
        with self.assertRaisesRegex(ValueError, '"weight".*flat:100'):
            layout.plan({"weight": ((4, 4), "fp32", "flat:100")}, HSDP)
        for pair in ([("w", (2,)), ("w", (2,))], [("a..b", (2,))], [("w", layout.Parameter((2,), tied_to="v"))]):
            with self.assertRaises(errors.Error):
                layout.plan(pair, HSDP)
        with self.assertRaises(errors.ResourceExhausted):
            layout.plan({"w": (2**40, 2**30)}, HSDP)
        with self.assertRaises(errors.NotFound):
            layout.plan({"w": (2,)}, HSDP, replicate=["dpp"])


class PlanTest(unittest.TestCase):
    def test_parts_make_up_the_parameter_and_name_the_replicas(self):
        plan = layout.plan({"w": (100, 64), "v": (3,)}, HSDP)
        parts = plan.shard_of("w")
        self.assertEqual(plan.num_shards, 4)
        self.assertEqual([part.first_element for part in parts][0], 0)
        for before, after in zip(parts, parts[1:]):
            self.assertEqual(before.first_element + before.num_elements, after.first_element)
            self.assertEqual(before.shard + 1, after.shard)
        self.assertEqual(sum(part.num_elements for part in parts), plan.place("w").padded_elements)
        for part in parts:
            self.assertEqual(part.ranks, (part.shard, part.shard + 4))

    def test_roles_are_those_of_the_names_unless_given(self):
        shards = {("ddp", "fsdp"): 4, ("dp_replicate", "tp"): 4, ("a", "replicate"): 2, ("a", "b"): 8}
        for names, count in shards.items():
            self.assertEqual(layout.plan({"w": (64, 64)}, Mesh([2, 4], names)).num_shards, count)
        self.assertEqual(layout.plan({"w": (64, 64)}, HSDP, replicate=[]).num_shards, 8)
        self.assertEqual(layout.plan({"w": (64, 64)}, HSDP, replicate=["fsdp"]).num_shards, 2)
        self.assertEqual(layout.plan({"w": (64, 64)}, HSDP, replicate=["fsdp", "ddp"]).num_shards, 1)

    def test_ranks_follow_the_mesh(self):
        swapped = Mesh([2, 4], ["fsdp", "ddp"], ranks=[7, 6, 5, 4, 3, 2, 1, 0])
        first, second = layout.plan({"w": (64, 64)}, swapped).shard_of("w")
        self.assertEqual((first.ranks, second.ranks), ((7, 6, 5, 4), (3, 2, 1, 0)))

    def test_every_instance_of_a_slice_holds_the_plan(self):
        mesh = Mesh([2, 2, 2], ["ddp", "fsdp", "tp"]).slice(["ddp", "fsdp"])
        part = layout.plan({"w": (2, 2)}, mesh).shard_of("w")[0]
        self.assertEqual(part.ranks, (0, 4, 1, 5))

    def test_owned_matrix_has_one_part(self):
        plan = layout.plan({f"w{i}": ((64, 64), "fp32", "whole") for i in range(4)}, HSDP)
        self.assertEqual({plan.place(f"w{i}").owner for i in range(4)}, {0, 1, 2, 3})
        for i in range(4):
            (part,) = plan.shard_of(f"w{i}")
            self.assertEqual((part.shard, part.num_elements), (plan.place(f"w{i}").owner, 64 * 64))
        self.assertTrue(plan.buckets[0].owned)

    def test_tied_parameter_lies_where_its_owner_does(self):
        plan = layout.plan([("embed", (100, 64)), ("head", layout.Parameter((100, 64), tied_to="embed"))], HSDP)
        self.assertEqual(plan.shard_of("head"), plan.shard_of("embed"))
        self.assertEqual(plan.place("head"), plan.place("embed"))

    def test_empty_parameter_lies_nowhere(self):
        plan = layout.plan({"none": (0, 8), "one": ()}, HSDP)
        self.assertEqual((plan.place("none").bucket, plan.shard_of("none")), (None, []))
        self.assertEqual(plan.place("one").num_elements, 1)
        self.assertEqual(layout.plan({}, HSDP).buckets, [])

    def test_padding_is_counted_by_kind(self):
        plan = layout.plan(
            {"w": (100, 64), "m": ((128, 128), "fp8", "block:128"), "o": ((64, 64), "fp32", "whole")}, HSDP)
        self.assertEqual(set(plan.padding), {"flat", "block", "whole"})
        self.assertEqual(plan.padding["whole"].padding, 0)
        for kind, padding in plan.padding.items():
            buckets = [bucket for bucket in plan.buckets if bucket.kind == kind]
            self.assertEqual(padding.padding, sum(bucket.padding for bucket in buckets))
            self.assertEqual(padding.num_buckets, len(buckets))

    def test_options_reach_the_layout(self):
        parameters = {f"w{i}": (64, 64) for i in range(8)}
        self.assertEqual(len(layout.plan(parameters, HSDP).buckets), 1)
        self.assertEqual(len(layout.plan(parameters, HSDP, bucket_elements=64 * 64).buckets), 8)
        with self.assertRaises(errors.InvalidArgument):
            layout.plan(parameters, HSDP, bucket_elements=-1)
        with self.assertRaises(errors.InvalidArgument):
            layout.plan(parameters, HSDP, max_padding=float("nan"))

    def test_unknown_name_is_a_key_error(self):
        plan = layout.plan({"w": (2,)}, HSDP)
        for call in (plan.place, plan.shard_of):
            with self.assertRaises(KeyError):
                call("v")

    def test_names_that_utf8_cannot_write_are_value_errors(self):
        plan, bad = layout.plan({"w": (2,)}, HSDP), "a\ud800"
        for call in (lambda: layout.plan({bad: (2,)}, HSDP), lambda: layout.plan({"w": (2,)}, HSDP, format=bad),
                     lambda: layout.plan({"w": (2,)}, HSDP, granule=bad), lambda: plan.place(bad),
                     lambda: layout.plan({"w": (2,)}, HSDP, replicate=[bad]), lambda: plan.shard_of(bad),
                     lambda: plan.boxes({bad: layout.Shard(0)}, (0, 0)),
                     lambda: layout.plan({"w": layout.Parameter((2,), tied_to=bad)}, HSDP)):
            with self.assertRaisesRegex(errors.InvalidArgument, r"'a\\ud800'"):
                call()

    def test_copies_and_pickles_are_the_plan(self):
        mesh = Mesh([2, 2, 2], ["ddp", "fsdp", "tp"]).slice(["ddp", "fsdp"])
        parameters = {"w": ((100, 64), "bf16", "rows:4"), "m": ((64, 64), "fp32", "whole"),
                      "q": ((70, 40), "fp8", "block:16"), "t": layout.Parameter((100, 64), "bf16", "rows:4", "w")}
        options = {"bucket_elements": 4096, "max_padding": 0.5, "max_coarse_padding": 0.25}
        for plan in layout.plan({}, HSDP), layout.plan(parameters, mesh, replicate=["fsdp"], **options):
            pickled = [pickle.loads(pickle.dumps(plan, protocol)) for protocol in range(pickle.HIGHEST_PROTOCOL + 1)]
            for same in (copy.copy(plan), copy.deepcopy(plan), *pickled):
                self.assertEqual(same, plan)
                self.assertEqual((same.hash, same.mesh, same.shapes), (plan.hash, plan.mesh, plan.shapes))
                self.assertEqual((same.buckets, str(same)), (plan.buckets, str(plan)))

    def test_equal_plans_have_equal_hashes(self):
        plan, same = layout.plan({"w": (100, 64)}, HSDP), layout.plan([("w", (100, 64))], HSDP)
        self.assertEqual({plan: 1}[same], 1)
        for other in (layout.plan({"w": (100, 64)}, HSDP, format="bf16"), layout.plan({"w": (100, 64)}, Mesh([4], ["a"])),
                      None, plan.hash):
            self.assertNotEqual(plan, other)

    def test_format_is_text(self):
        for bad, text in (("a\0b", "NUL"), (b"\xff", "UTF-8"), ("é" * 2049, "4098 bytes"), ("", "empty")):
            with self.assertRaisesRegex(errors.InvalidArgument, '"w".*format.*' + text):
                layout.plan({"w": (4,)}, HSDP, format=bad)
        layout.plan({"w": (4,)}, HSDP, format="é" * 2048)

    def test_text_is_a_picture(self):
        plan = layout.plan({"layer.w": (100, 64)}, HSDP)
        self.assertIn("layer.w", str(plan))
        self.assertIn(plan.hash, repr(plan))


class BoxesTest(unittest.TestCase):
    def test_placements_in_every_form_are_one(self):
        plan = layout.plan({"w": (10, 64), "b": (10,)}, HSDP)
        expected = {"b": [((9,), (1,))], "w": [((9, 0), (1, 64))]}
        for placements in ([layout.Replicate(), layout.Shard(0)], {"fsdp": layout.Shard(0)},
                           lambda name: {"fsdp": layout.Shard(0)}, lambda name: (layout.Replicate(), layout.Shard(0))):
            self.assertEqual(plan.boxes(placements, (1, 3)), expected)

    def test_each_placement_has_its_boxes(self):
        plan = layout.plan({"w": (8, 64)}, HSDP)
        for placement, boxes in {
            layout.Replicate(): [((0, 0), (8, 64))],
            layout.Shard(1): [((0, 32), (8, 16))],
            layout.Flat(160): [((5, 0), (2, 64)), ((7, 0), (1, 32))],
            layout.Owned(2): [((0, 0), (8, 64))],
            layout.Owned(3): [],
        }.items():
            self.assertEqual(plan.boxes([layout.Replicate(), placement], (0, 2))["w"], boxes, repr(placement))
        strided = [layout.StridedShard(0, 4), layout.Shard(0)]
        self.assertEqual(plan.boxes(strided, (1, 2))["w"], [((5, 0), (1, 64))])

    def test_bad_placements_have_their_kind_and_name_the_parameter(self):
        plan = layout.plan({"weight": (10, 64)}, HSDP)
        with self.assertRaisesRegex(errors.InvalidArgument, '"weight"'):
            plan.boxes([layout.Replicate(), layout.Shard(2)], (0, 0))
        for bad in ([], [layout.Shard(0)], [layout.Shard(-1), layout.Replicate()]):
            with self.assertRaises(errors.InvalidArgument):
                plan.boxes(bad, (0, 0))
        with self.assertRaises(errors.NotFound):
            plan.boxes({"tp": layout.Shard(0)}, (0, 0))
        with self.assertRaises(errors.OutOfRange):
            plan.boxes({}, (0, 4))
        unmade = layout.Placement.__new__(layout.Placement)
        for bad in (None, 3, [None, None], ["Shard(0)"] * 2, {"fsdp": 3}, lambda name: None, [unmade, unmade]):
            with self.assertRaises(TypeError):
                plan.boxes(bad, (0, 0))

    def test_placements_are_equal_by_value(self):
        values = [layout.Replicate, lambda: layout.Shard(0), lambda: layout.Shard(1), lambda: layout.StridedShard(0, 2),
                  lambda: layout.StridedShard(0, 4), lambda: layout.Owned(1), lambda: layout.Flat(64)]
        for i, make in enumerate(values):
            self.assertEqual([make() == other() for other in values], [i == j for j in range(len(values))])
        self.assertEqual(len({make() for make in values * 2}), len(values))
        self.assertNotEqual(layout.Shard(0), 3)

    def test_dimension_beyond_32_bits_is_named(self):
        for dim in (2**31, -(2**31) - 1):
            for call in (lambda: layout.Shard(dim), lambda: layout.StridedShard(dim, 2)):
                with self.assertRaisesRegex(errors.InvalidArgument, str(dim)):
                    call()

    def test_copies_and_pickles_of_placements_are_equal(self):
        for placement in (layout.Replicate(), layout.Shard(1), layout.StridedShard(1, 4), layout.Owned(2),
                          layout.Flat(7)):
            pickled = [pickle.loads(pickle.dumps(placement, protocol)) for protocol in range(pickle.HIGHEST_PROTOCOL + 1)]
            for same in (copy.copy(placement), copy.deepcopy(placement), *pickled):
                self.assertEqual((same, hash(same), repr(same)), (placement, hash(placement), repr(placement)))
        plan = layout.plan({"w": (8, 64)}, HSDP)
        restore, _ = layout.Shard(0).__reduce__()
        with self.assertRaises(TypeError):
            restore((1,))
        unknown = restore((17, 0, 1, 0, 1, 0, 0))
        with self.assertRaises(errors.InvalidArgument):
            plan.boxes([unknown, unknown], (0, 0))

    def test_stored_boxes_of_one_replica_are_the_parameters(self):
        plan = layout.plan({"w": (33, 7), "t": (3, 5, 64), "m": ((64, 64), "fp32", "whole"),
                            "q": ((70, 40), "fp8", "block:16"), "s": (), "e": (0, 3)}, HSDP)
        counts = dict.fromkeys(plan.shapes, 0)
        for rank in range(4):
            self.assertEqual(plan.stored_boxes(rank), plan.stored_boxes(rank + 4))
            for name, boxes in plan.stored_boxes(rank).items():
                counts[name] += sum(math.prod(box.sizes) for box in boxes)
        self.assertEqual(counts, {name: math.prod(shape) for name, shape in plan.shapes.items()})
        with self.assertRaises(errors.NotFound):
            plan.stored_boxes(8)
        with self.assertRaises(errors.ResourceExhausted):
            layout.plan({"w": ((2**20, 2**20), "fp8", "block:8")}, HSDP).stored_boxes(0)


class ReshardTest(unittest.TestCase):
    PARAMETERS = {"w": (100, 64), "m": ((64, 64), "fp32", "whole"), "q": ((70, 40), "fp8", "block:16"), "b": (3,)}

    @staticmethod
    def memory(plan, rank):
        """What a rank stores, as (bucket, offset in its shard) -> (parameter, element)."""
        cells = {}
        for name in plan.shapes:
            place = plan.place(name)
            for part in plan.shard_of(name):
                if rank in part.ranks:
                    for i in range(part.num_elements):
                        cells[place.bucket, part.shard_offset + i] = (name, part.first_element + i)
        return cells

    def test_copies_fill_the_other_plan(self):
        source = layout.plan(self.PARAMETERS, HSDP)
        for mesh in (Mesh([3], ["fsdp"]), Mesh([2, 2], ["ddp", "fsdp"], [9, 1, 8, 2]), Mesh([16], ["x"])):
            target = layout.plan(self.PARAMETERS, mesh, bucket_elements=4096)
            for rank in mesh.ranks:
                wanted, moved = self.memory(target, rank), source.reshard_to(target, rank)
                real = 0
                for each in moved.copies:
                    held = self.memory(source, each.source)
                    for i in range(each.num_elements):
                        self.assertEqual(wanted.pop((each.destination_bucket, each.destination_offset + i)),
                                         held[each.source_bucket, each.source_offset + i])
                        real += 1
                for name, element in wanted.values():  # what nobody copies is padding
                    self.assertTrue(name == "q" or element >= math.prod(source.shapes[name]), (name, element))
                self.assertEqual((moved.num_elements, sum(moved.elements_from.values())), (real, real))

    def test_rank_of_both_copies_from_itself_and_replicas_take_turns(self):
        source = layout.plan({"w": (100, 64)}, HSDP)
        for rank in range(8):
            self.assertEqual(set(source.reshard_to(source, rank).elements_from), {rank})
        target = layout.plan({"w": (100, 64)}, Mesh([4], ["fsdp"], [10, 11, 12, 13]))
        self.assertEqual([set(source.reshard_to(target, rank).elements_from) for rank in target.mesh.ranks],
                         [{0}, {5}, {2}, {7}])

    def test_without_a_rank_every_rank_is_listed(self):
        source, target = layout.plan({"w": (100, 64)}, HSDP), layout.plan({"w": (100, 64)}, Mesh([3], ["fsdp"], [5, 9, 1]))
        moved = source.reshard_to(target)
        self.assertEqual(moved, {rank: source.reshard_to(target, rank) for rank in (5, 9, 1)})
        self.assertEqual(sum(each.num_elements for each in moved.values()), 6400)
        self.assertEqual(moved[5].num_copies, len(moved[5].copies))

    def test_hash_says_which_rank_holds_what(self):
        plans = [layout.plan({"w": (100, 64)}, mesh, replicate=replicate) for mesh, replicate in (
            (Mesh([4], ["fsdp"]), []), (Mesh([4], ["fsdp"], [3, 2, 1, 0]), []),
            (Mesh([2, 2], ["a", "b"]), ["a"]), (Mesh([2, 2], ["a", "b"]), ["b"]))]
        self.assertEqual(len({plan.hash for plan in plans}), len(plans))
        with self.assertRaises(errors.InvalidArgument):
            layout.plan({"w": (1,)}, Mesh([2], ["a"]), replicate=["a", "a"])

    def test_numbers_beyond_64_bits_are_named(self):
        for big, text in ((2**63, str(2**63)), (-(2**70), str(-(2**70))), (10**5000, "16610 bits")):
            for call in (lambda: layout.plan({"w": (big,)}, HSDP), lambda: layout.plan({}, HSDP, bucket_elements=big),
                         lambda: layout.Shard(big), lambda: layout.StridedShard(big, 2),
                         lambda: layout.StridedShard(0, big), lambda: layout.Owned(big), lambda: layout.Flat(big)):
                with self.assertRaisesRegex(errors.InvalidArgument, text):
                    call()

    def test_other_models_are_refused(self):
        plan = layout.plan({"w": (10, 64)}, HSDP)
        small, other = layout.plan({"w": (11, 4), "b": (10,)}, HSDP), layout.plan({"w": (10, 4), "b": (10,)}, HSDP)
        for rank in range(8):  # also those that hold nothing of the parameter that differs
            with self.assertRaises(errors.InvalidArgument):
                small.reshard_to(other, rank)
            with self.assertRaises(errors.InvalidArgument):
                plan.reshard_to(layout.plan({"w": (10, 64)}, HSDP, format="bf16"), rank)
        with self.assertRaises(errors.NotFound):
            plan.reshard_to(layout.plan({"v": (10, 64)}, HSDP), 0)
        with self.assertRaises(errors.InvalidArgument):
            plan.reshard_to(layout.plan({"w": (64, 10)}, HSDP), 0)
        with self.assertRaises(errors.NotFound):
            plan.reshard_to(plan, 8)
        with self.assertRaises(TypeError):
            plan.reshard_to(3, 0)


if __name__ == "__main__":
    sys.exit(unittest.main())
