#!/usr/bin/env python3
"""What is drawn of a trace made up here."""
import json
import os
import sys
import tempfile
import unittest
from pathlib import Path

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, os.path.join(os.getcwd(), "bench/harness"))
import trace_plot  # noqa: E402


def event(pid, tid, category, begin, duration):
    kind = {"ph": "X", "dur": duration} if duration else {"ph": "i", "s": "p"}
    return {"name": f"{category} 7", "cat": category, "pid": pid, "tid": tid, "ts": begin, **kind}


TRACE = {
    "displayTimeUnit": "ms",
    "traceEvents": [
        {"name": "process_name", "ph": "M", "pid": 0, "args": {"name": "rank 0 (pid 42)"}},
        {"name": "process_sort_index", "ph": "M", "pid": 0, "args": {"sort_index": 0}},
        event(0, 1, "range", 1500, 500),
        event(0, 0, "step", 1000, 2000),
        event(1, 0, "declared", 500, 0),
    ],
}


class TracePlotTest(unittest.TestCase):
    def read(self, text):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "trace.json")
            path.write_text(text)
            return trace_plot.read(path)

    def test_a_row_for_each_thread_and_ranges_above_commands(self):
        timeline = self.read(json.dumps(TRACE))
        self.assertEqual(timeline.rows, ["rank 0 (pid 42), thread 0", "rank 0 (pid 42), thread 1", "1, thread 0"])
        self.assertEqual(
            timeline.spans, [(0, "step", 1.0, 2.0), (1, "range", 1.5, 0.5), (2, "declared", 0.5, 0.0)]
        )

    def test_what_is_no_trace_is_said(self):
        for text in "no json", "[]", '{"traceEvents": [{"ph": "X"}]}':
            with self.assertRaisesRegex(SystemExit, "is no trace of shardctl"):
                self.read(text)
        with self.assertRaisesRegex(SystemExit, "nothing to draw"):
            self.read('{"traceEvents": []}')


if __name__ == "__main__":
    unittest.main()
