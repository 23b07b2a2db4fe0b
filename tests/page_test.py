"""The daemon's page in Debian's Chromium, under load: every panel shows data, at both widths and in both colours.

Skipped unless `tools/test --browser` says where Chromium is."""

from __future__ import annotations

import html.parser
import os
import shutil
import subprocess
import tempfile
import unittest

import kvmanager_testing
from kvmanager_testing import data_path

BROWSER = os.environ.get("KVMANAGER_BROWSER", "")
DEADLINE_S = 120
PAGE_MS = 5000  # of the browser's own clock: five polls
COLOURS = (("light", ()), ("dark", ("--blink-settings=preferredColorScheme=0",)))
PANELS = {"summary", "memory", "tiers", "codecs", "tenants", "hits", "transfer", "attention", "encoding", "quality", "calls",
          "errors", "disk", "kept"}


class Panels(html.parser.HTMLParser):
    """What each panel holds that only data makes: lines of charts, bars, cells, tiles."""

    def __init__(self) -> None:
        super().__init__()
        self.marks: dict[str, int] = {}
        self.texts: dict[str, str] = {}
        self.root: dict[str, str] = {}
        self._panel = ""

    def handle_starttag(self, tag: str, attributes: list) -> None:
        named = dict(attributes)
        if tag == "html":
            self.root = named
        if "data-panel" in named:
            self._panel = named["data-panel"]
            self.marks[self._panel], self.texts[self._panel] = 0, ""
        drawn = tag == "path" and len(named.get("d", "")) > 8
        if self._panel and (drawn or tag in ("td", "b") or named.get("class") == "fill"):
            self.marks[self._panel] += 1

    def handle_endtag(self, tag: str) -> None:
        if tag == "section":
            self._panel = ""

    def handle_data(self, data: str) -> None:
        if self._panel:
            self.texts[self._panel] += data


@unittest.skipUnless(BROWSER, "needs Chromium: tools/test --browser")
class Page(unittest.TestCase):
    def setUp(self) -> None:
        self.folder = tempfile.mkdtemp(prefix="kvpage")
        self.addCleanup(shutil.rmtree, self.folder, ignore_errors=True)
        self.peer = self.enterContext(kvmanager_testing.Daemon())
        flags = ("--http-listen", "127.0.0.1:0", "--quality-sample", "1", "--disk-path", f"{self.folder}/disk",
                 "--disk-bytes", "256MiB", "--state-dir", f"{self.folder}/state", "--state-keep-s", "5")
        self.daemon = self.enterContext(kvmanager_testing.Daemon(flags=flags))
        self.load = subprocess.Popen(
            [data_path("tests/daemon_load"), self.daemon.listen, "--peer", self.peer.listen, "--peer-address", self.peer.peer],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.addCleanup(self.end_load)
        self.assertEqual(self.load.stdout.readline(), "loaded\n")

    def end_load(self) -> None:
        self.load.stdin.close()
        self.load.stdout.close()
        self.assertEqual(self.load.wait(timeout=DEADLINE_S), 0)

    def browse(self, *flags: str) -> str:
        done = subprocess.run(
            [BROWSER, "--headless=new", "--no-sandbox", "--disable-gpu", f"--user-data-dir={self.folder}/profile",
             "--hide-scrollbars", f"--virtual-time-budget={PAGE_MS}", *flags, f"http://{self.daemon.http}/"],
            capture_output=True, text=True, check=False, timeout=DEADLINE_S)
        self.assertEqual(done.returncode, 0, done.stderr[-2000:])
        return done.stdout

    def test_every_panel_is_alive(self) -> None:
        for width in (1280, 400):
            for colours, flags in COLOURS:
                page = Panels()
                page.feed(self.browse("--dump-dom", f"--window-size={width},1000", *flags))
                self.assertEqual(set(page.marks), PANELS)
                self.assertGreaterEqual(int(page.root.get("data-polls", "0")), 2)
                for name, marks in page.marks.items():
                    with self.subTest(width=width, colours=colours, panel=name):
                        self.assertGreater(marks, 0, page.texts[name])
                self.assertIn("crop", page.texts["errors"])
                self.assertIn("INVALID_ARGUMENT", page.texts["errors"])

    def test_pictures(self) -> None:
        folder = os.environ.get("TEST_UNDECLARED_OUTPUTS_DIR", self.folder)  # kept beside the test's log, to be looked at
        for width, height in ((1280, 1700), (400, 3600)):
            for colours, flags in COLOURS:
                with self.subTest(width=width, colours=colours):
                    picture = os.path.join(folder, f"page-{width}-{colours}.png")
                    self.browse(f"--window-size={width},{height}", f"--screenshot={picture}", *flags)
                    self.assertGreater(os.path.getsize(picture), 20000)


if __name__ == "__main__":
    unittest.main()
