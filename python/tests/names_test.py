#!/usr/bin/env python3
"""shardmesh.names: that Python reaches the rules of core/, each by its argument."""
import random
import sys
import unittest

from shardmesh import errors, names


class CanonicalTest(unittest.TestCase):
    def test_wrappers_go_and_lookalikes_stay(self):
        for raw, canonical in {
            "_orig_mod.layers.0._orig_mod.w": "layers.0.w",
            "_checkpoint_wrapped_module._orig_mod.w": "w",
            "a._fsdp_wrapped_module.w": "a.w",
            "layers.0._orig_module.w": "layers.0._orig_module.w",
            "_orig_mod.my_orig_mod.w": "my_orig_mod.w",
            "x._orig_mod": "x._orig_mod",
            "module.w": "module.w",
            "größe.w": "größe.w",
        }.items():
            self.assertEqual(names.canonical(raw), canonical)

    def test_each_rule_has_its_effect(self):
        self.assertEqual(names.canonical("module.w", root_wrappers=["module"]), "w")
        self.assertEqual(names.canonical("_orig_mod.module.w", root_wrappers=("_orig_mod", "module")), "w")
        self.assertEqual(names.canonical("a._orig_mod.w", literal={"a._orig_mod"}), "a._orig_mod.w")
        self.assertEqual(names.canonical("a.module.w", wrapped_at=["a"]), "a.w")

    def test_many_are_as_one_by_one(self):
        raw = [f"_orig_mod.layers.{i}.w" for i in range(100)]
        self.assertEqual(names.canonical_many(raw), [names.canonical(name) for name in raw])
        self.assertEqual(names.canonical_many(iter(["module.w"]), root_wrappers=["module"]), ["w"])
        self.assertEqual(names.canonical_many([]), [])

    def test_bad_names_and_rules_are_value_errors_with_the_name(self):
        for bad in ("", "a..b", "a.", "a\0b", "x" * 5000):
            with self.assertRaises(errors.InvalidArgument):
                names.canonical(bad)
        with self.assertRaisesRegex(ValueError, "a..b"):
            names.canonical_many(["w", "a..b"])
        with self.assertRaisesRegex(ValueError, "wrapper"):
            names.canonical("w", root_wrappers=["wrapper"])

    def test_names_that_utf8_cannot_write_are_value_errors(self):
        table, bad = names.AliasTable(), "a\ud800"
        for call in (names.canonical, table.add, table.canonical, table.raw, table.storage, table.export_names,
                     lambda name: table.add("w", tied_to=name), lambda name: names.canonical_many(["w", name]),
                     *(lambda name, rule=rule: names.canonical("w", **{rule: [name]})
                       for rule in ("root_wrappers", "literal", "wrapped_at"))):
            with self.assertRaisesRegex(errors.InvalidArgument, r"'a\\ud800'"):
                call(bad)

    def test_wrong_types_are_type_errors(self):
        for bad in (None, 3, ["w"]):
            with self.assertRaises(TypeError):
                names.canonical(bad)
            with self.assertRaises(TypeError):
                names.AliasTable().add(bad)
        for rule in ("root_wrappers", "literal", "wrapped_at"):
            for bad in (None, 3, "module", [3]):
                with self.assertRaises(TypeError):
                    names.canonical("w", **{rule: bad})
        with self.assertRaises(TypeError):
            names.canonical_many("w")

    def test_random_text_is_a_name_or_an_error(self):
        seed = random.randrange(2**32)
        print("seed", seed)
        rng = random.Random(seed)
        pieces = ["_orig_mod", "module", "a", ".", "..", "\0", "é", "\U0001f600", "\ud800", " "]
        for _ in range(2000):
            raw = "".join(rng.choices(pieces, k=rng.randrange(8)))
            try:
                canonical = names.canonical(raw)
                self.assertEqual(names.canonical(canonical), canonical, raw)
            except errors.InvalidArgument:
                pass


class OptimizerNamesTest(unittest.TestCase):
    def test_parts_make_up_the_name(self):
        for name, parts in {
            "state.layers.0.w.exp_avg": ("", "state", "layers.0.w", "exp_avg"),
            "optim.state.w.step": ("optim", "state", "w", "step"),
            "my.optimizer.param_groups.a.w.lr": ("my.optimizer", "param_groups", "a.w", "lr"),
        }.items():
            parsed = names.parse_optimizer(name, prefixes=["optim", "my.optimizer"])
            self.assertEqual(parsed, parts)
            self.assertEqual((parsed.prefix, parsed.kind, parsed.parameter, parsed.state), parts)
            self.assertEqual(str(parsed), name)

    def test_parameter_alone_is_made_canonical(self):
        raw = "optim.state.module.a._orig_mod.w._orig_mod"
        self.assertEqual(names.canonical_optimizer(raw, root_wrappers=["module"], prefixes=["optim"]),
                         "optim.state.a.w._orig_mod")
        self.assertEqual(names.canonical_optimizer("state.a._orig_mod.w.s", literal=["a._orig_mod"]),
                         "state.a._orig_mod.w.s")
        self.assertEqual(names.canonical_optimizer("state.a.module.w.s", wrapped_at=["a"]), "state.a.w.s")

    def test_many_are_as_one_by_one(self):
        raw = [f"o.state.module.layers.{i}.w.step" for i in range(20)]
        many = names.canonical_optimizer_many(iter(raw), root_wrappers=["module"], prefixes={"o"})
        self.assertEqual(many, [names.canonical_optimizer(name, ["module"], prefixes=["o"]) for name in raw])
        self.assertEqual(many[3], "o.state.layers.3.w.step")

    def test_bad_names_and_prefixes_are_value_errors_with_the_name(self):
        for bad in ("w.exp_avg", "state.w", "optim.state.w.step", "", "state..w.s", "a\ud800"):
            for call in (names.parse_optimizer, names.canonical_optimizer):
                with self.assertRaises(errors.InvalidArgument):
                    call(bad)
        for bad in ("a.state", "a..b", "\ud800"):
            with self.assertRaises(errors.InvalidArgument):
                names.parse_optimizer("state.w.step", prefixes=[bad])
        for call in (lambda: names.parse_optimizer(3), lambda: names.parse_optimizer("state.w.s", prefixes="optim"),
                     lambda: names.canonical_optimizer_many("state.w.s")):
            with self.assertRaises(TypeError):
                call()


class AliasTableTest(unittest.TestCase):
    def test_both_directions(self):
        table = names.AliasTable(root_wrappers=["module"])
        self.assertEqual(table.add("module.embed.w"), "embed.w")
        self.assertEqual(table.add("module.head.w", tied_to="module.embed.w"), "head.w")
        self.assertEqual(table.canonical("module.head.w"), "head.w")
        self.assertEqual(table.raw("head.w"), ["module.head.w"])
        self.assertEqual(table.storage("head.w"), "embed.w")
        self.assertEqual(table.export_names("embed.w"), ["module.embed.w", "module.head.w"])
        self.assertEqual((table.storages, len(table)), (["embed.w"], 2))

    def test_collision_names_both(self):
        table = names.AliasTable()
        table.add("_orig_mod.a.w")
        with self.assertRaises(errors.AlreadyExists) as caught:
            table.add("a.w")
        self.assertIn('"_orig_mod.a.w"', str(caught.exception))
        self.assertIn('"a.w"', str(caught.exception))
        self.assertEqual(len(table), 1)

    def test_unknown_names_are_key_errors(self):
        table = names.AliasTable()
        for call in (table.canonical, table.raw, table.storage, table.export_names,
                     lambda name: table.add("v", tied_to=name)):
            with self.assertRaises(KeyError):
                call("w")

    def test_bad_rule_is_refused_at_once(self):
        with self.assertRaises(errors.InvalidArgument):
            names.AliasTable(literal=["a..b"])


if __name__ == "__main__":
    sys.exit(unittest.main())
