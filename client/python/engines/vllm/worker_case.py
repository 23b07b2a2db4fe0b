"""What tests of the connector's half in a worker share: ranks against a real daemon, and what their blocks are compared with.

On a GPU with KVMANAGER_TEST_DEVICE=cuda: there steps are kernels that are under way while the connector copies, and blocks
are written again as soon as it allows that; with =threads, threads of the CPU are. Needs torch, and vLLM or not (stand_in.py). The
daemon keeps these blocks in host memory: the connector has no caches on a GPU.
"""

from __future__ import annotations

import threading
import time

import torch
from engine_testing import DaemonTestCase
from kvmanager_testing import Daemon
from rank import BLOCKS, DEVICE, DEVICE_NAME, LAYERS, STREAM, Rank, StepPlan, hashes_of, random_rows
from stand_in import USED

DEADLINE_S = 120
DIRECT_FLAGS = ("--devices", "0", "--device-pool-bytes", "256MiB")  # the daemon has the worker's GPU


def say_where() -> None:
    """Once a file."""
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


class WorkerTestCase(DaemonTestCase):
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
