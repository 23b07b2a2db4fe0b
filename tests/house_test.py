"""How the source tree is written: formatted, comments whole and within their width, links that lead somewhere."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import unittest
from collections.abc import Iterable, Iterator
from urllib.parse import unquote

from source_tree import paths, read, root

WIDTH_MAX = 120  # columns of a line of comment in a header, as .clang-format's ColumnLimit
CLANG_FORMAT = "clang-format-14"  # of Debian 12; other versions format otherwise
SOURCES = (".cc", ".h", ".cu", ".cuh", ".c")
HEADERS = (".h", ".cuh")


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


if __name__ == "__main__":
    unittest.main()
