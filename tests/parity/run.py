#!/usr/bin/env python3
"""Runs the tests of python/ and of this folder in one interpreter, with the package that is installed there.

Usage: run.py COUNTS. Writes "passed failed skipped" to the file COUNTS; exits 1 if any failed.
"""
import os
import sys
import unittest

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


def main():
    os.chdir(ROOT)
    tests = unittest.TestSuite()
    for folder, pattern in ("python/tests", "*_test.py"), ("tests/parity", "*_parity_test.py"):
        tests.addTests(unittest.TestLoader().discover(folder, pattern, top_level_dir=folder))
    result = unittest.TextTestRunner(verbosity=1).run(tests)
    failed = len({getattr(test, "test_case", test).id() for test, _ in result.failures + result.errors})  # not subtests
    with open(sys.argv[1], "w", encoding="utf-8") as counts:
        print(result.testsRun - failed - len(result.skipped), failed, len(result.skipped), file=counts)
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
