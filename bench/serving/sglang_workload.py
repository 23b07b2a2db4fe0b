"""What is asked of SGLang servers, in which order. Times, hits and token ids go into a Record.

Prompts are token ids that a seed draws, asked for one at a time. Each is asked for twice in a row, so a "resident" request,
whose prompt is in the engine's own cache, follows each of another way: cold, storage (after a flush of the engine's caches),
disk (the same, and the storage's files have left the page cache), restart (of a server that was started anew).
"""

from __future__ import annotations

import dataclasses
import sys
import time
from typing import Callable, Protocol

import processes
from workload import prompts

sys.path += [str(processes.ROOT / "client/python/engines" / name) for name in ("vllm_serve", "sglang_serve")]

from sglang_server import PAGE_TOKENS, Answer  # noqa: E402

COLD, STORAGE, DISK, RESTART, RESIDENT = "cold", "storage", "disk", "restart", "resident"
FOUND = (STORAGE, DISK, RESTART)  # ways whose prompts the storage has
_POLL_S = 0.1


class Asked(Protocol):
    """A server."""

    def generate(self, prompt: list[int], tokens: int) -> Answer: ...
    def forget(self) -> None:
        """Empties the engine's own caches."""


@dataclasses.dataclass(frozen=True)
class Stored:
    """How a storage is looked at. count: its pages, and its bytes or anything else that changes while it is written.
    leave_page_cache: its files, if it has some."""

    count: Callable[[], tuple[int, int]]
    leave_page_cache: Callable[[], None] | None = None


@dataclasses.dataclass(frozen=True)
class Scale:
    """lengths: of prompts in tokens, prompts: how many of each. passes: over all prompts, each behind a flush. engine_cache:
    tokens of the engine's own cache on its device; the host has room for host_ratio times as many."""

    lengths: tuple[int, ...]
    prompts: tuple[int, ...]
    passes: int
    pool_bytes: int
    engine_cache: int
    host_ratio: int = 2
    output: int = 8

    @property
    def context(self) -> int:
        """SGLang's --context-length."""
        return max(self.lengths) + 2048

    @property
    def stored_tokens(self) -> int:
        """Of all prompts, and of one of each length that warms up."""
        return sum(length * (count + 1) for length, count in zip(self.lengths, self.prompts))

    def check(self, token_bytes: int) -> None:
        """ValueError: what is asked for is not measured. token_bytes: of K and V, raw."""
        if len(self.lengths) != len(self.prompts):
            raise ValueError(f"--prompts has {len(self.prompts)} numbers, must have one, or one for each of "
                             f"{len(self.lengths)} --lengths")
        if min(self.prompts) < 1 or self.passes < 1:
            raise ValueError(f"--prompts is {min(self.prompts)} and --passes {self.passes}, must be at least 1")
        for length in self.lengths:
            if length < 1 or length % PAGE_TOKENS or self.lengths.count(length) > 1:
                raise ValueError(f"--lengths has {length}, must be different multiples of a page's {PAGE_TOKENS} tokens")
        if not 1 <= self.output <= PAGE_TOKENS:
            raise ValueError(f"--output is {self.output}, must be 1..{PAGE_TOKENS}")
        if self.context > self.engine_cache:
            raise ValueError(f"--lengths has {max(self.lengths)}, must be at most {self.engine_cache - 2048} here")
        needed = int(1.1 * self.stored_tokens * token_bytes)
        if needed > self.pool_bytes:
            raise ValueError(f"--pool-gib is {self.pool_bytes / (1 << 30):.2f}, must be at least {needed / (1 << 30):.2f}: "
                             f"{self.stored_tokens} tokens are stored raw")


@dataclasses.dataclass
class Record:
    """requests, stored: as results.json has them. say: progress. end: monotonic seconds, after which nothing is asked."""

    say: Callable[[str], None] = lambda line: None
    end: float = float("inf")
    requests: list[dict] = dataclasses.field(default_factory=list)
    stored: list[dict] = dataclasses.field(default_factory=list)

    def ask(self, server: Asked, way: str, behind: str, cycle: int, pair: int, prompt: list[int], output: int) -> None:
        """behind: the way of the pass. cycle: which pass of this way; pair: which prompt of its length."""
        if time.monotonic() > self.end:
            raise TimeoutError("--seconds are over")
        answer = server.generate(prompt, output)
        self.requests.append({
            "way": way, "behind": behind, "length": len(prompt), "cycle": cycle, "pair": pair, "first_s": answer.first_s,
            "total_s": answer.total_s, "cached": answer.cached_tokens, "found": answer.found_tokens, "ids": answer.ids,
        })


def settle(count: Callable[[], tuple[int, int]], pages: int, still_s: float, give_up_s: float, end: float = float("inf"),
           now: Callable[[], float] = time.monotonic, pause: Callable[[float], None] = time.sleep) -> dict:
    """Waits until `pages` are stored and nothing changes for still_s, or nothing changes for give_up_s, or it is `end`."""
    began = still = now()
    before: tuple[int, int] | None = None
    while True:
        found = count()
        if found != before:
            before, still = found, now()
        waited = now() - still
        if waited >= give_up_s or (found[0] >= pages and waited >= still_s) or now() >= end:
            return {"pages": found[0], "expected": pages, "seconds": still - began}
        pause(_POLL_S)


class Work:
    """What is asked of the servers of one configuration. stored: None where there is no storage: then passes behind a flush
    compute, and their requests are cold."""

    def __init__(self, scale: Scale, vocabulary: int, record: Record, stored: Stored | None, still_s: float = 1.0,
                 give_up_s: float = 60.0) -> None:
        self._scale, self._record, self._stored = scale, record, stored
        self._still_s, self._give_up_s = still_s, give_up_s
        self._prompts = {length: prompts(length, count, length, vocabulary)
                         for length, count in zip(scale.lengths, scale.prompts)}
        self._warm_up = {length: prompts(length + 1, 1, length, vocabulary)[0] for length in scale.lengths}
        self._pages = 0  # that must be stored by now

    def first(self, server: Asked) -> None:
        """All ways but restart, one length behind the other."""
        for length in self._scale.lengths:
            self._warm(server, length)
            self._pass(server, COLD, 0, length)
            self._settle(length, len(self._prompts[length]))
            for cycle in range(self._scale.passes):
                server.forget()
                self._pass(server, *((STORAGE, cycle) if self._stored else (COLD, cycle + 1)), length)
            if self._stored and self._stored.leave_page_cache:
                server.forget()
                self._stored.leave_page_cache()
                self._pass(server, DISK, 0, length)

    def restarted(self, server: Asked) -> None:
        """A pass over everything, of a new server with the same storage."""
        for length in self._scale.lengths:
            server.generate(self._warm_up[length], self._scale.output)
            self._pass(server, RESTART, 0, length)

    def _warm(self, server: Asked, length: int) -> None:
        """Computes a prompt, and finds it again, so that kernels are compiled and memory is touched before anything counts."""
        server.generate(self._warm_up[length], self._scale.output)
        self._settle(length, 1, counts=False)
        server.forget()
        server.generate(self._warm_up[length], self._scale.output)

    def _settle(self, length: int, count: int, counts: bool = True) -> None:
        self._pages += count * (length // PAGE_TOKENS)
        if self._stored is None:
            return
        found = settle(self._stored.count, self._pages, self._still_s, self._give_up_s, self._record.end)
        if counts:
            self._record.stored.append({"length": length, **found})
            self._record.say(f"{length} tokens: {found['pages']} of {found['expected']} pages stored, {found['seconds']:.1f} s "
                             "behind the last prompt")

    def _pass(self, server: Asked, way: str, cycle: int, length: int) -> None:
        began = time.monotonic()
        for pair, prompt in enumerate(self._prompts[length]):
            for each in (way, RESIDENT):
                self._record.ask(server, each, way, cycle, pair, prompt, self._scale.output)
        self._record.say(f"{length} tokens, {way}, pass {cycle + 1}: {time.monotonic() - began:.1f} s")
