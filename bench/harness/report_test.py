#!/usr/bin/env python3
"""Rows of benchmarks in Python are those of harness.h."""
import json
import os
import sys
import tempfile
import unittest

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, os.path.join(os.getcwd(), "bench/harness"))
from report import Report, Row, at_least, at_most, compare, cost  # noqa: E402


class ReportTest(unittest.TestCase):
    def test_compare_is_how_many_times_less_ours_is(self):
        row = compare("x, ms", [1.0, 2.0, 4.0], [3.0, 2.0, 8.0], 1e3, at_least(2))
        self.assertEqual(row.json(), {"name": "x, ms", "ours": 2000, "rival": 3000, "ratio": 2, "min": 1, "max": 3,
                                      "goal": ">= 2", "met": True})

    def test_cost_is_how_much_more_ours_is(self):
        row = cost("x, times y, ms", [1.0, 3.0], [2.0, 2.0], 1e3, at_most(0.9))
        self.assertEqual((row.ratio, min(row.ratios), max(row.ratios), row.met()), (1.0, 0.5, 1.5, False))

    def test_a_row_without_figures_says_why(self):
        row = Row("x", goal=at_least(2), missing="no torch")
        self.assertEqual(row.json(), {"name": "x", "ours": None, "rival": None, "ratio": None, "min": None, "max": None,
                                      "goal": ">= 2", "met": None, "missing": "no torch"})

    def test_publish_writes_the_rows_and_prints_a_table(self):
        report = Report("title")
        report.add(compare("faster, ms", [1.0], [4.0], 1e3))
        report.add(Row("absent", missing="no torch"))
        lines = report.text().splitlines()
        self.assertEqual(lines[0], "title")
        self.assertRegex(lines[2], r"^faster, ms +1000\.00 +4000\.00 +4\.00 +4\.00 - +4\.00$")
        self.assertEqual(lines[3], "absent      not measured: no torch")
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "rows.json")
            report.publish(path)
            with open(path, encoding="utf-8") as file:
                self.assertEqual([row["name"] for row in json.load(file)], ["faster, ms", "absent"])


if __name__ == "__main__":
    unittest.main()
