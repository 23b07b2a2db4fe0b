"""Coroutines: many calls at once, cancellation, and ends."""

from __future__ import annotations

import asyncio
import gc
import os
import threading
import unittest

import kvmanager as kv
import numpy
from kvmanager import aio
from kvmanager_testing import Daemon
from reference import MODEL, Prompt, attention

THREAD = "kvmanager"


class Coroutines(unittest.IsolatedAsyncioTestCase):
    async def asyncSetUp(self) -> None:
        self.daemon = self.enterContext(Daemon())
        self.client = await self.enterAsyncContext(await aio.connect(self.daemon.listen, name="aio"))
        self.cache = await self.client.open_cache(**MODEL)

    async def append(self, sequence, prompt) -> None:
        for layer in range(2):
            await self.cache.step(layer, [(sequence, 0, prompt.tokens)], prompt.k[layer], prompt.v[layer])

    async def test_many_calls_are_under_way_at_once(self) -> None:
        prompts = [Prompt(seed, 20 + seed) for seed in range(40)]
        sequences = await self.cache.create_sequences([None] * 40)

        async def serve(prompt, sequence) -> None:
            await self.append(sequence, prompt)
            out = numpy.zeros_like(prompt.q[-1:])
            for layer in range(2):
                await self.cache.step(layer, [(sequence, prompt.tokens - 1, 1)], q=prompt.q[-1:], out=out)
                want, _ = attention(prompt.k[layer], prompt.v[layer], prompt.q[-1:], prompt.tokens - 1)
                numpy.testing.assert_allclose(out, want, atol=2e-3)
            fork = await sequence.fork()
            await fork.crop(10)
            self.assertEqual((await fork.info()).tokens, 10)
            await fork.close()
            await sequence.close()

        await asyncio.gather(*(serve(p, s) for p, s in zip(prompts, sequences)))
        self.assertEqual((await self.client.status()).leases, 0)

    async def test_prefixes_arenas_and_reading(self) -> None:
        prompt = Prompt(1, 130)
        names = self.cache.block_names(prompt.ids)
        async with await self.cache.create_sequence(names) as sequence:
            await self.append(sequence, prompt)
            self.assertEqual(await sequence.publish(names), (2, 0, 0))
        self.assertEqual(await self.cache.match([names], prefetch=True), [(2, "none", 2)])
        self.assertEqual(await self.cache.prefetch(names), (2, "none", 2))
        self.assertEqual(await self.client.prefetch(self.cache.description.id, names), (2, "none", 2))
        self.assertEqual((await self.cache.retain(names, 80)).blocks, 2)
        self.assertEqual((await self.client.retain(self.cache.description.id, names, 50)).blocks, 2)
        again = await self.cache.create_sequence(names)
        self.assertEqual((again.hit_blocks, again.miss_reason), (2, "none"))
        arena = await self.client.create_arena(1 << 16)
        k = arena.tensor((128, 2, 64), "float16")
        v = numpy.zeros((128, 2, 64), numpy.float16)
        self.assertEqual(sum(await self.cache.read(0, [(again, 0, 128)], k, v)), 128)
        numpy.testing.assert_array_equal(k.numpy(), prompt.k[0][:128])
        numpy.testing.assert_array_equal(v, prompt.v[0][:128])
        self.assertEqual(await self.client.purge(), 0)  # pinned
        self.assertIsNone(await self.cache.output_factors(0))
        self.assertEqual((await self.cache.refresh()).published_blocks, 2)

    async def test_hand_offs(self) -> None:
        with Daemon() as there:
            async with await aio.connect(there.listen) as receiver:
                far = await receiver.open_cache(**MODEL)
                prompt = Prompt(2, 70)
                sequence = await self.cache.create_sequence()
                hand_off = await sequence.begin_hand_off(there.peer, 70)
                claim = asyncio.ensure_future(far.claim(hand_off.ticket))
                await self.append(sequence, prompt)
                sent = await hand_off.finish(b"blob")
                claimed = await claim
                self.assertEqual((claimed.tokens, claimed.blob, sent.peer), (70, b"blob", hand_off.peer))
                self.assertEqual((await claimed.sequence.info()).tokens, 70)
                again = await sequence.hand_off(there.peer)
                self.assertEqual((await far.claim(again.ticket)).tokens, 70)
                self.assertEqual(len(await self.client.peers()), 1)

    async def test_errors_are_those_of_blocking_calls(self) -> None:
        with self.assertRaises(kv.InvalidArgumentError):
            await self.client.open_cache(**{**MODEL, "layers": 0})
        with self.assertRaises(kv.NotFoundError):
            await self.cache.claim(b"none such")
        with self.assertRaises(kv.UnavailableError):
            await aio.connect("unix:/tmp/kv_nobody_is_there", connect_ms=20)

    async def test_a_task_that_is_cancelled_cancels_its_call(self) -> None:
        with Daemon() as there:
            sequence = await self.cache.create_sequence()
            async with await aio.connect(there.listen) as receiver:
                far = await receiver.open_cache(**MODEL)
                hand_off = await sequence.begin_hand_off(there.peer, 70)
                claim = asyncio.ensure_future(far.claim(hand_off.ticket))
                await receiver.ping()
                claim.cancel()
                with self.assertRaises(asyncio.CancelledError):
                    await claim
                await receiver.ping()
                await self.append(sequence, Prompt(3, 70))
                await hand_off.finish()
                self.assertEqual((await far.claim(hand_off.ticket)).tokens, 70)  # the call that was cancelled took nothing

    async def test_what_is_let_go_is_given_back(self) -> None:
        sequences = await self.cache.create_sequences([None] * 10)
        self.assertEqual((await self.client.status()).leases, 10)
        del sequences
        gc.collect()
        while (await self.client.status()).leases:
            pass

    async def test_clients_that_are_let_go_end_with_their_last_handle(self) -> None:
        with Daemon() as there:
            async with await aio.connect(there.listen) as watcher:
                client = await aio.connect(there.listen)
                sequence = await (await client.open_cache(**MODEL)).create_sequence()
                dropped = [await aio.connect(there.listen) for _ in range(3)]
                waiting = asyncio.ensure_future(dropped[0].ping())
                del client, dropped
                await waiting
                gc.collect()
                while (await watcher.status()).connections > 2:
                    pass
                self.assertEqual((await sequence.info()).tokens, 0)  # it keeps its client
                del sequence
                gc.collect()
                while (await watcher.status()).connections > 1:
                    pass

    async def test_a_closed_client_refuses_and_its_thread_ends(self) -> None:
        with Daemon() as there:
            client = await aio.connect(there.listen)
            cache = await client.open_cache(**MODEL)
            waiting = asyncio.ensure_future(cache.claim(b"x"))
            await client.close()
            await client.close()
            with self.assertRaises(kv.Error):
                await waiting
            with self.assertRaises(kv.FailedPreconditionError):
                await cache.create_sequence()
            await self.client.close()
            for thread in threading.enumerate():
                if thread.name == THREAD:
                    await asyncio.to_thread(thread.join)

    async def test_a_daemon_that_goes_and_comes_back(self) -> None:
        sequence = await self.cache.create_sequence()
        self.daemon.kill()
        with self.assertRaises(kv.UnavailableError):
            await sequence.info()
        self.assertFalse(await self.client.connected())
        self.daemon.start()
        await self.client.reconnect()
        cache = await self.client.open_cache(**MODEL)
        await cache.create_sequence()


class Forks(unittest.TestCase):
    def test_a_child_is_told_so_and_may_connect_itself(self) -> None:
        daemon = self.enterContext(Daemon())
        loop = asyncio.new_event_loop()
        self.addCleanup(loop.close)
        client = loop.run_until_complete(aio.connect(daemon.listen))

        async def work() -> None:
            for call in (client.ping, client.close):
                try:
                    await call()
                    raise AssertionError("it was answered")
                except kv.FailedPreconditionError as error:
                    assert "connect a client of its own" in str(error), error
            async with await aio.connect(daemon.listen) as own:
                await own.ping()

        pid = os.fork()
        if pid == 0:
            try:
                asyncio.new_event_loop().run_until_complete(work())
                os._exit(0)
            except BaseException as error:
                print(f"child: {error!r}", flush=True)
                os._exit(1)
        self.assertEqual(os.waitpid(pid, 0)[1], 0)
        loop.run_until_complete(client.ping())
        loop.run_until_complete(client.close())


if __name__ == "__main__":
    unittest.main()
