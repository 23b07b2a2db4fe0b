"""Whole blocks between the daemon's memory and an engine's paged caches on a GPU, enqueued by one call for many. Needs torch.

What an engine's thread and the connector's do in Python waits for one another: a load of an 8K prompt that began its copies and
kernels one by one took as long with a quarter of the bytes. So all of it is begun by the client's library (client/c/paged_blocks.cc),
without Python's lock.
"""

from __future__ import annotations

import array

import torch

from ._lib import PagedCaches, PagedLoad, PagedSave
from .cache import BlocksMapped
from .page_codec import DECODE_ITEM_BYTES, ENCODE_ITEM_BYTES, PageCodec
from .paged import PagedCopy
from .stored import Extent, Extents, Geometry

_WORD = 16  # bytes that a thread of the GPU moves at a time
_PART_BYTES = 64 << 20  # of raw pages: what is encoded while the part before is copied to host memory


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _WORD) * _WORD


class PagedBlocks:
    """Of one connection's codec and one engine's caches. It belongs to the client's thread."""

    def __init__(
        self, codec: PageCodec, copies: PagedCopy, geometry: Geometry, stores: Extents, calls: int, blocks: int
    ) -> None:
        """stores: what save() is given extents of. calls: of load() that are under way at once, at most; blocks: of one.
        ValueError: caches that it cannot copy."""
        self._codec, self._copies = codec, copies
        views, groups = copies.views, copies.groups
        first = views[0][0]
        _, pieces, piece_tokens, heads, head_dim = first.shape
        size, strides = first.element_size(), [stride * first.element_size() for stride in first.stride()]
        for side in (side for both in views for side in both):
            if side.shape != first.shape or side.stride() != first.stride() or side.dtype != first.dtype:
                raise ValueError("layers have caches of different shapes")
            if side.data_ptr() % _WORD:
                raise ValueError(f"a cache begins within {_WORD} bytes")
        if strides[-1] != size or any(stride % _WORD for stride in (*strides[:-1], head_dim * size)):
            raise ValueError(f"rows of the caches are not of {_WORD} bytes each")
        table = [[*(side.data_ptr() for side in both), group] for both, group in zip(views, groups)]
        with torch.inference_mode(False):
            self._table = torch.tensor(table, dtype=torch.int64, device=copies.device)
            self.blocks_max, self._groups = blocks, max(groups) + 1
            list_bytes = _aligned(blocks * (8 * self._groups + DECODE_ITEM_BYTES * geometry.layers))
            self._lists = torch.empty((calls, list_bytes), dtype=torch.uint8, pin_memory=True)
            self._device_lists = torch.empty_like(self._lists, device=copies.device)
            save_bytes = _aligned(stores.extent_blocks * (8 * self._groups + (ENCODE_ITEM_BYTES + 4) * geometry.layers)) + 2 * _WORD
            self._save_lists = torch.empty((stores.stagings, save_bytes), dtype=torch.uint8, pin_memory=True)
            self._device_save_lists = torch.empty_like(self._save_lists, device=copies.device)
            self._part_blocks = max(1, _PART_BYTES // geometry.raw_block_bytes)
            self._sums = torch.empty((calls, blocks * geometry.layers), dtype=torch.int64, pin_memory=True)
        torch.cuda.current_stream(copies.device).synchronize()
        codec.set_paged(
            PagedCaches(
                len(views), heads, pieces * piece_tokens, piece_tokens, head_dim * size, 0, *strides[:4], self._table.data_ptr()
            )
        )

    def load(self, mapped: BlocksMapped, ids: list[list[int]], stagings: list[Extent], extents: int, call: int) -> int:
        """Brings all mapped blocks into the caches' blocks `ids`, by group, 0: not wanted. Only begun: they are there behind
        copies.loaded(). Returns their bytes. stagings: two. extents: of stagings[0].blocks each, that calls for the same load began
        before; 0: the first, and what was begun for others has ended. call: a number below `calls` that none under way has."""
        given = array.array("q", [each for group in ids for each in group])
        load = PagedLoad(
            (stagings[0].raw.data_ptr(), stagings[1].raw.data_ptr()),
            (stagings[0].encoded_pages.data_ptr(), stagings[1].encoded_pages.data_ptr()),
            stagings[0].blocks,
            self._groups,
            extents,
            0,
            given.buffer_info()[0],
            self._lists[call].data_ptr(),
            self._device_lists[call].data_ptr(),
            self._sums[call].data_ptr(),
            self._copies.fetch_stream.cuda_stream,
            self._copies.load_stream.cuda_stream,
        )
        return self._codec.load_blocks(mapped, 0, mapped.blocks, load)

    def corrupt(self, mapped: BlocksMapped, call: int) -> int | None:
        """Once what load() began is done: the first of the blocks that is not what was stored."""
        return self._codec.corrupt_block(mapped, 0, mapped.blocks, self._sums[call].data_ptr())

    def save(self, extent: Extent, count: int, first: int, ids: list[list[int]]) -> None:
        """Brings `count` of the caches' blocks `ids`, by group, of which the first is block `first` of its sequence, into the
        extent's range, as extent.encode() does. Only begun, behind what save_stream was given: the blocks are read behind
        copies.saved(), and the range is filled behind copies.sent()."""
        given = array.array("q", [each for group in ids for each in group])
        save = PagedSave(
            extent.raw.data_ptr(),
            extent.encoded_pages.data_ptr(),
            extent.host_address,
            given.buffer_info()[0],
            self._save_lists[extent.staging].data_ptr(),
            self._device_save_lists[extent.staging].data_ptr(),
            extent.declined_address,
            extent.sums_address,
            first,
            count,
            self._groups,
            self._part_blocks,
            self._copies.save_stream.cuda_stream,
            self._copies.send_stream.cuda_stream,
        )
        extent.note_encoded(count, first, self._codec.save_blocks(save))


__all__ = ["PagedBlocks"]
