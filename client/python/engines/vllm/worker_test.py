"""The connector's half in a worker, against a real daemon: blocks of real paged caches there and back, in order with what
the engine's stream does, and what is said of loads that fail.

On a GPU with KVMANAGER_TEST_DEVICE=cuda: there steps are kernels that are under way while the connector copies, and blocks
are written again as soon as it allows that; with =threads, threads of the CPU are. Needs torch, and vLLM or not (stand_in.py). The daemon keeps these blocks in
host memory: the connector has no caches on a GPU.
"""

from __future__ import annotations

import ctypes
import threading
import time
import unittest
import unittest.mock

import kvmanager
import torch
from engine_testing import DaemonTestCase, metric
from kvmanager_testing import Daemon
from rank import BLOCKS, DEVICE, DEVICE_NAME, HEAD_DIM, HEADS, LAYERS, LAYOUTS, STREAM, Rank, StepPlan
from rank import hashes_of, random_rows
from stand_in import USED  # before what needs vLLM

import kvmanager.vllm.jobs
import kvmanager.vllm.load_ends
import kvmanager.vllm.mapped_load
import kvmanager.vllm.worker
from kvmanager.vllm.measured import LoadMeter, LoadTimes
from kvmanager.vllm.messages import Load
from kvmanager.vllm.retention import Retention, retention_of

DEADLINE_S = 120


def setUpModule() -> None:
    name = torch.cuda.get_device_name(DEVICE) if DEVICE.type == "cuda" else DEVICE_NAME
    print(f"{name}, torch {torch.__version__}, {USED}", flush=True)


class Gate:
    """A job that keeps the link's thread until it is opened."""

    def __init__(self, rank: Rank) -> None:
        self._open, self._entered = threading.Event(), threading.Event()
        assert rank.half.link.submit(self, urgent=True)
        assert self._entered.wait(DEADLINE_S)

    def run(self, session) -> None:
        self._entered.set()
        assert self._open.wait(DEADLINE_S)

    def fail(self, error) -> None:
        raise AssertionError(error)

    def open(self) -> None:
        self._open.set()


class WorkerTest(DaemonTestCase):
    flags = ("--slab-bytes", "32MiB")  # eight: none is cut, so all blocks may be mapped

    def rank(self, daemon: Daemon | None = None, **options) -> Rank:
        rank = Rank((daemon or self.daemon).listen, **options)
        self.addCleanup(rank.close)
        self.assertEqual(DEVICE.type, rank.half.copies.device.type)
        return rank

    def assert_bytes(self, rank: Rank, ids: list[int], rows: torch.Tensor, layers=range(LAYERS), name: object = "") -> None:
        """Blocks of `ids` are `rows`, by layer."""
        for layer in layers:
            got = rank.read(layer, ids)
            off = int((got.view(torch.int16) != rows[layer].view(torch.int16)).sum())
            self.assertEqual(0, off, f"{name} layer {layer}: values that differ, of {got.numel()}")

    def assert_spoilt(self, rank: Rank, ids: list[int]) -> None:
        for layer in range(LAYERS):
            self.assertTrue(bool(rank.read(layer, ids).isnan().all()))

    def there_and_back(self, source: Rank, target: Rank, seed: int, count: int = 9) -> None:
        """Stores blocks of a step that takes a while, spoils them when they are given back, and loads them elsewhere."""
        rows, hashes = random_rows(seed, count, source.block_tokens, source.dtype), hashes_of(seed, count)
        ids, there = list(range(3, 3 + count)), list(range(BLOCKS - 2, BLOCKS - 2 - 2 * count, -2))
        name = f"request {seed}"
        written, end = source.indices(ids), time.monotonic() + DEADLINE_S
        source.store(name, hashes, ids, rows)
        computed = STREAM.here()
        source.finish(name)
        while name not in source.sent:  # as an engine's loop does
            self.assertLess(time.monotonic(), end, "blocks are not given back")
            source.step(StepPlan())
        self.assertTrue(computed(), "blocks are given back before they are computed")
        source.spoil(written)
        source.settle()
        self.assertEqual(set(), target.load(name, hashes, (there,)))
        self.assert_bytes(target, there, rows, name=name)
        self.assert_spoilt(target, [each for each in range(1, BLOCKS) if each not in there])

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
        paged, begun = rank.half.paged, threading.Event()
        saver, method = (paged, "save") if paged is not None else (rank.half.copies, "save_blocks")
        save = getattr(saver, method)

        def told(*arguments):
            fences = save(*arguments)
            begun.set()
            return fences

        setattr(saver, method, told)
        taken = rank.indices(ids)
        with unittest.mock.patch.object(kvmanager.vllm.jobs, "_FIRST_BLOCKS", 8):  # all at once
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

    def test_what_the_daemon_has_is_not_copied_again(self) -> None:
        rank = self.rank()
        rows, hashes, ids = random_rows(16, 8, 16), hashes_of(16, 8), list(range(10, 18))
        rank.store("a", hashes, ids, rows)
        rank.settle()
        copied = []
        save = rank.half.copies.save_blocks
        rank.half.copies.save_blocks = lambda raw, count, *rest: copied.append(count) or save(raw, count, *rest)
        rank.store("b", hashes, ids, rows)
        rank.settle()
        self.assertEqual([], copied)
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

    def test_blocks_that_are_not_there_are_said_by_id(self) -> None:
        rank = self.rank()
        rows, hashes = random_rows(8, 8, 16), hashes_of(8, 8)
        rank.store("a", hashes, list(range(10, 18)), rows)
        rank.finish("a")
        rank.settle()
        # What follows was never stored.
        there = [40, 31, 22, 43, 24, 35, 26, 37, 28, 19]
        self.assertEqual({28, 19}, rank.load("b", hashes + hashes_of(9, 2), (there,)))
        self.assert_bytes(rank, there[:8], rows)
        self.assert_spoilt(rank, [28, 19])
        # Evicted from the sixth block on: somebody holds those before.
        with kvmanager.connect(self.daemon.listen) as client:
            cache = client.open_cache(**rank.half.facts.describe(("", 0)))
            with cache.create_sequence(cache.external_names(hashes[:5])) as held:
                self.assertEqual(5, held.hit_blocks)
                client.purge()
                self.assertEqual({35, 26, 37}, rank.load("c", hashes, (there[:8],)))
                self.assert_bytes(rank, there[:5], rows[:, :5])
                self.assertEqual({35, 26, 37}, rank.load("d", hashes, (there[4:8],), first=4))
            client.purge()
            self.assertEqual(set(there[:8]), rank.load("e", hashes, (there[:8],)))
        self.assertEqual(4, rank.stats["loads_failed"])

    def test_how_long_loads_took_is_said(self) -> None:
        meter = LoadMeter()
        meter.ended("a", began=10.0, now=13.0, whole=True)
        meter.ended("b", began=11.0, now=14.0, whole=False)
        meter.ended("c", began=12.0, now=20.0, whole=True)
        meter.ended("d", began=25.0, now=26.0, whole=True)
        times = meter.take()
        self.assertEqual({"a": (0.0, 3.0), "c": (2.0, 6.0), "d": (0.0, 1.0)}, times.by_request)
        self.assertIsNone(meter.take())
        # Of ranks the slowest counts.
        times = times.aggregate(LoadTimes({"a": (0.0, 2.0), "c": (2.0, 7.0), "e": (0.0, 1.0)}))
        self.assertEqual({"a": (0.0, 3.0), "c": (2.0, 7.0), "d": (0.0, 1.0), "e": (0.0, 1.0)}, times.by_request)
        rank = self.rank()
        hashes = hashes_of(16, 4)
        rank.store("a", hashes, list(range(10, 14)), random_rows(16, 4, 16))
        rank.settle()
        self.assertIsNone(rank.connector.build_connector_worker_meta())
        rank.load("whole", hashes, (list(range(20, 24)),))
        rank.load("not whole", hashes + hashes_of(17, 1), (list(range(30, 35)),))
        self.assertEqual(["whole"], list(rank.connector.build_connector_worker_meta().by_request))

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

    def test_the_daemon_dies_in_the_middle_of_a_load_and_comes_back(self) -> None:
        with Daemon(host_pool="64MiB") as daemon:
            rank = self.rank(daemon, staging_mib=1)
            self.assertLess(3 * rank.half.extent_blocks, 8)
            rows, hashes, there = random_rows(10, 8, 16), hashes_of(10, 8), list(range(30, 38))
            rank.store("a", hashes, list(range(10, 18)), rows)
            rank.settle()
            loader, method = (rank.half.copies, "load_blocks") if rank.half.paged is None else (rank.half.paged, "load")
            load = getattr(loader, method)

            def deadly(*arguments):
                begun = load(*arguments)
                daemon.kill()
                return begun

            # The first extents were read; the calls of others are under way, or not begun.
            setattr(loader, method, deadly)
            lost = rank.load("b", hashes, (there,))
            self.assertLessEqual(set(there[-rank.half.extent_blocks :]), lost)
            setattr(loader, method, load)
            self.assertTrue(rank.half.link.wait(False, DEADLINE_S))
            # While it is away: loads fail, stores are dropped, blocks are given back.
            self.assertEqual({30, 31}, rank.load("c", hashes[:2], ([30, 31],)))
            rank.store("d", hashes, there, rows)
            rank.finish("d")
            rank.settle()
            self.assertIn("d", rank.sent)
            daemon.start()
            self.assertTrue(rank.half.link.wait(True, DEADLINE_S))
            self.assertEqual(set(there), rank.load("e", hashes, (there,)))
            self.there_and_back(rank, self.rank(daemon, layout="2BNHD"), 11)
            self.assertEqual(1, rank.stats["detachments"])

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

    def test_loads_read_the_daemons_memory_and_the_daemon_copies_nothing(self) -> None:
        for codec in ("raw", "hack:k_bits=4,v_bits=3"):
            with self.subTest(codec=codec), Daemon(host_pool="256MiB", flags=self.flags) as daemon:
                source = self.rank(daemon, codec=codec, block_tokens=64)
                target = self.rank(daemon, codec=codec, block_tokens=64, layout="B2NHD")
                rows, hashes = random_rows(20, 9, 64), hashes_of(20 + len(codec), 9)
                source.store("a", hashes, list(range(10, 19)), rows)
                source.settle()
                there = list(range(40, 31, -1))
                self.assertEqual(set(), target.load("b", hashes, (there,)))
                self.assertEqual(0, metric(daemon, 'kvmanager_block_call_bytes_total{call="read"}'))
                self.assertTrue(target.half.maps)
                self.assertGreater(target.stats["loaded_encoded_bytes"], 0)
                if codec == "raw":
                    self.assert_bytes(target, there, rows)

    def test_a_copy_that_has_not_its_checksum_is_loaded_by_nobody(self) -> None:
        daemon = Daemon(host_pool="256MiB", flags=self.flags)
        self.addCleanup(daemon.__exit__)
        rank = self.rank(daemon, block_tokens=64)
        rows, hashes = random_rows(21, 6, 64), hashes_of(21, 6)
        rank.store("a", hashes, list(range(10, 16)), rows)
        rank.settle()
        codec, copy, extents = rank.half.loads.codec, type(rank.half.loads.codec).copy_pages, []
        self.assertEqual(2, rank.half.extent_blocks)

        def flip(self, sources, nbytes, count, to, stream=0):
            runs = copy(self, sources, nbytes, count, to, stream)
            extents.append(ctypes.c_ubyte.from_address(to + 5))
            if len(extents) == 2:  # of the first page of block 2
                extents[1].value ^= 1
            return runs

        if DEVICE.type == "cuda":
            self.skipTest("flips a byte of host memory")
        with unittest.mock.patch.object(type(codec), "copy_pages", flip):
            self.assertEqual({32, 33, 34, 35}, rank.load("b", hashes, ([30, 31, 32, 33, 34, 35],)))
        self.assert_bytes(rank, [30, 31], rows[:, :2])
        # The daemon's own bytes are right: it keeps them.
        self.assertEqual(set(), rank.load("c", hashes, ([30, 31, 32, 33, 34, 35],)))
        self.assert_bytes(rank, [30, 31, 32, 33, 34, 35], rows)

    def test_blocks_of_many_calls_are_on_their_way_at_once(self) -> None:
        """Also where blocks in the middle are gone, or are not what was stored."""
        few = {"MAPPED_PAGES_MAX": 3 * LAYERS, "_FIRST_BLOCKS": 1}  # of a call
        patch = unittest.mock.patch.multiple(kvmanager.vllm.mapped_load, **few)
        for codec in ("raw", "hack:k_bits=4,v_bits=3"):
            with self.subTest(codec=codec), patch, Daemon(host_pool="256MiB", flags=self.flags) as daemon:
                rank = self.rank(daemon, codec=codec, block_tokens=64)
                rows, hashes, there = random_rows(24, 44, 64), hashes_of(24, 44), list(range(3, 47))
                rank.store("a", hashes, there, rows)
                rank.settle()
                self.assertEqual(set(), rank.load("b", hashes, (there[::-1],)))
                if codec == "raw":
                    self.assert_bytes(rank, there[::-1], rows)
                again = [rank.read(layer, there[::-1]) for layer in range(LAYERS)]
                self.assertEqual(set(), rank.load("c", hashes, (there,)))
                self.assert_bytes(rank, there, torch.stack(again))
                self.assertEqual(0, metric(daemon, 'kvmanager_block_call_bytes_total{call="read"}'))
                # Others' names from block 23 on.
                lost = rank.load("d", hashes[:23] + hashes_of(25, 21), (there,))
                self.assertEqual(set(there[23:]), lost)
                self.assert_bytes(rank, there[:23], torch.stack(again)[:, :23])
                way = kvmanager.vllm.mapped_load.AtOnce if rank.half.paged else kvmanager.vllm.mapped_load.ByExtents
                corrupt, calls = way.corrupt, []

                def spoilt(self, mapped, token):
                    calls.append(mapped.blocks)
                    return 1 if len(calls) == 5 else corrupt(self, mapped, token)

                with unittest.mock.patch.object(way, "corrupt", spoilt):
                    self.assertEqual(set(there[sum((1, 2, 3, 3)) + 1 :]), rank.load("e", hashes, (there,)))
                # The daemon has compared its own bytes: it keeps them.
                self.assertEqual(set(), rank.load("f", hashes, (there,)))

    def test_a_step_that_computes_nothing_waits_a_moment_for_loads(self) -> None:
        rank = self.rank()
        rows, hashes = random_rows(26, 5, 16), hashes_of(26, 5)
        rank.store("a", hashes, list(range(3, 8)), rows)
        rank.settle()
        waits = {"_WAIT_S": DEADLINE_S, "_WAIT_AGAIN_S": DEADLINE_S}  # the former behind a step that computed
        with unittest.mock.patch.multiple(kvmanager.vllm.load_ends, **waits):
            for name, wanted in (("b", hashes), ("c", hashes_of(27, 5))):
                load = Load(name, "", wanted, 0, ([10, 11, 12, 13, 14],))
                rank.step(StepPlan(loads=[load], computes=False))
                self.assertIn(name, rank.received)
            rank.step(StepPlan(computes=False))  # none is under way
        self.assertEqual({10, 11, 12, 13, 14}, rank.errors)
        self.assert_bytes(rank, [10, 11, 12, 13, 14], rows)

    def test_a_daemon_that_maps_nothing_copies(self) -> None:
        with Daemon(flags=("--map-blocks", "off", *self.flags), host_pool="256MiB") as daemon:
            rank = self.rank(daemon)
            rows, hashes = random_rows(22, 9, 16), hashes_of(22, 9)
            rank.store("a", hashes, list(range(10, 19)), rows)
            rank.settle()
            self.assertEqual(set(), rank.load("b", hashes, (list(range(30, 39)),)))
            self.assert_bytes(rank, list(range(30, 39)), rows)
            self.assertFalse(rank.half.maps)

    def test_blocks_that_may_not_be_mapped_are_copied_among_the_others(self) -> None:
        with Daemon(host_pool="64MiB") as daemon:  # slabs of 2 MiB, of which some are cut
            rank = self.rank(daemon, block_tokens=64, staging_mib=2, map_gib=0)
            rows, hashes = random_rows(23, 40, 64), hashes_of(23, 40)
            rank.store("a", hashes, list(range(2, 42)), rows)
            rank.settle()
            copied = metric(daemon, 'kvmanager_block_call_bytes_total{call="read"}')
            rank.spoil(rank.indices(range(2, 42)))
            self.assertEqual(set(), rank.load("b", hashes, (list(range(2, 42)),)))
            self.assert_bytes(rank, list(range(2, 42)), rows)
            copied = metric(daemon, 'kvmanager_block_call_bytes_total{call="read"}') - copied
            self.assertGreater(copied, 0)
            self.assertLess(copied, rank.stats["loaded_bytes"])

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

        flags = (*WorkerTest.flags, "--devices", "0", "--device-pool-bytes", "256MiB")

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
