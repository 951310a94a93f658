#!/usr/bin/env python3
"""Counts what one bazel invocation built and tested.

Usage: test_report.py EVENTS.json          (written by bazel with --build_event_json_file)
Prints each failure to standard error, and "PASSED FAILED SKIPPED" to standard output. A test target counts once per
GoogleTest case (from its test.xml; one where it wrote none), a target that could not be built counts as one failure.
"""
import collections
import json
import os
import sys
import urllib.parse
import xml.etree.ElementTree as ET


def cases(path):
    """(passed, names of the failed, skipped) of one test.xml."""
    passed, failed, skipped = 0, [], 0
    for case in ET.parse(path).getroot().iter("testcase"):
        name = f'{case.get("classname") or ""}.{case.get("name") or ""}'.strip(".")
        if case.find("failure") is not None or case.find("error") is not None:
            failed.append(name)
        elif case.get("status") == "notrun" or case.get("result") in ("skipped", "suppressed") or case.find("skipped") is not None:
            skipped += 1
        else:
            passed += 1
    return passed, failed, skipped


def xml_path(result):
    for output in result.get("testActionOutput", []):
        path = urllib.parse.unquote(urllib.parse.urlparse(output.get("uri", "")).path)
        if output.get("name") == "test.xml" and os.path.exists(path):
            return path
    return None


def read_events(path):
    """Last attempt of every (label, run, shard) test result, and the targets that could not be built."""
    results, broken = {}, set()
    with open(path, encoding="utf-8") as lines:
        for line in lines:
            event = json.loads(line)
            ident = event.get("id", {})
            if "testResult" in ident and "testResult" in event:
                key = ident["testResult"]
                results[key["label"], key.get("run", 1), key.get("shard", 1)] = event["testResult"]
            elif "targetCompleted" in ident and not event.get("completed", {}).get("success"):
                broken.add(ident["targetCompleted"]["label"])
    return results, broken


def count(results, broken):
    """(passed, failures as lines, skipped)."""
    total, failures, skipped = 0, [], 0
    tested = collections.Counter(label for label, _, _ in results)
    for (label, _, _), result in sorted(results.items()):
        status, xml = result.get("status", "NO_STATUS"), xml_path(result)
        try:
            passed, failed, skips = cases(xml) if xml else (1 if status == "PASSED" else 0, [], 0)
        except ET.ParseError:
            passed, failed, skips = (1 if status == "PASSED" else 0), [], 0
        if status not in ("PASSED", "FLAKY") and not failed:
            failed = [status]
        total, skipped = total + passed, skipped + skips
        failures += [f"{label}: {name}" for name in failed]
    failures += [f"{label}: cannot be built" for label in sorted(broken) if label not in tested]
    return total, failures, skipped


def main():
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    try:
        results, broken = read_events(sys.argv[1])
    except (OSError, json.JSONDecodeError) as error:
        print(f"  no complete record of the run: {error}", file=sys.stderr)
        results, broken = {}, set()
    passed, failures, skipped = count(results, broken)
    for failure in failures:
        print(f"  FAILED {failure}", file=sys.stderr)
    print(passed, len(failures), skipped)


if __name__ == "__main__":
    main()
