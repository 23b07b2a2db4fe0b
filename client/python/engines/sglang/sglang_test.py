"""The storage backend as SGLang's factory makes it, on SGLang's own host pools, against a real daemon."""

from __future__ import annotations

import hashlib
import threading
import unittest

import torch

if not hasattr(torch.ops.torchvision, "nms"):  # torchvision, which SGLang imports, has its operators with CUDA alone
    _library = torch.library.Library("torchvision", "DEF")
    for _name in ("nms", "qnms"):
        _library.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

import kvmanager
from kvmanager.sglang import KvManagerHiCache
from engine_testing import DaemonTestCase, compare_signatures
from kvmanager_testing import Daemon
from sglang.srt.mem_cache.device_pool_info import KVBufferLayout, KVBuffers, MHABufferInfo
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorage,
    HiCacheStorageConfig,
    HiCacheStorageExtraInfo,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
)
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
from sglang.srt.mem_cache.storage.backend_factory import StorageBackendFactory

LAYERS, HEADS, HEAD_DIM, PAGE, PAGES = 3, 2, 64, 64, 40
LAYOUTS = ("layer_first", "page_first", "page_first_direct", "page_head")
DEADLINE_S = 120


def host_pool(layout: str = "layer_first", seed: int = 0, page: int = PAGE) -> MHATokenToKVPoolHost:
    """SGLang's own, for a device pool on the CPU; filled with random K and V, or with zeros for seed 0."""
    device = tuple(torch.zeros(page * 8, HEADS, HEAD_DIM, dtype=torch.float16) for _ in range(LAYERS))
    pointers = torch.tensor([each.data_ptr() for each in device], dtype=torch.uint64)
    buffers = KVBuffers(k=device, v=device, k_data_ptrs=pointers, v_data_ptrs=pointers, layout=KVBufferLayout.NHD)
    info = MHABufferInfo(
        buffers=buffers,
        page_size=page,
        head_num=HEADS,
        head_dim=HEAD_DIM,
        v_head_dim=HEAD_DIM,
        dtype=torch.float16,
        device=torch.device("cpu"),
    )
    pool = MHATokenToKVPoolHost(
        info,
        1.0,
        0,
        page,
        layout,
        pin_memory=False,
        device_capacity_tokens=page * 8,
        start_layer=0,
        end_layer=LAYERS - 1,
        host_token_capacity=page * PAGES,
    )
    pool.kv_buffer.zero_()
    if seed:
        generator = torch.Generator().manual_seed(seed)
        pool.kv_buffer.copy_(torch.randn(pool.kv_buffer.shape, generator=generator))
    return pool


def config(address: str, rank: int = 0, ranks: int = 1, **extra) -> HiCacheStorageConfig:
    return HiCacheStorageConfig(
        tp_rank=rank,
        tp_size=ranks,
        pp_rank=0,
        pp_size=1,
        attn_cp_rank=0,
        attn_cp_size=1,
        is_mla_model=False,
        enable_storage_metrics=False,
        is_page_first_layout=False,
        model_name="model",
        extra_config={
            "backend_name": "kvmanager",
            "module_path": "kvmanager.sglang",
            "class_name": "KvManagerHiCache",
            "interface_v1": 1,
            "address": address,
            **extra,
        },
    )


def keys_of(seed: int, count: int) -> list[str]:
    """A chain, as SGLang hashes pages."""
    keys, digest = [], b""
    for page in range(count):
        digest = hashlib.sha256(digest + bytes([seed, page])).digest()
        keys.append(digest.hex())
    return keys


def indices(pages: list[int], page: int = PAGE) -> torch.Tensor:
    return torch.cat([torch.arange(each * page, (each + 1) * page) for each in pages])


def page_of(pool: MHATokenToKVPoolHost, number: int) -> torch.Tensor:
    """[2][layers][page][heads][head_dim], by SGLang's own reading of its layout."""
    data = pool.get_data_page(number * pool.page_size, flat=False)
    if pool.layout == "layer_first":
        return data
    if pool.layout == "page_first":
        return data.transpose(1, 2)
    data = data[:, 0]
    return data if pool.layout == "page_first_direct" else data.permute(0, 3, 2, 1, 4)


class InterfaceTest(unittest.TestCase):
    def test_every_abstract_method_is_there(self) -> None:
        self.assertEqual(set(), set(KvManagerHiCache.__abstractmethods__))

    def test_methods_have_the_signatures_of_their_base(self) -> None:
        self.assertGreaterEqual(compare_signatures(self, KvManagerHiCache, HiCacheStorage), 13)

    def test_unknown_settings_are_refused(self) -> None:
        with self.assertRaisesRegex(ValueError, "addres"):
            KvManagerHiCache(config("unix:/nowhere", addres=1), {})
        for wrong in (
            {"deadline_ms": "10"},
            {"deadline_ms": 0},
            {"staging_mib": 4096},
            {"codec": None},
            {"codec": "hack;0=raw;sinks=64"},
            {"retention_priority": 101},
            {"retention_priority": True},
            {"retention_ttl_s": -1},
            {"retention_ttl_s": 60},
        ):
            with self.subTest(wrong), self.assertRaisesRegex(ValueError, f"{next(iter(wrong))} is .* must be"):
                KvManagerHiCache(config("unix:/nowhere", **wrong), {})


class StorageTest(DaemonTestCase):
    def backend(self, pool: MHATokenToKVPoolHost, daemon: Daemon | None = None, **options) -> HiCacheStorage:
        """As SGLang's controller does it."""
        settings = config((daemon or self.daemon).listen, **options)
        backend = StorageBackendFactory.create_backend("dynamic", settings, pool)
        self.assertIsInstance(backend, KvManagerHiCache)
        backend.register_mem_pool_host(pool)
        backend.on_host_pools_registered()
        self.assertTrue(backend._link.wait(True, DEADLINE_S))
        self.addCleanup(backend.close)
        return backend

    def test_pages_between_all_layouts(self) -> None:
        for number, layout in enumerate(LAYOUTS):
            to = LAYOUTS[number - 1]
            with self.subTest(layout=layout, to=to):
                keys = keys_of(number, 10)
                source, target = host_pool(layout, seed=number + 1), host_pool(to)
                prefix = HiCacheStorageExtraInfo(prefix_keys=keys[:2])
                first = self.backend(source)
                self.assertEqual(0, first.batch_exists(keys))
                from_pages = [7, 1, 22, 3, 9, 30, 11, 12]
                self.assertEqual([True] * 8, first.batch_set_v1(keys[:8], indices(from_pages), prefix))
                second = self.backend(target)
                self.assertEqual(8, second.batch_exists(keys))
                self.assertTrue(second.exists(keys[7]))
                self.assertFalse(second.exists(keys[8]))
                to_pages = [2, 4, 6, 8, 10, 5, 3, 1, 30, 31]
                got = second.batch_get_v1(keys, indices(to_pages))
                self.assertEqual([True] * 8 + [False] * 2, got)
                for was, now in zip(from_pages, to_pages):
                    self.assertTrue(torch.equal(page_of(source, was), page_of(target, now)))
                for untouched in (0, 30, 31):
                    self.assertEqual(0, int(page_of(target, untouched).count_nonzero()))

    def test_flat_pages(self) -> None:
        for number, layout in enumerate(LAYOUTS):
            with self.subTest(layout=layout):
                keys = keys_of(20 + number, 3)
                source, target = host_pool(layout, seed=5), host_pool(layout)
                backend = self.backend(source)
                self.assertTrue(backend.batch_set(keys[:2], [source.get_data_page(index * PAGE) for index in (3, 4)]))
                self.assertTrue(backend.set(keys[2], source.get_data_page(9 * PAGE)))
                pages = backend.batch_get(keys, [target.get_dummy_flat_data_page() for _ in keys])
                for page, index in zip(pages, (3, 4, 9)):
                    target.set_from_flat_data_page(index * PAGE, page)
                    self.assertTrue(torch.equal(page_of(source, index), page_of(target, index)))
                self.assertTrue(torch.equal(source.get_data_page(3 * PAGE), backend.get(keys[0])))
                self.assertIsNone(backend.get("f" * 64))

    def test_what_is_there_is_not_stored_again(self) -> None:
        keys, pool = keys_of(30, 6), host_pool(seed=6)
        backend = self.backend(pool)
        backend.batch_set_v1(keys[:4], indices([0, 1, 2, 3]))
        self.assertEqual([True] * 6, backend.batch_set_v1(keys, indices([0, 1, 2, 3, 4, 5])))
        self.assertEqual(6, self.published())

    def test_more_pages_than_one_call_takes(self) -> None:
        keys, pool = keys_of(39, 4), host_pool(seed=15)
        backend = self.backend(pool)
        backend.batch_set_v1(keys, indices([0, 1, 2, 3]))
        others = [hashlib.sha256(b"%d" % each).hexdigest() for each in range(4096)]
        self.assertEqual(4, backend.batch_exists(keys + others))
        self.assertEqual(0, backend.batch_exists(["\ud800"] + keys))

    def test_many_pages_take_several_turns(self) -> None:
        keys, pool, target = keys_of(31, 30), host_pool(seed=7), host_pool()
        backend = self.backend(pool, staging_mib=1)
        self.assertEqual([True] * 30, backend.batch_set_v1(keys, indices(list(range(30)))))
        other = self.backend(target, staging_mib=1)
        self.assertEqual([True] * 30, other.batch_get_v1(keys, indices(list(range(29, -1, -1)))))
        for number in range(30):
            self.assertTrue(torch.equal(page_of(pool, number), page_of(target, 29 - number)))

    def test_ranks_and_pools_have_pages_of_their_own(self) -> None:
        keys = keys_of(32, 4)
        pool = host_pool(seed=8)
        zero, one = (self.backend(pool, rank=rank, ranks=2) for rank in range(2))
        zero.batch_set_v1(keys, indices([0, 1, 2, 3]))
        self.assertEqual(4, zero.batch_exists(keys))
        self.assertEqual(0, one.batch_exists(keys))
        self.assertEqual(0, self.backend(pool, tenant="other").batch_exists(keys))

    def test_several_pools_by_version_2(self) -> None:
        keys, pool, draft = keys_of(33, 6), host_pool(seed=9), host_pool("page_first", seed=10)
        backend = self.backend(pool)
        backend.register_mem_host_pool_v2(pool, PoolName.KV)
        backend.register_mem_host_pool_v2(draft, PoolName.DRAFT)

        def both(keys, pages, policy=PoolHitPolicy.ALL_PAGES):
            return [
                PoolTransfer(name=PoolName.KV, keys=keys, host_indices=indices(pages)),
                PoolTransfer(name=PoolName.DRAFT, keys=keys, host_indices=indices(pages), hit_policy=policy),
            ]

        stored = backend.batch_set_v2(both(keys[:5], [0, 1, 2, 3, 4]))
        self.assertEqual({PoolName.KV: [True] * 5, PoolName.DRAFT: [True] * 5}, stored)
        backend.batch_set_v1(keys[5:], indices([5]))
        draft_alone = [PoolTransfer(name=PoolName.DRAFT, keys=keys[:2])]
        self.assertEqual(6, backend.batch_exists_v2(keys).kv_hit_pages)
        found = backend.batch_exists_v2(keys, draft_alone)
        self.assertEqual(5, found.kv_hit_pages)
        self.assertEqual({PoolName.KV: 6, PoolName.DRAFT: 5}, found.extra_pool_hit_pages)
        self.assertEqual([1, 2, 3, 4, 5], found.restorable_prefix_pages)
        draft_alone[0].hit_policy = PoolHitPolicy.TRAILING_PAGES
        self.assertEqual(5, backend.batch_exists_v2(keys, draft_alone).kv_hit_pages)
        unknown = [PoolTransfer(name=PoolName.MAMBA, keys=keys[:1], hit_policy=PoolHitPolicy.TRAILING_PAGES)]
        self.assertEqual(0, backend.batch_exists_v2(keys, unknown).kv_hit_pages)
        before = [page_of(each, 2).clone() for each in (pool, draft)]
        got = backend.batch_get_v2(both(keys[2:3], [20]))
        self.assertEqual({PoolName.KV: [True], PoolName.DRAFT: [True]}, got)
        for each, was in zip((pool, draft), before):
            self.assertTrue(torch.equal(was, page_of(each, 20)))
        short = [PoolTransfer(name=PoolName.KV, keys=keys, host_indices=indices([1]))]
        self.assertEqual({PoolName.KV: [False] * 6}, backend.batch_get_v2(short))

    def kept(self, backend: HiCacheStorage, keys: list[str]) -> list[tuple[int, bool]]:
        """Of each page its priority, and whether that ends."""
        with kvmanager.connect(self.daemon.listen) as client:
            cache = client.open_cache(**backend._pools["kv"].options)
            names = cache.external_names([bytes.fromhex(key) for key in keys])
            blocks = client.explain(names, cache.description.id)["blocks"]
        return [(each["priority"], each["retained_ms"] > 0) for each in blocks]

    def test_a_server_says_how_long_its_pages_are_kept(self) -> None:
        keys, pool = keys_of(40, 8), host_pool(seed=16)
        self.backend(pool).batch_set_v1(keys[:2], indices([0, 1]))
        usual, hour, lost = (50, False), (80, True), (10, False)
        longer = self.backend(pool, retention_priority=80, retention_ttl_s=3600)
        longer.batch_set_v1(keys[1:4], indices([1, 2, 3]))
        self.assertEqual([usual] + [hour] * 3, self.kept(longer, keys[:4]))
        shorter = self.backend(pool, retention_priority=10)
        shorter.batch_set_v1(keys, indices(list(range(8))))
        self.assertEqual([usual] + [hour] * 3 + [lost] * 4, self.kept(longer, keys))
        # What is loaded is used, too; a server whose own pages go first takes nothing from others.
        self.assertEqual([True] * 5, longer.batch_get_v1(keys[:5], indices([8, 9, 10, 11, 12])))
        self.assertEqual([True] * 8, shorter.batch_get_v1(keys, indices(list(range(8, 16)))))
        self.assertEqual([hour] * 5 + [lost] * 3, self.kept(longer, keys))

    def test_encoded_pages_come_back_within_the_codec_s_error(self) -> None:
        keys, pool, target = keys_of(34, 8), host_pool(seed=11), host_pool()
        codec = "hack:k_bits=3,v_bits=2"
        self.backend(pool, codec=codec).batch_set_v1(keys, indices(list(range(8))))
        self.assertEqual([True] * 8, self.backend(target, codec=codec).batch_get_v1(keys, indices(list(range(8)))))
        was, now = (each.kv_buffer[:, :, : 8 * PAGE].float() for each in (pool, target))
        for side, bound in enumerate((0.25, 0.5)):
            error = float((was[side] - now[side]).norm() / was[side].norm())
            self.assertTrue(0 < error < bound, error)

    def test_clear(self) -> None:
        keys, pool = keys_of(35, 4), host_pool(seed=12)
        backend = self.backend(pool)
        backend.batch_set_v1(keys, indices([0, 1, 2, 3]))
        backend.clear()
        self.assertEqual(0, backend.batch_exists(keys))

    def test_a_pool_that_cannot_be_kept_is_a_miss(self) -> None:
        pool = host_pool(page=8)
        settings = config(self.daemon.listen)
        backend = StorageBackendFactory.create_backend("dynamic", settings, pool)
        backend.register_mem_pool_host(pool)
        keys = keys_of(36, 2)
        self.assertEqual([False] * 2, backend.batch_set_v1(keys, indices([0, 1], 8)))
        self.assertEqual(0, backend.batch_exists(keys))
        self.assertEqual([None] * 2, backend.batch_get(keys))

    def test_threads_of_the_controller_at_once(self) -> None:
        pool, target = host_pool(seed=13), host_pool()
        backend, other = self.backend(pool), self.backend(target)
        keys = keys_of(37, 32)
        wrong: list[str] = []

        def store() -> None:
            for begin in range(0, 32, 4):
                if not all(backend.batch_set_v1(keys[begin : begin + 4], indices(list(range(begin, begin + 4))))):
                    wrong.append(f"store {begin}")

        def load() -> None:
            have = 0
            while have < 32 and not wrong:
                there = other.batch_exists(keys)
                if there > have:
                    pages = list(range(have, there))
                    if not all(other.batch_get_v1(keys[have:there], indices(pages))):
                        wrong.append(f"load {have}")
                    have = there

        threads = [threading.Thread(target=each) for each in (store, load)]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
        self.assertEqual([], wrong)
        for number in range(32):
            self.assertTrue(torch.equal(page_of(pool, number), page_of(target, number)))

    def test_the_daemon_dies_and_comes_back(self) -> None:
        keys, pool = keys_of(38, 8), host_pool(seed=14)
        with Daemon(host_pool="64MiB") as daemon:
            backend = self.backend(pool, daemon)
            self.assertEqual([True] * 8, backend.batch_set_v1(keys, indices(list(range(8)))))
            daemon.kill()
            self.assertEqual(0, backend.batch_exists(keys))
            self.assertEqual([False] * 8, backend.batch_get_v1(keys, indices(list(range(8)))))
            self.assertEqual([False] * 8, backend.batch_set_v1(keys, indices(list(range(8)))))
            self.assertFalse(backend.set(keys[0], pool.get_data_page(0)))
            self.assertTrue(backend._link.wait(False, DEADLINE_S))
            daemon.start()
            self.assertTrue(backend._link.wait(True, DEADLINE_S))
            self.assertEqual(0, backend.batch_exists(keys))
            self.assertEqual([True] * 8, backend.batch_set_v1(keys, indices(list(range(8)))))
            self.assertEqual(8, backend.batch_exists(keys))


if __name__ == "__main__":
    unittest.main()
