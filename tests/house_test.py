"""How the source tree is written: formatted, comments whole and within their width, links that lead somewhere."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import types
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


# Classes.

METHODS_MAX = 25  # public ones of a class of the daemon: more are several classes
_CLASS = re.compile(r"\b(class|struct)\s+(\w+)(?:\s+final)?\s*(?::[^;{}()]*)?\{")
_NO_METHOD = re.compile(r"(using|friend|static_assert|typedef|enum|union)\b|(struct|class)\s+\w+\s*$")


def without_words(text: str) -> str:
    """C++ without comments, literals and preprocessor lines."""
    text = re.sub(r"//[^\n]*|/\*.*?\*/", "", text, flags=re.S)
    text = re.sub(r'R"(\w*)\(.*?\)\1"|"(?:\\.|[^"\\\n])*"', '""', text, flags=re.S)
    text = re.sub(r"'(?:\\.|[^'\\\n])+'", "' '", text)
    return re.sub(r"^[ \t]*#.*(?:\\\n.*)*$", "", text, flags=re.M)


def is_method(declaration: str, name: str) -> bool:
    """Whether what stands in class `name` declares a method, its constructors, destructor and operators aside."""
    words = " ".join(declaration.split())
    before = words.split("(")[0].strip()
    if "(" not in words or "=" in before or "operator" in before or _NO_METHOD.match(words):
        return False
    found = re.search(r"(~?\w+)$", before)
    return found is not None and found[1] not in (name, "~" + name) and re.match(r"[\w\[:]", words) is not None


def public_methods(text: str) -> list[tuple[str, int]]:
    """Each class of a header or source, with the number of its public methods; overloads count."""
    text = without_words(text)
    counts = []
    for head in _CLASS.finditer(text):
        is_public, depth, declaration, count = head[1] == "struct", 1, "", 0
        opened = ""  # what stood before the brace that is open
        for at in range(head.end(), len(text)):
            letter = text[at]
            if letter == "{":
                opened = declaration if depth == 1 else opened
                depth += 1
            elif letter == "}":
                depth -= 1
                if depth == 0:
                    break
                if depth == 1:
                    count += is_public and is_method(opened, head[2])
                    declaration = ""
            elif depth == 1 and letter == ";":
                count += is_public and is_method(declaration, head[2])
                declaration = ""
            elif depth == 1 and letter == ":" and declaration.strip() in ("public", "private", "protected"):
                is_public, declaration = declaration.strip() == "public", ""
            elif depth == 1:
                declaration += letter
        counts.append((head[2], count))
    return counts


def classes_in_several_files(texts: dict[str, str]) -> list[str]:
    """Classes that are defined in more than one of these sources: such a class is several."""
    files: dict[tuple[str, str], set[str]] = {}
    for path, text in texts.items():
        for found in re.finditer(r"^(?!\s)[^\n(]*?\b(\w+)::~?\w+\(", without_words(text), flags=re.M):
            files.setdefault((os.path.dirname(path), found[1]), set()).add(path)
    return [f"{name}: {', '.join(sorted(of))}" for (_, name), of in sorted(files.items()) if len(of) > 1]


class Classes(unittest.TestCase):
    def sources(self, endings: tuple[str, ...]) -> dict[str, str]:
        tests = re.compile(r"_(test|testing|bench|fixture)\.|/(simulated|[a-z]+_walk)")
        return {p: read(p) for p in paths(endings) if p.startswith("kvmanager/") and not tests.search(p)}

    def test_classes_have_few_public_methods(self) -> None:
        counts = [(path, *of) for path, text in self.sources((".h", ".cc")).items() for of in public_methods(text)]
        self.assertGreater(len(counts), 200)
        self.assertGreater(max(count for _, _, count in counts), 15)  # they are found
        self.assertEqual([of for of in counts if of[2] > METHODS_MAX], [])

    def test_a_class_is_in_one_source(self) -> None:
        sources = self.sources((".cc",))
        self.assertGreater(len(sources), 80)
        self.assertEqual(classes_in_several_files(sources), [])

    def test_methods_are_counted(self) -> None:
        text = """
            class A final : public B<int> {
             public:
              explicit A(int x) : x_({x}), y_({1, 2}) { F(); }
              ~A() override { x_ = 0; }
              A& operator=(const A&) = delete;
              int x() const { if (x_) { return 1; } return x_; }  // x();
              virtual void Go(std::function<void(int)> f) = 0;
              static constexpr int kMax = Max(1);
              struct In { int a(); int b(); };
              using B::B;
             private:
              void Hidden();
              int x_ = 0;
            };"""
        self.assertEqual(public_methods(text), [("A", 2), ("In", 2)])

    def test_a_class_in_two_sources(self) -> None:
        texts = {"a/x.cc": "int A::F() {}\n  A::H();\n", "a/y.cc": "A::A() {}\n", "b/y.cc": "A::A() {}\n"}
        self.assertEqual(classes_in_several_files(texts), ["A: a/x.cc, a/y.cc"])


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
