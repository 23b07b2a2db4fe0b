"""Windows of text to train on, to probe with and to measure on, as token ids."""

from __future__ import annotations

import random
import string
from typing import Any, NamedTuple

PAGE_TOKENS = 64


class Window(NamedTuple):
    """counted: the first position whose prediction is looked at when the model is probed."""

    ids: list[int]
    counted: int


def begins_with(tokenizer: Any) -> list[int]:
    """What the tokenizer puts before a text: one BOS, or nothing."""
    first = tokenizer("a").input_ids[:1]
    return first if first and first[0] == tokenizer.bos_token_id else []


def tokenize(tokenizer: Any, path: str) -> list[int]:
    """A file's ids without special ones. Errors: OSError; ValueError for what is not UTF-8."""
    with open(path, encoding="utf-8") as file:
        return tokenizer(file.read(), add_special_tokens=False, verbose=False).input_ids


def spaced_windows(ids: list[int], window: int, count: int, before: list[int]) -> list[list[int]]:
    """`count` windows at equal distances from the beginning. Errors: ValueError if there is not one."""
    width = window - len(before)
    if len(ids) < width:
        raise ValueError(f"text: has {len(ids)} tokens; must have at least {width}, a window")
    count = min(count, len(ids) // width)
    stride = len(ids) // count
    return [before + ids[at * stride : at * stride + width] for at in range(count)]


def split(texts: list[list[int]], window: int, train: int, held_out: int, before: list[int]
          ) -> tuple[list[list[int]], list[list[int]]]:
    """Windows to train on and windows held out, from all texts evenly, none shared. Errors: ValueError for too little
    text."""
    width = window - len(before)
    every = [before + ids[at : at + width] for ids in texts for at in range(0, len(ids) - width + 1, width)]
    if not every:
        raise ValueError(f"text: the longest has {max(map(len, texts))} tokens; must have at least {width}, a window")
    held_out = min(held_out, len(every) - 1)
    chosen = {(2 * at + 1) * len(every) // (2 * held_out) for at in range(held_out)}
    rest = [ids for at, ids in enumerate(every) if at not in chosen]
    train = min(train, len(rest))
    return [rest[at * len(rest) // train] for at in range(train)], [every[at] for at in sorted(chosen)]


def _random_lines(tokenizer: Any, tokens: int, rng: random.Random) -> list[int]:
    """Lines of random words, at most `tokens` of them."""
    letters = string.ascii_letters + string.digits

    def word() -> str:
        return "".join(rng.choice(letters) for _ in range(rng.randint(4, 9)))

    ids: list[int] = []
    while True:
        line = tokenizer(f"{word()} = {word()} {word()}\n", add_special_tokens=False).input_ids
        if len(ids) + len(line) > tokens:
            return ids
        ids += line


def copy_window(tokenizer: Any, prose: list[int], window: int, seed: int, before: list[int]) -> Window:
    """Random strings between pieces of prose, and the same strings again: what has to be copied lies far back. The
    predictions of the repeated strings count."""
    rng = random.Random(seed)
    room = window - len(before)
    lines = _random_lines(tokenizer, room * 3 // 8, rng)
    between = room - 2 * len(lines)
    first = between // 2
    ids = before + prose[:first] + lines + prose[first:between]
    return Window((ids + lines)[:window], len(ids))
