#!/usr/bin/env python3
"""Tables of small runs, made up here."""
import os
import sys
import unittest

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, os.path.join(os.getcwd(), "bench/quality"))
import quality_report  # noqa: E402


def run(weights, seed, *losses):
    curve = [(200 * i, loss) for i, loss in enumerate(losses)]
    return {"weights": weights, "states": "fp32", "seed": seed, "parameters": 10, "bytes": 100, "losses": curve}


FP32 = [run("fp32", 0, 5.0, 1.0), run("fp32", 1, 5.0, 2.0)]


class QualityReportTest(unittest.TestCase):
    def test_rows_two_seeds_difference_is_paired(self):
        base, bf16 = quality_report.rows([*FP32, run("bf16", 0, 5.0, 1.1), run("bf16", 1, 5.0, 2.3)])
        self.assertEqual((base.difference, base.error, base.seeds), (0, 0, 2))
        self.assertAlmostEqual(bf16.mean, 1.7)
        self.assertAlmostEqual(bf16.difference, 0.2)
        self.assertAlmostEqual(bf16.error, 0.1)  # not that of the losses, which are 1.2 apart
        self.assertEqual(bf16.bytes_per_parameter, 10)

    def test_rows_seed_that_fp32_lacks_left_out(self):
        self.assertEqual([row.weights for row in quality_report.rows([*FP32, run("bf16", 2, 5.0, 1.1)])], ["fp32"])

    def test_json_one_seed_spread_is_null(self):
        (row,) = quality_report.as_json({}, FP32[:1])["rows"]
        self.assertIsNone(row["spread"])
        self.assertEqual(row["mean"], 1.0)

    def test_table_has_difference_with_its_error(self):
        lines = quality_report.table([*FP32, run("bf16", 0, 5.0, 1.1), run("bf16", 1, 5.0, 2.3)]).splitlines()
        self.assertEqual(lines[2], "| fp32 | fp32 | 10.00 | 1.5000 | 0.7071 | | |")
        self.assertEqual(lines[3], "| bf16 | fp32 | 10.00 | 1.7000 | 0.8485 | +0.20000 | 0.10000 |")


if __name__ == "__main__":
    unittest.main()
