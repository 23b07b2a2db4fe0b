#!/usr/bin/env python3
"""Plain text of HTML documentation, for measuring on prose: texts.py [--from FOLDER] [--out FILE]

FOLDER: of HTML files; default: the English Debian handbook of Debian's package debian-handbook, installed, or unpacked by
`dpkg -x debian-handbook_*.deb FOLDER` (the files are looked for below FOLDER). Paragraphs, lists and headings in the
order of the book's table of contents; no programs' output, tables, navigation or indexes. Equal files give equal text.
"""

import argparse
import html.parser
import pathlib
import re
import sys

_BOOK = "usr/share/doc/debian-handbook/html/en-US"
_BLOCKS = {"p", "h1", "h2", "h3", "h4", "li", "dt", "dd", "blockquote", "div"}
_SKIPPED = {"script", "style", "head", "pre", "table", "nav"}
_SKIPPED_CLASSES = {"docnav", "toc", "indexterm", "index", "navfooter", "navheader", "screen", "programlisting"}
_VOID = {"br", "img", "hr", "input", "meta", "link", "col", "area", "base", "wbr", "source", "embed", "param", "track"}


class _Text(html.parser.HTMLParser):
    """Collects paragraphs, and the order of linked files."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.paragraphs: list[str] = []
        self.links: list[str] = []
        self._words: list[str] = []
        self._open: list[bool] = []  # of each open element whether it is skipped
        self._tags: list[str] = []

    def handle_starttag(self, tag: str, attributes: list) -> None:
        given = dict(attributes)
        if tag == "a" and given.get("href"):
            self.links.append(given["href"].partition("#")[0])
        if tag in _VOID:
            return
        if tag in _BLOCKS:
            self._end()
        skipped = tag in _SKIPPED or bool(_SKIPPED_CLASSES & set((given.get("class") or "").split()))
        self._open.append(skipped or (self._open[-1] if self._open else False))
        self._tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag in _BLOCKS:
            self._end()
        if tag in self._tags:
            while self._tags:
                self._open.pop()
                if self._tags.pop() == tag:
                    break

    def handle_data(self, data: str) -> None:
        if not (self._open and self._open[-1]):
            self._words.append(data)

    def _end(self) -> None:
        paragraph = re.sub(r"\s+", " ", "".join(self._words)).strip()
        self._words = []
        if paragraph:
            self.paragraphs.append(paragraph)


def _parsed(file: pathlib.Path) -> _Text:
    parser = _Text()
    parser.feed(file.read_text(encoding="utf-8", errors="replace"))
    parser.close()
    return parser


def book(folder: pathlib.Path) -> str:
    """Text of all HTML files of `folder`: in the order in which index.html names them, others behind by name."""
    files = {file.name: file for file in sorted(folder.glob("*.html"))}
    if not files:
        raise FileNotFoundError(f"{folder}: has no *.html")
    first = _parsed(files["index.html"]).links if "index.html" in files else []
    order = [name for name in dict.fromkeys([*first, *files]) if name in files and not re.match(r"index|ix", name)]
    seen: set[str] = set()
    paragraphs = []
    for name in order:
        for paragraph in _parsed(files[name]).paragraphs:
            if len(paragraph) >= 60 and paragraph not in seen:  # what is repeated on many pages is not prose
                seen.add(paragraph)
                paragraphs.append(paragraph)
    return "\n\n".join(paragraphs) + "\n"


def handbook(below: pathlib.Path = pathlib.Path("/")) -> str:
    folder = below / _BOOK
    if not folder.is_dir():
        folder = below
    if not list(folder.glob("*.html")):
        raise FileNotFoundError(f"{below}: has neither {_BOOK} nor *.html; apt-get install debian-handbook, or unpack that "
                                "package with dpkg -x and name the folder by --from")
    return book(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--from", dest="folder", type=pathlib.Path, default=pathlib.Path("/"))
    parser.add_argument("--out", type=pathlib.Path)
    options = parser.parse_args()
    try:
        text = handbook(options.folder)
    except FileNotFoundError as error:
        sys.exit(f"texts: {error}")
    if options.out:
        options.out.write_text(text, encoding="utf-8")
        print(f"{options.out}: {len(text)} characters")
    else:
        sys.stdout.write(text)


if __name__ == "__main__":
    main()
