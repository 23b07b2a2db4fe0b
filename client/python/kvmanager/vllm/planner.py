"""What of a prompt that the daemon has is worth loading: the rest is computed, where that is faster.

The least of what a request may have to wait for, over n, the tokens that it begins with once they are loaded:

    seconds(n) = max(load(n), ahead) + compute(n .. end)      the last term as if nobody else computed
    load(n)    = queue + notice + a + b * (n - local)         0 if n is local: nothing is loaded
    compute    = c * steps + d * tokens + e * pairs           pairs of a query and a key before it; steps of chunk_tokens

local is what vLLM has itself, queue the rest of the loads under way (one runs after the other), notice how long after its
end a load is heard of, ahead what others compute first. KVPR (transport/recompute/plan.h) has the same arithmetic
where what is recomputed comes first and both overlap; here a load is a prefix, and what follows needs it. So without
anything ahead all or nothing is best, since later tokens cost more to compute than earlier ones; but what loads while
others compute anyway costs nothing.

a .. e are fitted to what was measured: least squares of relative errors, of no negative coefficient, in which outliers
and samples from long ago count little. While too little is known, or only of much smaller prompts, all is loaded.

Pure: no vLLM, no clock (`now` is in seconds, of any origin), no randomness, no threads.
"""

from __future__ import annotations

import collections
import math
from collections.abc import Iterable
from dataclasses import dataclass

LOADS_MIN = 8  # measured, before anything but a load of all is considered
STEPS_MIN = 8
PROBE_EVERY = 32  # of such decisions one loads nevertheless, as much as takes PROBE_TIMES as long
PROBE_TIMES = 2  # where even the least takes longer, probes are rarer
MARGIN_MIN, MARGIN_MAX = 0.03, 0.20  # by which another way must be faster; between these as far as the fits are unsure
POINTS = 8  # between nothing and all

_REACH = 4  # how many times beyond what was measured a fit is believed
_SURPRISES = 4  # loads in a row that far off: the rate is another one, and what came before is forgotten
_FASTER, _SLOWER = 0.7, 1.4
_GROUP_SAMPLES, _GROUPS = 12, 16
_ROUNDS = 4  # of reweighting
_HUBER = 1.5
_RIDGE = (0.3, 0.003, 0.03)  # of what samples alike leave open goes to the tokens' own rate first
_STEPS_UNDER_WAY_MAX = 4  # vLLM has at most two: more were not heard of, and are forgotten
_NOTICES = 32


class Fit:
    """y = sum of coefficients times x, all >= 0. x[0] is 1. Samples of sizes that differ are kept apart, so that many of one
    do not drive out all of another."""

    def __init__(self, decay: float, floor: float) -> None:
        self._decay, self._floor = decay, floor
        self._groups: collections.OrderedDict[object, collections.deque] = collections.OrderedDict()
        self.added = 0  # ever
        self._unused = 0  # since the last fit
        self._coefficients: list[float] = []
        self.error = math.inf  # relative, of what is predicted

    def __len__(self) -> int:
        return sum(map(len, self._groups.values()))

    def add(self, key: object, x: tuple[float, ...], y: float, end: int = 0) -> None:
        """end: of the part of a prompt that it is about."""
        if not y > 0 or not math.isfinite(y):
            return
        group = self._groups.setdefault(key, collections.deque(maxlen=_GROUP_SAMPLES))
        self._groups.move_to_end(key)
        while len(self._groups) > _GROUPS:
            self._groups.popitem(last=False)
        group.append((self.added, x, y, end))
        self.added += 1
        self._unused += 1

    def keep_last(self, count: int) -> None:
        for key, group in list(self._groups.items()):
            kept = [each for each in group if each[0] >= self.added - count]
            if kept:
                self._groups[key] = collections.deque(kept, maxlen=_GROUP_SAMPLES)
            else:
                del self._groups[key]
        self._unused = self.added

    def most(self) -> float:
        """Tokens."""
        return max((x[1] for group in self._groups.values() for _, x, _, _ in group), default=0.0)

    def furthest(self) -> int:
        return max((end for group in self._groups.values() for _, _, _, end in group), default=0)

    def coefficients(self) -> list[float]:
        """Of the samples so far, or of those before the last few."""
        size = len(self)
        if size and (not self._coefficients or self._unused > size // 16):
            self._solve()
            self._unused = 0
        return self._coefficients

    def of(self, *x: float) -> float:
        return sum(each * coefficient for each, coefficient in zip(x, self.coefficients()))

    def _solve(self) -> None:
        rows = [(x, y, max(self._decay ** (self.added - 1 - at), self._floor))
                for group in self._groups.values() for at, x, y, _ in group]
        scales, robust = [1 / y for _, y, _ in rows], [1.0] * len(rows)
        for _ in range(_ROUNDS):
            weighted = [(x, y, age * each * scale * scale)
                        for (x, y, age), each, scale in zip(rows, robust, scales)]
            found = _least_squares(weighted)
            predicted = [max(sum(a * b for a, b in zip(x, found)), 1e-12) for x, _, _ in rows]
            off = [(y - each) / each for (_, y, _), each in zip(rows, predicted)]
            spread = max(1.4826 * _weighted_median([abs(each) for each in off], [age for _, _, age in rows]), 1e-3)
            robust = [min(1.0, _HUBER * spread / max(abs(each), 1e-12)) for each in off]
            scales = [1 / each for each in predicted]
        ages = [age for _, _, age in rows]
        self._coefficients = found
        self.error = spread * math.sqrt(sum(each * each for each in ages)) / sum(ages)


def _weighted_median(values: list[float], weights: list[float]) -> float:
    left = sum(weights) / 2
    for value, weight in sorted(zip(values, weights)):
        left -= weight
        if left <= 0:
            return value
    return values[-1]


def _least_squares(rows: list[tuple[tuple[float, ...], float, float]]) -> list[float]:
    """Coefficients >= 0 of rows (x, y, weight), with a slight pull to 0 that says which where several would do."""
    width = len(rows[0][0])
    gram = [[sum(w * x[i] * x[j] for x, _, w in rows) for j in range(i + 1)] for i in range(width)]
    right = [sum(w * x[i] * y for x, y, w in rows) for i in range(width)]
    norms = [math.sqrt(gram[i][i]) or 1.0 for i in range(width)]
    used = [i for i in range(width) if gram[i][i] > 0]
    while used:
        matrix = []
        for i in used:
            row = [gram[max(i, j)][min(i, j)] / norms[i] / norms[j] for j in used] + [right[i] / norms[i]]
            row[used.index(i)] += _RIDGE[i] / len(rows)
            matrix.append(row)
        solved = dict(zip(used, _gauss(matrix)))
        least = min(used, key=lambda i: solved[i])
        if solved[least] >= 0:
            return [solved.get(i, 0.0) / norms[i] for i in range(width)]
        used.remove(least)
    return [0.0] * width


def _gauss(matrix: list[list[float]]) -> list[float]:
    """Solves a positive definite system, [matrix | right]."""
    size = len(matrix)
    for i in range(size):
        for below in range(i + 1, size):
            factor = matrix[below][i] / matrix[i][i]
            for j in range(i, size + 1):
                matrix[below][j] -= factor * matrix[i][j]
    solution = [0.0] * size
    for i in reversed(range(size)):
        solution[i] = (matrix[i][size] - sum(matrix[i][j] * solution[j] for j in range(i + 1, size))) / matrix[i][i]
    return solution


def pairs(first: int, end: int) -> float:
    """Of a query in tokens first .. end and a key before it."""
    return (end * end - first * first) / 2


@dataclass(frozen=True)
class Choice:
    """Of a request that has `local` tokens, while the daemon has `hit`: it begins with `until` of them. Seconds: expected,
    until the whole prompt is computed; 0 while they cannot be."""

    local: int
    hit: int
    until: int
    probe: bool = False  # it is loaded to measure loads again
    measured: bool = False
    every: float = 0.0  # probes are one of so many
    seconds: float = 0.0
    all_s: float = 0.0  # if all of the hit is loaded
    none_s: float = 0.0  # if nothing is

    @property
    def loads(self) -> int:
        """Tokens."""
        return self.until - self.local

    @property
    def computes(self) -> int:
        """Tokens that the daemon has."""
        return self.hit - self.until


class Planner:
    """Belongs to one thread.

    block_tokens: loads are of whole blocks. chunk_tokens: computed in a step at most."""

    def __init__(self, block_tokens: int, chunk_tokens: int) -> None:
        self._block, self._chunk = block_tokens, max(1, chunk_tokens)
        self._loads = Fit(decay=0.95, floor=0.02)  # 1, tokens
        self._steps = Fit(decay=0.99, floor=0.1)  # 1, tokens, pairs
        self._notices: collections.deque[float] = collections.deque(maxlen=_NOTICES)
        self._notice = 0.0
        self._loading: dict[str, tuple[int, float]] = {}  # tokens and begin, in order
        self._load_ended = -math.inf
        self._under_way: collections.deque[tuple[float, int, float, int]] = collections.deque()
        self._step_ended = -math.inf
        self._surprises = 0  # loads in a row that were faster (below 0) or slower than expected
        self._since = 0.0  # decisions since a probe

    # What is measured.

    def step_began(self, now: float, chunks: Iterable[tuple[int, int]]) -> None:
        """chunks: (first, end) of what the step computes of prompts; empty: nothing is learnt from it, for example since it
        mostly does something else."""
        if len(self._under_way) >= _STEPS_UNDER_WAY_MAX:
            self._under_way.clear()
        chunks = list(chunks)
        tokens = sum(end - first for first, end in chunks)
        furthest = max((end for _, end in chunks), default=0)
        self._under_way.append((now, tokens, sum(pairs(*each) for each in chunks), furthest))

    def step_ended(self, now: float) -> None:
        """The one that began first. It was computed from its begin on, or from the end of the one before; so idle time is
        none of it."""
        if not self._under_way:
            return
        began, tokens, pair_count, furthest = self._under_way.popleft()
        seconds = now - max(began, self._step_ended)
        self._step_ended = now
        if tokens:
            key = tokens.bit_length(), furthest.bit_length() // 2
            self._steps.add(key, (1.0, float(tokens), pair_count), seconds, furthest)

    def load_began(self, now: float, name: str, tokens: int) -> None:
        self._loading[name] = (tokens, now)

    def load_ended(self, now: float, name: str, waited_s: float | None = None, seconds: float = 0.0) -> None:
        """It is heard of now. seconds: from its begin, once those before it had ended, for which it waited waited_s; None:
        not measured, for example since not all was loaded."""
        load = self._loading.pop(name, None)
        self._load_ended = now
        if load is None or waited_s is None or seconds <= 0:
            return
        tokens, began = load
        self._notices.append(max(0.0, now - began - waited_s - seconds))
        self._notice = sorted(self._notices)[len(self._notices) // 2]
        if self._loads.added >= LOADS_MIN:
            ratio = seconds / max(self._loads.of(1.0, tokens), 1e-9)
            step = -1 if ratio < _FASTER else 1 if ratio > _SLOWER else 0
            self._surprises = self._surprises + step if step * self._surprises >= 0 and step else step
        self._loads.add(tokens.bit_length(), (1.0, float(tokens)), seconds)
        if abs(self._surprises) >= _SURPRISES:
            self._loads.keep_last(_SURPRISES)
            self._surprises = 0

    # What follows from it.

    def queue_s(self, now: float) -> float:
        """Until the loads under way have ended."""
        rest, since = 0.0, None
        for tokens, began in self._loading.values():
            expected = self._loads.of(1.0, tokens)
            if since is None:
                since = max(began, self._load_ended)
                expected = max(0.0, expected - (now - since))
            rest += expected
        return rest

    def compute_s(self, first: int, end: int) -> float:
        return self._steps.of(math.ceil((end - first) / self._chunk), end - first, pairs(first, end))

    def ahead_s(self, ahead: Iterable[tuple[int, int]]) -> float:
        """Of parts of prompts that share steps."""
        tokens = pair_count = 0
        for first, end in ahead:
            if end > first:
                tokens, pair_count = tokens + end - first, pair_count + pairs(first, end)
        return self._steps.of(math.ceil(tokens / self._chunk), tokens, pair_count) if tokens else 0.0

    def choose(self, now: float, local: int, hit: int, end: int, ahead: Iterable[tuple[int, int]] = ()) -> Choice:
        """local < hit <= end, tokens of a prompt of `end`; local and hit are of whole blocks. ahead: (first, end) of
        prompts that others compute before. Changes nothing: took() says that it was done."""
        if not self._known(local, hit):
            return Choice(local, hit, hit)
        queue, before = self.queue_s(now), self.ahead_s(ahead)

        def seconds(until: int) -> float:
            load = queue + self._notice + self._loads.of(1.0, until - local) if until > local else 0.0
            return max(load, before) + self.compute_s(until, end)

        ways = {until: seconds(until) for until in self._candidates(local, hit, before - queue)}
        best = min(ways, key=ways.__getitem__)
        best_s, all_s, none_s = ways[best], ways[hit], ways[local]
        margin = min(MARGIN_MAX, MARGIN_MIN + 2 * (self._loads.error + self._steps.error))
        if best == hit or best_s >= (1 - margin) * all_s:
            return Choice(local, hit, hit, measured=True, seconds=all_s, all_s=all_s, none_s=none_s)
        loading = [until for until in ways if until > local]
        probe = max((until for until in loading if ways[until] <= PROBE_TIMES * best_s),
                    default=min(loading, key=ways.__getitem__))
        every = PROBE_EVERY * max(1.0, (ways[probe] - best_s) / best_s)
        if self._surprises < 0 or self._since + 1 >= every:
            return Choice(local, hit, probe, True, True, every, ways[probe], all_s, none_s)
        return Choice(local, hit, best, False, True, every, best_s, all_s, none_s)

    def took(self, choice: Choice) -> None:
        if choice.probe:
            self._since = 0.0
        elif choice.computes:
            self._since += 1

    def _known(self, local: int, hit: int) -> bool:
        if self._loads.added < LOADS_MIN or self._steps.added < STEPS_MIN:
            return False
        return (
            _REACH * self._loads.most() >= hit - local
            and _REACH * self._steps.most() >= min(hit - local, self._chunk)
            and _REACH * self._steps.furthest() >= hit
            and bool(self._loads.coefficients() and self._steps.coefficients())
        )

    def _candidates(self, local: int, hit: int, free_s: float) -> list[int]:
        """free_s: how long a load may take without anybody waiting for it."""
        fixed, rate = self._loads.of(1.0, 0.0) + self._notice, self._loads.of(0.0, 1.0)
        free = (free_s - fixed) / rate if rate > 0 and free_s > fixed else 0.0
        wanted = [self._block, free] + [(hit - local) * each / POINTS for each in range(1, POINTS)]
        inside = {local + int(each) // self._block * self._block for each in wanted if each < hit - local}
        return [hit, local, *sorted(inside - {hit, local})]

    def rates(self) -> str:
        """For a log."""
        loads, steps = self._loads.coefficients(), self._steps.coefficients()
        if not loads or not steps:
            return f"{len(self._loads)} loads and {len(self._steps)} steps are measured"
        return (
            f"a load {1e3 * (loads[0] + self._notice):.1f} ms and {1e6 * loads[1]:.2f} us a token, computing "
            f"{1e3 * steps[0]:.1f} ms a step and {1e6 * (steps[1] + steps[2] * self._chunk / 2):.2f} us a token"
        )


__all__ = ["Choice", "Fit", "LOADS_MIN", "MARGIN_MAX", "PROBE_EVERY", "PROBE_TIMES", "Planner", "STEPS_MIN", "pairs"]
