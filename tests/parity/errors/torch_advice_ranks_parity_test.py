#!/usr/bin/env python3
"""Errors that say what several ranks are to do: the ranks provoke them, follow their advice, and train (advice_ranks.py)."""
import os
import sys
import unittest

HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, HERE)
import ranks  # noqa: E402
from advice import AdviceTest  # noqa: E402


class RanksTest(AdviceTest):
    def test_two_ranks(self):
        one, other = ranks.program(self, os.path.join(HERE, "errors", "advice_ranks.py"), self.address, self.path("checkpoints"), seconds=90)
        self.assertEqual(one, other)
        self.assertEqual(len(one), 6)


if __name__ == "__main__":
    unittest.main()
