#!/usr/bin/env python3
"""The C++ example of README.md is the one that readme_example_test.cc compiles and runs, line by line."""
import sys
import textwrap
import unittest


def read(path):
    with open(path, encoding="utf-8") as file:
        return file.read()


def example():
    source = read("tests/e2e/readme_example_test.cc")
    return textwrap.dedent(source.split("// [example]\n")[1].split("  // [/example]")[0]).rstrip() + "\n"


class ReadmeTest(unittest.TestCase):
    def test_example_is_about_ten_lines(self):
        self.assertLessEqual(len(example().splitlines()), 15)

    def test_readme_holds_the_example(self):
        lines = example()
        self.assertTrue("```cpp\n" + lines + "```" in read("README.md"),
                        "README.md lacks a ```cpp block with exactly these lines:\n" + lines)


if __name__ == "__main__":
    sys.exit(unittest.main())
