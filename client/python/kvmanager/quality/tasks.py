"""Retrieval tasks: what a codec loses of single tokens far back, which perplexity over a text averages away.

    prompts = make_prompts(tokenizer, "lookup", prompts=20, cases_per_prompt=20, context_tokens=1500, seed=1)
    right = [score(prompt, predicted_ids(prompt.ids)) for prompt in prompts]

Three tasks, all of material that is asked for further back than any window of raw pages:

    passkey   numbers hidden in filler text, each under a name of its own; asked for by name, in another order
    lookup    a dense list of `key: value` lines in the midst of filler; asked for by key, in another order
    copy      a list of random strings in the midst of filler; the list is repeated in the same order

A prompt is one token sequence that serves many cases: context, then question and right answer of one case behind the
other (teacher forcing, so a wrong answer does not spoil the next). A case counts as right if each of its answer's
tokens is the most likely one behind what precedes it. Equal arguments make equal prompts: generators are seeded by
(task, seed, prompt) alone, so every variant of a codec sees the same cases and differences can be paired.
"""

from __future__ import annotations

import random
import string
from typing import NamedTuple, Protocol

TASKS = ("passkey", "lookup", "copy")
LEAD_TOKENS = 96  # of filler before the material: behind the sinks
TAIL_TOKENS = 256  # of filler between the material and the first question: beyond the newest raw pages

_FILLER = """The grass is green and the sky is blue. The sun is yellow. Here we go. There and back again.
A train leaves the station at noon. The river runs slowly through the old town. Rain fell during the night.
Most of the shops open early in the morning. The library closes on Sunday. Two children play near the bridge.
The road to the north is long and quiet. A cat sleeps on the warm stones. The bakery sells bread and small cakes.
In autumn the leaves turn red and brown. Ships wait outside the harbour. The teacher writes on the board.
Snow covers the hills in winter. The market is busy every Friday. A bell rings from the tower.
The gardener waters the roses before breakfast. Birds gather on the roof. The museum has a new door.
An old man reads his paper in the park. The bus was late again. Farmers bring in the hay.
The wind comes from the west. Someone left an umbrella on the seat. The lamps are lit in the evening.
The mill has not worked for years. Tea is served in the hall. The path leads down to the lake.""".replace("\n", " ")
_SENTENCES = [sentence.strip() + "." for sentence in _FILLER.split(".") if sentence.strip()]
_COLOURS = ("red", "blue", "green", "black", "white", "brown", "grey", "pink", "golden", "silver", "purple", "orange")
_THINGS = ("apple", "bear", "boat", "book", "bottle", "box", "car", "chair", "clock", "cup", "dog", "door", "drum",
           "fish", "flag", "fox", "hat", "horse", "house", "key", "lamp", "lion", "moon", "piano", "plane", "ring",
           "rose", "ship", "star", "table", "tiger", "train", "tree", "wolf")


class Tokenizer(Protocol):
    """What is needed of a tokenizer: ids of a text, without special tokens."""

    def encode(self, text: str) -> list[int]: ...


class Shape(NamedTuple):
    """How hard a task is: chosen so that the model in question solves most of it without a codec."""

    answer_length: int  # digits of a number, letters of a string
    distractors: int = 0  # keys of `lookup` that are not asked for
    repeats: int = 1  # how often the context says the material: more for models that copy badly


class Prompt(NamedTuple):
    """ids: the whole sequence. answers: (first, last) of each case's answer: ids[first:last] are to be predicted, each
    from what is before it. material: (first, last) of what holds the answers in the context."""

    task: str
    ids: list[int]
    answers: list[tuple[int, int]]
    material: tuple[int, int]


DEFAULT_SHAPES = {"passkey": Shape(5), "lookup": Shape(4), "copy": Shape(6)}


class _Ids:
    """Token ids that grow piece by piece, so that places of pieces are known."""

    def __init__(self, tokenizer: Tokenizer, prefix: list[int]):
        self._tokenizer, self.ids = tokenizer, list(prefix)

    def add(self, text: str) -> tuple[int, int]:
        first = len(self.ids)
        self.ids += self._tokenizer.encode(text)
        return first, len(self.ids)

    def fill(self, until: int, choose: random.Random) -> None:
        while len(self.ids) < until:
            self.add(choose.choice(_SENTENCES) + " ")


def make_prompts(tokenizer: Tokenizer, task: str, *, prompts: int = 20, cases_per_prompt: int = 20,
                 context_tokens: int = 1200, seed: int = 1, shape: Shape | None = None,
                 prefix: list[int] = []) -> list[Prompt]:
    """`prompts` prompts of about context_tokens tokens before the first question, each with cases_per_prompt cases.
    prefix: ids that every sequence of the model begins with. Errors: ValueError."""
    if task not in TASKS:
        raise ValueError(f"task: {task!r}; must be one of {', '.join(TASKS)}")
    if not 1 <= cases_per_prompt <= len(_THINGS):
        raise ValueError(f"cases_per_prompt: {cases_per_prompt}; must be 1..{len(_THINGS)}")
    shape = shape or DEFAULT_SHAPES[task]
    make = {"passkey": _passkey, "lookup": _lookup, "copy": _copy}[task]
    made = []
    for at in range(prompts):
        prompt = make(_Ids(tokenizer, prefix), random.Random(f"{task} {seed} {at}"), cases_per_prompt, context_tokens,
                      shape)
        if prompt.material[1] + TAIL_TOKENS > prompt.answers[0][0]:
            raise ValueError(f"context_tokens: {context_tokens}; the material of {cases_per_prompt} cases ends at token "
                             f"{prompt.material[1]}: must be {TAIL_TOKENS} more than that at least")
        made.append(prompt)
    return made


def score(prompt: Prompt, predicted: list[list[int]]) -> list[bool]:
    """Of each case whether it is right. predicted: for each of prompt.answers the most likely token at each of its
    places."""
    if len(predicted) != len(prompt.answers):
        raise ValueError(f"predicted: of {len(predicted)} cases; the prompt has {len(prompt.answers)}")
    return [list(got) == prompt.ids[first:last] for got, (first, last) in zip(predicted, prompt.answers)]


def _names(choose: random.Random, count: int) -> list[str]:
    pairs = [f"{colour} {thing}" for colour in _COLOURS for thing in _THINGS]
    return choose.sample(pairs, count)


def _digits(choose: random.Random, length: int) -> str:
    return str(choose.randrange(10 ** (length - 1), 10**length))


def _letters(choose: random.Random, length: int) -> str:
    return "".join(choose.choice(string.ascii_lowercase) for _ in range(length))


def _passkey(out: _Ids, choose: random.Random, cases: int, context: int, shape: Shape) -> Prompt:
    names = _names(choose, cases)
    keys = {name: _digits(choose, shape.answer_length) for name in names}
    out.add("Pass keys are hidden inside a lot of irrelevant text. Find and memorize them.\n")
    out.fill(LEAD_TOKENS, choose)
    first, room, said = len(out.ids), context - TAIL_TOKENS - len(out.ids), names * shape.repeats
    for at, name in enumerate(said):
        out.add(f"\n{name}: {keys[name]}\n")
        last = len(out.ids)
        out.fill(first + room * (at + 1) // len(said), choose)
    out.fill(max(context, last + TAIL_TOKENS), choose)
    out.add("\n")
    choose.shuffle(names)
    return Prompt("passkey", out.ids, [_ask(out, f"{name}:", f" {keys[name]}", "\n") for name in names], (first, last))


def _lookup(out: _Ids, choose: random.Random, cases: int, context: int, shape: Shape) -> Prompt:
    names = _names(choose, cases + shape.distractors)
    values = {name: _digits(choose, shape.answer_length) for name in names}
    out.add("A table of names and numbers is somewhere in this text.\n")
    lines = [f"{name}: {values[name]}\n" for name in names]
    first, last = _amid(out, choose, context, lines, shape.repeats)
    choose.shuffle(names)
    return Prompt("lookup", out.ids, [_ask(out, f"{name}:", f" {values[name]}", "\n") for name in names[:cases]],
                  (first, last))


def _copy(out: _Ids, choose: random.Random, cases: int, context: int, shape: Shape) -> Prompt:
    strings = [_letters(choose, shape.answer_length) for _ in range(cases)]
    out.add("A list of words is somewhere in this text.\n")
    first, last = _amid(out, choose, context, ["List:"] + [f"\n{word}" for word in strings] + ["\n"], shape.repeats)
    out.add("List:")
    return Prompt("copy", out.ids, [_ask(out, "", f"\n{word}", "") for word in strings], (first, last))


def _amid(out: _Ids, choose: random.Random, context: int, pieces: list[str], repeats: int) -> tuple[int, int]:
    """Adds filler, the pieces, filler, the pieces again..., and filler: `context` tokens in all. Returns where the pieces are."""
    probe = _Ids(out._tokenizer, [])
    for piece in pieces:
        probe.add(piece)
    free = max(0, context - TAIL_TOKENS - repeats * len(probe.ids) - len(out.ids) - LEAD_TOKENS)
    out.fill(len(out.ids) + LEAD_TOKENS, choose)
    places = []
    for _ in range(repeats):
        out.fill(len(out.ids) + choose.randrange(free // (2 * repeats) + 1), choose)
        out.add("\n")
        places.append(len(out.ids))
        for piece in pieces:
            out.add(piece)
    last = len(out.ids)
    out.fill(max(context, last + TAIL_TOKENS), choose)
    out.add("\n")
    return places[0], last


def _ask(out: _Ids, question: str, answer: str, end: str) -> tuple[int, int]:
    out.add(question)
    place = out.add(answer)
    out.add(end)
    return place
