#!/usr/bin/env python3
"""shardmesh.errors: each is an Error and a builtin kind, with the plain message."""
import pickle
import sys
import unittest

import shardmesh
from shardmesh import errors


class ErrorsTest(unittest.TestCase):
    def test_each_code_has_its_own_class(self):
        self.assertEqual(len(set(errors.BY_CODE.values())), len(errors.BY_CODE))
        for code, kind in errors.BY_CODE.items():
            self.assertEqual(kind.__name__.lower(), code.replace("_", "").lower())
            self.assertIs(getattr(errors, kind.__name__), kind)

    def test_each_is_an_error_and_a_builtin_kind(self):
        for kind in errors.BY_CODE.values():
            self.assertTrue(issubclass(kind, shardmesh.Error))
            self.assertNotEqual(kind.__mro__[2], Exception, kind)

    def test_text_is_the_message(self):
        for kind in errors.BY_CODE.values():
            error = kind("it's \"so\"")
            self.assertEqual(str(error), "it's \"so\"")
            self.assertEqual(str(pickle.loads(pickle.dumps(error))), str(error))
            self.assertEqual(str(kind()), "")

    def test_message_with_foreign_bytes_is_text(self):
        with self.assertRaises(errors.InvalidArgument) as caught:
            shardmesh.names.canonical(b"a\xff")
        self.assertIn("UTF-8", str(caught.exception))


if __name__ == "__main__":
    sys.exit(unittest.main())
