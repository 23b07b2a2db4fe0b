"""Programs of tools/: what clang-tidy analyses and remembers, compile_commands.json, the count of tests, where torch comes from."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import types
import unittest

from source_tree import paths, root


def tool(name: str) -> types.ModuleType:
    """A program of tools/, as a module."""
    loader = importlib.machinery.SourceFileLoader(name, os.path.join(root(), "tools", name))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader(loader.name, loader))
    sys.modules[name] = module  # dataclasses look there
    loader.exec_module(module)
    return module


class CompileCommands(unittest.TestCase):
    def test_entries(self) -> None:
        def action(source: str, *flags: str) -> dict:
            return {"arguments": ["/usr/bin/gcc", *flags, "-fno-canonical-system-headers", "-c", source, "-o", "a.o"]}

        entries = tool("compile_commands").sources_of(
            [
                action("client/wire.cc", "-O2", "-fPIC"),
                action("client/wire.cc", "-O2"),
                action("attention/merge.cc"),
                action("bazel-out/k8-opt/bin/kvmanager/api/kvmanager.capnp.c++"),
                action("external/other/other.cc"),
                {"arguments": ["/usr/bin/ar", "a.o"]},
            ]
        )
        self.assertEqual([entry["file"] for entry in entries], ["attention/merge.cc", "client/wire.cc"])
        self.assertEqual(entries[1]["arguments"], ["/usr/bin/gcc", "-O2", "-fPIC", "-c", "client/wire.cc", "-o", "a.o"])


class Tidy(unittest.TestCase):
    def setUp(self) -> None:
        self.tidy = tool("tidy")

    def test_sources_of_the_product(self) -> None:
        sources = [path for path in paths((".cc",)) if self.tidy.is_product(path)]
        self.assertGreater(len(sources), 250)
        self.assertIn("client/handles.cc", sources)
        for other in ("client/client_test.cc", "client/rpc_bench.cc", "tests/model.cc", "client/client.h"):
            self.assertFalse(self.tidy.is_product(other), other)

    def test_units_share_folder_and_flags(self) -> None:
        flags = {f"a/{n:02}.cc": ("-O3",) for n in range(self.tidy.UNIT_FILES_MAX + 1)}
        flags |= {"a/x.cc": ("-O3", "-mavx2"), "b/y.cc": ("-O3",)}
        units = self.tidy.units_of(flags)
        self.assertEqual(sorted(len(unit.files) for unit in units), [1, 1, 8, 9])
        self.assertEqual(sorted(path for unit in units for path in unit.files), sorted(flags))
        for unit in units:
            self.assertEqual({flags[path] for path in unit.files}, {unit.flags})

    def test_parts(self) -> None:
        unit = self.tidy.Unit(("a.cc", "b.cc", "c.cc", "d.cc"), ())
        for clashing, first in (({"b.cc", "d.cc"}, ("b.cc", "d.cc")), ({"x.h"}, ("a.cc", "b.cc")), (set(unit.files), ("a.cc", "b.cc"))):
            parts = unit.parts(clashing)
            self.assertEqual(parts[0].files, first)
            self.assertEqual(sorted(parts[0].files + parts[1].files), list(unit.files))

    def test_flags(self) -> None:
        command = ["gcc", "-O3", "-MD", "-MF", "a.d", "-frandom-seed=a.o", "-fPIC", "-iquote", ".", "-c", "a.cc", "-o", "a.o"]
        self.assertEqual(self.tidy.flags_of(command), ("-O3", "-iquote", "."))

    def test_findings(self) -> None:
        output = """/r/./a/b.h:7:3: error: 'x' used after it was moved [bugprone-use-after-move,-warnings-as-errors]
  x();
/r/./a/b.h:6:1: note: move occurred here
/r/./a/c.cc:1:1: error: no type named 'X' [clang-diagnostic-error]
"""
        found = self.tidy.findings_of(output, "/r")
        self.assertEqual([finding.check for finding in found], ["bugprone-use-after-move", "clang-diagnostic-error"])
        self.assertEqual([finding.path for finding in found], ["a/b.h", "a/c.cc"])
        self.assertTrue(found[0].text.startswith("a/b.h:7:3: error: 'x'"), found[0].text)
        self.assertIn("move occurred here", found[0].text)

    @unittest.skipUnless(shutil.which("clang-tidy-14"), "clang-tidy-14 is not installed: tools/setup --tests")
    def test_finds_and_remembers(self) -> None:
        moved = """
            namespace std { template <class T> T&& move(T& t) { return static_cast<T&&>(t); } }
            struct A { A(A&&) noexcept; int x(); };
            int F(A a) { A b = std::move(a); return %s.x(); }"""
        before = os.getcwd()
        with tempfile.TemporaryDirectory() as folder:
            shutil.copy(os.path.join(root(), ".clang-tidy"), folder)
            for path, returned in (("bad.cc", "a"), ("good.cc", "b")):
                with open(os.path.join(folder, path), "w", encoding="utf-8") as file:
                    file.write(moved % returned)
            os.chdir(folder)
            try:
                analysis = self.tidy.Analysis(folder, folder)
                flags = ("-std=c++20", "-iquote", ".")
                of = [("good.cc",), ("good.cc",), ("good.cc", "good.cc"), ("bad.cc",)]  # the third defines all twice
                outcomes = [analysis.run(self.tidy.Unit(files, flags)) for files in of]
            finally:
                os.chdir(before)
        self.assertEqual([outcome.analysed for outcome in outcomes], [1, 0, 1, 1])  # a part was remembered
        self.assertEqual([len(outcome.findings) for outcome in outcomes], [0, 0, 0, 1])
        self.assertIn("bugprone-use-after-move", outcomes[3].findings[0])


class Engines(unittest.TestCase):
    """With a pip that says what it was asked for, and has no torch for CPUs but from an index of its own."""

    PIP = """#!/bin/sh
echo "$*" >> "$0.calls"
case "$*" in
  *broken.txt) echo "ERROR: No matching distribution found for nosuch==1" >&2; exit 1 ;;
  *"--extra-index-url $TORCH_INDEX"*) exit 0 ;;
  *torch.txt)
    echo "ERROR: Could not find a version that satisfies the requirement torch==2.13.0+cpu (from versions: 2.12.0, 2.13.0)" >&2
    echo "ERROR: No matching distribution found for torch==2.13.0+cpu" >&2
    exit 1 ;;
esac
"""

    def asked(self, requirements: str) -> list[str]:
        """Calls of pip."""
        engines = tool("engines")
        with tempfile.TemporaryDirectory() as environment:
            pip = os.path.join(environment, "bin", "pip")
            os.mkdir(os.path.dirname(pip))
            with open(pip, "w", encoding="utf-8") as file:
                file.write(self.PIP.replace("$TORCH_INDEX", engines.TORCH_INDEX))
            os.chmod(pip, 0o755)
            try:
                engines.install(environment, requirements, ["--no-deps"])
            finally:
                with open(f"{pip}.calls", encoding="utf-8") as file:
                    self.calls = file.read().splitlines()
        return self.calls

    def test_what_pip_finds_comes_from_its_indexes(self) -> None:
        (call,) = self.asked("numpy.txt")
        self.assertTrue(call.startswith("install ") and call.endswith("--no-deps -r numpy.txt"), call)

    def test_torch_that_pip_does_not_find_comes_from_its_own_index(self) -> None:
        first, second = self.asked("torch.txt")
        self.assertNotIn("--extra-index-url", first)
        self.assertEqual(second, f"{first} --extra-index-url https://download.pytorch.org/whl/cpu")

    def test_what_else_is_not_found_ends_it(self) -> None:
        with self.assertRaisesRegex(SystemExit, "pip cannot install broken.txt"):
            self.asked("broken.txt")
        self.assertEqual(1, len(self.calls))


class CountTests(unittest.TestCase):
    def test_steps_count(self) -> None:
        event = {"id": {"testResult": {"label": "//a:b"}}, "testResult": {"status": "PASSED"}}
        with tempfile.NamedTemporaryFile("w", suffix=".json") as events:
            events.write(json.dumps(event))
            events.flush()
            for status, last in ((0, "2 passed, 0 failed, 0 skipped"), (1, "1 passed, 1 failed, 0 skipped")):
                command = [os.path.join(root(), "tools/count_tests.py"), events.name, "0", f"tools/tidy={status}"]
                done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
                self.assertEqual((done.returncode, done.stdout.splitlines()[-1]), (status, last))


if __name__ == "__main__":
    unittest.main()
