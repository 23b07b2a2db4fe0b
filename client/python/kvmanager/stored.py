"""Blocks of an engine's paged caches as the daemon stores them: encoded and decoded by the engine's own device. Needs torch.

An Extent is room for some whole blocks, all layers of them: raw pages [blocks][layers][K, V][heads][tokens][head_dim], which the
engine's blocks are copied to and from (paged.py), and a range of an arena, which has the same pages as Cache.read_blocks and
Cache.write_blocks want them. In between the cache's codec encodes or decodes, on a GPU by kernels on the stream of the copies.

                    raw pages            encoded pages        range of the arena
    GPU, lossy      GPU memory           GPU memory           pinned host memory
    GPU, raw        GPU memory, the same                      pinned host memory
    CPU, lossy      host memory          the range itself
    CPU, raw        the range itself
"""

from __future__ import annotations

import threading
import warnings

import torch

from .arena import Arena, ArenaTensor
from .page_codec import DECODE_ITEM_BYTES, ENCODE_ITEM_BYTES, PAGE_ALIGN, PageCodec


def _aligned(nbytes: int) -> int:
    return -(-nbytes // PAGE_ALIGN) * PAGE_ALIGN


class Geometry:
    """Of a cache's blocks."""

    def __init__(self, layers: int, block_tokens: int, heads: int, head_dim: int, dtype: torch.dtype) -> None:
        self.layers, self.block_tokens, self.heads, self.head_dim, self.dtype = layers, block_tokens, heads, head_dim, dtype
        self.raw_page_bytes = 2 * heads * block_tokens * head_dim * dtype.itemsize
        self.raw_block_bytes = layers * self.raw_page_bytes


class Extent:
    """Room for `blocks` blocks; one user at a time. close() gives it back."""

    def __init__(self, of: Extents, place: int) -> None:
        g, codec, device = of.geometry, of.codec, of.device
        self._of, self.blocks = of, of.extent_blocks
        self.range: ArenaTensor = of.arena.tensor((of.extent_bytes,), "uint8", place * of.extent_bytes)
        with torch.inference_mode(False):  # views made in an engine's step would be inference tensors
            self._host = torch.from_dlpack(self.range)
            shape = (self.blocks, g.layers, 2, g.heads, g.block_tokens, g.head_dim)
            self._on_gpu = device.type == "cuda"
            in_range = codec.identity and not self._on_gpu
            memory = self._host if in_range else torch.empty(of.extent_bytes, dtype=torch.uint8, device=device)
            self._raw_bytes = memory
            self._raw = memory.view(g.dtype).view(shape)
            if codec.identity:
                self._encoded = memory
            else:
                self._encoded = torch.empty_like(memory) if self._on_gpu else self._host
            pages = self.blocks * g.layers
            self._items = torch.empty((pages, 4), dtype=torch.int64, pin_memory=self._on_gpu)
            self._declined = torch.empty(pages, dtype=torch.int32, pin_memory=self._on_gpu)
        self._forms = torch.zeros(0, dtype=torch.bool)  # [pages] of what is under way: raw?
        self._encodes = torch.zeros(0, dtype=torch.int64)  # pages that are encoded

    def rows(self, layer: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(K, V) of the first `count` blocks, each [count][tokens][heads][head_dim]."""
        with torch.inference_mode(False):
            both = self._raw[:count, layer].transpose(3, 2)
            return both[:, 0], both[:, 1]

    # To the daemon. On the stream of the copies that fill the rows, or behind them on the CPU.

    def encode(self, count: int, first: int, stream: int = 0) -> None:
        """Brings `count` blocks, of which the first is block `first` of its sequence, into the range; only begun on a GPU."""
        g, of = self._of.geometry, self._of
        pages = count * g.layers
        layers, tokens = of.page_layer[:pages], (of.page_block[:pages] + first) * g.block_tokens
        self._forms = (tokens < of.codec.sink_tokens) | of.raw_layer[layers]
        offsets, nbytes = self._layout(self._forms)
        self._encodes = torch.nonzero(~self._forms).flatten() if not of.codec.identity else self._encodes[:0]
        if len(self._encodes):
            items = self._items.flatten()[: 4 * len(self._encodes)].view(-1, 4)
            items[:, 0] = self._encodes * g.raw_page_bytes + self._raw.data_ptr()
            items[:, 1] = offsets[self._encodes] + self._encoded.data_ptr()
            items[:, 2] = tokens[self._encodes]
            items[:, 3] = layers[self._encodes]
            of.codec.encode(items.data_ptr(), len(items), self._declined.data_ptr(), stream)
        if not of.codec.identity:
            for page in torch.nonzero(self._forms).flatten().tolist():
                self._copy(self._encoded, int(offsets[page]), self._raw_bytes, page * g.raw_page_bytes, g.raw_page_bytes)
        if self._on_gpu:
            self._host[:nbytes].copy_(self._encoded[:nbytes], non_blocking=True)

    def encoded(self) -> tuple[bytes, ArenaTensor]:
        """Once encode() is done: the forms of the pages, and the range that they take."""
        declined = self._encodes[self._declined[: len(self._encodes)] != 0]
        offsets, nbytes = self._layout(self._forms)
        if len(declined):
            nbytes = self._lay_out_anew(offsets.tolist(), declined)
        return bytes(self._forms.tolist()), self._range(nbytes)

    def _lay_out_anew(self, offsets: list[int], declined: torch.Tensor) -> int:
        """Pages that the codec declined stay raw and take more than was thought."""
        g, parts = self._of.geometry, []
        forms = self._forms.tolist()
        for page in declined.tolist():
            self._forms[page] = True
        for page, offset in enumerate(offsets):
            if self._forms[page] and not forms[page]:
                part = self._raw_bytes[page * g.raw_page_bytes : (page + 1) * g.raw_page_bytes]
            else:
                size = g.raw_page_bytes if forms[page] else self._of.codec.page_bytes[page % g.layers]
                part = self._encoded[offset : offset + size]
            parts.append(part.to("cpu", copy=True))
        anew, nbytes = self._layout(self._forms)
        for part, offset in zip(parts, anew.tolist()):
            self._host[offset : offset + len(part)].copy_(part)
        return nbytes

    # From the daemon.

    def decode(self, count: int, forms: bytes, stream: int = 0) -> None:
        """Brings `count` blocks of these forms out of the range into the rows; only begun on a GPU."""
        g, of = self._of.geometry, self._of
        self._forms = torch.tensor(list(forms), dtype=torch.bool)
        offsets, nbytes = self._layout(self._forms)
        if self._on_gpu:
            self._encoded[:nbytes].copy_(self._host[:nbytes], non_blocking=True)
        if of.codec.identity:
            return
        pages = torch.nonzero(~self._forms).flatten()
        if len(pages):
            items = self._items.flatten()[: 3 * len(pages)].view(-1, 3)
            items[:, 0] = offsets[pages] + self._encoded.data_ptr()
            items[:, 1] = pages * g.raw_page_bytes + self._raw.data_ptr()
            items[:, 2] = of.page_layer[pages]
            of.codec.decode(items.data_ptr(), len(items), stream)
        for page in torch.nonzero(self._forms).flatten().tolist():
            self._copy(self._raw_bytes, page * g.raw_page_bytes, self._encoded, int(offsets[page]), g.raw_page_bytes)

    @staticmethod
    def _copy(to: torch.Tensor, at: int, source: torch.Tensor, begin: int, size: int) -> None:
        to[at : at + size].copy_(source[begin : begin + size], non_blocking=True)

    def _layout(self, forms: torch.Tensor) -> tuple[torch.Tensor, int]:
        """Where pages begin in the range, and its size."""
        of = self._of
        sizes = torch.where(forms, of.raw_stride, of.encoded_stride[of.page_layer[: len(forms)]])
        ends = sizes.cumsum(0)
        return ends - sizes, int(ends[-1])

    def _range(self, nbytes: int) -> ArenaTensor:
        return self.range.arena.tensor((nbytes,), "uint8", self.range.offset)

    def close(self) -> None:
        """Nothing reads or writes it any more."""
        self._of._give_back(self)


class Extents:
    """An arena cut into extents of equal size. take() and close() may be called by any thread; the rest is the thread's that has
    the arena's client.

    device: where the engine's caches are; on a GPU the arena is pinned while this lives."""

    def __init__(self, arena: Arena, codec: PageCodec, geometry: Geometry, extent_blocks: int, device: torch.device) -> None:
        assert ENCODE_ITEM_BYTES == 32 and DECODE_ITEM_BYTES == 24
        self.arena, self.codec, self.geometry, self.device = arena, codec, geometry, device
        self.extent_blocks = extent_blocks
        self.extent_bytes = extent_blocks * geometry.raw_block_bytes
        self.count = arena.nbytes // self.extent_bytes
        with torch.inference_mode(False):
            pages = torch.arange(extent_blocks * geometry.layers)
            self.page_layer, self.page_block = pages % geometry.layers, pages // geometry.layers
            self.raw_layer = torch.tensor(codec.raw_layers or [False] * geometry.layers)
            self.raw_stride = torch.tensor(_aligned(geometry.raw_page_bytes))
            self.encoded_stride = torch.tensor([_aligned(size) for size in codec.page_bytes])
        self._pinned = False
        self._lock = threading.Lock()
        if device.type == "cuda":
            with torch.cuda.device(device):
                failed = torch.cuda.cudart().cudaHostRegister(arena.address, arena.nbytes, 0)
            self._pinned = int(failed) == 0
            if not self._pinned:
                warnings.warn("staging could not be pinned: copies between GPU and host will wait for one another")
        self._free = [Extent(self, place) for place in range(self.count)]

    @property
    def pinned(self) -> bool:
        return self._pinned

    def take(self) -> Extent | None:
        with self._lock:
            return self._free.pop() if self._free else None

    def _give_back(self, extent: Extent) -> None:
        with self._lock:
            self._free.append(extent)

    def close(self) -> None:
        """Before the arena goes. No extent is in use by a GPU."""
        if self._pinned:
            self._pinned = False
            with torch.cuda.device(self.device):
                torch.cuda.cudart().cudaHostUnregister(self.arena.address)


__all__ = ["Extent", "Extents", "Geometry"]
