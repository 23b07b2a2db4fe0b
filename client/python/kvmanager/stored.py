"""Blocks of an engine's paged caches as the daemon stores them: encoded and decoded by the engine's own device. Needs torch.

An Extent is room for some whole blocks, all layers of them: raw pages [blocks][layers][K, V][heads][tokens][head_dim], which the
engine's blocks are copied to and from (paged.py), and a range of an arena, which has the same pages as Cache.read_blocks and
Cache.write_blocks want them. In between the cache's codec encodes or decodes, on a GPU by kernels on the stream of the copies.
Pages that Cache.map_blocks found are copied out of the daemon's own memory instead (fetch), and the copies are compared with the
pages' checksums.

                            raw pages            encoded pages        range of the arena
    GPU, lossy              GPU memory           GPU memory           pinned host memory
    GPU, lossy, direct      GPU memory           the range itself
    GPU, raw                GPU memory, the same                      pinned host memory
    GPU, raw, direct        the range itself
    CPU, lossy              host memory          the range itself
    CPU, raw                the range itself

Direct: the arena is on the GPU (Device.create_arena), out of which the daemon copies to its own memory. For stores alone.

Encoded blocks take a part of what raw ones do. So extents for stores on a GPU may have few places in its memory, where blocks are
encoded, and more ranges of the arena, as large as encoded blocks: detach() gives a place back while its range is still written to the
daemon.
"""

from __future__ import annotations

import ctypes
import dataclasses
import threading
import warnings
from typing import Callable

import torch

from .arena import Arena, ArenaTensor
from .blocks_mapped import BlocksMapped
from .page_codec import DECODE_ITEM_BYTES, ENCODE_ITEM_BYTES, PAGE_ALIGN, PageCodec


def _aligned(nbytes: int) -> int:
    return -(-nbytes // PAGE_ALIGN) * PAGE_ALIGN


def _words(count: int) -> int:
    """Of 32 bits: a GPU's kernels copy four at a time."""
    return -(-count // 4) * 4


def range_bytes(codec: PageCodec, geometry: Geometry, blocks: int, raw: bool) -> int:
    """That ranges of an arena have for so many blocks of any forms; else of encoded ones, the first of them with sinks."""
    raw_bytes = blocks * geometry.raw_block_bytes
    if raw or codec.identity:
        return raw_bytes
    return min(raw_bytes, geometry.raw_block_bytes + (blocks - 1) * encoded_block_bytes(codec, geometry))


def encoded_block_bytes(codec: PageCodec, geometry: Geometry) -> int:
    """Of a block without sinks, in a range. Raw pages end at multiples of PAGE_ALIGN."""
    raw_layers = codec.raw_layers or [False] * geometry.layers
    return sum(geometry.raw_page_bytes if raw else _aligned(size) for raw, size in zip(raw_layers, codec.page_bytes))


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


class Range:
    """Of the arena, as large as what an extent brings there; one user at a time. close() gives it back."""

    def __init__(self, of: Extents, place: int) -> None:
        self._of = of
        self.pages: ArenaTensor = of.arena.tensor((of.range_bytes,), "uint8", place * of.range_bytes)
        with torch.inference_mode(False):  # views made in an engine's step would be inference tensors
            self.host = torch.from_dlpack(self.pages)

    def of_bytes(self, nbytes: int) -> ArenaTensor:
        """Its first ones."""
        return self.pages.arena.tensor((nbytes,), "uint8", self.pages.offset)

    def close(self) -> None:
        """Nothing reads or writes it any more."""
        self._of._give_back_range(self)


@dataclasses.dataclass(frozen=True)
class Piece:
    """Some of the blocks that an extent encoded, which fit its range together."""

    first: int  # of the extent's
    count: int
    forms: bytes  # of their pages, 1: raw
    nbytes: int
    there: bool  # the range has them; else Extent.bring() brings them
    checksums: bytes = b""  # of the pages, where they are known


class Extent:
    """Room for `blocks` blocks; one user at a time. close() gives it back."""

    def __init__(self, of: Extents, staging: int, room: Range) -> None:
        """room: the range that it begins with."""
        g, codec, device = of.geometry, of.codec, of.device
        self.of, self.blocks, self.staging = of, of.extent_blocks, staging
        self._room: Range | None = room
        with torch.inference_mode(False):
            shape = (self.blocks, g.layers, 2, g.heads, g.block_tokens, g.head_dim)
            self._on_gpu = device.type == "cuda"
            self._apart = (self._on_gpu or of.apart) and not of.direct  # encoded pages are not in the range
            in_range = codec.identity and not self._apart  # so the raw pages are, too
            raw_bytes = self.blocks * g.raw_block_bytes
            memory = room.host if in_range else torch.empty(raw_bytes, dtype=torch.uint8, device=device)
            self._raw_bytes = memory
            self.raw = memory.view(g.dtype).view(shape)  # pages
            if codec.identity:
                self.encoded_pages = memory
            elif self._apart:
                self.encoded_pages = torch.empty(of.range_bytes, dtype=torch.uint8, device=device)
            else:
                self.encoded_pages = room.host
            pages = self.blocks * g.layers
            self._items = torch.empty((pages, 4), dtype=torch.int64, pin_memory=self._on_gpu)
            self._declined = torch.zeros(_words(pages), dtype=torch.int32, pin_memory=self._on_gpu)
            self._sums = torch.empty(pages, dtype=torch.int64, pin_memory=self._on_gpu)  # of what was fetched, or saved
        self._expected: torch.Tensor | None = None  # of the same
        self._encoded = self.encoded_pages  # all that was encoded, while pieces of it are brought
        self.declined_address = self._declined.data_ptr()
        # Where PagedBlocks.save() leaves the pages' checksums; 0: the daemon makes them, of what its CPUs copy.
        self.sums_address = self._sums.data_ptr() if of.direct and not codec.identity else 0
        self._summed = False  # they are of what was encoded
        self._planned: dict[str, tuple[object, _Plan]] = {}  # the newest of each kind, and of what
        self._writing: tuple[int, int, int] = (0, 0, 0)  # of encode(): count, first, bytes
        self._items_are: tuple[_Plan | None, int | None] = (None, None)

    @property
    def range(self) -> ArenaTensor:
        return self._held().pages

    @property
    def host_address(self) -> int:
        """0: nothing goes to host memory."""
        return 0 if self.of.direct else self._held().host.data_ptr()

    def _held(self) -> Range:
        assert self._room is not None  # only of who took it, until detach()
        return self._room

    def fits(self, first: int, wanted: int) -> int:
        """How many of so many blocks, of which the first is block `first` of its sequence, have room."""
        count = min(wanted, self.blocks)
        while count > 1 and self.of.encoded_bytes_of(count, self._sinks(count, first)) > self.of.range_bytes:
            count -= 1
        return count

    def _sinks(self, count: int, first: int) -> int:
        """Of these blocks, those that begin with sinks."""
        g = self.of.geometry
        return min(max(-(-self.of.codec.sink_tokens // g.block_tokens) - first, 0), count)

    def _plan(self, kind: str, key: object, forms: Callable[[], torch.Tensor]) -> _Plan:
        planned = self._planned.get(kind)
        if planned is None or planned[0] != key:
            planned = self._planned[kind] = key, _Plan(self, forms())
        return planned[1]

    def _plan_to_encode(self, count: int, first: int) -> _Plan:
        of, sinks = self.of, self._sinks(count, first)

        def forms() -> torch.Tensor:
            pages = count * of.geometry.layers
            return (of.page_block[:pages] < sinks) | of.raw_layer[of.page_layer[:pages]]

        return self._plan("encode", (count, sinks, self.encoded_pages.data_ptr()), forms)

    # To the daemon. On the stream of the copies that fill the raw pages, or behind them on the CPU.

    def encode(self, count: int, first: int, stream: int = 0) -> None:
        """Brings `count` blocks, of which the first is block `first` of its sequence, into the range; only begun on a GPU."""
        g, of = self.of.geometry, self.of
        plan = self._plan_to_encode(count, first)
        self._writing, self._summed = (count, first, plan.nbytes), False
        if len(plan.encoded):
            self._write_items(plan, first * g.block_tokens)
            of.codec.encode(self._items.data_ptr(), len(plan.encoded), self._declined.data_ptr(), stream)
        for page in plan.raw:
            self._copy(self.encoded_pages, int(plan.offsets[page]), self._raw_bytes, page * g.raw_page_bytes)
        if self._apart:
            self._held().host[: plan.nbytes].copy_(self.encoded_pages[: plan.nbytes], non_blocking=True)

    def note_encoded(self, count: int, first: int, nbytes: int) -> None:
        """encode() was begun by other means (paged_blocks.py), and takes so much of the range."""
        self._writing, self._items_are, self._summed = (count, first, nbytes), (None, None), self.sums_address != 0
        expected = self.of.encoded_bytes_of(count, self._sinks(count, first))
        if nbytes != expected:
            raise RuntimeError(f"pages take {nbytes} bytes, thought to take {expected}")

    def encoded(self) -> list[Piece]:
        """Once encode() is done: what is to be written, in this order; bring() brings each into the range."""
        count, first, nbytes = self._writing
        forms = self.of.forms(count, self._sinks(count, first))
        pages = 0 if self.of.codec.identity else forms.count(0)
        if ctypes.string_at(self.declined_address, 4 * pages).strip(b"\0"):  # one of torch's operations takes longer
            plan = self._plan_to_encode(count, first)
            if self.of.direct:  # the first piece is brought to where the others are
                self._encoded = self.encoded_pages.clone()
            return self._pieces(plan, plan.encoded[self._declined[:pages] != 0])
        checksums = ctypes.string_at(self.sums_address, 8 * len(forms)) if self._summed else b""
        return [Piece(0, count, forms, nbytes, there=True, checksums=checksums)]

    def _pieces(self, plan: _Plan, declined: torch.Tensor) -> list[Piece]:
        """Pages that the codec declined stay raw and take more than was thought."""
        layers, forms, pieces = self.of.geometry.layers, plan.forms.clone(), []
        forms[declined] = True
        blocks, begin = len(forms) // layers, 0
        while begin < blocks:
            end = blocks
            while True:
                of_piece = forms[begin * layers : end * layers]
                _, nbytes = self.of.layout(of_piece)
                if nbytes <= self.of.range_bytes:
                    break
                end -= 1
            pieces.append(Piece(begin, end - begin, bytes(of_piece.tolist()), nbytes, there=False))
            begin = end
        return pieces

    def bring(self, piece: Piece) -> ArenaTensor:
        """The range, with this piece of what was encoded. It may be used once the one before was written."""
        room = self._held()
        if not piece.there:
            g = self.of.geometry
            plan, begin = self._plan_to_encode(*self._writing[:2]), piece.first * g.layers
            forms = torch.tensor(list(piece.forms), dtype=torch.bool)
            anew, parts = self.of.layout(forms)[0].tolist(), []
            encoded = self._encoded if self.of.direct else self.encoded_pages
            for page, raw in enumerate(piece.forms, begin):
                if raw and not plan.forms[page]:
                    part = self._raw_bytes[page * g.raw_page_bytes : (page + 1) * g.raw_page_bytes]
                else:
                    size, offset = g.raw_page_bytes if raw else self.of.codec.page_bytes[page % g.layers], int(plan.offsets[page])
                    part = encoded[offset : offset + size]
                parts.append(part.to("cpu", copy=True))  # on a CPU some lie in the range
            for offset, part in zip(anew, parts):
                room.host[offset : offset + len(part)].copy_(part)
            if self.of.direct:
                torch.cuda.current_stream(self.of.device).synchronize()
        return room.of_bytes(piece.nbytes)

    def detach(self) -> Range | Extent:
        """Once all of it was encoded, and the range has the last piece: what is to be closed when that was written. The extent itself
        may be used by others meanwhile, where there are more ranges than extents."""
        return self.of._detach(self)

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
        if self._apart and not fetched:
            self.encoded_pages[: plan.nbytes].copy_(self._held().host[: plan.nbytes], non_blocking=True)
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

    def close(self) -> None:
        """Nothing reads or writes it any more."""
        self.of._give_back(self)


class Extents:
    """An arena cut into ranges of equal size, and extents that bring blocks there. take() and close() may be called by any thread;
    the rest is the thread's that has the arena's client.

    device: where the engine's caches are; on a GPU an arena in host memory is pinned while this lives. stagings: how many extents
    there are; None: one for each range, which has room for raw blocks. Else ranges have room for encoded ones."""

    def __init__(
        self, arena: Arena, codec: PageCodec, geometry: Geometry, extent_blocks: int, device: torch.device, stagings: int | None = None
    ) -> None:
        assert ENCODE_ITEM_BYTES == 32 and DECODE_ITEM_BYTES == 24
        self.arena, self.codec, self.geometry, self.device = arena, codec, geometry, device
        self.extent_blocks, self.apart = extent_blocks, stagings is not None
        self.direct = arena.device_index >= 0
        with torch.inference_mode(False):
            pages = torch.arange(extent_blocks * geometry.layers)
            self.page_layer, self.page_block = pages % geometry.layers, pages // geometry.layers
            self.raw_layer = torch.tensor(codec.raw_layers or [False] * geometry.layers)
            self.raw_stride = torch.tensor(_aligned(geometry.raw_page_bytes))
            self.encoded_bytes = torch.tensor(codec.page_bytes)
            self.encoded_stride = torch.tensor([_aligned(size) for size in codec.page_bytes])
        # Of a block: its pages' forms, and what it takes.
        self._forms = bytes(codec.raw_layers or [False] * geometry.layers)
        self._block_bytes = encoded_block_bytes(codec, geometry)
        self.range_bytes = range_bytes(codec, geometry, extent_blocks, raw=stagings is None)
        count = arena.nbytes // self.range_bytes
        self.stagings = count if stagings is None else min(stagings, count)
        self._pinned = False
        self._lock = threading.Lock()
        if device.type == "cuda" and not self.direct:
            with torch.cuda.device(device):
                failed = torch.cuda.cudart().cudaHostRegister(arena.address, arena.nbytes, 0)
            self._pinned = int(failed) == 0
            if not self._pinned:
                warnings.warn("staging could not be pinned: copies between GPU and host will wait for one another")
        self.ranges = ranges = [Range(self, place) for place in range(count)]
        self.extents = [Extent(self, staging, ranges[staging]) for staging in range(self.stagings)]
        self._free = list(self.extents)
        # Those that no extent has. What is given back last is taken first: caches may still have it.
        self._ranges: list[Range] | None = None
        if stagings is not None:
            self._ranges = ranges
            for extent in self._free:
                extent._room = None

    @property
    def pinned(self) -> bool:
        return self._pinned

    @property
    def tied(self) -> bool:
        """Each extent has a range of its own."""
        return self._ranges is None

    @property
    def idle(self) -> bool:
        """Nobody has an extent or a range."""
        with self._lock:
            return len(self._free) == len(self.extents) and (self._ranges is None or len(self._ranges) == len(self.ranges))

    def take(self) -> Extent | None:
        with self._lock:
            if not self._free or self._ranges == []:
                return None
            extent = self._free.pop()
            if self._ranges is not None:
                extent._room = self._ranges.pop()
                if self.direct:
                    extent.encoded_pages = extent._room.host
            return extent

    def forms(self, count: int, sinks: int) -> bytes:
        """Of the pages of so many blocks, the first of which begin with sinks."""
        layers = self.geometry.layers
        kept = b"\0" if self.codec.identity else b"\1"
        return kept * (sinks * layers) + self._forms * (count - sinks)

    def encoded_bytes_of(self, count: int, sinks: int) -> int:
        """What they take of a range."""
        if self.codec.identity:
            return count * self.geometry.raw_block_bytes
        return sinks * self.geometry.raw_block_bytes + (count - sinks) * self._block_bytes

    def layout(self, forms: torch.Tensor) -> tuple[torch.Tensor, int]:
        """Where pages of these forms begin in a range, and its size."""
        sizes = torch.where(forms, self.raw_stride, self.encoded_stride[self.page_layer[: len(forms)]])
        ends = sizes.cumsum(0)
        return ends - sizes, int(ends[-1])

    def page_bytes(self, forms: torch.Tensor) -> torch.Tensor:
        """Of pages of these forms."""
        encoded = self.encoded_bytes[self.page_layer[: len(forms)]]
        return torch.where(forms, torch.tensor(self.geometry.raw_page_bytes), encoded)

    def _detach(self, extent: Extent) -> Range | Extent:
        if self._ranges is None:
            return extent
        with self._lock:
            room, extent._room = extent._held(), None
            self._free.append(extent)
        return room

    def _give_back(self, extent: Extent) -> None:
        with self._lock:
            if self._ranges is not None:
                self._ranges.append(extent._held())
                extent._room = None
            self._free.append(extent)

    def _give_back_range(self, room: Range) -> None:
        with self._lock:
            assert self._ranges is not None
            self._ranges.append(room)

    def close(self) -> None:
        """Before the arena goes. No extent is in use by a GPU."""
        if self.direct:  # its memory, and the connection, stay as long as there are tensors of it
            nothing = torch.empty(0, dtype=torch.uint8)
            for room in self.ranges:
                room.host = nothing
            for extent in self.extents:
                extent.encoded_pages = extent.raw = extent._raw_bytes = extent._encoded = nothing
                extent._planned.clear()
        if self._pinned:
            self._pinned = False
            with torch.cuda.device(self.device):
                torch.cuda.cudart().cudaHostUnregister(self.arena.address)


__all__ = ["Extent", "Extents", "Geometry", "Piece", "Range"]
