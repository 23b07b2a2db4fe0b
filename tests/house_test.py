"""How the source tree is written: formatted, comments whole and within their width, links that lead somewhere."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import re
import shutil
import subprocess
import unittest
from collections.abc import Iterable, Iterator
from urllib.parse import unquote

WIDTH_MAX = 120  # columns of a line of comment in a header, as .clang-format's ColumnLimit
CLANG_FORMAT = "clang-format-14"  # of Debian 12; other versions format otherwise
SOURCES = (".cc", ".h", ".cu", ".cuh", ".c")
HEADERS = (".h", ".cuh")


def root() -> str:
    """The source tree: the file behind the runfile's symbolic link lies in it."""
    return os.path.dirname(os.path.dirname(os.path.realpath("docs/design.md")))


def paths(endings: tuple[str, ...]) -> list[str]:
    """Files of the tree with one of these endings, relative to its root. Folders of Bazel, git and Python are left out."""
    found = []
    for folder, folders, files in os.walk(root()):
        folders[:] = [
            name
            for name in folders
            if not name.startswith((".", "bazel-")) and name != "__pycache__" and not os.path.islink(f"{folder}/{name}")
        ]
        found += [os.path.relpath(os.path.join(folder, name), root()) for name in files if name.endswith(endings)]
    return sorted(found)


def read(path: str) -> str:
    with open(os.path.join(root(), path), encoding="utf-8") as file:
        return file.read()


# Comments.

_COMMENT = re.compile(r"^\s*//[/!]?(?P<indent> *)(?P<text>.*)$")
_ITEM = re.compile(r"^(-|\d+\.|[a-z]\)) ")
_ARROW = re.compile(r"[─│├└┌┐┘┤┬┴┼▶►]|->|=>|--|\|")
_GAP = re.compile(r"\S {3,}\S")


def too_wide(text: str) -> list[int]:
    """Numbers of lines that have a comment and more than WIDTH_MAX columns."""
    return [n for n, line in enumerate(text.splitlines(), 1) if len(line) > WIDTH_MAX and "//" in line]


def broken_comments(text: str) -> list[int]:
    """Numbers of lines that a formatter cut off the line before.

    A formatter fills paragraphs. In a diagram or a table, whose rows stand deeper than the text around, the end of a row
    that was too long becomes a line of its own at the same depth; in a list, it begins below the item's mark. Both end
    what the reader's eye follows. A row is taken for cut if it has an arrow, a frame or a column and no room for the
    first word of the next line, which has neither.
    """
    broken = []
    before = None
    for number, line in enumerate(text.splitlines(), 1):
        here = _COMMENT.match(line)
        if here and before and here["text"] and len(here["indent"]) >= 2 and here["indent"] == before[1]["indent"]:
            row, rest = before[1]["text"], here["text"]
            no_room = len(before[0]) + 1 + len(rest.split()[0]) > WIDTH_MAX
            if _ITEM.match(row):
                is_cut = no_room and not _ITEM.match(rest)
            else:
                is_cut = (
                    no_room
                    and bool(_ARROW.search(row) or _GAP.search(row))
                    and not _ARROW.search(rest)
                    and "  " not in rest
                    and not rest.endswith(";")
                )
            if is_cut:
                broken.append(number)
        before = (line, here) if here else None
    return broken


class Comments(unittest.TestCase):
    def test_headers_are_narrow_enough(self) -> None:
        headers = paths(HEADERS)
        self.assertGreater(len(headers), 300)
        wide = [f"{path}:{line}" for path in headers for line in too_wide(read(path))]
        self.assertEqual(wide, [], f"comments of more than {WIDTH_MAX} columns: wrap them")

    def test_diagrams_and_lists_are_whole(self) -> None:
        broken = [f"{path}:{line}" for path in paths(SOURCES) for line in broken_comments(read(path))]
        self.assertEqual(
            broken, [], "lines cut off the row or list item before: shorten the row, and indent an item's next lines"
        )


class CommentChecks(unittest.TestCase):
    """The checks above, on what they are for and on what they must let pass."""

    def test_width(self) -> None:
        comment = "// " + "x" * (WIDTH_MAX - 3)
        self.assertEqual(too_wide(comment), [])
        self.assertEqual(too_wide(f"int a;\n{comment}x\nint b;"), [2])
        self.assertEqual(too_wide("int a;  " + comment), [1])
        self.assertEqual(too_wide("auto a = " + "x" * WIDTH_MAX), [])  # a line that has no comment is the formatter's
        self.assertEqual(too_wide("// " + "─" * (WIDTH_MAX - 3)), [])  # columns, not bytes

    def test_diagram_that_was_cut(self) -> None:
        row = "//   Free ──open──> Filling ──seal──> Sealed ──encode──> Encoding ──encoded──> Declined ──release the raw form──>"
        self.assertLess(len(row), WIDTH_MAX)
        self.assertEqual(broken_comments(f"{row}\n//   Resident"), [2])
        self.assertEqual(broken_comments(f"#pragma once\n\n{row}\n//   Resident\n//    │"), [4])
        self.assertEqual(broken_comments(f"{row} Resident\n//    │\n//    └──reserve──> Receiving"), [])
        self.assertEqual(broken_comments("//   Free ──open──> Filling\n//   Resident"), [])  # it had room
        self.assertEqual(broken_comments(f"{row}\n//   Receiving ──received──> Resident"), [])

    def test_table_that_was_cut(self) -> None:
        row = "//   kReceiving   pages and LAST come      kCompleting: LAST is here, and every page that is wanted has arrived too, or"
        self.assertLessEqual(len(row), WIDTH_MAX)
        self.assertEqual(broken_comments(f"{row}\n//   withdrawn"), [2])
        self.assertEqual(broken_comments(f"{row}\n//   kEnded       nothing comes"), [])
        self.assertEqual(broken_comments(f"{row}\n//                             withdrawn"), [])

    def test_list_that_was_cut(self) -> None:
        item = "//  - it runs in a process of its own, which maps the memory of this daemon for reading alone, and UCX may end that"
        self.assertEqual(broken_comments(f"{item}\n//  where a peer fails"), [2])
        self.assertEqual(broken_comments(f"{item}\n//    where a peer fails"), [])
        self.assertEqual(broken_comments(f"{item}\n//  - reads go to its memory"), [])
        self.assertEqual(broken_comments(item.replace("-", "2.") + "\n//  where a peer fails"), [2])

    def test_prose(self) -> None:
        prose = "// A page belongs to a block of the store, and everything here runs on the thread of the store -> nowhere else at"
        self.assertEqual(broken_comments(f"{prose}\n// all"), [])
        self.assertEqual(broken_comments("int a;\nint b;"), [])


# The formatter.


LINES_MAX = 500  # of a file of kvmanager/


def too_long(texts: dict[str, str]) -> list[str]:
    """Sources of the daemon with more lines than one idea takes; tests and what they share are left out."""
    return [
        f"{path}: {text.count(chr(10))} lines, at most {LINES_MAX}"
        for path, text in texts.items()
        if text.count("\n") > LINES_MAX and not re.search(r"_(test|testing|bench|benchmark)\.", path)
    ]


class Length(unittest.TestCase):
    def test_files_of_the_daemon_are_short(self) -> None:
        sources = {path: read(path) for path in paths(SOURCES) if path.startswith("kvmanager/")}
        self.assertGreater(len(sources), 100)
        self.assertEqual(too_long(sources), [])

    def test_length(self) -> None:
        long = "x\n" * (LINES_MAX + 1)
        self.assertEqual(len(too_long({"kvmanager/a.cc": long, "kvmanager/b.h": "x\n" * LINES_MAX})), 1)
        self.assertEqual(too_long({"kvmanager/a_test.cc": long}), [])


class Format(unittest.TestCase):
    @unittest.skipUnless(shutil.which(CLANG_FORMAT), f"{CLANG_FORMAT} is not installed: tools/setup --tests")
    def test_sources_are_formatted(self) -> None:
        sources = paths(SOURCES)
        self.assertGreater(len(sources), 900)
        done = subprocess.run(
            [CLANG_FORMAT, "--dry-run", "--Werror", *sources], cwd=root(), capture_output=True, text=True, check=False
        )
        differ = sorted(set(re.findall(r"^(\S+?):\d+:\d+: error:", done.stderr, re.MULTILINE)))
        self.assertEqual(differ, [], "not as .clang-format says: run tools/format")
        self.assertEqual(done.returncode, 0, done.stderr)


# Links.

_FENCE = re.compile(r"^\s*(```|~~~)")
_CODE = re.compile(r"(`+).+?\1")
_LINK = re.compile(r"!?\[(?:[^\[\]]|\[[^\[\]]*\])*\]\(<?([^()<>\s]+(?:\([^()\s]*\)[^()\s]*)?)>?(?:\s+\"[^\"]*\")?\)")
_REFERENCE = re.compile(r"^\s{0,3}\[[^\]]+\]:\s+<?(\S+?)>?(?:\s|$)")
_HEADING = re.compile(r"^#{1,6}\s+(.*?)\s*#*\s*$")
_ANCHOR = re.compile(r"<a\s+(?:id|name)=\"([^\"]+)\"")


def prose(text: str) -> Iterator[str]:
    """Lines of a page that are no code block."""
    fence = ""
    for line in text.splitlines():
        mark = _FENCE.match(line)
        if mark and not fence:
            fence = mark[1]
        elif mark and mark[1] == fence:
            fence = ""
        elif not fence:
            yield line


def links(text: str) -> list[str]:
    found = []
    for line in prose(text):
        plain = _CODE.sub(lambda code: "`" * len(code[0]), line)
        found += _LINK.findall(plain) + _REFERENCE.findall(plain)
    return found


def anchors(text: str) -> set[str]:
    """The anchors of a page: its headings as GitHub and cmark-gfm name them, and those that it sets itself."""
    found: set[str] = set()
    for line in prose(text):
        found.update(_ANCHOR.findall(line))
        heading = _HEADING.match(line)
        if not heading:
            continue
        title = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", heading[1]).replace("`", "")
        name = re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")
        number, unique = 0, name
        while unique in found:
            number += 1
            unique = f"{name}-{number}"
        found.add(unique)
    return found


def dead_links(pages: Iterable[str]) -> list[str]:
    dead = []
    for page in pages:
        for link in links(read(page)):
            if re.match(r"[a-z][a-z+.-]*:", link):
                continue  # another site's
            path, _, anchor = link.partition("#")
            target = os.path.normpath(os.path.join(os.path.dirname(page), unquote(path))) if path else page
            if target.startswith("..") or path.startswith("/") or not os.path.exists(os.path.join(root(), target)):
                dead.append(f"{page}: {link}: there is no {target}")
            elif anchor and target.endswith(".md") and unquote(anchor) not in anchors(read(target)):
                dead.append(f"{page}: {link}: {target} has no heading of that name")
    return dead


class Links(unittest.TestCase):
    def test_pages_lead_somewhere(self) -> None:
        pages = paths((".md",))
        self.assertGreater(len(pages), 20)
        self.assertGreater(sum(len(links(read(page))) for page in pages), 100)
        self.assertEqual(dead_links(pages), [])


class LinkChecks(unittest.TestCase):
    def test_links(self) -> None:
        self.assertEqual(links("[a](b.md) and ![c](d.png \"e\"), [f [g]](h.md#i)"), ["b.md", "d.png", "h.md#i"])
        self.assertEqual(links("`[a](b.md)` [c](d.md)\n```\n[e](f.md)\n```\n[g](h.md)"), ["d.md", "h.md"])
        self.assertEqual(links("[a]: b.md\n[c](d_(e).md)"), ["b.md", "d_(e).md"])
        self.assertEqual(links("v[i] (x), f(x)[0]"), [])

    def test_anchors(self) -> None:
        page = "# A `codec`, at 2 bits\n## [Same](x.md)\n## Same\n```\n# none\n```\n<a id=\"mine\"></a>"
        self.assertEqual(anchors(page), {"a-codec-at-2-bits", "same", "same-1", "mine"})


# Tools.


class CompileCommands(unittest.TestCase):
    def test_entries(self) -> None:
        loader = importlib.machinery.SourceFileLoader("compile_commands", os.path.join(root(), "tools/compile_commands"))
        tool = importlib.util.module_from_spec(importlib.util.spec_from_loader(loader.name, loader))
        loader.exec_module(tool)

        def action(source: str, *flags: str) -> dict:
            return {"arguments": ["/usr/bin/gcc", *flags, "-fno-canonical-system-headers", "-c", source, "-o", "a.o"]}

        entries = tool.sources_of(
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


if __name__ == "__main__":
    unittest.main()
