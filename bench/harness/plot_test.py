#!/usr/bin/env python3
"""What is drawn, of rows made up here."""
import json
import os
import sys
import tempfile
import unittest
from pathlib import Path

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, os.path.join(os.getcwd(), "bench/harness"))
import plot  # noqa: E402


def row(name, ours, rival, ratio, goal=None):
    return {"name": name, "ours": ours, "rival": rival, "ratio": ratio, "min": 0.5, "max": 9.0, "goal": goal, "met": True}


ROWS = [
    row("step, times its memory bound, ms", 30.0, 20.0, 1.5, "<= 1.1"),
    row("step / three passes, ms", 30.0, 60.0, 2.0, ">= 2"),
    row("step, times its pass alone, ms", 30.0, 28.0, 1.07),
    row("step / a rival that is not there, ms", None, None, None, ">= 2"),
]


class PlotTest(unittest.TestCase):
    def test_bars_are_times_and_bounds(self):
        self.assertEqual(plot.bars(ROWS), [("step", 30.0, 20.0)])

    def test_dots_are_the_other_ratios_with_their_goals(self):
        first, second = plot.dots(ROWS)
        self.assertEqual(first, ("step / three passes, ms", 2.0, 0.5, 9.0, 2.0, True))
        self.assertEqual((second.name, second.goal, second.more_is_better), ("step, times its pass alone, ms", None, None))

    def test_goal_at_most(self):
        self.assertIs(plot.dots([row("cost, ms", 1.0, 1.0, 1.0, "<= 1.03")])[0].more_is_better, False)

    def test_read_joins_files_and_names_a_wrong_one(self):
        with tempfile.TemporaryDirectory() as folder:
            good, bad = Path(folder, "good.json"), Path(folder, "bad.json")
            good.write_text(json.dumps(ROWS))
            self.assertEqual(len(plot.read([good, good])), 8)
            for text in "[1]", '[{"name": 1}]', "no json", '{"a": 1}':
                bad.write_text(text)
                with self.assertRaisesRegex(SystemExit, "bad.json holds no rows"):
                    plot.read([good, bad])
            with self.assertRaisesRegex(SystemExit, "none.json"):
                plot.read([Path(folder, "none.json")])


if __name__ == "__main__":
    unittest.main()
