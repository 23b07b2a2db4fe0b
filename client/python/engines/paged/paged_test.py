"""Blocks of paged caches in vLLM's layouts, to the daemon and back: equal bytes with raw, the codec's error with K3V2.

On a GPU as on the CPU; needs torch and a daemon, and no engine."""

from __future__ import annotations

import itertools
import os
import unittest

import kvmanager
import torch
from kvmanager.packing import learn_packing
from kvmanager.paged import Fence, PagedCopy, Staging, layer_views
from kvmanager_testing import Daemon

LAYERS, HEADS, HEAD_DIM, BLOCKS = 3, 4, 128, 24


def caches(layout: str, tokens: int, device: str, fill: bool) -> list[torch.Tensor]:
    """One per layer; names are the order of axes in memory, the shape is what vLLM shows."""
    generator = torch.Generator(device="cpu").manual_seed(1)
    made = []
    for _ in range(LAYERS):
        both = torch.zeros(BLOCKS, tokens, HEADS, 2, HEAD_DIM, dtype=torch.float16)
        if fill:
            both = torch.randn(both.shape, generator=generator).to(torch.float16)
        both = both.to(device)
        if layout == "BHN(KV)":
            made.append(both.permute(0, 2, 1, 3, 4).flatten(3).contiguous())
        elif layout == "BNH(KV)":
            made.append(both.flatten(3).contiguous().permute(0, 2, 1, 3))
        elif layout == "BHN(KV) split":
            made.append(both.flatten(3).unflatten(1, (2, tokens // 2)).flatten(0, 1).permute(0, 2, 1, 3).contiguous())
        elif layout == "2BNHD":
            made.append(both.permute(3, 0, 1, 2, 4).contiguous())
        elif layout == "2BHND":
            made.append(both.permute(3, 0, 2, 1, 4).contiguous().permute(0, 1, 3, 2, 4))
        elif layout == "B2NHD":
            made.append(both.permute(0, 3, 1, 2, 4).contiguous())
        elif layout == "B2HND":
            made.append(both.permute(0, 3, 2, 1, 4).contiguous().permute(0, 1, 3, 2, 4))
        else:
            raise ValueError(layout)
    return made


LAYOUTS = ("BHN(KV)", "BNH(KV)", "BHN(KV) split", "2BNHD", "2BHND", "B2NHD", "B2HND")


class PagedTest(unittest.TestCase):
    device = "cpu"

    def staging(self, tokens: int, blocks: int) -> Staging:
        memory = torch.zeros(blocks * LAYERS * 2 * tokens * HEADS * HEAD_DIM * 2, dtype=torch.uint8)
        return Staging(memory, LAYERS, tokens, HEADS, HEAD_DIM, torch.float16, torch.device(self.device))

    def test_blocks_move_between_all_layouts(self) -> None:
        ids = [5, 2, 17, 9]
        for tokens in (16, 64):
            reference = layer_views(caches(LAYOUTS[0], tokens, "cpu", True)[1], BLOCKS, tokens, HEADS, HEAD_DIM)
            for number, layout in enumerate(LAYOUTS):
                with self.subTest(layout=layout, tokens=tokens):
                    source = PagedCopy(caches(layout, tokens, self.device, True), BLOCKS, tokens, HEADS, HEAD_DIM)
                    staging = self.staging(tokens, 8)
                    extent = staging.take(len(ids))
                    fences = [
                        source.save(layer, source.indices(ids), *extent.rows(layer), source.here())
                        for layer in range(LAYERS)
                    ]
                    for fence in fences:
                        fence.wait()
                    for rows, view in zip(extent.rows(1), reference):
                        self.assertTrue(torch.equal(rows.view(-1), view[ids].reshape(-1)))
                    for to in (LAYOUTS[number - 1], LAYOUTS[number - 3]):
                        empty = caches(to, tokens, self.device, False)
                        target = PagedCopy(empty, BLOCKS, tokens, HEADS, HEAD_DIM)
                        there = [3, 4, 20, 1]
                        for layer in range(LAYERS):
                            fence = target.load(layer, target.indices(there), *extent.rows(layer), target.here())
                        fence.wait()
                        for view, expected in zip(layer_views(empty[1], BLOCKS, tokens, HEADS, HEAD_DIM), reference):
                            got = view.cpu().reshape(BLOCKS, -1)
                            self.assertTrue(torch.equal(got[there], expected.reshape(BLOCKS, -1)[ids]), to)
                            others = [block for block in range(BLOCKS) if block not in there]
                            self.assertEqual(0, int(got[others].count_nonzero()))

    def test_one_kernel_copies_what_layer_by_layer_is_copied(self) -> None:
        """Without a GPU by Triton's interpreter. Blocks of 0 are left alone."""
        if self.device == "cpu":
            if torch.cuda.is_available():
                self.skipTest("CudaPagedTest runs the kernel itself")
            os.environ["TRITON_INTERPRET"] = "1"  # read as the kernel is made
        try:
            from kvmanager.paged_kernel import PagedKernel
        except ImportError as error:
            self.skipTest(f"{error}: Triton comes with torch for CUDA")
        groups, count = [0, 1, 0], 3
        ids = [[5, 2, 17], [9, 0, 3]]
        for tokens in (16, 48):
            shape = (count + 1, LAYERS, 2, HEADS, tokens, HEAD_DIM)
            for layout in LAYOUTS:
                with self.subTest(layout=layout, tokens=tokens):
                    pages = []
                    for kernel in (False, True):
                        filled, empty = (caches(layout, tokens, self.device, fill) for fill in (True, False))
                        raw = torch.full(shape, 7.0, dtype=torch.float16, device=self.device)
                        for layers, into in ((filled, False), (empty, True)):
                            copy = PagedCopy(layers, BLOCKS, tokens, HEADS, HEAD_DIM, None, groups)
                            copy._kernel = None
                            if kernel:
                                views = [layer_views(layer, BLOCKS, tokens, HEADS, HEAD_DIM) for layer in layers]
                                PagedKernel(views, groups)(raw, torch.tensor(ids, device=self.device), count, into)
                            elif into:
                                copy.load_blocks(raw, count, ids, copy.here()).wait()
                            else:
                                for fence in copy.save_blocks(raw, count, ids, [copy.here()] * LAYERS):
                                    fence.wait()
                        pages.append((raw.cpu(), [layer.cpu() for layer in empty]))
                    (by_layer, caches_by_layer), (by_kernel, caches_by_kernel) = pages
                    by_layer[1, 1] = 7.0  # block 0 of layer 1, which torch copies
                    self.assertTrue(torch.equal(by_layer, by_kernel))
                    self.assertTrue(bool((by_kernel[count] == 7.0).all()))
                    for one, other in zip(caches_by_layer, caches_by_kernel):
                        self.assertTrue(torch.equal(one, other))

    def test_the_kernel_refuses_caches_that_differ(self) -> None:
        try:
            from kvmanager.paged_kernel import PagedKernel
        except ImportError as error:
            self.skipTest(f"{error}: Triton comes with torch for CUDA")
        for second, why in (
            (torch.zeros(2, BLOCKS, 32, HEADS, HEAD_DIM, dtype=torch.float16), "different shapes"),
            (torch.zeros(2, BLOCKS, 16, HEADS, HEAD_DIM, dtype=torch.float32), "different shapes"),
        ):
            first = torch.zeros(2, BLOCKS, 16, HEADS, HEAD_DIM, dtype=torch.float16)
            views = [(each[0].unsqueeze(1), each[1].unsqueeze(1)) for each in (first, second)]
            with self.assertRaisesRegex(ValueError, why):
                PagedKernel(views, [0, 0])
        odd = torch.zeros(2, BLOCKS, 16, HEADS, 126, dtype=torch.float16)
        with self.assertRaisesRegex(ValueError, "whole words"):
            PagedKernel([(odd[0].unsqueeze(1), odd[1].unsqueeze(1))], [0])

    def test_shapes_that_are_no_layout_are_refused(self) -> None:
        for shape in ((BLOCKS, HEADS, 16, HEAD_DIM), (3, BLOCKS, 16, HEADS, HEAD_DIM), (BLOCKS + 1, HEADS, 16, 256)):
            with self.assertRaisesRegex(ValueError, "kv_caches"):
                layer_views(torch.zeros(shape), BLOCKS, 16, HEADS, HEAD_DIM)

    def test_extents_are_given_back(self) -> None:
        staging = self.staging(16, 8)
        a, b, c = staging.take(3), staging.take(3), staging.take(2)
        self.assertIsNone(staging.take(1))
        b.close()
        self.assertIsNone(staging.take(4))
        c.close()
        self.assertIsNotNone(staging.take(5))
        a.close()
        a.close()
        self.assertIsNone(staging.take(4))
        self.assertIsNotNone(staging.take(3))

    def test_copies_are_behind_what_the_engine_did(self) -> None:
        """A step that takes a while writes blocks; the copy, begun at once, has what it wrote."""
        tokens, ids = 16, [7, 8]
        layers = caches("BHN(KV)", tokens, self.device, False)
        copy = PagedCopy(layers, BLOCKS, tokens, HEADS, HEAD_DIM)
        staging = self.staging(tokens, 4)
        extent = staging.take(2)
        work = torch.randn(2048, 2048, device=self.device)
        for _ in range(20):
            work = work @ work / 2048
        for layer in layers:
            layer.fill_(2.0)
        saved = [copy.save(layer, copy.indices(ids), *extent.rows(layer), copy.here()) for layer in range(LAYERS)]
        for fence in saved:  # blocks are taken away: what the engine writes now comes after the copies
            fence.hold()
        for layer in layers:
            layer.fill_(3.0)
        for fence in saved:
            fence.wait()
            self.assertTrue(fence.passed())
        for layer in range(LAYERS):
            for rows in extent.rows(layer):
                self.assertTrue(bool((rows == 2.0).all()))
        self.assertTrue(Fence().passed())

    def test_an_engine_in_inference_mode(self) -> None:
        """Its step takes staging, perhaps its caches were made there, too; a thread without that mode copies."""
        tokens, ids, there = 16, [5, 2, 17, 9], [3, 4, 20, 1]
        staging = self.staging(tokens, 8)
        with torch.inference_mode():
            filled, empty = (caches("BHN(KV)", tokens, self.device, fill) for fill in (True, False))
            source, target = (PagedCopy(each, BLOCKS, tokens, HEADS, HEAD_DIM) for each in (filled, empty))
            extent = staging.take(len(ids))
        self.assertTrue(empty[0].is_inference())
        self.assertFalse(torch.is_inference_mode_enabled())
        for layer in range(LAYERS):
            rows = extent.rows(layer)
            source.save(layer, source.indices(ids), *rows, source.here()).wait()
            target.load(layer, target.indices(there), *rows, target.here()).wait()
        for was, now in zip(filled, empty):
            self.assertTrue(torch.equal(was[ids], now[there]))

    def test_through_the_daemon(self) -> None:
        """raw: equal bytes. K3V2: the codec's error."""
        for codec, bounds in (("raw", (0.0, 0.0)), ("hack:k_bits=3,v_bits=2", (0.25, 0.5))):
            with self.subTest(codec=codec), Daemon(host_pool="256MiB") as daemon:
                with kvmanager.connect(daemon.listen) as client:
                    error = self._there_and_back(client, codec)
                print(f"{self.device} {codec}: relative error of K {error[0]:.4f}, of V {error[1]:.4f}")
                for each, bound in zip(error, bounds):
                    self.assertLessEqual(each, bound)
                    self.assertEqual(codec == "raw", each == 0.0)

    def _there_and_back(self, client, codec: str) -> list[float]:
        tokens, ids, there = 64, list(range(2, 18)), list(range(20, 4, -1))
        layers = caches("BHN(KV)", tokens, self.device, True)
        source = PagedCopy(layers, BLOCKS, tokens, HEADS, HEAD_DIM)
        empty = caches("2BNHD", tokens, self.device, False)
        target = PagedCopy(empty, BLOCKS, tokens, HEADS, HEAD_DIM)
        cache = client.open_cache(
            model="m", layers=LAYERS, kv_heads=HEADS, query_heads=HEADS, head_dim=HEAD_DIM, codec=codec, lag_pages=0
        )
        arena = client.create_arena(len(ids) * LAYERS * 2 * tokens * HEADS * HEAD_DIM * 2)
        memory = torch.from_dlpack(arena.tensor((arena.nbytes,), "uint8"))
        staging = Staging(memory, LAYERS, tokens, HEADS, HEAD_DIM, torch.float16, torch.device(self.device))
        extent = staging.take(len(ids))
        names = cache.external_names(bytes([block]) * 32 for block in range(len(ids)))
        with cache.create_sequence() as sequence:
            for layer in range(LAYERS):
                source.save(layer, source.indices(ids), *extent.rows(layer), source.here()).wait()
                cache.step(layer, [(sequence, 0, len(ids) * tokens)], *extent.rows(layer))
            sequence.publish(names)
        memory.zero_()
        with cache.create_sequence(names) as found:
            self.assertEqual(len(ids), found.hit_blocks)
            for layer in range(LAYERS):
                cache.read(layer, [(found, 0, len(ids) * tokens)], *extent.rows(layer))
                target.load(layer, target.indices(there), *extent.rows(layer), target.here()).wait()
        errors = [0.0, 0.0]
        for was, now in zip(layers, empty):
            before = layer_views(was, BLOCKS, tokens, HEADS, HEAD_DIM)
            after = layer_views(now, BLOCKS, tokens, HEADS, HEAD_DIM)
            for side in range(2):
                expected, got = before[side][ids].flatten().float(), after[side][there].flatten().float()
                errors[side] = max(errors[side], float((expected - got).norm() / expected.norm()))
        extent.close()
        return errors


class PackingTest(unittest.TestCase):
    """An engine's attention on a CPU, which keeps K and V of a block's head in an order of its own."""

    def engine(self, tokens: int, dtype: torch.dtype, order=None):
        """Its write(k, v, cache, slots). order: place of each of K's values, then V's; one for each head."""
        size = 2 * tokens * HEAD_DIM
        if order is None:
            order = torch.randperm(size, generator=torch.Generator().manual_seed(tokens)).expand(HEADS, size)

        def write(k, v, cache, slots) -> None:
            self.assertEqual(dtype, cache.dtype)
            rows = torch.stack([k, v]).permute(2, 0, 1, 3).flatten(1)  # [HEADS][K, V; tokens; HEAD_DIM]
            for block in range(len(cache)):
                if block * tokens in slots.tolist():
                    cache[block].view(HEADS, size).scatter_(1, order, rows)

        return write

    @staticmethod
    def amx(tokens: int) -> torch.Tensor:
        """As vLLM's kernels for AMX: pairs of K's channels beside one another for 16 tokens, of V's tokens for 16 channels."""
        t, d = torch.arange(tokens).view(-1, 1), torch.arange(HEAD_DIM)
        k = d % 2 + 2 * (t % 16) + 32 * (d // 2) + 16 * HEAD_DIM * (t // 16)
        v = t % 2 + 2 * (d % 16) + 32 * (t // 2) + 16 * tokens * (d // 16)
        return torch.cat([k.flatten(), tokens * HEAD_DIM + v.flatten()]).expand(HEADS, -1)

    @staticmethod
    def transposed(tokens: int) -> torch.Tensor:
        """K channel by channel."""
        t, d = torch.arange(tokens).view(-1, 1), torch.arange(HEAD_DIM)
        return torch.cat([(t + tokens * d).flatten(), tokens * HEAD_DIM + (HEAD_DIM * t + d).flatten()]).expand(HEADS, -1)

    def test_blocks_move_from_and_to_packed_ones(self) -> None:
        ids, there = [5, 2, 17, 9], [3, 4, 20, 1]
        for dtype, order in itertools.product((torch.float16, torch.bfloat16), (None, self.amx, self.transposed)):
            for tokens in (16, 64):
                with self.subTest(dtype=dtype, tokens=tokens, order=order):
                    plain = [each.to(dtype) for each in caches("BHN(KV)", tokens, "cpu", True)]
                    write = self.engine(tokens, dtype, order and order(tokens))
                    packing = learn_packing(write, tokens, HEADS, HEAD_DIM, dtype)
                    self.assertEqual(order is not None, packing.strided)
                    packed = [torch.zeros_like(each) for each in plain]
                    for layer, cache in zip(plain, packed):
                        for block in range(BLOCKS):
                            k, v = layer[block].transpose(0, 1).split(HEAD_DIM, -1)
                            write(k, v, cache[block : block + 1], torch.arange(tokens))
                    self.assertFalse(torch.equal(plain[0], packed[0]))
                    packings = [packing] * LAYERS
                    size = BLOCKS, tokens, HEADS, HEAD_DIM
                    for source, empty, target, expected in (
                        (PagedCopy(packed, *size, packings), torch.zeros_like(plain[1]), None, plain),
                        (PagedCopy(plain, *size), torch.zeros_like(plain[1]), packings, packed),
                    ):
                        memory = torch.zeros(4 * LAYERS * 2 * tokens * HEADS * HEAD_DIM * 2, dtype=torch.uint8)
                        rows = Staging(memory, LAYERS, tokens, HEADS, HEAD_DIM, dtype).take(len(ids)).rows(1)
                        source.save(1, source.indices(ids), *rows, source.here())
                        copy = PagedCopy([empty], *size, target and target[:1])
                        copy.load(0, copy.indices(there), *rows, copy.here())
                        self.assertTrue(torch.equal(expected[1][ids], empty[there]))
                        others = [block for block in range(BLOCKS) if block not in there]
                        self.assertEqual(0, int(empty[others].count_nonzero()))

    def test_an_engine_whose_packing_cannot_be_learned_is_refused(self) -> None:
        tokens, size = 16, 2 * 16 * HEAD_DIM
        order = torch.arange(size)
        twice = order.clone()
        twice[7] = 8
        for write, text in (
            (lambda k, v, cache, slots: None, "each value of a block"),
            (self.engine(tokens, torch.float16, twice.expand(HEADS, size)), "each value of a block"),
            (lambda k, v, cache, slots: cache.zero_(), "once"),
            (
                self.engine(tokens, torch.float16, torch.stack([order.roll(head) for head in range(HEADS)])),
                "heads of a block",
            ),
        ):
            with self.subTest(text=text), self.assertRaisesRegex(ValueError, text):
                learn_packing(write, tokens, HEADS, HEAD_DIM, torch.float16)


class CudaPagedTest(PagedTest):
    device = "cuda"

    def setUp(self) -> None:
        if not torch.cuda.is_available():
            self.skipTest("needs a GPU")

    def test_memory_that_cannot_be_pinned_costs_time_alone(self) -> None:
        """Registered already, it cannot be registered again; that error is nobody else's."""
        tokens, ids = 16, [7, 8]
        source = PagedCopy(caches("BHN(KV)", tokens, self.device, True), BLOCKS, tokens, HEADS, HEAD_DIM)
        pinned = self.staging(tokens, 4)
        self.assertTrue(pinned.pinned)
        with self.assertWarnsRegex(UserWarning, "pinned"):
            shape = (LAYERS, tokens, HEADS, HEAD_DIM)
            unpinned = Staging(pinned._memory, *shape, torch.float16, torch.device(self.device))
        self.assertFalse(unpinned.pinned)
        extent = unpinned.take(2)
        for layer in range(LAYERS):
            source.save(layer, source.indices(ids), *extent.rows(layer), source.here()).wait()
        expected = layer_views(caches("BHN(KV)", tokens, "cpu", True)[1], BLOCKS, tokens, HEADS, HEAD_DIM)
        for rows, view in zip(extent.rows(1), expected):
            self.assertTrue(torch.equal(rows.view(-1), view[ids].reshape(-1)))


if __name__ == "__main__":
    unittest.main()
