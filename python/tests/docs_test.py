#!/usr/bin/env python3
"""The examples of docs/python.md, run. The current folder is the repository's root."""
import doctest
import sys
import unittest


class DocsTest(unittest.TestCase):
    def test_examples_print_what_the_page_says(self):
        result = doctest.testfile("docs/python.md", module_relative=False, encoding="utf-8")
        self.assertGreater(result.attempted, 30)
        self.assertEqual(result.failed, 0)


if __name__ == "__main__":
    sys.exit(unittest.main())
