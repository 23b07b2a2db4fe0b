"""Blocks of an engine's paged caches as the daemon stores them: encoded and decoded by the engine's own device. Needs torch.

An Extent is room for some whole blocks, all layers of them: raw pages [blocks][layers][K, V][heads][tokens][head_dim], which the
engine's blocks are copied to and from (paged.py), and a range of an arena, which has the same pages as Cache.read_blocks and
Cache.write_blocks want them. In between the cache's codec encodes or decodes, on a GPU by kernels on the stream of the copies.
Pages that Cache.map_blocks found are copied out of the daemon's own memory instead (fetch), and the copies are compared with the
pages' checksums.

                    raw pages            encoded pages        range of the arena
    GPU, lossy      GPU memory           GPU memory           pinned host memory
    GPU, raw        GPU memory, the same                      pinned host memory
    CPU, lossy      host memory          the range itself
    CPU, raw        the range itself
"""

from __future__ import annotations

import array
import ctypes
import threading
import warnings
from typing import Callable

import torch

from .arena import Arena, ArenaTensor
from .cache import BlocksMapped
from .page_codec import DECODE_ITEM_BYTES, ENCODE_ITEM_BYTES, PAGE_ALIGN, PageCodec


def _aligned(nbytes: int) -> int:
    return -(-nbytes // PAGE_ALIGN) * PAGE_ALIGN


class Geometry:
    """Of a cache's blocks."""

    def __init__(self, layers: int, block_tokens: int, heads: int, head_dim: int, dtype: torch.dtype) -> None:
        self.layers, self.block_tokens, self.heads, self.head_dim, self.dtype = layers, block_tokens, heads, head_dim, dtype
        self.raw_page_bytes = 2 * heads * block_tokens * head_dim * dtype.itemsize
        self.raw_block_bytes = layers * self.raw_page_bytes


class _Plan:
    """Where the pages of some blocks lie in a range, and the codec's items for them. The same for all blocks whose pages have the
    same forms: what an extent planned last it keeps, since each of torch's small operations costs an engine some Python."""

    def __init__(self, extent: Extent, forms: torch.Tensor) -> None:
        """forms: [pages], whether a page is raw."""
        of = extent.of
        self.forms = forms
        self.offsets, self.nbytes = of.layout(forms)
        self.raw = [] if of.codec.identity else torch.nonzero(forms).flatten().tolist()
        self.encoded = torch.nonzero(~forms).flatten() if not of.codec.identity else torch.zeros(0, dtype=torch.int64)
        layers = of.page_layer[self.encoded]
        raw = self.encoded * of.geometry.raw_page_bytes + extent.raw.data_ptr()
        stored = self.offsets[self.encoded] + extent.encoded_pages.data_ptr()
        tokens = of.page_block[self.encoded] * of.geometry.block_tokens
        self._made = torch.stack((raw, stored, tokens, layers), 1), torch.stack((stored, raw, layers), 1)
        self.form_bytes = bytes(forms.tolist())
        self.sizes = of.page_bytes(forms)
        self.stored = self.offsets + extent.encoded_pages.data_ptr()

    def write_items(self, items: torch.Tensor, first: int | None) -> None:
        """For encoding blocks of which the first begins at token `first` of its sequence; None: for decoding."""
        made = self._made[first is None]
        place = items.flatten()[: made.numel()].view(made.shape)
        place.copy_(made)
        if first:
            place[:, 2] += first


class Extent:
    """Room for `blocks` blocks; one user at a time. close() gives it back."""

    def __init__(self, of: Extents, place: int) -> None:
        g, codec, device = of.geometry, of.codec, of.device
        self.of, self.blocks = of, of.extent_blocks
        self.range: ArenaTensor = of.arena.tensor((of.extent_bytes,), "uint8", place * of.extent_bytes)
        with torch.inference_mode(False):  # views made in an engine's step would be inference tensors
            self._host = torch.from_dlpack(self.range)
            shape = (self.blocks, g.layers, 2, g.heads, g.block_tokens, g.head_dim)
            self._on_gpu = device.type == "cuda"
            in_range = codec.identity and not self._on_gpu
            memory = self._host if in_range else torch.empty(of.extent_bytes, dtype=torch.uint8, device=device)
            self._raw_bytes = memory
            self.raw = memory.view(g.dtype).view(shape)  # pages
            if codec.identity:
                self.encoded_pages = memory
            else:
                self.encoded_pages = torch.empty_like(memory) if self._on_gpu else self._host
            pages = self.blocks * g.layers
            self._items = torch.empty((pages, 4), dtype=torch.int64, pin_memory=self._on_gpu)
            self._declined = torch.zeros(pages, dtype=torch.int32, pin_memory=self._on_gpu)
            self._sums = torch.empty(pages, dtype=torch.int64, pin_memory=self._on_gpu)  # of what was fetched
        self._expected: torch.Tensor | None = None  # of the same
        self.host_address, self.items_address = self._host.data_ptr(), self._items.data_ptr()
        self.declined_address, self.ids_address = self._declined.data_ptr(), 0
        self._ids: torch.Tensor | None = None
        self._planned: dict[str, tuple[object, _Plan]] = {}  # the newest of each kind, and of what
        self._writing: _Plan | None = None  # of encode()
        self._items_are: tuple[_Plan | None, int | None] = (None, None)

    def _plan(self, kind: str, key: object, forms: Callable[[], torch.Tensor]) -> _Plan:
        planned = self._planned.get(kind)
        if planned is None or planned[0] != key:
            planned = self._planned[kind] = key, _Plan(self, forms())
        return planned[1]

    def _plan_to_encode(self, count: int, first: int) -> _Plan:
        g, of = self.of.geometry, self.of
        sinks = min(max(-(-of.codec.sink_tokens // g.block_tokens) - first, 0), count)  # blocks that begin with sinks

        def forms() -> torch.Tensor:
            pages = count * g.layers
            return (of.page_block[:pages] < sinks) | of.raw_layer[of.page_layer[:pages]]

        return self._plan("encode", (count, sinks), forms)

    # To the daemon. On the stream of the copies that fill the raw pages, or behind them on the CPU.

    def encode(self, count: int, first: int, stream: int = 0) -> None:
        """Brings `count` blocks, of which the first is block `first` of its sequence, into the range; only begun on a GPU."""
        g, of = self.of.geometry, self.of
        plan = self._plan_to_encode(count, first)
        self._writing = plan
        if len(plan.encoded):
            self._write_items(plan, first * g.block_tokens)
            of.codec.encode(self._items.data_ptr(), len(plan.encoded), self._declined.data_ptr(), stream)
        for page in plan.raw:
            self._copy(self.encoded_pages, int(plan.offsets[page]), self._raw_bytes, page * g.raw_page_bytes)
        if self._on_gpu:
            self._host[: plan.nbytes].copy_(self.encoded_pages[: plan.nbytes], non_blocking=True)

    # The same by paged_blocks.py.

    def put_ids(self, ids: list[list[int]]) -> int:
        """Of the engine's blocks, by group; returns how many have room in a group. What read the last ones has ended."""
        if self._ids is None or len(self._ids) < len(ids):
            with torch.inference_mode(False):
                self._ids = torch.empty((len(ids), self.blocks), dtype=torch.int64, pin_memory=self._on_gpu)
        self.ids_address = self._ids.data_ptr()
        for group, of_group in enumerate(ids):
            given = array.array("q", of_group)
            ctypes.memmove(self.ids_address + 8 * self.blocks * group, given.buffer_info()[0], 8 * len(given))
        return self.blocks

    def note_encoded(self, count: int, first: int, nbytes: int) -> None:
        """encode() was begun by other means, and takes so much of the range."""
        self._writing, self._items_are = self._plan_to_encode(count, first), (None, None)
        if self._writing.nbytes != nbytes:
            raise RuntimeError(f"pages take {nbytes} bytes, thought to take {self._writing.nbytes}")

    def encoded(self) -> tuple[bytes, ArenaTensor]:
        """Once encode() is done: the forms of the pages, and the range that they take."""
        plan = self._writing
        declined = self._declined[: len(plan.encoded)]
        if len(declined) and bool(declined.any()):
            return self._lay_out_anew(plan, plan.encoded[declined != 0].tolist())
        return plan.form_bytes, self._range(plan.nbytes)

    def _lay_out_anew(self, plan: _Plan, declined: list[int]) -> tuple[bytes, ArenaTensor]:
        """Pages that the codec declined stay raw and take more than was thought."""
        g, parts = self.of.geometry, []
        forms, was = plan.forms.clone(), plan.forms.tolist()
        forms[declined] = True
        for page, (raw, offset) in enumerate(zip(forms.tolist(), plan.offsets.tolist())):
            if raw and not was[page]:
                part = self._raw_bytes[page * g.raw_page_bytes : (page + 1) * g.raw_page_bytes]
            else:
                size = g.raw_page_bytes if raw else self.of.codec.page_bytes[page % g.layers]
                part = self.encoded_pages[offset : offset + size]
            parts.append(part.to("cpu", copy=True))
        anew, nbytes = self.of.layout(forms)
        for part, offset in zip(parts, anew.tolist()):
            self._host[offset : offset + len(part)].copy_(part)
        return bytes(forms.tolist()), self._range(nbytes)

    # From the daemon.

    def fetch(self, mapped: BlocksMapped, first: int, count: int, stream: int = 0) -> int:
        """Copies `count` of the blocks that were mapped, from `first` of these on, to where decode(fetched=True) finds them; only
        begun on a GPU. Returns their bytes."""
        of = self.of
        begin, pages = first * of.geometry.layers, count * of.geometry.layers
        plan = self._plan_to_decode(mapped.raw[begin : begin + pages])
        of.codec.copy_pages(ctypes.addressof(mapped.addresses) + 8 * begin, plan.sizes.data_ptr(), pages, self.encoded_pages.data_ptr(), stream)
        of.codec.hash_pages(plan.stored.data_ptr(), plan.sizes.data_ptr(), pages, self._sums.data_ptr(), stream)
        self._expected = torch.frombuffer(mapped.checksums, dtype=torch.int64, count=pages, offset=8 * begin)
        return plan.nbytes

    def corrupt(self) -> int | None:
        """Once what fetch() began is done: the first block of it whose bytes have not their checksum."""
        expected = self._expected
        if expected is None or torch.equal(self._sums[: len(expected)], expected):
            return None
        return int((self._sums[: len(expected)] != expected).nonzero()[0]) // self.of.geometry.layers

    def _plan_to_decode(self, forms: bytes) -> _Plan:
        return self._plan("decode", forms, lambda: torch.tensor(list(forms), dtype=torch.bool))

    def decode(self, count: int, forms: bytes, stream: int = 0, fetched: bool = False) -> None:
        """Brings `count` blocks of these forms out of the range, or of what was fetched, into the raw pages; only begun on a
        GPU."""
        g, of = self.of.geometry, self.of
        plan = self._plan_to_decode(forms)
        if self._on_gpu and not fetched:
            self.encoded_pages[: plan.nbytes].copy_(self._host[: plan.nbytes], non_blocking=True)
        if len(plan.encoded):
            self._write_items(plan, None)
            of.codec.decode(self._items.data_ptr(), len(plan.encoded), stream)
        for page in plan.raw:
            self._copy(self._raw_bytes, page * g.raw_page_bytes, self.encoded_pages, int(plan.offsets[page]))

    def _write_items(self, plan: _Plan, first: int | None) -> None:
        if self._items_are != (plan, first):
            plan.write_items(self._items, first)
            self._items_are = plan, first

    def _copy(self, to: torch.Tensor, at: int, source: torch.Tensor, begin: int) -> None:
        size = self.of.geometry.raw_page_bytes
        to[at : at + size].copy_(source[begin : begin + size], non_blocking=True)

    def _range(self, nbytes: int) -> ArenaTensor:
        return self.range.arena.tensor((nbytes,), "uint8", self.range.offset)

    def close(self) -> None:
        """Nothing reads or writes it any more."""
        self.of._give_back(self)


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
            self.encoded_bytes = torch.tensor(codec.page_bytes)
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

    def layout(self, forms: torch.Tensor) -> tuple[torch.Tensor, int]:
        """Where pages of these forms begin in a range, and its size."""
        sizes = torch.where(forms, self.raw_stride, self.encoded_stride[self.page_layer[: len(forms)]])
        ends = sizes.cumsum(0)
        return ends - sizes, int(ends[-1])

    def page_bytes(self, forms: torch.Tensor) -> torch.Tensor:
        """Of pages of these forms."""
        encoded = self.encoded_bytes[self.page_layer[: len(forms)]]
        return torch.where(forms, torch.tensor(self.geometry.raw_page_bytes), encoded)

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
