#!/usr/bin/env python3
"""Counts of small recorded runs, made up here."""
import json
import os
import sys
import tempfile
import unittest

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__))))
sys.path.insert(0, os.path.join(os.getcwd(), "tools"))
import test_report  # noqa: E402

XML = """<testsuites><testsuite name="S">
<testcase name="a" status="run" result="completed" classname="S"/>
<testcase name="b" status="run" result="completed" classname="S"><failure message="x"/></testcase>
<testcase name="c" status="run" result="skipped" classname="S"><skipped message="no device"/></testcase>
<testcase name="d" status="notrun" result="suppressed" classname="S"/>
</testsuite></testsuites>"""


class TestReportTest(unittest.TestCase):
    def run_events(self, events, xml=XML):
        with tempfile.TemporaryDirectory() as folder:
            xml_path, events_path = os.path.join(folder, "test.xml"), os.path.join(folder, "events.json")
            with open(xml_path, "w", encoding="utf-8") as out:
                out.write(xml)
            with open(events_path, "w", encoding="utf-8") as out:
                for event in events:
                    out.write(json.dumps(event).replace("XML_URI", "file://" + xml_path) + "\n")
            return test_report.count(*test_report.read_events(events_path))

    def result(self, label, status, xml=True, attempt=1):
        output = [{"name": "test.log", "uri": "file:///nowhere"}] + ([{"name": "test.xml", "uri": "XML_URI"}] if xml else [])
        return {"id": {"testResult": {"label": label, "run": 1, "shard": 1, "attempt": attempt}},
                "testResult": {"status": status, "testActionOutput": output}}

    def completed(self, label, success):
        return {"id": {"targetCompleted": {"label": label}}, "completed": {"success": True} if success else {}}

    def test_cases_are_counted_one_by_one(self):
        events = [self.completed("//a:t", True), self.result("//a:t", "FAILED")]
        self.assertEqual(self.run_events(events), (1, ["//a:t: S.b"], 2))

    def test_crash_or_timeout_without_a_failed_case_is_one_failure(self):
        xml = '<testsuites><testsuite><testcase name="a"/></testsuite></testsuites>'
        self.assertEqual(self.run_events([self.result("//a:t", "TIMEOUT")], xml), (1, ["//a:t: TIMEOUT"], 0))
        self.assertEqual(self.run_events([self.result("//a:t", "FAILED", xml=False)]), (0, ["//a:t: FAILED"], 0))
        self.assertEqual(self.run_events([self.result("//a:t", "FAILED")], "<torn"), (0, ["//a:t: FAILED"], 0))

    def test_the_last_attempt_counts(self):
        xml = '<testsuites><testsuite><testcase name="a"/></testsuite></testsuites>'
        events = [self.result("//a:t", "FAILED", xml=False), self.result("//a:t", "PASSED", attempt=2)]
        self.assertEqual(self.run_events(events, xml), (1, [], 0))

    def test_a_target_that_cannot_be_built_is_one_failure(self):
        events = [self.completed("//a:lib", False), self.completed("//a:t", False), self.completed("//b:x", True)]
        self.assertEqual(self.run_events(events), (0, ["//a:lib: cannot be built", "//a:t: cannot be built"], 0))

    def test_aborted_target_is_a_failure(self):
        events = [{"id": {"targetCompleted": {"label": "//a:t"}}, "aborted": {"reason": "ANALYSIS_FAILURE"}}]
        self.assertEqual(self.run_events(events), (0, ["//a:t: cannot be built"], 0))


if __name__ == "__main__":
    unittest.main()
