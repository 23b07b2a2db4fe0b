"""One worker of vLLM as its connector sees it: a paged cache of random K and V on a device, and a model runner's hooks.

KVMANAGER_TEST_DEVICE: cuda instead of cpu; or threads: the CPU, with threads for a GPU's streams.
"""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Callable, Iterable

from stand_in import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, SlidingWindowSpec

import kvmanager.vllm.worker
import torch
from kvmanager.vllm import KvManagerConnector
from kvmanager.vllm.connector import KVConnectorRole
from kvmanager.vllm.messages import Finish, Load, StepPlan, Store
from kvmanager.vllm.retention import Retention
from kvmanager.vllm.worker import WorkerHalf

LAYERS, HEADS, HEAD_DIM, BLOCKS = 3, 4, 128, 48
DEADLINE_S = 120
DEVICE_NAME = os.environ.get("KVMANAGER_TEST_DEVICE", "cpu")
DEVICE = torch.device("cpu" if DEVICE_NAME == "threads" else DEVICE_NAME)
_BUSY_CYCLES = 50_000_000  # some 30 ms of a GPU

# Names are the order of axes in memory. Of each: how a layer's memory is made of blocks B, pieces P, tokens N of a piece,
# heads H, K and V (2) and D values; what vLLM shows of it; and that memory as [B][P][N][H][2][D].
LAYOUTS: dict[str, tuple[Callable, Callable, Callable]] = {
    "BHN(KV)": (
        lambda b, n: (b, HEADS, n, 2, HEAD_DIM),
        lambda memory: memory.flatten(3),
        lambda memory: memory.permute(0, 2, 1, 3, 4).unsqueeze(1),
    ),
    "BNH(KV)": (
        lambda b, n: (b, n, HEADS, 2, HEAD_DIM),
        lambda memory: memory.flatten(3).permute(0, 2, 1, 3),
        lambda memory: memory.unsqueeze(1),
    ),
    "BHN(KV) split": (
        lambda b, n: (b, 2, HEADS, n // 2, 2, HEAD_DIM),
        lambda memory: memory.flatten(4).flatten(0, 1),
        lambda memory: memory.permute(0, 1, 3, 2, 4, 5),
    ),
    "2BNHD": (
        lambda b, n: (2, b, n, HEADS, HEAD_DIM),
        lambda memory: memory,
        lambda memory: memory.permute(1, 2, 3, 0, 4).unsqueeze(1),
    ),
    "2BHND": (
        lambda b, n: (2, b, HEADS, n, HEAD_DIM),
        lambda memory: memory.permute(0, 1, 3, 2, 4),
        lambda memory: memory.permute(1, 3, 2, 0, 4).unsqueeze(1),
    ),
    "B2NHD": (
        lambda b, n: (b, 2, n, HEADS, HEAD_DIM),
        lambda memory: memory,
        lambda memory: memory.permute(0, 2, 3, 1, 4).unsqueeze(1),
    ),
    "B2HND": (
        lambda b, n: (b, 2, HEADS, n, HEAD_DIM),
        lambda memory: memory.permute(0, 1, 3, 2, 4),
        lambda memory: memory.permute(0, 3, 2, 1, 4).unsqueeze(1),
    ),
}


def random_rows(seed: int, blocks: int, block_tokens: int, dtype=torch.float16) -> torch.Tensor:
    """[LAYERS][blocks][tokens][HEADS][K, V][HEAD_DIM], on the device."""
    generator = torch.Generator().manual_seed(seed)
    shape = (LAYERS, blocks, block_tokens, HEADS, 2, HEAD_DIM)
    return torch.randn(shape, generator=generator).to(dtype).to(DEVICE)


def hashes_of(seed: int, count: int) -> list[bytes]:
    return [bytes([seed, place]) * 16 for place in range(count)]


class DeviceStream:
    """The current stream of the device. On the CPU all is done at once."""

    def put(self, work: Callable[[], object]) -> None:
        work()

    def busy(self) -> None:
        """Keeps the stream from going on for a while, but leaves room for kernels of others: what is not ordered behind
        this stream overtakes it."""
        if DEVICE.type == "cuda":
            torch.cuda._sleep(_BUSY_CYCLES)

    def here(self) -> Callable[[], bool]:
        """Whether the stream has come to where it is now."""
        if DEVICE.type != "cuda":
            return lambda: True
        event = torch.cuda.Event()
        event.record()
        return event.query

    def wait(self) -> None:
        if DEVICE.type == "cuda":
            torch.cuda.current_stream().synchronize()


if DEVICE_NAME == "threads":
    from streams import ENGINE, ThreadedCopy

    STREAM = ENGINE
    kvmanager.vllm.worker.PagedCopy = ThreadedCopy
    WorkerHalf.maps_ahead = property(lambda self: self.settings.map_gib != 0)  # as with a GPU
else:
    STREAM = DeviceStream()


class Rank:
    """A worker of KvManagerConnector, made as vLLM makes it. A context manager.

    windows: of each cache group, None: full attention; layers are dealt out in turn. Blocks begin as NaN."""

    def __init__(
        self,
        address: str,
        layout: str = "BHN(KV)",
        block_tokens: int = 16,
        dtype: torch.dtype = torch.float16,
        windows: tuple[int | None, ...] = (None,),
        **extra,
    ) -> None:
        self.block_tokens, self.dtype = block_tokens, dtype
        self.names = [f"model.layers.{layer}.self_attn.attn" for layer in range(LAYERS)]
        shape = {"block_size": block_tokens, "num_kv_heads": HEADS, "head_size": HEAD_DIM, "dtype": dtype}
        groups = [
            KVCacheGroupSpec(
                layer_names=self.names[group :: len(windows)],
                kv_cache_spec=FullAttentionSpec(**shape)
                if window is None
                else SlidingWindowSpec(sliding_window=window, **shape),
            )
            for group, window in enumerate(windows)
        ]
        caches = KVCacheConfig(num_blocks=BLOCKS, kv_cache_tensors=[], kv_cache_groups=groups)
        settings = {"address": address, "staging_mib": 8, **extra}
        config = SimpleNamespace(
            kv_transfer_config=SimpleNamespace(kv_connector_extra_config=settings, is_kv_producer=True),
            parallel_config=SimpleNamespace(tensor_parallel_size=1),
            model_config=SimpleNamespace(model="m", revision=None, get_num_attention_heads=lambda _: HEADS),
        )
        made, shown, seen = LAYOUTS[layout]
        memory = [torch.full(made(BLOCKS, block_tokens), float("nan"), dtype=dtype, device=DEVICE) for _ in self.names]
        self.caches = {name: shown(each) for name, each in zip(self.names, memory)}
        self.blocks = [seen(each) for each in memory]
        self.connector = KvManagerConnector(config, KVConnectorRole.WORKER, caches)
        self.connector.register_kv_caches(self.caches)
        self.half = self.connector._worker
        if self.half is None or not self.half.link.wait(True, DEADLINE_S):
            raise AssertionError("the connector does not attach")
        self.sent: set[str] = set()
        self.received: set[str] = set()
        self.errors: set[int] = set()
        self.stats: dict[str, float] = {}

    # Blocks. write() and spoil() only begin, on STREAM; the others wait for it.

    def indices(self, ids: Iterable[int]) -> torch.Tensor:
        STREAM.wait()
        return torch.tensor(list(ids), device=DEVICE)

    def write(self, layer: int, indices: torch.Tensor, rows: torch.Tensor) -> None:
        """rows: [blocks][tokens][HEADS][2][HEAD_DIM]."""
        blocks = self.blocks[layer]
        STREAM.put(lambda: blocks.index_copy_(0, indices, rows.unflatten(1, blocks.shape[1:3])))

    def spoil(self, indices: torch.Tensor) -> None:
        for blocks in self.blocks:
            STREAM.put(lambda blocks=blocks: blocks.index_fill_(0, indices, float("nan")))

    def read(self, layer: int, ids: Iterable[int]) -> torch.Tensor:
        """[blocks][tokens][HEADS][2][HEAD_DIM]"""
        return self.blocks[layer][self.indices(ids)].flatten(1, 2)

    # Steps.

    @torch.inference_mode()
    def step(self, plan: StepPlan, forward: Callable[[int], None] = lambda layer: None) -> None:
        """What vLLM's model runner does in a step, in its mode; gathers what the connector says."""
        connector = self.connector
        connector.handle_preemptions(plan)
        connector.bind_connector_metadata(plan)
        connector.start_load_kv(None)
        for layer, name in enumerate(self.names):
            connector.wait_for_layer_load(name)
            forward(layer)
            connector.save_kv_layer(name, self.caches[name], None)
        connector.wait_for_save()
        sent, received = connector.get_finished(set())
        self.sent |= sent or set()
        self.received |= received or set()
        self.errors |= connector.get_block_ids_with_load_errors()
        connector.clear_connector_metadata()
        stats = connector.get_kv_connector_stats()
        for name, value in (stats.data if stats is not None else {}).items():
            if not isinstance(value, list):
                self.stats[name] = self.stats.get(name, 0) + value

    def settle(self) -> None:
        """Until the link has done what it was given; and a step that gathers what it says."""
        if not self.half.link.settle(DEADLINE_S):
            raise AssertionError("the connector does not come to rest")
        self.step(StepPlan())

    def store(
        self, name: str, hashes: list[bytes], ids: list[int], rows: torch.Tensor, first: int = 0, tenant: str = ""
    ) -> None:
        """A step that computes these blocks, behind a kernel that takes a while, and stores them. Only begun. hashes: of
        all blocks from the request's first on, of which rows and ids are those from `first` on."""
        indices = self.indices(ids)
        plan = StepPlan(stores=[Store(name, tenant, first, hashes[first:], first, (ids,) * self.half.facts.group_count)])
        STREAM.busy()
        self.step(plan, lambda layer: self.write(layer, indices, rows[layer]))

    def finish(self, name: str, retention: Retention | None = None) -> None:
        self.step(StepPlan(finishes=[Finish(name, True, retention=retention)]))

    def load(self, name: str, hashes: list[bytes], ids: tuple[list[int], ...], first: int = 0, tenant: str = "") -> set[int]:
        """Loads blocks that an earlier step, still under way, writes to; returns block ids that were not loaded."""
        groups = self.half.facts.group_count
        ids = ids * groups if len(ids) < groups else ids
        taken = self.indices(sorted({each for group in ids for each in group if each}))
        STREAM.busy()
        self.spoil(taken)
        self.received.discard(name)
        self.errors = set()
        self.step(StepPlan(loads=[Load(name, tenant, hashes, first, ids)]))
        self.settle()
        if name not in self.received:
            raise AssertionError(f"the end of the load of {name} is not reported")
        return self.errors

    def close(self) -> None:
        self.connector.shutdown()

    def __enter__(self) -> Rank:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


__all__ = ["BLOCKS", "DEVICE", "DEVICE_NAME", "HEADS", "HEAD_DIM", "LAYERS", "LAYOUTS", "STREAM", "Rank", "StepPlan", "hashes_of", "random_rows"]
