"""The files of the source tree. The tests that read them are given docs/design.md, which leads there."""

from __future__ import annotations

import os


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
