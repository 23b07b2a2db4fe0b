"""Stores of the connector's half in a worker, and blocks there and back, against a real daemon: of real paged caches, in order with
what the engine's stream does. On which devices: worker_case.py."""

from __future__ import annotations

import threading
import unittest
import unittest.mock

import kvmanager
import torch
from engine_testing import metric
from kvmanager_testing import Daemon
from rank import DEVICE, HEAD_DIM, HEADS, LAYERS, LAYOUTS, STREAM, Rank, StepPlan, hashes_of, random_rows
from worker_case import DEADLINE_S, DIRECT_FLAGS, Gate, WorkerTestCase
from worker_case import say_where as setUpModule  # noqa: F401

import kvmanager.vllm.store_job
import kvmanager.vllm.worker
from kvmanager._lib import StoreSignals
from kvmanager.paged_blocks import PagedStore
from kvmanager.vllm.retention import Retention, retention_of


class WorkerTest(WorkerTestCase):
    def test_equal_bytes_between_all_layouts(self) -> None:
        for tokens in (16, 64):
            ranks = {layout: self.rank(layout=layout, block_tokens=tokens) for layout in LAYOUTS}
            names = list(LAYOUTS)
            for number, layout in enumerate(names):
                to = names[number - 1]
                with self.subTest(tokens=tokens, layout=layout, to=to):
                    fresh = self.rank(layout=to, block_tokens=tokens)
                    self.there_and_back(ranks[layout], fresh, 16 * number + tokens // 16)
                    self.assertEqual(9 * tokens, fresh.stats["loaded_tokens"])

    def test_equal_bytes_layer_by_layer_and_in_bfloat16(self) -> None:
        source = self.rank(layerwise_saves=True, dtype=torch.bfloat16, block_tokens=64)
        self.there_and_back(source, self.rank(dtype=torch.bfloat16, block_tokens=64, layout="2BNHD"), 1)

    def test_staging_is_pinned_for_a_gpu(self) -> None:
        self.assertEqual(DEVICE.type == "cuda", self.rank().half.stores.pinned)

    def test_many_blocks_take_turns_in_little_staging(self) -> None:
        source = self.rank(staging_mib=1, block_tokens=64)
        target = self.rank(staging_mib=1, block_tokens=64, layout="B2NHD")
        self.assertEqual(1, target.half.extent_blocks)
        rows, hashes = random_rows(2, 20, 64), hashes_of(2, 20)
        source.store("a", hashes, list(range(5, 25)), rows)
        source.settle()
        self.assertEqual(20, self.published())
        self.assertEqual(20 * 64, source.stats["stored_tokens"])
        self.assertNotIn("stores_dropped", source.stats)
        there = list(range(25, 45))
        self.assertEqual(set(), target.load("a", hashes, (there,)))
        self.assert_bytes(target, there, rows)

    def test_blocks_that_are_taken_while_they_are_copied(self) -> None:
        """Preemption: their next owner's step is behind the copies that were begun."""
        rank = self.rank()
        rows, hashes, ids = random_rows(3, 8, 16), hashes_of(3, 8), list(range(10, 18))
        copier = type(rank.half.copies)
        begun, save, run = threading.Event(), copier.save_blocks, PagedStore.run

        def told(copies, *arguments):
            fences = save(copies, *arguments)
            begun.set()
            return fences

        def whole(store, cache, signals):
            if begun.is_set():
                return run(store, cache, signals)
            state = run(store, cache, StoreSignals(urgent=1))  # it returns when the first are begun
            begun.set()
            return state

        for of, method, instead in ((copier, "save_blocks", told), (PagedStore, "run", whole)):
            patched = unittest.mock.patch.object(of, method, instead)
            patched.start()
            self.addCleanup(patched.stop)
        taken = rank.indices(ids)
        with unittest.mock.patch.object(kvmanager.vllm.store_job, "_FIRST_BLOCKS", 8):  # all at once
            rank.store("a", hashes, ids, rows)
            self.assertTrue(begun.wait(DEADLINE_S))
        rank.step(StepPlan(preempted=True), lambda layer: rank.spoil(taken))
        rank.settle()
        self.assertEqual(8, self.published())
        self.assertEqual(set(), rank.load("b", hashes, (list(range(20, 28)),)))
        self.assert_bytes(rank, list(range(20, 28)), rows)

    def test_blocks_that_are_taken_before_they_are_copied(self) -> None:
        """Then nothing is stored: not what their next owner wrote."""
        rank = self.rank()
        rows, hashes, ids = random_rows(4, 8, 16), hashes_of(4, 8), list(range(10, 18))
        gate, taken = Gate(rank), rank.indices(ids)
        rank.store("a", hashes, ids, rows)
        rank.step(StepPlan(preempted=True), lambda layer: rank.spoil(taken))
        gate.open()
        rank.settle()
        self.assertEqual(0, self.published())
        self.assertEqual(1, rank.stats["stores_dropped"])
        self.assertEqual(8 * 16, rank.stats["unstored_preempted_tokens"])

    def test_a_finish_that_asks_for_nothing_is_no_job(self) -> None:
        """A store takes large parts while a job waits behind it."""
        rank = self.rank()
        for retention, jobs in ((None, 0), (Retention(10, 0, 0), 1)):
            with self.subTest(jobs), unittest.mock.patch.object(rank.half.link, "submit", return_value=True) as submit:
                rank.finish("a", retention)
                self.assertEqual(jobs, submit.call_count)

    def test_what_is_urgent_does_not_wait_for_the_step_whose_blocks_are_stored(self) -> None:
        if DEVICE.type != "cuda":
            self.skipTest("a store on a CPU begins when its blocks are there")
        rank = self.rank()
        rows, hashes, ids = random_rows(30, 8, 16), hashes_of(30, 8), list(range(10, 18))
        rank.store("a", hashes, ids, rows)
        computed = STREAM.here()
        gate = Gate(rank)
        self.assertFalse(computed())
        gate.open()
        rank.settle()
        self.assertEqual(8, self.published())
        self.assertEqual(set(), rank.load("b", hashes, (list(range(20, 28)),)))
        self.assert_bytes(rank, list(range(20, 28)), rows)

    def test_what_the_daemon_has_is_not_copied_again(self) -> None:
        rank = self.rank()
        rows, hashes, ids = random_rows(16, 8, 16), hashes_of(16, 8), list(range(10, 18))
        rank.store("a", hashes, ids, rows)
        rank.settle()
        given = metric(self.daemon, 'kvmanager_block_call_bytes_total{call="write"}')
        self.assertGreater(given, 0)
        rank.store("b", hashes, ids, rows)
        rank.settle()
        self.assertEqual(given, metric(self.daemon, 'kvmanager_block_call_bytes_total{call="write"}'))
        self.assertEqual(8 * 16, rank.stats["stored_tokens"])
        self.assertEqual(8 * 16, rank.stats["stores_present"])
        self.assertEqual(8, self.published())

    def test_a_daemon_without_room_is_counted_and_served_without(self) -> None:
        with Daemon(host_pool="2MiB") as daemon:
            rank = self.rank(daemon, block_tokens=64)
            with kvmanager.connect(daemon.listen) as client:  # holds all of its memory
                cache = client.open_cache(**rank.half.facts.describe(("", 0)))
                held = cache.create_sequence()
                k = torch.zeros(128, HEADS, HEAD_DIM, dtype=torch.float16)
                try:
                    for at in range(0, 1280, 128):
                        for layer in range(LAYERS):
                            cache.step(layer, [(held, at, 128)], k, k)
                except kvmanager.ResourceExhaustedError:
                    pass
                rank.store("a", hashes_of(17, 4), [1, 2, 3, 4], random_rows(17, 4, 64))
                rank.settle()
                self.assertEqual(4 * 64, rank.stats["unstored_full_tokens"])
                held.close()
            rank.store("b", hashes_of(18, 2), [1, 2], random_rows(18, 2, 64))
            rank.settle()
            self.assertEqual(2 * 64, rank.stats["stored_tokens"])

    def test_what_cannot_be_kept_is_said_and_ends_a_start_that_requires_it(self) -> None:
        with self.assertRaises(RuntimeError) as raised:
            Rank(self.daemon.listen, codec="hack:k_bits=9", block_tokens=64, required=True, deadline_ms=2000)
        self.assertIn("kvmanager: OFF, because", str(raised.exception))
        self.assertIn("k_bits", str(raised.exception))

    def test_blocks_are_kept_until_they_are_copied(self) -> None:
        rank = self.rank()
        rows, hashes, ids = random_rows(5, 8, 16), hashes_of(5, 8), list(range(10, 18))
        gate = Gate(rank)
        rank.store("a", hashes, ids, rows)
        rank.finish("a")
        rank.step(StepPlan())
        self.assertEqual(set(), rank.sent)
        gate.open()
        rank.settle()
        self.assertEqual({"a"}, rank.sent)
        self.assertEqual(8, self.published())

    def test_a_prefix_grows_and_is_loaded_behind_what_is_there(self) -> None:
        source, target = self.rank(), self.rank(layout="B2HND")
        rows, hashes = random_rows(6, 12, 16), hashes_of(6, 12)
        source.store("a", hashes[:5], [4, 9, 2, 7, 30], rows[:, :5])
        source.settle()
        # Another request with the same beginning stores what follows.
        source.store("b", hashes, [11, 12, 13, 14, 15, 21, 22, 23, 24, 25, 26, 27], rows)
        source.settle()
        self.assertEqual(12, self.published())
        self.assertEqual(5 * 16, source.stats["stores_present"])
        there = list(range(31, 40))
        self.assertEqual(set(), target.load("c", hashes, (there,), first=3))
        self.assert_bytes(target, there, rows[:, 3:])

    def test_windows_take_their_blocks_back(self) -> None:
        """A group of layers with a sliding window: its blocks may be written in the next step, and a load leaves out those
        before the window."""
        windows = (None, 64)
        source, target = self.rank(windows=windows), self.rank(windows=windows, layout="2BHND")
        rows, hashes, ids = random_rows(7, 8, 16), hashes_of(7, 8), list(range(10, 18))
        taken = source.indices(ids)
        source.store("a", hashes, ids, rows)
        source.step(StepPlan(), lambda layer: source.spoil(taken))
        source.settle()
        self.assertEqual(8, self.published())
        full, window = list(range(20, 28)), [0, 0, 0, 0, 31, 32, 33, 34]
        self.assertEqual(set(), target.load("b", hashes, (full, window)))
        self.assert_bytes(target, full, rows, layers=(0, 2))
        self.assert_bytes(target, window[4:], rows[:, 4:], layers=(1,))
        self.assert_spoilt(target, [1, 2, 3, 40, 41])

    def test_blocks_of_a_finished_request_are_retained(self) -> None:
        rank = self.rank()
        rows, hashes = random_rows(9, 6, 16), hashes_of(9, 6)
        for name, retention in (("a", Retention(80, 60000)), ("b", None), ("c", Retention(0, 0, first=4))):
            rank.store(name, hashes, list(range(10, 16)), rows)
            rank.finish(name, retention)
        rank.settle()
        with kvmanager.connect(self.daemon.listen) as client:
            cache = client.open_cache(**rank.half.facts.describe(("", 0)))
            explained = client.explain(cache.external_names(hashes), cache.description.id)
        self.assertEqual([80] * 4 + [0] * 2, [block["priority"] for block in explained["blocks"]])

    def test_what_requests_may_ask_of_retention(self) -> None:
        priority, ttl_s = "kvmanager_retention_priority", "kvmanager_retention_ttl_s"
        self.assertIsNone(retention_of({"do_remote_decode": True}, 3))
        self.assertEqual(Retention(80, 0), retention_of({priority: 80}, 3))
        self.assertEqual(Retention(100, 1500), retention_of({priority: 100, ttl_s: 1.5}, 3))
        self.assertEqual(Retention(80, 1), retention_of({priority: 80, ttl_s: 1e-9}, 3))
        # What the request found is shared with others: it goes no earlier for this one.
        self.assertEqual(Retention(0, 0, first=3), retention_of({priority: 0}, 3))
        for wrong in ({priority: -1}, {priority: 101}, {priority: True}, {priority: "80"}, {priority: 80.0}, {ttl_s: 5},
                      {priority: [80]}, {priority: 10**30}, {priority: 80, ttl_s: 0}, {priority: 80, ttl_s: -1},
                      {priority: 80, ttl_s: float("nan")}, {priority: 80, ttl_s: float("inf")},
                      {priority: 80, ttl_s: "1"}, {priority: 80, ttl_s: True}, {priority: 80, ttl_s: 10**400}):
            with self.subTest(wrong), self.assertRaisesRegex(ValueError, "must be"):
                retention_of(wrong, 3)

    def test_the_daemon_dies_with_stores_under_way(self) -> None:
        with Daemon(host_pool="64MiB") as daemon:
            rank = self.rank(daemon)
            rows, hashes = random_rows(12, 8, 16), hashes_of(12, 8)
            gate = Gate(rank)
            for number in range(3):
                rank.store(f"r{number}", hashes, list(range(10, 18)), rows)
                rank.finish(f"r{number}")
            daemon.kill()
            gate.open()
            self.assertTrue(rank.half.link.wait(False, DEADLINE_S))
            rank.settle()
            self.assertEqual({"r0", "r1", "r2"}, rank.sent)
            self.assertEqual(3, rank.stats["stores_dropped"])

    def test_encoded_blocks_are_what_the_codec_makes_of_the_same_rows(self) -> None:
        """K3V2, K4V3, and a policy that leaves layer 1 raw: the error is that of rows that went by way of Cache alone."""
        for codec in ("hack:k_bits=3,v_bits=2", "hack:k_bits=4,v_bits=3", "hack:k_bits=2,v_bits=2;1=raw"):
            with self.subTest(codec=codec):
                source = self.rank(codec=codec, block_tokens=64)
                target = self.rank(codec=codec, block_tokens=64, layout="2BNHD")
                rows, hashes = random_rows(13, 8, 64), hashes_of(13, 8)
                source.store("a", hashes, list(range(10, 18)), rows)
                source.settle()
                there = list(range(40, 32, -1))
                self.assertEqual(set(), target.load("b", hashes, (there,)))
                expected = self._by_cache(source, rows)
                self.assert_bytes(target, there, expected)
                errors = [self._errors(torch.stack([target.read(i, there) for i in range(LAYERS)]), rows)]
                errors.append(self._errors(expected, rows))
                self.assertEqual(errors[1], errors[0])
                self.assertGreater(min(errors[0]), 0)
                if "1=raw" in codec:
                    self.assert_bytes(target, there, rows, layers=(1,))
                print(f"{codec}: relative error of K {errors[0][0]:.4f}, of V {errors[0][1]:.4f}", flush=True)

    def test_pages_that_the_codec_declines_are_stored_raw_in_pieces_that_fit(self) -> None:
        """As on a GPU, where what is written to the daemon at once has room for encoded blocks."""
        with unittest.mock.patch.object(kvmanager.vllm.worker.WorkerHalf, "_encodes_apart", lambda half, codec: True):
            source = self.rank(codec="hack:k_bits=2,v_bits=2", block_tokens=64, dtype=torch.bfloat16)
        target = self.rank(codec="hack:k_bits=2,v_bits=2", block_tokens=64, dtype=torch.bfloat16)
        rows, hashes, written = random_rows(29, 23, 64, torch.bfloat16), hashes_of(29, 23), []
        declined = [3, 4, 5, 8, 9, 10, 11, 12, 17]
        rows[1:, declined] = 1e38
        write = kvmanager.Cache.write_blocks_async

        def noted(cache, names, raw, pages, first, checksums):
            written.append((first, len(names), pages.nbytes))
            return write(cache, names, raw, pages, first, checksums)

        with unittest.mock.patch.object(kvmanager.Cache, "write_blocks_async", noted):
            source.store("a", hashes, list(range(10, 33)), rows)
            source.settle()
        self.assertEqual(23 * 64, source.stats["stored_tokens"])
        self.assertEqual(list(range(23)), [each for first, count, _ in written for each in range(first, first + count)])
        extents, fitting = source.half.stores, -(-23 // source.half.stores.extent_blocks)
        self.assertEqual(2, extents.stagings)
        self.assertGreater(len(written), fitting)
        self.assertLessEqual(max(nbytes for *_, nbytes in written), extents.range_bytes)
        there = list(range(40, 17, -1))
        self.assertEqual(set(), target.load("b", hashes, (there,)))
        stayed = [there[each] for each in declined]
        for layer in (1, 2):
            self.assert_bytes(target, stayed, rows[:, declined], layers=(layer,))
        others = [each for each in range(1, 23) if each not in declined]  # block 0 is a sink
        got = torch.stack([target.read(layer, [there[each] for each in others]) for layer in range(LAYERS)])
        error = float((got - rows[:, others]).float().square().mean().sqrt())
        self.assertTrue(0 < error < 0.7, error)
        self.assertEqual(2, sum(1 for _ in iter(extents.take, None)))  # all were given back

    def _by_cache(self, rank: Rank, rows: torch.Tensor) -> torch.Tensor:
        """The rows as the package's Cache gives them back, of a cache of its own, without the connector."""
        layers, blocks, tokens = rows.shape[:3]
        host = rows.cpu().view(layers, blocks * tokens, HEADS, 2, HEAD_DIM)
        back = torch.empty_like(host)
        with kvmanager.connect(self.daemon.listen) as client:
            cache = client.open_cache(**{**rank.half.facts.describe(("", 0)), "revision": "by Cache alone"})
            names = cache.block_names(list(range(blocks * tokens)))
            with cache.create_sequence() as sequence:
                for layer in range(layers):
                    k, v = (host[layer, :, :, side].contiguous() for side in range(2))
                    cache.step(layer, [(sequence, 0, blocks * tokens)], k, v)
                sequence.publish(names)
            with cache.create_sequence(names) as found:
                self.assertEqual(blocks, found.hit_blocks)
                for layer in range(layers):
                    k, v = (torch.empty(blocks * tokens, HEADS, HEAD_DIM, dtype=rows.dtype) for _ in range(2))
                    result = cache.read(layer, [(found, 0, blocks * tokens)], k, v)
                    self.assertEqual(blocks * tokens, sum(result))
                    back[layer] = torch.stack([k, v], dim=2)
        return back.view(rows.shape).to(DEVICE)

    def _errors(self, got: torch.Tensor, rows: torch.Tensor) -> list[float]:
        """Of K and V: the L2 norm of what differs, over that of the rows."""
        got, rows = (each.cpu().contiguous().double() for each in (got, rows))
        sides = ((got[..., side, :], rows[..., side, :]) for side in range(2))
        return [float((now - was).norm() / was.norm()) for now, was in sides]


if DEVICE.type == "cuda":

    class DirectTest(WorkerTest):
        """The same with a daemon that has the worker's GPU, whose copy engines bring what is stored to its place."""

        flags = (*WorkerTest.flags, *DIRECT_FLAGS)

        def test_staging_is_pinned_for_a_gpu(self) -> None:
            half = self.rank().half
            self.assertTrue(half.stores.direct)
            self.assertFalse(half.stores.pinned)
            self.assertTrue(half.loads.pinned)

        def test_a_setting_has_stores_go_by_way_of_host_memory(self) -> None:
            self.assertFalse(self.rank(direct=False).half.stores.direct)

else:

    class DirectTest(unittest.TestCase):
        @unittest.skip("no GPU here: KVMANAGER_TEST_DEVICE=cuda")
        def test_stores_by_the_daemons_gpu(self) -> None:
            pass


if __name__ == "__main__":
    unittest.main()
