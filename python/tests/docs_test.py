#!/usr/bin/env python3
"""The examples of docs/python.md, run, but those of a running job: tests/e2e/python_docs_test.py has these. The current
folder is the repository's root."""
import doctest
import sys
import unittest

OF_A_RUNNING_JOB = "## Versions of a running job\n"


class DocsTest(unittest.TestCase):
    def test_examples_print_what_the_page_says(self):
        with open("docs/python.md", encoding="utf-8") as page:
            before, section, after = page.read().partition(OF_A_RUNNING_JOB)
        self.assertTrue(section)
        text = before + after[after.index("\n## "):]
        test = doctest.DocTestParser().get_doctest(text, {}, "docs/python.md", "docs/python.md", 0)
        runner = doctest.DocTestRunner()
        runner.run(test)
        self.assertGreater(runner.tries, 30)
        self.assertEqual(runner.failures, 0)


if __name__ == "__main__":
    sys.exit(unittest.main())
