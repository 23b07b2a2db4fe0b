"""Loads of a worker that are under way, or have ended: when the engine's thread waits for them, and when it says their ends.

A request whose load has ended is in the engine's next step, and a step takes about as long with some short rests of prompts as with
one. So where the engine computes nothing, an end is said together with those of other loads that end soon. A request that misses a
step may wait for two, since vLLM plans a step ahead: so soon means within the time of two. Loads run one behind the other, so the
next one's end follows from its blocks. Prompts that come meanwhile are seen between two steps alone: only the last of a load's time
is waited for within one.

vLLM's scheduler is told of a step's ends when the next step was begun. Where scheduler and worker are in one process, its half of the
connector takes ends as soon as it is told of any step, so that such a request is in a step one earlier.
"""

from __future__ import annotations

import collections
import math
import threading
import time
import weakref
from typing import NamedTuple

_WAIT_S = 0.002  # of a step without anything to compute: the engine sleeps a millisecond before the next
_WAIT_AGAIN_S = 0.008  # the same behind another such step, where a load ends soon: no output of an earlier one waits meanwhile
_SOON_S = 0.003
_TOGETHER_S = 0.05  # at most, that an end waits for others'
_TOGETHER_STEPS = 2  # the same in steps
_STEPS = 16  # of which the shortest counts


class End(NamedTuple):
    """missing: block ids of group 0 that were not loaded; None: all was. times: as LoadTimes has them, of one that was loaded whole."""

    missing: set[int] | None
    times: tuple[float, float] | None


class LoadEnds:
    """begin() and end() are for any thread, wait() and take() for the engine's, each once a step, in this order. take_whole() is for the
    scheduler's, which is the same or that of another process, where nothing begins."""

    def __init__(self) -> None:
        self.config: object = None  # show()'s
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._under_way: dict[str, tuple[float, int]] = {}  # by request, in their order: when each began, its blocks
        self._ended: dict[str, End] = {}  # requests that were not said
        self._heard = False  # the scheduler's half takes those that are whole
        self._left: set[str] = set()  # for it, in the step before
        self._first_s = math.inf  # when the first of them ended
        self._last_s = -math.inf  # when any did
        self._block_s = 0.0  # that a block of the load before took
        self._idle = False  # the step computes nothing
        self._computes_since: float | None = None  # when the step before began, if it computed
        self._periods_s: collections.deque[float] = collections.deque(maxlen=_STEPS)  # from such a step to the next

    def begin(self, request: str, blocks: int) -> None:
        with self._lock:
            self._under_way[request] = time.monotonic(), max(1, blocks)

    def end(self, request: str, missing: set[int] | None, times: tuple[float, float] | None = None) -> None:
        """As End has them."""
        with self._lock:
            now = time.monotonic()
            began, blocks = self._under_way.pop(request, (now, 1))  # an earlier one of that name had none left
            if missing is None:
                self._block_s = (now - max(began, self._last_s)) / blocks
            self._last_s = now
            if not self._ended:
                self._first_s = now
            self._ended[request] = End(missing, times)
            self._changed.notify()

    def wait(self, computes: bool) -> None:
        """A step begins. Where it computes nothing: a moment, until there is something to say."""
        now = time.monotonic()
        if self._computes_since is not None:
            self._periods_s.append(now - self._computes_since)
        self._computes_since = now if computes else None
        idle, self._idle = self._idle, not computes
        if computes:
            return
        with self._lock:
            soon = idle and self._under_way and abs(self._next_end_s() - now) < _SOON_S  # not one that is late
            until = now + (_WAIT_AGAIN_S if soon else _WAIT_S)
            while self._under_way:
                left = min(until, self._say_s()) - time.monotonic()
                if left <= 0:
                    return
                self._changed.wait(left)

    def take(self) -> dict[str, End]:
        """A step ends: requests whose loads have ended and were not said before. Those that take_whole() may take are left to it for a
        step."""
        with self._lock:
            if not self._may_say():
                return {}
            left = {name for name, end in self._ended.items() if end.missing is None and name not in self._left} if self._heard else set()
            taken = {name: end for name, end in self._ended.items() if name not in left}
            self._ended = {name: self._ended[name] for name in left}
            self._left = left
            return taken

    def take_whole(self) -> dict[str, tuple[float, float] | None]:
        """The scheduler hears of a step: requests of which all was loaded that were not said before, and their times."""
        with self._lock:
            self._heard = True
            if not self._may_say():
                return {}
            whole = {name: end.times for name, end in self._ended.items() if end.missing is None}
            for name in whole:
                del self._ended[name]
            return whole

    @property
    def pending(self) -> bool:
        """Some are under way, or were not said."""
        with self._lock:
            return bool(self._under_way or self._ended)

    def _may_say(self) -> bool:
        return not (self._idle and self._under_way and time.monotonic() < self._say_s())

    def _say_s(self) -> float:
        """When what has ended is to be said, while others are under way."""
        if not self._ended:
            return math.inf
        until = self._first_s + min(_TOGETHER_S, _TOGETHER_STEPS * min(self._periods_s, default=0.0))
        return until if self._next_end_s() <= until else self._first_s

    def _next_end_s(self) -> float:
        """When the oldest load that is under way may end, as the one before took."""
        began, blocks = next(iter(self._under_way.values()))
        return max(began, self._last_s) + blocks * self._block_s


_of_engines: weakref.WeakValueDictionary[int, LoadEnds] = weakref.WeakValueDictionary()


def show(config: object, ends: LoadEnds) -> None:
    """To the scheduler's half of the engine that was made with `config`, if it is in this process."""
    ends.config = config  # so that no other has its address
    _of_engines[id(config)] = ends


def shown(config: object) -> LoadEnds | None:
    return _of_engines.get(id(config))


__all__ = ["End", "LoadEnds", "show", "shown"]
