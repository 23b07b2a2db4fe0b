"""Loads of the connector's half in a worker, against a real daemon: out of its memory or copied by it, what is said of those that
fail, and of how long they take. On which devices: worker_case.py."""

from __future__ import annotations

import ctypes
import unittest
import unittest.mock

import kvmanager
import torch
from engine_testing import metric
from kvmanager_testing import Daemon
from rank import DEVICE, LAYERS, StepPlan, hashes_of, random_rows
from worker_case import DEADLINE_S, DIRECT_FLAGS, WorkerTestCase
from worker_case import say_where as setUpModule  # noqa: F401

import kvmanager.vllm.load_ends
import kvmanager.vllm.mapped_load
from kvmanager.vllm.measured import LoadMeter, LoadTimes
from kvmanager.vllm.messages import Load


def _mappings(process: object) -> list[tuple[int, int, str, int, str]]:
    """Begin, end, rights, offset, device and inode."""
    found = []
    with open(f"/proc/{process}/maps", encoding="utf-8") as lines:
        for line in lines:
            place, rights, offset, device, inode, *_ = line.split()
            begin, end = (int(each, 16) for each in place.split("-"))
            found.append((begin, end, rights, int(offset, 16), f"{device} {inode}"))
    return found


def flip_bit(daemon: Daemon, address: int) -> None:
    """Of the daemon's memory, which this process has mapped for reading at `address`."""
    offset, file = next((at + address - begin, of) for begin, end, _, at, of in _mappings("self") if begin <= address < end)
    pid = daemon.process.pid
    place = next(begin + offset - at for begin, end, rights, at, of in _mappings(pid)
                 if of == file and rights.startswith("rw") and at <= offset < at + end - begin)
    with open(f"/proc/{pid}/mem", "r+b", buffering=0) as memory:
        memory.seek(place)
        byte = memory.read(1)[0]
        memory.seek(place)
        memory.write(bytes([byte ^ 1]))


class LoadsTest(WorkerTestCase):
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

    def test_each_tenant_finds_its_own_blocks(self) -> None:
        """Of requests with a salt, and of all that come behind a reset."""
        rank = self.rank()
        hashes, there = hashes_of(28, 5), list(range(30, 35))
        rows = {tenant: random_rows(40 + number, 5, 16) for number, tenant in enumerate(("", "a", "b"))}
        for number, tenant in enumerate(rows):
            rank.store(f"store {tenant}", hashes, list(range(3 + 5 * number, 8 + 5 * number)), rows[tenant], tenant=tenant)
        rank.settle()
        for tenant in (*rows, "a", ""):
            self.assertEqual(set(), rank.load(f"load {tenant}", hashes, (there,), tenant=tenant))
            self.assert_bytes(rank, there, rows[tenant], name=tenant)
        self.assertEqual(set(there), rank.load("load c", hashes, (there,), tenant="c"))

    def test_a_bit_that_flips_in_the_daemons_memory_is_loaded_by_nobody(self) -> None:
        daemon = Daemon(host_pool="256MiB", flags=self.flags)
        self.addCleanup(daemon.__exit__)
        for codec in ("raw", "hack:k_bits=4,v_bits=3"):
            with self.subTest(codec=codec):
                rank = self.rank(daemon, codec=codec, block_tokens=64)
                rows, hashes, there = random_rows(29, 20, 64), hashes_of(29, 20), list(range(20, 40))
                rank.store("a", hashes, list(range(3, 23))[:20], rows)
                rank.settle()
                self.assertEqual(set(), rank.load("b", hashes, (there,)))
                with kvmanager.connect(daemon.listen) as client:
                    cache = client.open_cache(**rank.half.facts.describe(("", 0)))
                    with cache.map_blocks_async(cache.external_names(hashes)).wait() as mapped:
                        self.assertEqual(20, mapped.blocks)
                        flip_bit(daemon, mapped.addresses[13 * LAYERS + 1] + 100)
                self.assertEqual(set(there[13:]), rank.load("c", hashes, (there,)))
                if codec == "raw":
                    self.assert_bytes(rank, there[:13], rows[:, :13])
                # The daemon has compared its own bytes, and has forgotten the block.
                with kvmanager.connect(daemon.listen) as client:
                    cache = client.open_cache(**rank.half.facts.describe(("", 0)))
                    self.assertEqual(13, cache.match([cache.external_names(hashes)])[0].hit_blocks)

    def test_how_long_loads_took_is_said(self) -> None:
        meter = LoadMeter()
        loads = {"a": (10.0, 13.0), "b": (11.0, 14.0), "c": (12.0, 20.0), "d": (25.0, 26.0)}
        times = LoadTimes({name: meter.ended(began, now) for name, (began, now) in loads.items()})
        self.assertEqual({"a": (0.0, 3.0), "b": (2.0, 1.0), "c": (2.0, 6.0), "d": (0.0, 1.0)}, times.by_request)
        # Of ranks the slowest counts.
        times = times.aggregate(LoadTimes({"a": (0.0, 2.0), "c": (2.0, 7.0), "e": (0.0, 1.0)}))
        slowest = {"a": (0.0, 3.0), "b": (2.0, 1.0), "c": (2.0, 7.0), "d": (0.0, 1.0), "e": (0.0, 1.0)}
        self.assertEqual(slowest, times.by_request)
        rank = self.rank()
        hashes = hashes_of(16, 4)
        rank.store("a", hashes, list(range(10, 14)), random_rows(16, 4, 16))
        rank.settle()
        self.assertIsNone(rank.connector.build_connector_worker_meta())
        rank.load("whole", hashes, (list(range(20, 24)),))
        rank.load("not whole", hashes + hashes_of(17, 1), (list(range(30, 35)),))
        self.assertEqual(["whole"], list(rank.connector.build_connector_worker_meta().by_request))

    def test_the_daemon_dies_in_the_middle_of_a_load_and_comes_back(self) -> None:
        with Daemon(host_pool="64MiB") as daemon:
            rank = self.rank(daemon, staging_mib=1)
            self.assertLess(3 * rank.half.extent_blocks, 8)
            rows, hashes, there = random_rows(10, 8, 16), hashes_of(10, 8), list(range(30, 38))
            rank.store("a", hashes, list(range(10, 18)), rows)
            rank.settle()
            loader, method = (rank.half.copies, "load_blocks") if rank.half.paged is None else (rank.half.paged, "bring")
            load = getattr(loader, method)

            def deadly(*arguments):
                if rank.half.paged is not None:  # it is a whole load, of which nothing is left then
                    daemon.kill()
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
                if rank.half.paged is not None:  # then client/block_load_test.cc has this
                    continue
                way, calls = kvmanager.vllm.mapped_load.ByExtents, []
                bring = way.bring

                def spoilt(self, mapped, ids):
                    calls.append(mapped.blocks)
                    corrupt = bring(self, mapped, ids)
                    return 1 if len(calls) == 5 else corrupt

                with unittest.mock.patch.object(way, "bring", spoilt):
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


if DEVICE.type == "cuda":

    class DirectTest(LoadsTest):
        """The same of blocks that the daemon's GPU copied."""

        flags = (*LoadsTest.flags, *DIRECT_FLAGS)


if __name__ == "__main__":
    unittest.main()
