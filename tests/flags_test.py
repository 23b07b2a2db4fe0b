"""What `kvmanagerd --help`, docs/operating.md and docs/security.md say of the same flags."""

from __future__ import annotations

import re
import subprocess
import unittest

from kvmanager_testing import daemon_program
from source_tree import read

_FLAG = re.compile(r"^ {2}(--[a-z-]+)", re.MULTILINE)
_DEFAULT = re.compile(r"\(default:? ([^;,)]+)")
# Not of operation.
_OTHER = {"--help", "--version"}


def flags(text: str) -> dict[str, str]:
    """Each flag that a help text names at the start of a line, and what it says of it in one line."""
    parts = _FLAG.split(text)
    return {flag: " ".join(said.split()) for flag, said in zip(parts[1::2], parts[2::2])}


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


class Flags(unittest.TestCase):
    def setUp(self) -> None:
        done = subprocess.run([daemon_program(), "--help"], stdout=subprocess.PIPE, text=True, check=True)
        self.flags = {flag: said for flag, said in flags(done.stdout).items() if flag not in _OTHER}
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
        for flag in listeners + ["--hand-off-peers", "--insecure"]:
            self.assertIn(f"`{flag}", page)


if __name__ == "__main__":
    unittest.main()
