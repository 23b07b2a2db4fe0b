#!/usr/bin/env python3
"""Counts test cases from the results of one `bazel test`: tools/count_tests.py BUILD_EVENTS.json BAZEL_STATUS [STEP=STATUS...]

Reads the test.xml of every test target of that run (one entry per GoogleTest case), prints failures and the reasons of skipped
cases, and ends with the line `N passed, N failed, N skipped`. A target without a readable test.xml counts as one case, by its
own status, and so does each STEP that is no Bazel target. Exits non-zero on any failure, or when bazel failed.
"""
import json
import sys
import xml.etree.ElementTree as ElementTree
from urllib.parse import unquote, urlparse


def cases_of(path):
    """(name, outcome, text) of each case in a test.xml."""
    for case in ElementTree.parse(path).getroot().iter("testcase"):
        name = f"{case.get('classname') or case.get('class') or ''}.{case.get('name')}"
        if case.find("failure") is not None or case.find("error") is not None:
            yield name, "failed", ""
        elif case.find("skipped") is not None or case.get("status") == "notrun" or case.get("result") == "skipped":
            skipped = case.find("skipped")
            yield name, "skipped", (skipped.get("message") or "") if skipped is not None else ""
        else:
            yield name, "passed", ""


def main():
    events, bazel_status = sys.argv[1], int(sys.argv[2])
    count = {"passed": 0, "failed": 0, "skipped": 0}
    results = {}  # of tests that are run again when they fail, the last
    with open(events) as lines:
        for line in lines:
            event = json.loads(line)
            if "testResult" in event:
                of = event["id"]["testResult"]
                results[of["label"], of.get("run"), of.get("shard")] = event["testResult"]
    for (label, _, _), result in results.items():
        target_passed = result["status"] in ("PASSED", "FLAKY")
        xml = [o["uri"] for o in result.get("testActionOutput", []) if o["name"] == "test.xml"]
        try:
            cases = list(cases_of(unquote(urlparse(xml[0]).path)))
        except (IndexError, OSError, ElementTree.ParseError):
            cases = []
        if not cases:
            cases = [(label, "passed" if target_passed else "failed", "")]
        if not target_passed and not any(outcome == "failed" for _, outcome, _ in cases):
            cases.append((label, "failed", ""))  # it crashed or timed out after its last recorded case
        for name, outcome, text in cases:
            count[outcome] += 1
            if outcome != "passed":
                print(f"{outcome}: {label} {name} {text}".rstrip())
    if bazel_status != 0 and count["failed"] == 0:
        print(f"failed: bazel ended with status {bazel_status} (a build error above?)")
        count["failed"] = 1
    if not sum(count.values()):
        print("failed: no test ran")
        count["failed"] = 1
    for step in sys.argv[3:]:
        name, _, status = step.rpartition("=")
        outcome = "passed" if status == "0" else "failed"
        count[outcome] += 1
        if outcome != "passed":
            print(f"failed: {name} ended with status {status} (its messages are above)")
    print(f"{count['passed']} passed, {count['failed']} failed, {count['skipped']} skipped")
    return 1 if count["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
