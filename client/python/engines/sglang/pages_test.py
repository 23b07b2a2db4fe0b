"""Pages of a KV pool on a device through SGLang's storage backend, against a real daemon: to host pages, on to the daemon,
and back into other places.

On a GPU with KVMANAGER_TEST_DEVICE=cuda: then host pages are pinned. Needs torch, and SGLang or not: without it, stand-ins
for its base class and its configuration are put into sys.modules, which do what SGLang's do as far as this needs them. The
host pool is a stand-in in both cases, with the shapes of SGLang's (sglang_test.py takes SGLang's own, on the CPU).
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import sys
import threading
import time
import types
import unittest
from unittest import mock

import kvmanager
import torch
from engine_testing import DaemonTestCase
from kvmanager_testing import Daemon

if importlib.util.find_spec("sglang") is None:
    USED = "stand-ins for SGLang's types"

    class HiCacheStorage:
        def register_mem_pool_host(self, mem_pool_host) -> None:
            self.mem_pool_host = mem_pool_host

    _storage = types.ModuleType("sglang.srt.mem_cache.hicache_storage")
    _storage.HiCacheStorage = HiCacheStorage
    _storage.HiCacheStorageConfig = _storage.HiCacheStorageExtraInfo = types.SimpleNamespace
    for _name in ("sglang", "sglang.srt", "sglang.srt.mem_cache"):
        sys.modules[_name] = types.ModuleType(_name)
    sys.modules["sglang.srt.mem_cache"].hicache_storage = _storage
    sys.modules[_storage.__name__] = _storage
else:
    USED = "SGLang's own types"
    if not hasattr(torch.ops.torchvision, "nms"):  # torchvision, which SGLang imports, has its operators with CUDA alone
        _library = torch.library.Library("torchvision", "DEF")
        for _name in ("nms", "qnms"):
            _library.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

from kvmanager.page_codec import LOADED, MISSING, UNMAPPED, PageCodec
from kvmanager.pool_pages import PoolPages
from kvmanager.sglang import HiCacheStorageConfig, KvManagerHiCache

LAYERS, HEADS, HEAD_DIM, PAGE, PAGES = 3, 2, 128, 64, 24
DEADLINE_S = 120
DEVICE = torch.device(os.environ.get("KVMANAGER_TEST_DEVICE", "cpu"))
# A host pool's shape, and that as [K, V][layers][pages][tokens of a page][heads][head_dim].
LAYOUTS = {
    "layer_first": (
        (2, LAYERS, PAGES * PAGE, HEADS, HEAD_DIM),
        lambda pool: pool.unflatten(2, (PAGES, PAGE)),
    ),
    "page_first": (
        (2, PAGES * PAGE, LAYERS, HEADS, HEAD_DIM),
        lambda pool: pool.unflatten(1, (PAGES, PAGE)).permute(0, 3, 1, 2, 4, 5),
    ),
    "page_first_direct": (
        (2, PAGES, LAYERS, PAGE, HEADS, HEAD_DIM),
        lambda pool: pool.permute(0, 2, 1, 3, 4, 5),
    ),
    "page_head": (
        (2, PAGES, HEADS, PAGE, LAYERS, HEAD_DIM),
        lambda pool: pool.permute(0, 4, 1, 3, 2, 5),
    ),
}


def setUpModule() -> None:
    name = torch.cuda.get_device_name(DEVICE) if DEVICE.type == "cuda" else "CPU"
    print(f"{name}, torch {torch.__version__}, {USED}", flush=True)


def keys_of(seed: int, count: int) -> list[str]:
    return [hashlib.sha256(bytes([seed, page])).hexdigest() for page in range(count)]


def indices(pages: list[int]) -> torch.Tensor:
    return torch.cat([torch.arange(each * PAGE, (each + 1) * PAGE) for each in pages])


class Engine:
    """A pool on the device, a host pool, and the backend, as SGLang's controller makes it. A context manager."""

    def __init__(self, address: str, layout: str = "layer_first", seed: int = 0, **extra) -> None:
        shape = (2, LAYERS, PAGES, PAGE, HEADS, HEAD_DIM)
        generator = torch.Generator().manual_seed(seed)
        filled = torch.randn(shape, generator=generator) if seed else torch.zeros(shape)
        self.pool = filled.to(torch.float16).to(DEVICE)
        made, seen = LAYOUTS[layout]
        buffer = torch.zeros(made, dtype=torch.float16, pin_memory=DEVICE.type == "cuda")
        self.host = seen(buffer)
        ranks = {"tp_rank": 0, "tp_size": 1, "pp_rank": 0, "pp_size": 1, "attn_cp_rank": 0, "attn_cp_size": 1}
        config = HiCacheStorageConfig(
            **ranks,
            is_mla_model=False,
            enable_storage_metrics=False,
            is_page_first_layout=layout != "layer_first",
            model_name="model",
            extra_config={"address": address, **extra},
        )
        self.backend = KvManagerHiCache(config, {})
        self.backend.register_mem_pool_host(
            types.SimpleNamespace(
                layout=layout,
                page_size=PAGE,
                layer_num=LAYERS,
                head_num=HEADS,
                head_dim=HEAD_DIM,
                kv_buffer=buffer,
            )
        )
        if self.backend._link is None or not self.backend._link.wait(True, DEADLINE_S):
            raise AssertionError("the backend does not attach")

    def store(self, keys: list[str], pages: list[int]) -> list[bool]:
        """Device to host, and on to the daemon when that is done."""
        for page in pages:
            self.host[:, :, page].copy_(self.pool[:, :, page])
        return self.backend.batch_set_v1(keys, indices(pages))

    def load(self, keys: list[str], pages: list[int]) -> list[bool]:
        """From the daemon to the host, and on to the device."""
        done = self.backend.batch_get_v1(keys, indices(pages))
        for page, there in zip(pages, done):
            if there:
                self.pool[:, :, page].copy_(self.host[:, :, page])
        return done

    def pages(self) -> PoolPages:
        """Of the connection."""
        return self.backend._call(lambda session: self.backend._of(session, "kv"), None)

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.backend.close()


def load_mapped(
    test: unittest.TestCase, engine: Engine, stored: list[str], was: list[int], keys: list[str], now: list[int]
) -> list[int]:
    """Stores pages, and loads keys; results of load_rows. engine.before: the pool then."""
    test.assertEqual([True] * len(stored), engine.store(stored, was))
    engine.before = engine.pool.cpu().clone()
    load_rows, found = PageCodec.load_rows, []

    def noted(*arguments) -> bytes:
        found[:] = load_rows(*arguments)
        return bytes(found)

    deadline = time.monotonic() + DEADLINE_S
    with mock.patch.object(PageCodec, "load_rows", noted):
        engine.load(keys, now)
        while UNMAPPED in found and time.monotonic() < deadline:  # until they are encoded
            time.sleep(0.01)
            engine.load(keys, now)
    return found


def flip_byte(address: int, pid: int) -> None:
    """In another process's memory, which has the file mapped that this one has at this address."""

    def mappings(of: str) -> list[tuple[int, int, int, str]]:
        found = []
        with open(f"/proc/{of}/maps", encoding="ascii") as lines:
            for line in lines:
                span, _, offset, device, inode = line.split()[:5]
                begin, end = (int(each, 16) for each in span.split("-"))
                found.append((begin, end, int(offset, 16), f"{device} {inode}"))
        return found

    (file, place), = [(each[3], each[2] + address - each[0]) for each in mappings("self") if each[0] <= address < each[1]]
    theirs = [each[0] + place - each[2] for each in mappings(str(pid))
              if each[3] == file and 0 <= place - each[2] < each[1] - each[0]]
    with open(f"/proc/{pid}/mem", "r+b", buffering=0) as memory:
        memory.seek(theirs[0])
        (byte,) = memory.read(1)
        memory.seek(theirs[0])
        memory.write(bytes([byte ^ 1]))


class PagesTest(DaemonTestCase):
    def assert_pages(self, expected: torch.Tensor, was: list[int], got: torch.Tensor, now: list[int]) -> None:
        off = (expected[:, :, was].view(torch.int16) != got[:, :, now].view(torch.int16)).sum()
        self.assertEqual(0, int(off), "values that differ")

    def test_equal_bytes_between_all_layouts(self) -> None:
        for number, layout in enumerate(LAYOUTS):
            to = list(LAYOUTS)[number - 1]
            with self.subTest(layout=layout, to=to):
                keys, was, now = keys_of(number, 8), [7, 1, 22, 3, 9, 20, 11, 12], [2, 4, 6, 8, 10, 5, 3, 1]
                with Engine(self.daemon.listen, layout, seed=number + 1) as source:
                    self.assertEqual([True] * 8, source.store(keys, was))
                with Engine(self.daemon.listen, to) as target:
                    more = keys + keys_of(100 + number, 1)
                    self.assertEqual(8, target.backend.batch_exists(more))
                    self.assertEqual([True] * 8 + [False], target.load(more, [*now, 15]))
                    self.assert_pages(source.pool, was, target.pool, now)
                    others = [page for page in range(PAGES) if page not in now]
                    self.assertEqual(0, int(target.pool[:, :, others].count_nonzero()))

    def test_encoded_pages_are_what_the_codec_makes_of_the_same_rows(self) -> None:
        keys, pages = keys_of(20, 8), list(range(8))
        codec = "hack:k_bits=3,v_bits=2"
        with Engine(self.daemon.listen, seed=21, codec=codec) as source:
            self.assertEqual([True] * 8, source.store(keys, pages))
            options = source.backend._pools["kv"].options
        with Engine(self.daemon.listen, "page_head", codec=codec) as target:
            self.assertEqual([True] * 8, target.load(keys, pages))
        expected = torch.zeros_like(source.pool, device="cpu")
        with kvmanager.connect(self.daemon.listen) as client:
            cache = client.open_cache(**{**options, "revision": "by Cache alone"})
            names = [cache.external_names([bytes.fromhex(key)]) for key in keys]
            for page, name in zip(pages, names):
                rows = source.pool[:, :, page].cpu()
                with cache.create_sequence() as sequence:
                    for layer in range(LAYERS):
                        cache.step(layer, [(sequence, 0, PAGE)], rows[0, layer], rows[1, layer])
                    sequence.publish(name)
                with cache.create_sequence(name) as found:
                    self.assertEqual(1, found.hit_blocks)
                    for layer in range(LAYERS):
                        back = expected[:, layer, page]
                        self.assertEqual((PAGE, 0), cache.read(layer, [(found, 0, PAGE)], back[0], back[1]))
        self.assert_pages(expected.to(DEVICE), pages, target.pool, pages)
        for side, name in enumerate("KV"):
            was = source.pool[side, :, :8].double()
            error = float((target.pool[side, :, :8].double() - was).norm() / was.norm())
            self.assertGreater(error, 0)
            print(f"{codec}: relative error of {name} {error:.4f}", flush=True)
        self.assertEqual(codec + ";sinks=0", options["codec"])  # each page begins a sequence
        with self.assertRaisesRegex(ValueError, "must be without sinks"):
            Engine(self.daemon.listen, codec=codec + ";sinks=64")

    def test_pages_of_an_engine_in_inference_mode(self) -> None:
        """Where host pages are inference tensors, the backend's thread writes them all the same."""
        keys, was, now = keys_of(40, 4), [3, 4, 5, 6], [10, 11, 12, 13]
        with torch.inference_mode(), Engine(self.daemon.listen, seed=41) as engine:
            self.assertTrue(engine.host.is_inference())
            self.assertEqual([True] * 4, engine.store(keys, was))
            self.assertEqual([True] * 4, engine.load(keys, now))
            self.assert_pages(engine.pool, was, engine.pool, now)
            flat = engine.backend.batch_get(keys)
            self.assertNotIn(None, flat)
            for page, got in zip(was, flat):
                self.assertTrue(torch.equal(engine.pool[:, :, page].reshape(-1), got))

    def test_pieces_of_which_some_pages_are_not_found(self) -> None:
        """Pieces of three pages have one, three, two and none that the daemon has."""
        keys, was = keys_of(60, 12), list(range(12))
        there = [False, True, False, True, True, True, True, False, True, False, False, False]
        with Engine(self.daemon.listen, seed=61, staging_mib=4) as engine:
            stored = [place for place in was if there[place]]
            self.assertEqual([True] * 6, engine.store([keys[place] for place in stored], stored))
            engine.host.zero_()
            self.assertEqual(there, engine.backend.batch_get_v1(keys, indices(was)))
            self.assert_pages(engine.pool, stored, engine.host.to(DEVICE), stored)
            self.assertEqual(0, int(engine.host[:, :, [place for place in was if not there[place]]].count_nonzero()))
            self.assertEqual([True] * 12, engine.store(keys, was))
            self.assertEqual([True] * 12, engine.backend.batch_get_v1(keys, indices([12 + place for place in was])))
            self.assert_pages(engine.pool, was, engine.host.to(DEVICE), [12 + place for place in was])

    def test_a_lookup_and_a_load_do_not_wait_for_a_store(self) -> None:
        """They are done between two pieces of it."""
        did: list[str] = []
        keys, known = keys_of(50, 8), keys_of(51, 2)
        append, read, there = PoolPages._append, PoolPages._read, PoolPages.there
        with Engine(self.daemon.listen, seed=52, staging_mib=2) as engine:  # a piece has one page
            self.assertEqual([True] * 2, engine.store(known, [20, 21]))
            found: list = []

            def ask(call) -> threading.Thread:
                waiting = len(engine.backend._link._urgent)
                thread = threading.Thread(target=lambda: found.append(call()))
                thread.start()
                deadline = time.monotonic() + DEADLINE_S
                while len(engine.backend._link._urgent) == waiting and time.monotonic() < deadline:
                    time.sleep(0.001)
                return thread

            threads: list[threading.Thread] = []

            def store(*arguments) -> None:
                if not threads:
                    threads.append(ask(lambda: engine.backend.batch_exists(known)))
                    threads.append(ask(lambda: engine.backend.batch_get_v1(known, indices([14, 15]))))
                append(*arguments)
                did.append("stored")

            def load(*arguments) -> None:
                read(*arguments)
                did.append("loaded")

            def look(*arguments, **options) -> list[bool]:
                did.append("looked up" if options["prefetch"] else "looked for what is to be stored")
                return there(*arguments, **options)

            engine.pages().codec = None  # by the arena
            with mock.patch.multiple(PoolPages, _append=store, _read=load, there=look):
                self.assertEqual([True] * 8, engine.store(keys, list(range(8))))
            for thread in threads:
                thread.join(DEADLINE_S)
            between = ["looked up", "loaded", "loaded"]
            self.assertEqual(["looked for what is to be stored", "stored", *between, *["stored"] * 7], did)
            self.assertEqual([2, [True] * 2], found)
            self.assert_pages(engine.pool, [20, 21], engine.host.to(DEVICE), [14, 15])

    def test_pages_come_out_of_the_daemons_memory(self) -> None:
        """The same bytes as by way of the arena, which is not made."""
        cases = [(layout, "raw") for layout in LAYOUTS] + [("page_first", "hack:k_bits=3,v_bits=2")]
        with Daemon(host_pool="256MiB") as daemon:
            for number, (layout, codec) in enumerate(cases):
                keys, was, now = keys_of(70 + number, 9), list(range(8)), list(range(8, 16))
                with self.subTest(layout=layout, codec=codec), Engine(daemon.listen, layout, seed=71 + number, codec=codec) as engine:
                    results = load_mapped(self, engine, keys[:8], was, [*keys[:4], keys[8], *keys[4:8]], [*now[:4], 16, *now[4:]])
                    self.assertEqual([LOADED] * 4 + [MISSING] + [LOADED] * 4, results)
                    if codec == "raw":  # nothing waits to be encoded
                        self.assertNotIn("loads", engine.pages()._stagings)
                    mapped = engine.pool[:, :, now].clone()
                    self.assertEqual(0, int(engine.pool[:, :, 16:].cpu().ne(engine.before[:, :, 16:]).sum()))
                    engine.pages().codec = None
                    self.assertEqual([True] * 8, engine.load(keys[:8], now))
                    self.assert_pages(mapped, list(range(8)), engine.pool, now)
                    if codec == "raw":
                        self.assert_pages(engine.before, was, engine.pool, now)

    def test_wrong_bytes_in_the_daemons_memory_are_a_miss(self) -> None:
        for codec in ("raw", "hack:k_bits=3,v_bits=2"):
            keys, was, now = keys_of(80, 6), list(range(6)), list(range(6, 12))
            with self.subTest(codec=codec), Daemon(host_pool="256MiB") as daemon, Engine(daemon.listen, seed=81, codec=codec) as engine:
                self.assertEqual([LOADED] * 6, load_mapped(self, engine, keys, was, keys, now))

                def flip(session) -> None:
                    cache = session.cache("kv")
                    name = cache.external_names([bytes.fromhex(keys[3])])
                    with cache.map_blocks_async(name).wait() as mapped:
                        flip_byte(mapped.addresses[LAYERS - 1] + 100, daemon.process.pid)

                engine.backend._call(flip, None)
                expected = [True] * 3 + [False] + [True] * 2
                self.assertEqual(expected, engine.load(keys, now))
                self.assertEqual(3, engine.backend.batch_exists(keys), "the daemon has compared it, and forgot it")
                self.assertEqual([True] * 6, engine.store(keys, was))

    def test_a_daemon_that_maps_nothing_copies(self) -> None:
        keys, was, now = keys_of(90, 4), [3, 4, 5, 6], [10, 11, 12, 13]
        with Daemon(flags=("--map-blocks", "off"), host_pool="64MiB") as daemon, Engine(daemon.listen, seed=91) as engine:
            self.assertEqual([True] * 4, engine.store(keys, was))
            self.assertEqual([True] * 4, engine.load(keys, now))
            self.assert_pages(engine.pool, was, engine.pool, now)
            self.assertIsNone(engine.pages().codec)

    def test_the_daemon_dies_and_comes_back(self) -> None:
        keys, pages = keys_of(30, 4), [3, 4, 5, 6]
        with Daemon(host_pool="64MiB") as daemon, Engine(daemon.listen, seed=31) as engine:
            self.assertEqual([True] * 4, engine.store(keys, pages))
            before = engine.pool.clone()
            daemon.kill()
            self.assertEqual([False] * 4, engine.load(keys, pages))
            self.assertEqual([False] * 4, engine.store(keys, pages))
            self.assertTrue(engine.backend._link.wait(False, DEADLINE_S))
            self.assertEqual(0, engine.backend.batch_exists(keys))
            daemon.start()
            self.assertTrue(engine.backend._link.wait(True, DEADLINE_S))
            self.assertEqual([False] * 4, engine.load(keys, pages))
            self.assertEqual([True] * 4, engine.store(keys, pages))
            self.assertEqual([True] * 4, engine.load(keys, [10, 11, 12, 13]))
            self.assert_pages(before, pages, engine.pool, [10, 11, 12, 13])
            self.assert_pages(before, pages, engine.pool, pages)


if __name__ == "__main__":
    unittest.main()
