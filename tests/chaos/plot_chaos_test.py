#!/usr/bin/env python3
"""What is drawn, of events made up here."""
import json
import os
import sys
import tempfile
import unittest
from pathlib import Path

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, os.path.join(os.getcwd(), "tests", "chaos"))
import plot_chaos  # noqa: E402


def event(kind, workers, stop=0):
    jobs = [{"mesh": "fsdp=2", "step": 7, "at_ms": 1490.0, "pause_ms": 250.0}]
    return {"kind": kind, "workers": workers, "at_ms": 1500.0, "stop_ms": stop, "pause_ms": 250.0, "jobs": jobs}


class PlotChaosTest(unittest.TestCase):
    def test_every_process_of_an_event_has_a_mark(self):
        events = [event("worker, coordinator killed", ["w-1"]), event("node killed", []), event("worker stopped", ["w-0"], 500.0)]
        self.assertEqual(
            [(mark.who, mark.at, mark.stop) for mark in plot_chaos.marks(events)],
            [("w-1", 1.5, 0), ("coordinator", 1.5, 0), ("node", 1.5, 0), ("w-0", 1.5, 0.5)],
        )

    def test_pauses_are_those_of_jobs(self):
        self.assertEqual(plot_chaos.pauses([event("node killed", [])]), [("fsdp=2", "node killed", 1.49, 0.25)])

    def test_read_names_a_wrong_file(self):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "events.jsonl")
            path.write_text(json.dumps(event("node killed", [])) + "\n")
            self.assertEqual(len(plot_chaos.read(path)), 1)
            for text in "", "[1]", '{"kind": 1}', "no json":
                path.write_text(text)
                with self.assertRaisesRegex(SystemExit, "events.jsonl"):
                    plot_chaos.read(path)


if __name__ == "__main__":
    unittest.main()
