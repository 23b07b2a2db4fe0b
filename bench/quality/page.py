#!/usr/bin/env python3
"""Puts fresh tables into a benchmark page: page.py PAGE NAME=FILE...

Replaces what stands in PAGE between `<!-- NAME -->` and `<!-- end NAME -->` by FILE's text (of compare.py --markdown or
generate.py --markdown). Nothing else of the page changes.
"""

import pathlib
import re
import sys


def replaced(page: str, name: str, text: str) -> str:
    """Errors: ValueError where the page has no such place, or several."""
    place = re.compile(rf"(<!-- {re.escape(name)} -->\n).*?(<!-- end {re.escape(name)} -->)", re.S)
    if len(place.findall(page)) != 1:
        raise ValueError(f"{name}: the page must have exactly one <!-- {name} --> with its <!-- end {name} -->")
    return place.sub(lambda found: f"{found[1]}\n{text.strip()}\n\n{found[2]}", page)


def main() -> None:
    if len(sys.argv) < 3 or not all("=" in each for each in sys.argv[2:]):
        sys.exit(__doc__)
    path = pathlib.Path(sys.argv[1])
    page = path.read_text(encoding="utf-8")
    for name, _, file in (each.partition("=") for each in sys.argv[2:]):
        try:
            page = replaced(page, name, pathlib.Path(file).read_text(encoding="utf-8"))
        except ValueError as error:
            sys.exit(f"page: {path}: {error}")
    path.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
