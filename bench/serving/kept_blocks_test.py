"""kept_blocks.KeptBlocks on a worker whose model runner is simulated: torch, no vLLM."""

from __future__ import annotations

import types
import unittest

import torch
from kept_blocks import KeptBlocks

BLOCKS, TOKENS, HEADS, WIDTH, LAYERS = 10, 4, 2, 8, 3


class Runner:
    def __init__(self, shape: tuple[int, ...]) -> None:
        generator = torch.Generator().manual_seed(1)
        self.kv_caches = [torch.randn(shape, generator=generator).bfloat16() for _ in range(LAYERS)]
        self.vllm_config = types.SimpleNamespace(cache_config=types.SimpleNamespace(num_gpu_blocks=BLOCKS))
        self.steps = 0

    def execute_model(self, scheduled, intermediate=None):
        self.steps += 1
        return intermediate


class Worker(KeptBlocks):
    def __init__(self, shape: tuple[int, ...]) -> None:
        self.model_runner, self.device = Runner(shape), torch.device("cpu")

    def step(self, new: dict[str, list[int]], running: dict[str, list[int] | None]) -> object:
        return self.model_runner.execute_model(types.SimpleNamespace(
            scheduled_new_reqs=[types.SimpleNamespace(req_id=name, block_ids=(ids,)) for name, ids in new.items()],
            scheduled_cached_reqs=types.SimpleNamespace(
                req_ids=list(running), new_block_ids=[None if ids is None else (ids,) for ids in running.values()])), "passed on")


class KeptBlocksTest(unittest.TestCase):
    # K and V before blocks, behind them, in kernel blocks of half the tokens, and within heads.
    SHAPES = ((2, BLOCKS, TOKENS, HEADS, WIDTH), (BLOCKS, 2, TOKENS, HEADS, WIDTH), (2 * BLOCKS, 2, TOKENS // 2, HEADS, WIDTH),
              (BLOCKS, HEADS, TOKENS, 2 * WIDTH), (2 * BLOCKS, HEADS, TOKENS // 2, 2 * WIDTH))

    def worker(self, shape: tuple[int, ...]) -> Worker:
        worker = Worker(shape)
        worker.watch_blocks()
        self.assertEqual("passed on", worker.step({"a": [7, 2]}, {}))
        worker.step({}, {"a": [5], "other": [9]})
        worker.step({}, {"a": None})
        self.assertEqual(3, worker.model_runner.steps)
        worker.keep_blocks(0, 3)
        return worker

    def block(self, cache: torch.Tensor, block: int, side: int) -> torch.Tensor:
        """K or V of a block, as a view."""
        if cache.shape[0] == 2:
            return cache[side, block]
        parts = cache.shape[0] // BLOCKS
        pieces = cache[block * parts : (block + 1) * parts]
        return pieces[:, side] if cache.dim() == 5 else pieces.flatten(2).unflatten(-1, (2, -1))[:, :, side]

    def test_what_is_copied_elsewhere_is_equal(self) -> None:
        for shape in self.SHAPES:
            with self.subTest(shape=shape):
                worker = self.worker(shape)
                before = [cache.clone() for cache in worker.model_runner.kv_caches]
                worker.overwrite_blocks()
                overwritten = worker.compare_kept_blocks(0, 3)
                self.assertEqual((0, 3), (overwritten["equal"], overwritten["compared"]))
                for cache, then in zip(worker.model_runner.kv_caches, before):
                    for to, source in ((1, 7), (3, 2), (8, 5)):
                        for side in range(2):
                            self.block(cache, to, side).copy_(self.block(then, source, side))
                worker.step({"b": [1, 3, 8]}, {})
                self.assertEqual({"equal": 3, "compared": 3, "k_error": 0.0, "v_error": 0.0}, worker.compare_blocks(0, 3))
                worker.step({"c": [3, 1, 8]}, {})
                self.assertEqual(1, worker.compare_blocks(0, 3)["equal"], "blocks in another order")
                self.assertEqual(0, worker.compare_blocks(0, 2)["equal"])

    def test_one_bit_is_a_block(self) -> None:
        for shape in self.SHAPES:
            with self.subTest(shape=shape):
                worker = self.worker(shape)
                value = self.block(worker.model_runner.kv_caches[-1], 5, 1)
                value[(-1,) * value.dim()] = value.flatten()[-1:].view(torch.int16).bitwise_xor(1).view(torch.bfloat16)[0]
                found = worker.compare_blocks(0, 3)
                self.assertEqual(2, found["equal"])
                self.assertEqual(0.0, found["k_error"])
                self.assertGreater(found["v_error"], 0.0)

    def test_minus_zero_is_not_zero(self) -> None:
        worker = Worker(self.SHAPES[0])
        worker.watch_blocks()
        for cache in worker.model_runner.kv_caches:
            cache.zero_()
        worker.step({"a": [1]}, {})
        worker.keep_blocks(0, 1)
        worker.model_runner.kv_caches[0][0, 1] = -0.0
        self.assertEqual(0, worker.compare_blocks(0, 1)["equal"])

    def test_error_is_relative(self) -> None:
        worker = self.worker(self.SHAPES[0])
        for cache in worker.model_runner.kv_caches:
            cache[0] *= 1.5
        found = worker.compare_blocks(0, 3)
        self.assertAlmostEqual(0.5, found["k_error"], places=2)
        self.assertEqual(0.0, found["v_error"])

    def test_a_cache_that_is_not_known_is_refused(self) -> None:
        for shape in ((BLOCKS + 1, 2, TOKENS, HEADS, WIDTH), (BLOCKS, TOKENS, 2, HEADS, WIDTH), (BLOCKS, WIDTH)):
            worker = Worker(shape)
            worker.watch_blocks()
            worker.step({"a": [1]}, {})
            with self.assertRaisesRegex(ValueError, "with a multiple of 10 blocks"):
                worker.keep_blocks(0, 1)


if __name__ == "__main__":
    unittest.main()
