"""Quantiles, and bootstrap intervals of a ratio of medians."""

from __future__ import annotations

import math
import random
import statistics
from typing import NamedTuple, Sequence

RESAMPLES = 2000
CONFIDENCE = 0.95


class Interval(NamedTuple):
    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.2f} [{self.low:.2f}, {self.high:.2f}]"


def quantile(values: Sequence[float], share: float) -> float:
    """The smallest of `values` that at least `share` of them do not exceed; no interpolation. values: not empty."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def ratio_of_medians(values: Sequence[float], base: Sequence[float], seed: int = 1, paired: bool = False) -> Interval | None:
    """Median of `values` over median of `base`, with its percentile bootstrap interval (Efron, Tibshirani: An Introduction to
    the Bootstrap, 1993, chapter 13): both samples are drawn again, RESAMPLES times; independently, or, if they are paired and
    of one length, pair by pair. None if a sample is empty or a median of `base`, also a drawn one, is not positive: the ratio
    means nothing then."""
    if not values or not base or statistics.median(base) <= 0:
        return None
    source = random.Random(seed)
    ratios = []
    for _ in range(RESAMPLES):
        if paired and len(values) == len(base):
            drawn = source.choices(range(len(base)), k=len(base))
            above, below = (statistics.median(each[place] for place in drawn) for each in (values, base))
        else:
            below = statistics.median(source.choices(base, k=len(base)))
            above = statistics.median(source.choices(values, k=len(values)))
        if below <= 0:
            return None
        ratios.append(above / below)
    tail = (1 - CONFIDENCE) / 2
    value = statistics.median(values) / statistics.median(base)
    return Interval(value, quantile(ratios, tail), quantile(ratios, 1 - tail))
