#!/usr/bin/python3
"""Runs the unittest cases of one file as a Bazel test, and writes them to $XML_OUTPUT_FILE one by one.

run_tests.py FILE [ENGINE]: with ENGINE, by the Python of the virtual environment $KVMANAGER_ENGINES/ENGINE that
`tools/test --engines` makes; without that variable every case of the file is skipped, which its report shows.
"""

from __future__ import annotations

import ast
import importlib.util
import os
import subprocess
import sys
import time
import unittest
import xml.etree.ElementTree as ElementTree

_PACKAGE = "client/python/package"
_TESTING = "client/python/testing"
_STARTED = "KVMANAGER_TEST_STARTED"  # set in the process that runs the cases


class Report(unittest.TextTestResult):
    """Keeps each case with its time and outcome."""

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.cases: list[tuple[str, float, str, str]] = []  # name, seconds, outcome, text
        self._began = 0.0

    def startTest(self, test) -> None:
        self._began = time.monotonic()
        super().startTest(test)

    def _add(self, test, outcome: str, text: str = "") -> None:
        self.cases.append((test.id(), time.monotonic() - self._began, outcome, text))

    def addSuccess(self, test) -> None:
        super().addSuccess(test)
        self._add(test, "passed")

    def addFailure(self, test, err) -> None:
        super().addFailure(test, err)
        self._add(test, "failure", self._exc_info_to_string(err, test))

    def addError(self, test, err) -> None:
        super().addError(test, err)
        self._add(test, "error", self._exc_info_to_string(err, test))

    def addSkip(self, test, reason) -> None:
        super().addSkip(test, reason)
        self._add(test, "skipped", reason)

    def addSubTest(self, test, subtest, err) -> None:
        super().addSubTest(test, subtest, err)
        if err is not None:
            self._add(subtest, "failure", self._exc_info_to_string(err, test))


def write_xml(name: str, cases: list[tuple[str, float, str, str]]) -> None:
    path = os.environ.get("XML_OUTPUT_FILE")
    if not path:
        return
    suite = ElementTree.Element("testsuite", name=name, tests=str(len(cases)))
    for identity, seconds, outcome, text in cases:
        group, _, case = identity.rpartition(".")
        element = ElementTree.SubElement(suite, "testcase", classname=group, name=case, time=f"{seconds:.3f}")
        if outcome != "passed":
            ElementTree.SubElement(element, outcome, message=text.strip().splitlines()[-1] if text.strip() else "").text = text
    ElementTree.ElementTree(suite).write(path, encoding="utf-8", xml_declaration=True)


def cases_of(path: str) -> list[str]:
    """Names of the test methods of a file, without running it."""
    with open(path, encoding="utf-8") as file:
        tree = ast.parse(file.read(), path)
    return [
        f"{kind.name}.{method.name}"
        for kind in tree.body
        if isinstance(kind, ast.ClassDef)
        for method in kind.body
        if isinstance(method, (ast.FunctionDef, ast.AsyncFunctionDef)) and method.name.startswith("test")
    ]


def preloads_of(library: str) -> str:
    """What has to be in a process before a sanitized `library`, as in $LD_PRELOAD; empty if it is none: the sanitizer's
    own library, and C++'s, which the interpreter lacks and AddressSanitizer looks for only when it starts."""
    lines = subprocess.run(["ldd", library], capture_output=True, text=True, check=False).stdout.splitlines()
    paths = [fields[2] for fields in map(str.split, lines) if fields[1:2] == ["=>"]]
    sanitizers = [path for path in paths if os.path.basename(path).startswith(("libasan", "libtsan"))]
    return " ".join(sanitizers + [path for path in paths if sanitizers and "libstdc++" in path])


def python_of(engine: str) -> str:
    return os.path.join(os.environ.get("KVMANAGER_ENGINES", "/nonexistent"), engine, "bin", "python")


def start(path: str, engine: str) -> int:
    """Runs this file again, in the environment that the cases need."""
    root = os.path.join(os.environ.get("TEST_SRCDIR", "."), os.environ.get("TEST_WORKSPACE", "."))
    python = python_of(engine) if engine else sys.executable
    environment = dict(os.environ)
    environment[_STARTED] = "1"
    folders = [os.path.join(root, _PACKAGE), os.path.join(root, _TESTING), os.path.dirname(os.path.abspath(path))]
    environment["PYTHONPATH"] = os.pathsep.join(os.path.abspath(folder) for folder in folders)
    environment["PYTHONDONTWRITEBYTECODE"] = "1"
    preloads = preloads_of(os.path.join(root, _PACKAGE, "kvmanager", "libkvmanager_client.so"))
    if preloads:
        environment["LD_PRELOAD"] = preloads
        environment["ASAN_OPTIONS"] = "detect_leaks=0"  # the interpreter's own
        suppressions = os.path.abspath(os.path.join(root, _TESTING, "tsan_suppressions"))
        # A test's forked child makes a client, with threads, of its own.
        options = [environment.get("TSAN_OPTIONS", ""), "die_after_fork=0", f"suppressions={suppressions}"]
        environment["TSAN_OPTIONS"] = ":".join(filter(None, options))
    os.execve(python, [python, __file__, path], environment)


def main() -> int:
    path, engine = sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else ""
    name = os.path.splitext(os.path.basename(path))[0]
    if _STARTED not in os.environ:
        if engine and not os.path.exists(python_of(engine)):
            reason = f"needs the virtual environment `{engine}`: tools/test --engines"
            skipped = [(f"{name}.{case}", 0.0, "skipped", reason) for case in cases_of(path)]
            write_xml(name, skipped)
            print(f"{len(skipped)} cases skipped: {reason}")
            return 0 if skipped else 1
        return start(path, engine)
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    suite = unittest.defaultTestLoader.loadTestsFromModule(module)
    result = unittest.TextTestRunner(stream=sys.stdout, verbosity=2, resultclass=Report).run(suite)
    write_xml(name, result.cases)
    if not result.cases:
        print("no case ran")
        return 1
    return 0 if result.wasSuccessful() else 1


if __name__ == "__main__":
    sys.exit(main())
