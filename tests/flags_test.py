"""What `kvmanagerd --help`, docs/operating.md and docs/security.md say of the same flags and limits."""

from __future__ import annotations

import re
import subprocess
import unittest
from typing import NamedTuple

from kvmanager_testing import daemon_program
from source_tree import read

_FLAG = re.compile(r"^ {2}(--[a-z-]+)", re.MULTILINE)
_LIMIT = re.compile(r"^ {2}(?P<name>[a-z_]+) +(?P<value>\S.*?) +of a (?P<scope>[a-z]+) +(?P<bounds>.+?)(?: \((?P<flag>--[a-z-]+)\))?$")
_DEFAULT = re.compile(r"\(default:? ([^;,)]+)")
# Not of operation.
_OTHER = {"--help", "--version"}
# Of limits.h: what a number must be a multiple of.
_NO_LIMITS = {"kArenaBytesStep", "kTensorAlign"}


def flags(text: str) -> dict[str, str]:
    """Each flag that a help text names at the start of a line, and what it says of it in one line."""
    parts = _FLAG.split(text)
    return {flag: " ".join(said.split()) for flag, said in zip(parts[1::2], parts[2::2])}


class Limit(NamedTuple):
    name: str
    value: str
    scope: str
    bounds: str
    flag: str | None

    def row(self) -> str:
        """In the table of docs/operating.md."""
        flag = f"`{self.flag}`" if self.flag else "fixed"
        return f"| `{self.name}` | {self.value} | {self.scope} | {flag} | {self.bounds} |"

    def entry(self) -> str:
        """In the table of docs/security.md, in the row of its scope."""
        return f"`{self.name}` {self.value}"


def limits(text: str) -> list[Limit]:
    """The limits that a help text lists behind a line which begins with "Limits"."""
    _, found, behind = text.partition("\nLimits")
    if not found:
        return []
    lines = behind.splitlines()[1:]
    return [Limit(**match.groupdict()) for match in map(_LIMIT.match, lines) if match]


def section(page: str, heading: str) -> list[str]:
    """The rows of the table below a heading, without its first two."""
    lines = page.partition(f"\n## {heading}\n")[2].partition("\n## ")[0].splitlines()
    return [line for line in lines if line.startswith("|")][2:]


def constants(header: str) -> list[str]:
    return re.findall(r"\bconstexpr \w+ (k\w+) =", header)


def default(said: str) -> str | None:
    found = _DEFAULT.search(said)
    return found[1] if found else None


class HelpTexts(unittest.TestCase):
    def test_flags(self) -> None:
        text = "x\n  --a TEXT   of a (default 3;\n      none)\n  --b-c   of b\n  -h,--help  z\n"
        self.assertEqual(flags(text), {"--a": "TEXT of a (default 3; none)", "--b-c": "of b -h,--help z"})
        self.assertEqual(default("of a (default 3; none)"), "3")
        self.assertEqual(default("(default: none)"), "none")
        self.assertIsNone(default("of b"))


    def test_limits(self) -> None:
        text = "  --a  of a\n\nLimits, as said:\n  a_ms    10000 ms  of a call  how long\n  b  as set of a daemon  b (--b-c)\n\n"
        self.assertEqual(
            limits(text), [Limit("a_ms", "10000 ms", "call", "how long", None), Limit("b", "as set", "daemon", "b", "--b-c")]
        )
        self.assertEqual(limits("  --a  of a\n"), [])
        self.assertEqual(Limit("a", "1", "call", "x", "--a").row(), "| `a` | 1 | call | `--a` | x |")
        page = "# P\n## Limits\ntext\n| a |\n| - |\n| 1 |\n\n## Next\n| b |\n| - |\n| 2 |\n"
        self.assertEqual(section(page, "Limits"), ["| 1 |"])
        self.assertEqual(constants("constexpr size_t kA = 1;  // x\n  static constexpr int64_t kBMs = 2;\nint kC = 3;\n"), ["kA", "kBMs"])


def help_text() -> str:
    return subprocess.run([daemon_program(), "--help"], stdout=subprocess.PIPE, text=True, check=True).stdout


class Limits(unittest.TestCase):
    """The daemon's table of limits, which --help prints, against the pages and the headers."""

    def setUp(self) -> None:
        self.limits = limits(help_text())
        self.assertGreater(len(self.limits), 50)

    def test_help_lists_every_row_of_the_table(self) -> None:
        rows = re.findall(r'^ {6}\{"(\w+)", k', read("kvmanager/daemon/limit_table.cc"), re.MULTILINE)
        self.assertEqual([limit.name for limit in self.limits], rows)

    def test_operating_has_the_same_table(self) -> None:
        self.assertEqual(section(read("docs/operating.md"), "Limits"), [limit.row() for limit in self.limits])

    def test_security_names_each_with_its_value(self) -> None:
        scopes = list(dict.fromkeys(limit.scope for limit in self.limits))
        rows = [f"| a {scope} | {', '.join(x.entry() for x in self.limits if x.scope == scope)} |" for scope in scopes]
        self.assertEqual(section(read("docs/security.md"), "Limits"), rows)

    def test_flags_are_named_as_they_are(self) -> None:
        known = flags(help_text().partition("\nLimits")[0])
        self.assertEqual([limit for limit in self.limits if limit.flag and limit.flag not in known], [])

    def test_every_bound_of_the_headers_is_in_the_table(self) -> None:
        table = read("kvmanager/daemon/limit_table.cc")
        for header, least in {"kvmanager/rpc/limits.h": 25, "kvmanager/handoff/limits.h": 8}.items():
            names = [name for name in constants(read(header)) if name not in _NO_LIMITS]
            self.assertGreaterEqual(len(names), least, header)
            self.assertEqual([name for name in names if f"limits::{name}" not in table], [], header)


class Flags(unittest.TestCase):
    def setUp(self) -> None:
        said_of = flags(help_text().partition("\nLimits")[0])
        self.flags = {flag: said for flag, said in said_of.items() if flag not in _OTHER}
        self.assertGreater(len(self.flags), 20)

    def test_operating_names_each_with_its_default(self) -> None:
        page = read("docs/operating.md")
        for flag, said in self.flags.items():
            lines = [line for line in page.splitlines() if re.search(rf"{flag}(?![a-z-])", line)]
            self.assertTrue(lines, flag)
            value = default(said)
            if value is not None and re.match(r"[1-9]", value):  # 0 and words are explained, not repeated
                self.assertTrue([line for line in lines if value in line], f"docs/operating.md: {flag}, default {value}")

    def test_security_names_each_listener(self) -> None:
        page = read("docs/security.md")
        listeners = [flag for flag in self.flags if flag.endswith("listen")]
        self.assertGreater(len(listeners), 3)
        for flag in listeners + ["--hand-off-peers", "--http-hosts", "--insecure"]:
            self.assertIn(f"`{flag}", page)


if __name__ == "__main__":
    unittest.main()
