#!/usr/bin/env python3
"""Runs the tests of python/, of this folder and of its rooms with the package that is installed there, the files dealt
out to two interpreters side by side.

Usage: run.py COUNTS. Writes "passed failed skipped" to the file COUNTS; exits 1 if any failed.
"""
import glob
import os
import subprocess
import sys
import tempfile
import unittest

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
INTERPRETERS = 2
WHERE = ("python/tests/*_test.py", "tests/parity/*_parity_test.py", "tests/parity/*/*_parity_test.py")


def run_files(files, counts):
    """In this interpreter; writes the counts."""
    tests = unittest.TestSuite()
    for file in files:
        folder, name = os.path.split(file)
        tests.addTests(unittest.TestLoader().discover(folder, name, top_level_dir=folder))
    result = unittest.TextTestRunner(verbosity=1).run(tests)
    failed = len({getattr(test, "test_case", test).id() for test, _ in result.failures + result.errors})  # not subtests
    with open(counts, "w", encoding="utf-8") as file:
        print(result.testsRun - failed - len(result.skipped), failed, len(result.skipped), file=file)


def run_all(counts):
    files = sorted(file for pattern in WHERE for file in glob.glob(pattern))
    with tempfile.TemporaryDirectory() as folder:
        hands = []
        for number in range(INTERPRETERS):
            log = open(os.path.join(folder, f"{number}.log"), "w+", encoding="utf-8", errors="replace")
            of_hand = os.path.join(folder, f"{number}.counts")
            command = [sys.executable, os.path.abspath(__file__), of_hand, *files[number::INTERPRETERS]]
            hands.append((subprocess.Popen(command, stdout=log, stderr=log), log, of_hand))
        total = [0, 0, 0]
        for process, log, of_hand in hands:
            process.wait()
            log.seek(0)
            print(log.read(), flush=True)
            log.close()
            said = open(of_hand, encoding="utf-8").read().split() if os.path.exists(of_hand) else [0, 1, 0]  # it died
            total = [a + int(b) for a, b in zip(total, said)]
    with open(counts, "w", encoding="utf-8") as file:
        print(*total, file=file)
    return total[1] > 0


def main():
    os.chdir(ROOT)
    counts, *files = sys.argv[1:]
    if files:
        run_files(files, counts)
    else:
        sys.exit(run_all(os.path.abspath(counts)))


if __name__ == "__main__":
    main()
