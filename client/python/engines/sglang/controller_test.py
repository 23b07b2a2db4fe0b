"""The storage backend below SGLang's own HiCache controller: its queues, its threads, its hashes of pages, and a
request's life as its scheduler plays it. What is missing is a GPU: K and V in host pages are a function of the tokens."""

from __future__ import annotations

import json
import threading
import types
import unittest

import torch
from engine_testing import DaemonTestCase
from kvmanager_testing import Daemon
from sglang_test import LAYERS, LAYOUTS, PAGE, host_pool, page_of  # before SGLang's: it completes torchvision

from sglang.srt.mem_cache.base_prefix_cache import CacheRequestHandle
from sglang.srt.mem_cache.hicache_storage import PoolName
from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import HybridCacheController
from sglang.srt.mem_cache.hybrid_cache.hybrid_pool_assembler import build_pool_entry
from sglang.srt.mem_cache.pool_host.group import HostPoolGroup
from sglang.srt.mem_cache.utils import get_storage_hash_str
from sglang.srt.runtime_context import get_parallel

DEADLINE_S = 120
THRESHOLD = 2 * PAGE  # tokens: shorter hits are not worth a transfer

get_parallel().override_permanently(
    tp_size=1, tp_rank=0, pp_size=1, pp_rank=0, attn_tp_size=1, attn_cp_size=1, attn_dcp_size=1, attn_dcp_rank=0
)


def tokens_of(seed: int, pages: int) -> list[int]:
    return torch.randint(0, 1000, (pages * PAGE,), generator=torch.Generator().manual_seed(seed)).tolist()


def content(tokens: list[int], page: int) -> torch.Tensor:
    """Of a page, a function of all tokens up to its end: [2][layers][page]... as page_of() gives it."""
    seed = hash(tuple(tokens[: (page + 1) * PAGE])) % 2**31
    return torch.randn(2, LAYERS, PAGE, 2, 64, generator=torch.Generator().manual_seed(seed)).to(torch.float16)


class Engine:
    """SGLang's host pool, controller and threads for one model. A context manager."""

    def __init__(self, address: str, layout: str = "layer_first", wait: bool = True, **extra) -> None:
        settings = {
            "backend_name": "kvmanager",
            "module_path": "kvmanager.sglang",
            "class_name": "KvManagerHiCache",
            "interface_v1": 1,
            "address": address,
            "prefetch_threshold": THRESHOLD,
            **extra,
        }
        parsed, threshold, *_ = HybridCacheController.parse_storage_backend_extra_config(json.dumps(settings))
        self.pool = host_pool(layout)
        device = types.SimpleNamespace(
            device="cpu", layer_num=LAYERS, register_layer_transfer_counter=lambda counter: None
        )
        entry = build_pool_entry(
            name=PoolName.KV,
            host_pool=self.pool,
            device_pool=device,
            layer_mapping={layer: layer for layer in range(LAYERS)},
            transfer_layer_id_max=LAYERS,
            is_anchor=True,
        )
        self.controller = HybridCacheController(
            types.SimpleNamespace(get_kvcache=lambda: device),
            HostPoolGroup([entry]),
            PAGE,
            None,
            threading.Event(),
            io_backend="direct",
            storage_backend="dynamic",
            prefetch_threshold=threshold,
            model_name="model",
            storage_backend_extra_config=parsed,
        )
        self.backend = self.controller.storage_backend
        if wait and not self.backend._link.wait(True, DEADLINE_S):
            raise AssertionError("the backend does not attach")

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.controller.detach_storage_backend()

    def store(self, tokens: list[int]) -> int:
        """A prompt that was computed, and came to the host pool: backs it up; returns the tokens that were."""
        pages = len(tokens) // PAGE
        indices = self.pool.alloc(pages * PAGE)
        for page in range(pages):
            page_of(self.pool, int(indices[page * PAGE]) // PAGE).copy_(content(tokens, page))
        self.controller.write_storage(indices, tokens, get_storage_hash_str(tokens, None, page_size=PAGE), [])
        done = self.controller.ack_backup_queue.get(timeout=DEADLINE_S)
        self.pool.free(indices)
        return done.completed_tokens

    def look(self, tokens: list[int]):
        """A request comes: SGLang's threads ask how much of its prompt is there."""
        self.controller.prefetch(CacheRequestHandle(rid=f"r{tokens[0]}", attempt_id=0), tokens, None, [])
        return self.controller.prefetch_hit_queue.get(timeout=DEADLINE_S)

    def load(self, operation, terminate: bool = False) -> int:
        """What the scheduler does with the answer: revokes, or gives host pages and waits for the transfer. Returns
        the tokens that need not be computed, whose K and V are checked."""
        if operation.storage_hit_count < self.controller.prefetch_threshold:
            return 0
        operation.host_indices = self.pool.alloc(operation.storage_hit_count)
        if terminate:
            self.controller.terminate_prefetch(operation)
        self.controller.prefetch_buffer.put(operation)
        completed = 0
        while not (ack := self.controller.ack_prefetch_queue.get(timeout=DEADLINE_S)).completed_req:
            completed = ack.completed_tokens if ack.completed_tokens is not None else completed
        for page in range(completed // PAGE):
            got = page_of(self.pool, int(operation.host_indices[page * PAGE]) // PAGE)
            if not torch.equal(content(operation.token_ids, page), got):
                raise AssertionError(f"page {page} has other K or V")
        self.pool.free(operation.host_indices)
        return completed

    def run(self, tokens: list[int]) -> int:
        """A request's life; returns the tokens that were found. What was not is computed and backed up."""
        found = self.load(self.look(tokens))
        if found < len(tokens):
            self.store(tokens)
        return found


class LifeTest(DaemonTestCase):
    def engine(self, **options) -> Engine:
        return self.enterContext(Engine(self.daemon.listen, **options))

    def test_miss_store_hit_between_all_layouts_and_interfaces(self) -> None:
        for number, layout in enumerate(LAYOUTS):
            for interface in (0, 1):
                with self.subTest(layout=layout, interface=interface):
                    tokens = tokens_of(10 * number + interface, 9)
                    first = self.engine(layout=layout, interface_v1=interface)
                    self.assertEqual((0, 9 * PAGE), (first.run(tokens), first.run(tokens)))
                    other = self.engine(layout=LAYOUTS[number - 1], interface_v1=1 - interface)
                    self.assertEqual(9 * PAGE, other.run(tokens))

    def test_partial_hit_and_what_follows_is_stored(self) -> None:
        engine, tokens = self.engine(), tokens_of(1, 6)
        engine.run(tokens)
        longer = tokens[: 4 * PAGE] + tokens_of(2, 5)
        self.assertEqual((4 * PAGE, 9 * PAGE), (engine.run(longer), engine.run(longer)))
        self.assertEqual(6 + 5, self.published())

    def test_a_hit_below_the_threshold_is_not_fetched(self) -> None:
        engine, tokens = self.engine(), tokens_of(3, 6)
        engine.run(tokens)
        operation = engine.look(tokens[:PAGE] + tokens_of(4, 3))
        self.assertEqual((PAGE, 0), (operation.storage_hit_count, engine.load(operation)))

    def test_a_load_that_fails_is_recomputed(self) -> None:
        """Pages go between the lookup and the transfer: SGLang gets what is left, and computes the rest."""
        engine, tokens = self.engine(), tokens_of(5, 12)
        engine.run(tokens)
        operation = engine.look(tokens)
        self.assertEqual(12 * PAGE, operation.storage_hit_count)
        engine.backend.clear()
        with self.assertLogs("sglang.srt.managers.cache_controller", "WARNING"):
            self.assertEqual(0, engine.load(operation))
        self.assertEqual((0, 12 * PAGE), (engine.run(tokens), engine.run(tokens)))

    def test_a_request_that_is_taken_back_loads_nothing(self) -> None:
        engine, tokens = self.engine(), tokens_of(6, 8)
        engine.run(tokens)
        self.assertEqual(0, engine.load(engine.look(tokens), terminate=True))
        self.assertEqual(8 * PAGE, engine.run(tokens))

    def test_prefill_here_and_decode_there(self) -> None:
        """Two engines of one daemon: what one computes, the other does not."""
        prefill, decode, tokens = self.engine(), self.engine(layout="page_first"), tokens_of(7, 10)
        prefill.store(tokens)
        self.assertEqual(10 * PAGE, decode.run(tokens))
        self.assertEqual(10, self.published())

    def test_a_prompt_that_is_larger_than_staging(self) -> None:
        engine = self.engine(staging_mib=1)
        tokens = tokens_of(8, 39)
        self.assertEqual((0, 39 * PAGE), (engine.run(tokens), engine.run(tokens)))

    def test_the_backend_is_taken_off_and_put_on_again(self) -> None:
        engine, tokens = self.engine(), tokens_of(9, 4)
        engine.run(tokens)
        controller, extra = engine.controller, engine.controller.storage_config.extra_config
        controller.detach_storage_backend()
        controller.attach_storage_backend("dynamic", THRESHOLD, "model", extra, controller.mem_pool_host.entries)
        engine.backend = controller.storage_backend
        self.assertTrue(engine.backend._link.wait(True, DEADLINE_S))
        self.assertEqual(4 * PAGE, engine.run(tokens))
        self.assertTrue(controller.clear_storage_backend())
        self.assertEqual(0, engine.run(tokens))


class DaemonGoneTest(unittest.TestCase):
    def test_requests_go_on_and_the_daemon_is_used_when_it_is_back(self) -> None:
        tokens = tokens_of(20, 8)
        with Daemon(host_pool="64MiB") as daemon, Engine(daemon.listen) as engine:
            engine.run(tokens)
            operation = engine.look(tokens)
            self.assertEqual(8 * PAGE, operation.storage_hit_count)
            daemon.kill()
            self.assertEqual(0, engine.load(operation))
            self.assertTrue(engine.backend._link.wait(False, DEADLINE_S))
            self.assertEqual((0, 0), (engine.run(tokens), engine.store(tokens)))
            daemon.start()
            self.assertTrue(engine.backend._link.wait(True, DEADLINE_S))
            self.assertEqual((0, 8 * PAGE), (engine.run(tokens), engine.run(tokens)))

    def test_a_daemon_that_comes_later(self) -> None:
        tokens = tokens_of(21, 4)
        with Daemon(host_pool="64MiB") as daemon:
            daemon.kill()
            with Engine(daemon.listen, wait=False) as engine:
                self.assertEqual(0, engine.run(tokens))
                daemon.start()
                self.assertTrue(engine.backend._link.wait(True, DEADLINE_S))
                self.assertEqual((0, 4 * PAGE), (engine.run(tokens), engine.run(tokens)))


if __name__ == "__main__":
    unittest.main()
