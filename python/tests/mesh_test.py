#!/usr/bin/env python3
"""shardmesh.Mesh: that Python reaches the mesh of core/, whose own tests show that it is right."""
import copy
import itertools
import pickle
import sys
import unittest

import shardmesh
from shardmesh import Mesh
from shardmesh.mesh import Use, communicator_key, communicators


def cube():
    return Mesh([2, 2, 2], ["ddp", "fsdp", "abcd"])


class MeshTest(unittest.TestCase):
    def test_slice_of_slice_stands_for_all_instances(self):
        fsdp = cube().slice(["ddp", "fsdp"]).slice("fsdp")
        self.assertEqual(fsdp.describe(), {
            "names": ["fsdp"], "sizes": [2], "instances": [[0, 2], [1, 3], [4, 6], [5, 7]],
            "groups": {"fsdp": [[0, 2], [1, 3], [4, 6], [5, 7]]}})
        self.assertEqual(fsdp.instances[fsdp.instance(5)], [5, 7])
        self.assertEqual(fsdp.group(5, "fsdp"), [5, 7])

    def test_slice_takes_the_order_given(self):
        for names in itertools.permutations(["ddp", "fsdp", "abcd"], 2):
            self.assertEqual(cube().slice(names).names, names)
            self.assertEqual(cube().slice(names).transpose(names[::-1]), cube().slice(names[::-1]))
        self.assertEqual(cube().slice(["abcd", "ddp"]).instances, [[[0, 4], [1, 5]], [[2, 6], [3, 7]]])
        parts = [cube().slice(["abcd", "ddp"]), cube().slice("fsdp")]
        self.assertEqual(Mesh.concatenate(parts).names, ("abcd", "ddp", "fsdp"))

    def test_transpose_takes_the_order_given(self):
        mesh = cube().transpose(["abcd", "ddp", "fsdp"])
        self.assertEqual((mesh.names, mesh.sizes), (("abcd", "ddp", "fsdp"), (2, 2, 2)))
        self.assertEqual(mesh.instances, [[[[0, 2], [4, 6]], [[1, 3], [5, 7]]]])

    def test_flatten_takes_the_order_given_and_keeps_the_rest_if_asked(self):
        self.assertEqual(cube().flatten(["ddp", "abcd"], "dp").describe()["groups"], {
            "dp": [[0, 1, 4, 5], [2, 3, 6, 7]], "fsdp": [[0, 2], [1, 3], [4, 6], [5, 7]]})
        alone = cube().flatten(["abcd", "ddp"], "pd", keep_rest=False)
        self.assertEqual((alone.names, alone.instances), (("pd",), [[0, 4, 1, 5], [2, 6, 3, 7]]))

    def test_unflatten_by_name_undoes_flatten(self):
        flat = cube().flatten(["ddp", "abcd"], "dp")
        self.assertEqual(flat.unflatten("dp", [2, 2], ["ddp", "abcd"]).slice("abcd").groups("abcd"),
                         cube().groups("abcd"))

    def test_concatenate_puts_slices_side_by_side(self):
        mesh = Mesh.concatenate([cube().slice("abcd"), cube().slice("ddp")])
        self.assertEqual((mesh.names, mesh.instances), (("abcd", "ddp"), [[[0, 4], [1, 5]], [[2, 6], [3, 7]]]))
        self.assertEqual(Mesh.concatenate((cube(),)), cube())

    def test_restrict_keeps_a_full_grid(self):
        mesh = cube().restrict([5, 4, 1, 0])
        self.assertEqual((mesh.sizes, mesh.ranks), ((2, 1, 2), [0, 1, 4, 5]))

    def test_groups_along_several_dimensions(self):
        self.assertEqual(cube().groups(["abcd", "ddp"]), [[0, 4, 1, 5], [2, 6, 3, 7]])
        self.assertEqual(cube().groups("ddp"), cube().groups(["ddp"]))

    def test_ranks_lie_in_the_order_given(self):
        mesh = Mesh((2, 2), ("a", "b"), ranks=[7, 5, 3, 1])
        self.assertEqual(mesh.ranks, [7, 5, 3, 1])
        self.assertEqual(mesh.instances, [[[7, 5], [3, 1]]])
        for rank in mesh.ranks:
            self.assertEqual(mesh.rank_at(mesh.coordinate(rank)), rank)
        self.assertEqual(mesh.coordinate(3), (1, 0))
        self.assertEqual(mesh.slice("b").rank_at([1], instance=1), 1)

    def test_equality_is_that_of_what_is_described(self):
        self.assertEqual(cube(), cube().flatten(["ddp", "fsdp"], "x").unflatten("x", [2, 2], ["ddp", "fsdp"]))
        self.assertEqual(hash(cube()), hash(cube().slice(["ddp", "fsdp", "abcd"])))
        for other in (cube().slice("ddp"), Mesh([2, 2, 2], ["ddp", "fsdp", "x"]), Mesh([8], ["ddp"]), None, 3):
            self.assertNotEqual(cube(), other)

    def test_copies_and_pickles_are_equal(self):
        eight = Mesh([2] + [1] * 7, list("abcdefgh"))
        turned = cube().transpose(["abcd", "fsdp", "ddp"]).slice(["abcd", "ddp"])
        for mesh in (cube(), eight, turned, cube().slice("fsdp"), Mesh([2, 2], ["_", "a"]).slice("_")):
            pickled = [pickle.loads(pickle.dumps(mesh, protocol)) for protocol in range(pickle.HIGHEST_PROTOCOL + 1)]
            for same in (copy.copy(mesh), copy.deepcopy(mesh), *pickled):
                self.assertEqual(same, mesh)

    def test_base_of_all_classes_makes_no_objects(self):
        base = type(cube()).__mro__[1]
        for made in (base, type("Unbound", (base,), {})):
            with self.assertRaisesRegex(TypeError, "makes no objects"):
                made()
        with self.assertRaises(TypeError):
            pickle.dumps(shardmesh.views.placed((4,), Mesh([2], ["tp"]), {}), 0)

    def test_pickled_slices_are_still_of_one_root(self):
        mesh = cube()
        parts = [mesh.slice("fsdp"), mesh.flatten(["ddp", "abcd"], "da", keep_rest=False)]
        expected = Mesh.concatenate(parts)
        again = [pickle.loads(pickle.dumps(part)) for part in parts]
        for slices in (pickle.loads(pickle.dumps(parts)), again, [again[0], parts[1]], [parts[0], again[1]],
                       [pickle.loads(pickle.dumps(mesh)).slice("fsdp"), parts[1]]):
            self.assertEqual(Mesh.concatenate(slices), expected)

    def test_pickled_slice_keeps_the_order_of_its_instances(self):
        data = cube().slice(["ddp", "fsdp"])
        again = pickle.loads(pickle.dumps(data))
        self.assertEqual(again.slice("fsdp"), data.slice("fsdp"))

    def test_state_of_no_mesh_is_refused(self):
        make, ((root, ranks, axes),) = cube().slice(["ddp", "fsdp"]).__reduce_ex__(2)
        for error, state in {
            shardmesh.errors.InvalidArgument: (root, ranks[:-1], axes),
            TypeError: (root, ranks),
        }.items():
            with self.assertRaises(error):
                make(state)

    def test_text_names_dimensions_and_sizes(self):
        for text in (str(cube().slice(["ddp", "abcd"])), repr(cube().slice(["ddp", "abcd"]))):
            self.assertIn("ddp=2", text)
            self.assertIn("2 instances of 4 ranks", text)
            self.assertNotIn("fsdp", text)


class CommunicatorsTest(unittest.TestCase):
    def test_key_is_that_of_the_set_of_ranks(self):
        key = communicator_key([0, 2, 4, 6])
        self.assertRegex(key, "^[0-9a-f]{32}$")
        self.assertEqual(communicator_key(iter([6, 0, 4, 2, 0])), key)
        self.assertNotEqual(communicator_key(range(4)), key)

    def test_no_rank_and_negative_ranks_have_no_key(self):
        for bad, text in (([], "no rank"), ([0, -1], "rank -1"), ([-(2**31)], "-2147483648")):
            with self.assertRaisesRegex(shardmesh.errors.InvalidArgument, text):
                communicator_key(bad)

    def test_groups_of_equal_ranks_share_a_communicator(self):
        flat = cube().flatten(["fsdp", "ddp"], "dp")
        found = communicators([(cube(), ["ddp", "fsdp"]), (flat, "dp"), (cube().slice("abcd"), "abcd")])
        self.assertEqual([each.ranks for each in found],
                         [[0, 2, 4, 6], [1, 3, 5, 7], [0, 1], [2, 3], [4, 5], [6, 7]])
        self.assertEqual(found[1].uses, [Use(asked=0, group=1), Use(asked=1, group=1)])
        self.assertEqual(found[3].uses, [(2, 1)])
        self.assertEqual([each.key for each in found], [communicator_key(each.ranks) for each in found])
        self.assertEqual(communicators([]), [])

    def test_errors(self):
        with self.assertRaises(shardmesh.errors.NotFound):
            communicators([(cube(), "tp")])
        for bad in ((cube(), []), (cube(), ["ddp", "ddp"]), (cube(), "\ud800")):
            with self.assertRaises(shardmesh.errors.InvalidArgument):
                communicators([bad])
        with self.assertRaisesRegex(shardmesh.errors.InvalidArgument, str(2**70)):
            communicator_key([2**70])
        for bad in (3, [3], [(cube(),)], [("ddp", cube())], [(Mesh.__new__(Mesh), "ddp")]):
            with self.assertRaises(TypeError):
                communicators(bad)


class MeshErrorsTest(unittest.TestCase):
    def expect(self, error, call, *parts):
        with self.assertRaises(error) as caught:
            call()
        self.assertNotIsInstance(caught.exception, SystemError)
        for part in parts:
            self.assertIn(part, str(caught.exception))
        return caught.exception

    def test_unknown_dimension_is_a_key_error_that_lists_the_known_ones(self):
        error = self.expect(KeyError, lambda: cube().slice("tp"), '"tp"', "ddp, fsdp, abcd")
        self.assertIsInstance(error, shardmesh.errors.NotFound)
        self.assertFalse(str(error).startswith("'"), "the plain message, not KeyError's quoted one")

    def test_bad_values_are_value_errors(self):
        for call in (lambda: Mesh([], []), lambda: Mesh([2], ["a", "b"]), lambda: Mesh([2, 2], ["a", "a"]),
                     lambda: Mesh([0], ["a"]), lambda: Mesh([2], ["a\0"]), lambda: Mesh([2], [""]),
                     lambda: Mesh([2], ["a"], [0, 0]), lambda: Mesh([2], ["a"], [0, -1]), lambda: Mesh([2], ["a"], []),
                     lambda: cube().slice([]), lambda: cube().slice(["ddp", "ddp"]),
                     lambda: cube().transpose(["ddp"]), lambda: cube().flatten(["ddp"], "fsdp"),
                     lambda: cube().unflatten("ddp", [3], ["x"]), lambda: cube().rank_at([0]),
                     lambda: Mesh.concatenate([]), lambda: Mesh.concatenate([cube(), cube()]),
                     lambda: Mesh.concatenate([cube().slice("ddp"), Mesh([4], ["x"])]),
                     lambda: cube().restrict([]), lambda: cube().restrict([0, 1, 2]), lambda: cube().restrict([0, 0])):
            self.expect(shardmesh.errors.InvalidArgument, call)
        self.expect(ValueError, lambda: Mesh([2], ["a"], [0, 2**32]), "4294967296")  # not rank 0

    def test_other_kinds(self):
        self.expect(shardmesh.errors.ResourceExhausted, lambda: Mesh([2**40], ["a"]))
        self.expect(shardmesh.errors.ResourceExhausted, lambda: Mesh([1] * 9, list("abcdefghi")))
        self.expect(IndexError, lambda: cube().rank_at([0, 0, 2]))
        self.expect(LookupError, lambda: cube().coordinate(8), "8")

    def test_wrong_types_are_type_errors(self):
        for bad in (None, 3, 2.5, "ab", b"ab", {"a"}, {"a": 2}, [None], [[2]], [2.0], object()):
            self.expect(TypeError, lambda: Mesh(bad, ["a"]))
            self.expect(TypeError, lambda: cube().unflatten("ddp", bad, ["a"]))
            self.expect(TypeError, lambda: cube().rank_at(bad))
        for bad in (None, 3, {"a"}, [None], [3], "ab", [["a"]]):
            self.expect(TypeError, lambda: Mesh([2], bad))
        for bad in ("5", 5.0, None, [5]):
            self.expect(TypeError, lambda: cube().coordinate(bad))
            self.expect(TypeError, lambda: cube().restrict([bad]))
        for bad in (None, cube(), [None], ["ddp"], [Mesh.__new__(Mesh)]):
            self.expect(TypeError, lambda: Mesh.concatenate(bad))
        self.expect(TypeError, lambda: Mesh([2], ["a"], ["0", "1"]))
        self.expect(TypeError, lambda: Mesh.slice(3, "a"))

    def test_names_that_utf8_cannot_write_are_value_errors(self):
        bad = "a\ud800"
        for call in (lambda: Mesh([2], [bad]), lambda: cube().slice(bad), lambda: cube().slice(["ddp", bad]),
                     lambda: cube().transpose([bad]), lambda: cube().flatten([bad], "x"), lambda: cube().groups(bad),
                     lambda: cube().flatten(["ddp"], bad), lambda: cube().unflatten(bad, [2], ["x"]),
                     lambda: cube().unflatten("ddp", [2], [bad]), lambda: cube().group(0, bad)):
            self.expect(shardmesh.errors.InvalidArgument, call, r"'a\ud800'")

    def test_numbers_beyond_64_bits_are_named(self):
        for big, text in ((2**63, str(2**63)), (-(2**70), str(-(2**70))), (10**5000, "16610 bits")):
            for call in (lambda: Mesh([big], ["a"]), lambda: Mesh([1], ["a"], [big]), lambda: cube().coordinate(big),
                         lambda: cube().unflatten("ddp", [big, 2], ["a", "b"]), lambda: cube().rank_at([0, big, 0]),
                         lambda: cube().rank_at([0, 0, 0], instance=big), lambda: cube().restrict([0, big])):
                self.expect(shardmesh.errors.InvalidArgument, call, text)

    def test_object_without_constructor_is_refused(self):
        class Half(Mesh):
            def __init__(self):
                pass

        self.expect(TypeError, Half)
        for method in ("names", "instances", "ranks"):
            self.expect(TypeError, lambda: getattr(Mesh.__new__(Mesh), method))
        self.expect(TypeError, lambda: str(Mesh.__new__(Mesh)))
        self.assertFalse(cube() == Mesh.__new__(Mesh))

    def test_hostile_sequence_raises_its_own_error(self):
        class Hostile:
            def __len__(self):
                return 2

            def __getitem__(self, index):
                raise ZeroDivisionError

        with self.assertRaises((TypeError, ZeroDivisionError)):
            Mesh(Hostile(), ["a", "b"])


if __name__ == "__main__":
    sys.exit(unittest.main())
