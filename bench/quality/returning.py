"""Prompts that return: a trace of them over documents, what each request gave, and whether a way of keeping their keys
and values lies above the line between two others."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import Sequence

PAGE = 64  # tokens of a block


@dataclass(frozen=True)
class Request:
    """The first `prompt` tokens of a document are asked for; the `answer` tokens behind them are measured."""

    document: int
    prompt: int
    answer: int

    @property
    def blocks(self) -> int:
        """Full blocks that may hit: the prompt's last token is computed in any case."""
        return (self.prompt - 1) // PAGE


def make_trace(*, documents: int, tokens: int, requests: int, answer: int, exponent: float, seed: int) -> list[Request]:
    """Documents are chosen by Zipf's law; each is a conversation. Its first prompt is half of the document, a later one
    has the answer before and as much again, and behind the document's end it begins anew. All ends lie between two
    blocks' ends."""
    if tokens < 2 * (PAGE + answer):
        raise ValueError(f"tokens: {tokens}; must be at least {2 * (PAGE + answer)}, for two prompts and answers")
    chance = random.Random(seed)
    weights = [1 / (rank + 1) ** exponent for rank in range(documents)]
    first, step = tokens // 2 // PAGE * PAGE + PAGE // 4, 2 * answer
    prompts = range(first, tokens - answer + 1, step)
    turns = [0] * documents
    trace = []
    for document in chance.choices(range(documents), weights, k=requests):
        trace.append(Request(document, prompts[turns[document] % len(prompts)], answer))
        turns[document] += 1
    return trace


@dataclass(frozen=True)
class Outcome:
    """Of one request: blocks that were found, and the loss of its answer in nats per token."""

    hit_blocks: int
    loss: float


@dataclass(frozen=True)
class Estimate:
    value: float
    error: float  # standard error; documents are what is independent

    def text(self, digits: int, factor: float = 1.0, sign: str = "") -> str:
        return f"{factor * self.value:{sign}.{digits}f} ±{factor * self.error:.{digits}f}"


@dataclass(frozen=True)
class Comparison:
    """Of each way, by name: the share of blocks that hit, and the change of perplexity against exact attention.
    above: hit ratio of the middle way less that of the line between the others at its change of perplexity."""

    hits: dict[str, Estimate]
    change: dict[str, Estimate]
    above: Estimate | None
    above_share: float  # of the resamples in which `above` is more than 0


def _weighted(values: Sequence[float], weights: Sequence[float]) -> float:
    return math.fsum(v * w for v, w in zip(values, weights)) / math.fsum(weights)


def _point(trace: Sequence[Request], base: Sequence[float], outcomes: Sequence[Outcome], times: Sequence[int]) -> tuple[float, float]:
    """(hit ratio, change of perplexity) where each request counts `times`."""
    asked = math.fsum(request.blocks * n for request, n in zip(trace, times))
    hits = math.fsum(outcome.hit_blocks * n for outcome, n in zip(outcomes, times)) / asked
    more = _weighted([outcome.loss - loss for outcome, loss in zip(outcomes, base)],
                     [request.answer * n for request, n in zip(trace, times)])
    return hits, math.exp(more) - 1


def above_line(high: tuple[float, float], middle: tuple[float, float], low: tuple[float, float]) -> float:
    """How far the hit ratio of `middle` is above the line from `high` to `low`, all (hit ratio, change). On the far
    side of `high`, where it loses less than that, the line is flat."""
    share = (middle[1] - high[1]) / (low[1] - high[1]) if low[1] > high[1] else 0.0
    return middle[0] - (high[0] + max(0.0, share) * (low[0] - high[0]))


def compare(trace: Sequence[Request], base: Sequence[float], ways: dict[str, Sequence[Outcome]], *, resamples: int = 2000,
            seed: int = 1) -> Comparison:
    """base: each request's loss with exact attention. ways: "high", "low" and "ladder", or some of them. Errors are of
    resampled documents, all of whose requests come with them, the same in every way."""
    documents = sorted({request.document for request in trace})
    chance = random.Random(seed)
    points = {name: _point(trace, base, outcomes, [1] * len(trace)) for name, outcomes in ways.items()}
    whole = {"high", "low", "ladder"} <= set(ways)
    drawn: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    above = []
    for _ in range(resamples):
        chosen = chance.choices(documents, k=len(documents))
        times = [chosen.count(request.document) for request in trace]
        at = {name: _point(trace, base, outcomes, times) for name, outcomes in ways.items()}
        for name, point in at.items():
            drawn[name].append(point)
        if whole:
            above.append(above_line(at["high"], at["ladder"], at["low"]))

    def estimate(value: float, values: Sequence[float]) -> Estimate:
        mean = math.fsum(values) / len(values)
        return Estimate(value, math.sqrt(math.fsum((each - mean) ** 2 for each in values) / (len(values) - 1)))

    return Comparison(
        {name: estimate(points[name][0], [point[0] for point in drawn[name]]) for name in ways},
        {name: estimate(points[name][1], [point[1] for point in drawn[name]]) for name in ways},
        estimate(above_line(points["high"], points["ladder"], points["low"]), above) if whole else None,
        sum(each > 0 for each in above) / len(above) if whole else math.nan)
