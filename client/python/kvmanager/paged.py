"""Moves blocks between an engine's paged KV cache and host memory. Needs torch alone.

Layouts of one layer's cache, B blocks of N tokens, H heads of D values, strides being whatever they are:

    [B][H][N][2 D]     K, then V, of a token and head (vLLM since 0.24); B may be a multiple of the blocks, of fewer tokens
    [2][B][N][H][D]    vLLM's FlashAttention before
    [B][2][N][H][D]    vLLM's FlashInfer and Triton before

On a CPU the 2 N D values of a block's head may be packed for the machine's instructions: packing.py.

On a GPU, copies go by a stream of their own. Nothing here waits for a GPU but Fence.wait(), and it waits for the copies
alone: what the engine's stream wrote before is ordered by an event that the copies' stream waits for.

Engines run their steps in torch.inference_mode(), and copies run in another thread, outside of it. torch lets no such thread
write to an inference tensor. So staging has no tensors of that mode, and the engine's caches are written in it.
"""

from __future__ import annotations

import threading
import warnings

from typing import TYPE_CHECKING

import torch

from .packing import Packing

if TYPE_CHECKING:
    from .paged_kernel import PagedKernel


def layer_views(cache: torch.Tensor, blocks: int, block_tokens: int, heads: int, head_dim: int):
    """(K, V) of a layer's cache as views [blocks][pieces][tokens of a piece][heads][head_dim]. ValueError: no layout of
    the above has this shape."""
    shape = tuple(cache.shape)
    if cache.dim() == 4 and shape[1] == heads and shape[3] == 2 * head_dim and shape[0] % blocks == 0:
        pieces = shape[0] // blocks
        if pieces * shape[2] == block_tokens:
            both = cache.permute(0, 2, 1, 3).unflatten(0, (blocks, pieces))
            return both[..., :head_dim], both[..., head_dim:]
    if cache.dim() == 5 and shape[2:] == (block_tokens, heads, head_dim):
        if shape[:2] == (2, blocks) and blocks != 2:
            return cache[0].unsqueeze(1), cache[1].unsqueeze(1)
        if shape[:2] == (blocks, 2) and blocks != 2:
            return cache[:, 0].unsqueeze(1), cache[:, 1].unsqueeze(1)
    raise ValueError(
        f"kv_caches (shape) is {shape}, must be [{blocks}][{heads}][{block_tokens}][{2 * head_dim}], "
        f"[2][{blocks}][{block_tokens}][{heads}][{head_dim}] or [{blocks}][2][{block_tokens}][{heads}][{head_dim}], "
        "with more than 2 blocks"
    )


def _rows(raw: torch.Tensor, layer: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(K, V) of the first `count` of raw pages, each [count][tokens][heads][head_dim]."""
    with torch.inference_mode(False):
        both = raw[:count, layer].transpose(3, 2)
        return both[:, 0], both[:, 1]


class Fence:
    """A point in the copies' stream; of copies on the CPU, one that is passed."""

    __slots__ = ("_event",)

    def __init__(self, event: torch.cuda.Event | None = None) -> None:
        self._event = event

    def passed(self) -> bool:
        return self._event is None or self._event.query()

    def wait(self) -> None:
        """Blocks this thread, and no stream. For threads of the connector's own."""
        if self._event is not None:
            self._event.synchronize()

    def hold(self, stream: torch.cuda.Stream | None = None) -> None:
        """What `stream` does from now on comes after; None: the engine's current one. Blocks no thread."""
        if self._event is not None:
            self._event.wait(stream)


class PagedCopy:
    """Copies between blocks of an engine's caches and rows [tokens][heads][head_dim], or [blocks][tokens of a block][heads]
    [head_dim] of any strides, in host memory or on the caches' device.

    layers: per layer the engine's cache, its packing, and the group that its block ids are of; None: there is none, or one group.
    What saves, and what loads, may be called by one thread each."""

    def __init__(
        self,
        layers: list[torch.Tensor],
        blocks: int,
        block_tokens: int,
        heads: int,
        head_dim: int,
        packings: list[Packing | None] | None = None,
        groups: list[int] | None = None,
    ) -> None:
        self.views = [layer_views(layer, blocks, block_tokens, heads, head_dim) for layer in layers]
        self._packings = packings or [None] * len(layers)
        self._packed = [  # [blocks][pieces][heads][2 * tokens of a piece * head_dim]
            None if packing is None else layer.flatten(2).unflatten(0, (blocks, -1))
            for layer, packing in zip(layers, self._packings)
        ]
        self.device = layers[0].device
        self.block_tokens = block_tokens
        self.cuda = self.device.type == "cuda"
        self.index = (self.device.index or 0) if self.cuda else -1  # of the GPU; -1: the CPU
        self.save_stream = self.load_stream = None
        self.fetch_stream = None  # what brings pages to the GPU, ahead of the loads
        self.send_stream = None  # what brings them from there, behind the saves
        self.groups = groups or [0] * len(layers)
        self._kernel: PagedKernel | None = None
        if self.cuda:
            low = torch.cuda.Stream.priority_range()[0]
            self.save_stream = torch.cuda.Stream(self.device, priority=low)
            self.load_stream = torch.cuda.Stream(self.device, priority=low)
            self.fetch_stream = torch.cuda.Stream(self.device, priority=low)
            self.send_stream = torch.cuda.Stream(self.device, priority=low)
            self._kernel = self._make_kernel()

    def _make_kernel(self) -> PagedKernel | None:
        """None: layers are copied one by one."""
        try:
            from .paged_kernel import PagedKernel

            with torch.cuda.device(self.device):
                return PagedKernel(self.views, self.groups)
        except Exception as error:  # Triton is not there, or finds no compiler
            warnings.warn(f"kvmanager copies layers one by one, which takes longer: {type(error).__name__}: {error}")
            return None

    def here(self) -> Fence:
        """Where the engine's current stream is: what it was given so far."""
        return self._record(torch.cuda.current_stream(self.device)) if self.cuda else Fence()

    def indices(self, block_ids: list[int]) -> torch.Tensor:
        """For save() and load(), of any layer."""
        ids = torch.tensor(block_ids, dtype=torch.int64)
        return ids.pin_memory() if self.cuda else ids

    def save(self, layer: int, indices: torch.Tensor, k: torch.Tensor, v: torch.Tensor, after: Fence) -> Fence:
        """Copies blocks of `layer` into rows k and v behind `after`. Only begun: rows are there behind the fence."""
        if not self.cuda:
            for blocks, rows in zip(self._read(layer, indices), (k, v)):
                rows.copy_(blocks.reshape(rows.shape))
            return Fence()
        with torch.cuda.stream(self.save_stream):
            after.hold()
            on_device = indices.to(self.device, non_blocking=True)
            for view, rows in zip(self.views[layer], (k, v)):
                rows.copy_(view.index_select(0, on_device).reshape(rows.shape), non_blocking=True)
            return self._record(self.save_stream)

    def load(self, layer: int, indices: torch.Tensor, k: torch.Tensor, v: torch.Tensor, after: Fence) -> Fence:
        """Copies rows k and v into blocks of `layer` behind `after`. Only begun: rows are read, and blocks there, behind
        the fence."""
        if not self.cuda:
            with torch.inference_mode():
                self._write(layer, indices, k, v)
            return Fence()
        with torch.inference_mode(), torch.cuda.stream(self.load_stream):
            after.hold()
            on_device = indices.to(self.device, non_blocking=True)
            for view, rows in zip(self.views[layer], (k, v)):
                there = rows.to(self.device, non_blocking=True)
                view.index_copy_(0, on_device, there.reshape(len(indices), *view.shape[1:]))
            return self._record(self.load_stream)

    def save_blocks(self, raw: torch.Tensor, count: int, ids: list[list[int]], after: list[Fence]) -> list[Fence]:
        """Copies blocks of all layers into the first `count` of raw pages [blocks][layers][K, V][heads][tokens][head_dim] on the
        caches' device. ids: by group. after: by layer. Only begun: pages are there behind the fences."""
        if self._kernel is None:
            indices, fences = [self.indices(each) for each in ids], []
            for layer, group in enumerate(self.groups):
                k, v = _rows(raw, layer, count)
                fences.append(self.save(layer, indices[group], k, v, after[layer]))
            return fences
        with torch.cuda.stream(self.save_stream):
            for fence in after:
                fence.hold()
            self._kernel(raw, self._on_device(ids), count, into_cache=False)
            return [self._record(self.save_stream)]

    def load_blocks(self, raw: torch.Tensor, count: int, ids: list[list[int]], after: Fence) -> Fence:
        """Copies the first `count` of raw pages into blocks of all layers. ids: by group; 0: not wanted. Only begun: pages are read,
        and blocks there, behind the fence."""
        if self._kernel is None:
            wanted = [[place for place, each in enumerate(group) if each] for group in ids]
            indices = [self.indices([group[place] for place in places]) for group, places in zip(ids, wanted)]
            for layer, group in enumerate(self.groups):
                k, v = _rows(raw, layer, count)
                if len(wanted[group]) < count:
                    k, v = k[wanted[group]], v[wanted[group]]
                if wanted[group]:
                    self.load(layer, indices[group], k, v, after)
            return self.loaded()
        with torch.cuda.stream(self.load_stream):
            after.hold()
            self._kernel(raw, self._on_device(ids), count, into_cache=True)
            return self._record(self.load_stream)

    def _on_device(self, ids: list[list[int]]) -> torch.Tensor:
        with torch.inference_mode(False):
            return torch.tensor(ids, dtype=torch.int64).pin_memory().to(self.device, non_blocking=True)

    def _read(self, layer: int, indices: torch.Tensor) -> list[torch.Tensor]:
        """K and V of blocks on a CPU, each [blocks][pieces][tokens of a piece][heads][head_dim]."""
        packing = self._packings[layer]
        if packing is None:
            return [view.index_select(0, indices) for view in self.views[layer]]
        return [side.transpose(2, 3) for side in packing.unpack(self._packed[layer].index_select(0, indices))]

    def _write(self, layer: int, indices: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        packing = self._packings[layer]
        sides = [rows.reshape(len(indices), *view.shape[1:]) for view, rows in zip(self.views[layer], (k, v))]
        if packing is None:
            for view, side in zip(self.views[layer], sides):
                view.index_copy_(0, indices, side)
        else:
            packed = packing.pack(*(side.transpose(2, 3) for side in sides))
            self._packed[layer].index_copy_(0, indices, packed)

    def saved(self) -> Fence:
        """All that save() began so far, also where it failed in the middle."""
        return self._record(self.save_stream) if self.cuda else Fence()

    def sent(self) -> Fence:
        """Behind all that send_stream was given."""
        return self._record(self.send_stream) if self.cuda else Fence()

    def hold_saves(self, after: list[Fence]) -> None:
        """What saves is given from now on comes behind these."""
        for fence in set(after):
            fence.hold(self.save_stream)

    def fetched(self) -> Fence:
        """Behind all that fetch_stream was given."""
        return self._record(self.fetch_stream) if self.cuda else Fence()

    def loaded(self) -> Fence:
        """The same of load()."""
        return self._record(self.load_stream) if self.cuda else Fence()

    def _record(self, stream: torch.cuda.Stream) -> Fence:
        event = torch.cuda.Event(blocking=True)  # who waits sleeps: a step may take long, and engines need their cores
        event.record(stream)
        return Fence(event)


def _forget_error(device: torch.device) -> None:
    """CUDA keeps the last error of a call for each thread, and torch takes it for that of the next kernel it begins."""
    try:
        torch.empty(1, device=device).fill_(1)
    except RuntimeError:
        pass


class Staging:
    """Host memory cut into extents of whole blocks, each [layers][K, V][blocks * tokens][heads][head_dim].

    memory: a flat uint8 tensor that stays mapped; device: a GPU that it is pinned for while this lives, or none. Every method may
    be called by any thread."""

    def __init__(
        self,
        memory: torch.Tensor,
        layers: int,
        block_tokens: int,
        heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | None = None,
    ) -> None:
        self._memory = memory
        self._shape = (layers, 2, block_tokens, heads, head_dim)
        self._dtype = dtype
        self.block_bytes = layers * 2 * block_tokens * heads * head_dim * dtype.itemsize
        self.blocks = memory.numel() // self.block_bytes
        self._lock = threading.Lock()
        self._free = [(0, self.blocks)]  # (first, blocks), ascending, apart from one another
        self._pinned = False
        self._device = device
        if device is not None and device.type == "cuda":
            with torch.cuda.device(device):
                failed = torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.numel(), 0)
            self._pinned = int(failed) == 0
            if not self._pinned:
                warnings.warn("staging could not be pinned: copies between GPU and host will wait for one another")
                _forget_error(device)

    def __del__(self) -> None:
        if getattr(self, "_pinned", False):
            with torch.cuda.device(self._device):
                torch.cuda.cudart().cudaHostUnregister(self._memory.data_ptr())

    @property
    def pinned(self) -> bool:
        return self._pinned

    def take(self, blocks: int) -> Extent | None:
        """None: there is no room for that many in a row."""
        with self._lock:
            for place, (first, size) in enumerate(self._free):
                if size >= blocks:
                    self._free[place : place + 1] = [(first + blocks, size - blocks)] if size > blocks else []
                    return Extent(self, first, blocks)
        return None

    def _give_back(self, first: int, blocks: int) -> None:
        with self._lock:
            merged: list[tuple[int, int]] = []
            for begin, size in sorted([*self._free, (first, blocks)]):
                if merged and sum(merged[-1]) == begin:
                    merged[-1] = (merged[-1][0], merged[-1][1] + size)
                else:
                    merged.append((begin, size))
            self._free = merged


class Extent:
    """Room for some blocks of all layers: rows(layer) is (K, V), each [blocks * tokens][heads][head_dim]. Given back by
    close()."""

    __slots__ = ("_staging", "_first", "blocks", "_rows")

    def __init__(self, staging: Staging, first: int, blocks: int) -> None:
        self._staging: Staging | None = staging
        self._first, self.blocks = first, blocks
        layers, two, tokens, heads, head_dim = staging._shape
        begin, size = first * staging.block_bytes, blocks * staging.block_bytes
        with torch.inference_mode(False):  # a view made in the engine's step would be an inference tensor
            flat = staging._memory[begin : begin + size].view(staging._dtype)
            self._rows = flat.view(layers, two, blocks * tokens, heads, head_dim)

    def rows(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self._rows[layer, 0], self._rows[layer, 1]

    def side(self, side: int) -> torch.Tensor:
        """K (0) or V (1) of all layers: [layers][blocks * tokens][heads][head_dim]."""
        return self._rows[:, side]

    def close(self) -> None:
        """Nothing reads or writes it any more."""
        staging, self._staging = self._staging, None
        if staging is not None:
            staging._give_back(self._first, self.blocks)


__all__ = ["Extent", "Fence", "PagedCopy", "Staging", "layer_views"]
