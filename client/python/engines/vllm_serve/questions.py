"""Prompts that share long prefixes with none of the others, about passages.txt."""

from __future__ import annotations

from kvmanager_testing import data_path

_QUESTION = "Read the following text.\n\n{}\n\nNow tell me in a few sentences what the text says about {}."
_SUBJECTS = ("lighthouses", "bread", "honeybees", "rivers")


def questions() -> list[str]:
    """A question about each passage, behind all of them; each begins with another."""
    with open(data_path("client/python/engines/vllm_serve/passages.txt"), encoding="utf-8") as file:
        passages = file.read().strip().split("\n\n")
    assert len(passages) == len(_SUBJECTS), len(passages)
    return [
        _QUESTION.format("\n\n".join(passages[place:] + passages[:place]), subject)
        for place, subject in enumerate(_SUBJECTS)
    ]
