"""What is asked of one engine, in which order. Times, hits and counters go into a Record.

Prompts are token ids that a seed draws. Prefixes of a length do not fit the engine's own cache together, so each is gone from it
when its turn comes again. A warm request (a known prefix, a new suffix) is followed by a resident one: the same prefix again,
which is in the engine's own cache by then. The two ways so alternate, and their difference is what bringing K and V back costs.
"""

from __future__ import annotations

import asyncio
import dataclasses
import random
import time
from typing import AsyncContextManager, Awaitable, Callable, Protocol

from counters import change
from scale import BLOCK_TOKENS, Scale

LENGTHS = ("short", "long")
AT_ONCE = 4


@dataclasses.dataclass(frozen=True)
class Answer:
    """cached: tokens of the prompt that were not computed, from wherever."""

    first_s: float
    total_s: float
    cached: int
    output: int


class Asked(Protocol):
    """An engine."""

    async def ask(self, prompt: list[int], output: int) -> Answer: ...
    def turn(self) -> AsyncContextManager[None]:
        """Within it no other engine of the benchmark's works."""
    async def forget(self) -> None:
        """Empties the engine's own cache."""
    async def settle(self) -> None:
        """Waits until nothing is being stored."""
    async def call(self, method: str, *arguments) -> object:
        """Of its worker's extension (kept_blocks.py)."""
    async def disk_blocks(self) -> float:
        """That the daemon has read from its disk so far."""
    def counted(self) -> dict[str, float]: ...


@dataclasses.dataclass
class Record:
    """requests, batches, counted: one dictionary per request, batch and phase, as results.json has them. say: progress."""

    say: Callable[[str], None] = lambda line: None
    requests: list[dict] = dataclasses.field(default_factory=list)
    batches: list[dict] = dataclasses.field(default_factory=list)
    counted: list[dict] = dataclasses.field(default_factory=list)

    def add(self, way: str, cycle: int, pair: int, prompt: list[int], answer: Answer, **more: float) -> None:
        """pair: which prefix, so that requests of two ways can be told to belong together."""
        self.requests.append({"way": way, "cycle": cycle, "pair": pair, "prompt": len(prompt), **dataclasses.asdict(answer), **more})


def prompts(seed: int, count: int, length: int, vocabulary: int) -> list[list[int]]:
    source = random.Random(seed)
    return [[source.randrange(100, vocabulary - 1000) for _ in range(length)] for _ in range(count)]


class Prompts:
    """Known prefixes, with suffixes that are never the same."""

    def __init__(self, scale: Scale, vocabulary: int) -> None:
        self.prefixes = {"short": prompts(1, scale.short_prefixes, scale.short, vocabulary),
                         "long": prompts(2, scale.long_prefixes, scale.long, vocabulary)}
        self._suffixes = random.Random(3)
        self._length, self._vocabulary = scale.suffix, vocabulary

    def suffixed(self, prefix: list[int]) -> list[int]:
        return prefix + [self._suffixes.randrange(100, self._vocabulary - 1000) for _ in range(self._length)]


async def _phase(engine: Asked, record: Record, name: str, work: Awaitable[None]) -> None:
    before, began = engine.counted(), time.monotonic()
    await work
    record.counted.append({"phase": name, "wall_s": time.monotonic() - began, **change(before, engine.counted())})
    record.say(f"{name}: {time.monotonic() - began:.1f} s")


async def _batch(engine: Asked, record: Record, way: str, cycle: int, asked: list[list[int]], output: int, at_once: int) -> None:
    free = asyncio.Semaphore(at_once)

    async def one(pair: int, prompt: list[int]) -> Answer:
        async with free:
            answer = await engine.ask(prompt, output)
        record.add(way, cycle, pair, prompt, answer)
        return answer

    began = time.monotonic()
    answers = await asyncio.gather(*(one(pair, prompt) for pair, prompt in enumerate(asked)))
    record.batches.append({"way": way, "cycle": cycle, "wall_s": time.monotonic() - began, "requests": len(asked),
                           "prompt": sum(map(len, asked)), "output": sum(answer.output for answer in answers)})


async def _warm_up(engine: Asked, scale: Scale, vocabulary: int) -> None:
    """Kernels are compiled, and memory is touched, before anything counts."""
    for length in LENGTHS:
        async with engine.turn():
            await engine.ask(prompts(4, 1, getattr(scale, length), vocabulary)[0], scale.output)
            await engine.settle()


async def unique(engine: Asked, record: Record, scale: Scale, vocabulary: int) -> None:
    """Prompts that never return, in batches. What a batch stores is stored when its turn ends."""
    await _warm_up(engine, scale, vocabulary)
    await _unique_batches(engine, record, scale, vocabulary)


async def _unique_batches(engine: Asked, record: Record, scale: Scale, vocabulary: int) -> None:
    for cycle in range(scale.unique_batches):
        asked = prompts(100 + cycle, scale.unique_prompts, scale.unique, vocabulary)
        work = _batch(engine, record, "unique", cycle, asked, scale.unique_output, scale.unique_at_once)
        async with engine.turn():
            await _phase(engine, record, "unique", work)
            await engine.settle()


async def latency(engine: Asked, record: Record, scale: Scale, vocabulary: int) -> None:
    """Cold prompts, then cycles of warm and resident ones and of warm ones four at once, then unique ones. Nothing of note is
    being stored when a turn ends."""
    known = Prompts(scale, vocabulary)

    async def cold(length: str) -> None:
        for pair, prefix in enumerate(known.prefixes[length]):
            prompt = known.suffixed(prefix)
            record.add(f"{length} cold", 0, pair, prompt, await engine.ask(prompt, scale.output))

    async def warm(length: str, cycle: int) -> None:
        for pair, prefix in enumerate(known.prefixes[length]):
            async with engine.turn():
                for way in ("warm", "resident"):
                    prompt = known.suffixed(prefix)
                    record.add(f"{length} {way}", cycle, pair, prompt, await engine.ask(prompt, scale.output))

    await _warm_up(engine, scale, vocabulary)
    for length in LENGTHS:
        async with engine.turn():
            await _phase(engine, record, f"{length} cold", cold(length))
            await engine.settle()
    for cycle in range(scale.cycles):
        for length in LENGTHS:
            await _phase(engine, record, f"{length} warm", warm(length, cycle))
        asked = [known.suffixed(prefix) for prefix in known.prefixes["short"]]
        way = "short at once"
        async with engine.turn():
            await _phase(engine, record, way, _batch(engine, record, way, cycle, asked, scale.output, AT_ONCE))
    await _unique_batches(engine, record, scale, vocabulary)


def filling(tokens: int, compression_max: float, raw_tokens: int) -> int:
    """Prompts of so many tokens that a pool which would hold `raw_tokens` raw has no room for."""
    return int(compression_max * raw_tokens * 1.25) // tokens + 2


async def capacity(engine: Asked, record: Record, scale: Scale, vocabulary: int, compression_max: float, raw_tokens: int) -> None:
    """Fills a pool that would hold `raw_tokens` raw with more than it can, and asks for all prompts again from the newest on:
    "found" has what is not computed again. The engine's own cache is emptied before, so none of it is found there."""
    count = filling(scale.short, compression_max, raw_tokens)
    asked = prompts(5, count, scale.short, vocabulary)
    for pair, prompt in enumerate(asked):
        record.add("fill", 0, pair, prompt, await engine.ask(prompt, 1))
    await engine.settle()
    await engine.forget()
    for pair in reversed(range(count)):
        answer = await engine.ask(asked[pair], 1)
        if not answer.cached:
            break
        record.add("found", 0, pair, asked[pair], answer)
    record.say(f"of {count} prompts {sum(each['way'] == 'found' for each in record.requests)} are found")


async def disk(engine: Asked, record: Record, scale: Scale, vocabulary: int, compression_max: float, raw_tokens: int) -> None:
    """Known prefixes that the daemon's disk alone has, since as many other prompts as fill its pool came behind them. Each is
    asked for from there, again from the pool, which has it then, and again from the engine's own cache."""
    known = Prompts(scale, vocabulary)
    for length in LENGTHS:  # kernels are compiled, and memory is touched, before anything counts
        await engine.ask(prompts(4, 1, getattr(scale, length), vocabulary)[0], scale.output)
    for length in LENGTHS:
        for pair, prefix in enumerate(known.prefixes[length]):
            prompt = known.suffixed(prefix)
            record.add(f"{length} computed", 0, pair, prompt, await engine.ask(prompt, scale.output))
    await engine.settle()
    for prompt in prompts(6, filling(scale.short, compression_max, raw_tokens), scale.short, vocabulary):
        await engine.ask(prompt, 1)
    await engine.settle()
    record.say("the pool is filled with others")
    for length in LENGTHS:
        for pair, prefix in enumerate(known.prefixes[length]):
            for way in ("from disk", "from pool", "from own"):
                if way != "from own":
                    await engine.forget()
                prompt, before = known.suffixed(prefix), await engine.disk_blocks()
                answer = await engine.ask(prompt, scale.output)
                record.add(f"{length} {way}", 0, pair, prompt, answer, disk_blocks=await engine.disk_blocks() - before)


async def compare(engine: Asked, record: Record, scale: Scale, vocabulary: int) -> list[dict]:
    """Compares blocks as they were computed with the same blocks as they are loaded, in the engine's cache.

    Between the two the engine forgets them and its whole cache is overwritten. One result a prompt, as KeptBlocks.compare_blocks
    gives it. overwritten_equal: blocks that were equal before they were loaded."""
    known = Prompts(scale, vocabulary)
    asked = [known.suffixed(prefix) for length, count in (("short", scale.compare_short), ("long", scale.compare_long))
             for prefix in known.prefixes[length][:count]]
    await engine.call("watch_blocks")
    for pair, prompt in enumerate(asked):
        record.add("computed", 0, pair, prompt, await engine.ask(prompt, 1))
        await engine.settle()
        await engine.call("keep_blocks", pair, (len(prompt) - 1) // BLOCK_TOKENS)
    await engine.forget()
    await engine.call("overwrite_blocks")
    results = []
    for pair, prompt in enumerate(asked):
        overwritten = await engine.call("compare_kept_blocks", pair, (len(prompt) - 1) // BLOCK_TOKENS)
        answer = await engine.ask(prompt, 1)
        record.add("loaded", 0, pair, prompt, answer)
        loaded = await engine.call("compare_blocks", pair, answer.cached // BLOCK_TOKENS)
        results.append({"prompt": len(prompt), "blocks": (len(prompt) - 1) // BLOCK_TOKENS,
                        "loaded": answer.cached // BLOCK_TOKENS, "overwritten_equal": overwritten["equal"], **loaded})
        record.say(f"prompt {pair}: {results[-1]}")
    return results
