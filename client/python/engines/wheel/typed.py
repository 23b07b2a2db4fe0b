"""A program that a type checker reads, and nobody runs: what users of the wheel see of its types."""

from __future__ import annotations

from typing import assert_type

import kvmanager as kv
from kvmanager import aio


def blocking(token_ids: list[int]) -> int:
    with kv.connect("unix:/nowhere", name="typed") as client:
        assert_type(client, kv.Client)
        cache = client.open_cache(model="m", layers=1, kv_heads=1, query_heads=1, head_dim=64)
        names = cache.block_names(token_ids)
        assert_type(names[:3], kv.BlockNames)
        assert_type(names[0], bytes)
        assert_type(cache.match([names], prefetch=True), list[kv.PrefixMatch])
        assert_type(cache.prefetch(names), kv.PrefixMatch)
        assert_type(cache.create_sequences([names, None]), list[kv.Sequence])
        arena = client.create_arena(4096)
        k = arena.tensor((1, 1, 64), "float16")
        with cache.create_sequence(names) as sequence:
            assert_type(sequence, kv.Sequence)
            assert_type(cache.step(0, [(sequence, 0, 1)], k, k), kv.StepResult)
            assert_type(cache.step(0, kv.Entries([(7, 0, 1)]), k, k), kv.StepResult)
            assert_type(cache.step_async(0, [(sequence, 1, 1)], k, k).wait(), kv.StepResult)
            assert_type(cache.read(0, [(sequence, 0, 1)], k, k), kv.ReadResult)
            assert_type(sequence.fork().publish(names), kv.PublishOutcome)
            sent = sequence.hand_off("there:1")
            assert_type(cache.claim(sent.ticket).sequence, kv.Sequence)
            assert_type(sequence.begin_hand_off("there:1", 2).finish(), kv.HandOffOutcome)
        try:
            client.ping()
        except kv.UnavailableError as error:
            assert_type(error.field, str)
        return cache.create_sequence().hit_blocks


async def coroutines() -> None:
    async with await aio.connect("unix:/nowhere") as client:
        assert_type(client, aio.Client)
        cache = await client.open_cache(model="m", layers=1, kv_heads=1, query_heads=1, head_dim=64)
        assert_type(cache, aio.Cache)
        sequence = await cache.create_sequence()
        assert_type(sequence, aio.Sequence)
        assert_type(await cache.create_sequences([None]), list[aio.Sequence])
        assert_type(await cache.step(0, [(sequence, 0, 1)]), kv.StepResult)
        assert_type(await client.status(), kv.DaemonDescription)
