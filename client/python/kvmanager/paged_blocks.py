"""Whole blocks between the daemon's memory and an engine's paged caches on a GPU, by one call for a whole load or store. Needs torch.

What an engine's thread and the connector's do in Python waits for one another: each call that the connector makes has the engine's
thread give Python's lock away and take it back. So the client's library runs loads and stores (client/c/bring_blocks.cc,
client/c/store_blocks.cc), without that lock.
"""

from __future__ import annotations

import array
import ctypes
from ctypes import byref, c_uint32, c_void_p

import torch

from . import _lib
from ._lib import BringRoom, Handle, PagedCaches, PagedSave, Stored, StoreRoom, StoreSignals, StoreStaging, check, lib
from .cache import Cache, miss_reason
from .errors import invalid
from .names import BlockHashes
from .page_codec import DECODE_ITEM_BYTES, ENCODE_ITEM_BYTES, PageCodec
from .paged import PagedCopy
from .stored import Extent, Extents, Geometry

_WORD = 16  # bytes that a thread of the GPU moves at a time
_PART_BYTES = 64 << 20  # of raw pages: what is encoded while the part before is copied to host memory
DONE, URGENT, DECLINED = 0, 1, 2  # states of a PagedStore that was run


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _WORD) * _WORD


def _ids(groups: list[list[int]], blocks: int) -> array.array[int]:
    for number, group in enumerate(groups):
        if len(group) != blocks:
            raise invalid(f"ids[{number}] (length)", len(group), f"{blocks}, one for each block")
    return array.array("q", [each for group in groups for each in group])


class PagedStore(Handle):
    """One store of an engine's blocks. run() belongs to the client's thread; stop() and read are for any thread."""

    __slots__ = ("_codec", "_read", "result", "full")

    def __init__(self, codec: PageCodec, room: StoreRoom, hashes: BlockHashes, first: int, ids: list[list[int]]) -> None:
        super().__init__(None)
        made, read, given = c_void_p(), ctypes.POINTER(c_uint32)(), _ids(ids, max(0, hashes.count - first))
        where = given.buffer_info()[0]
        call = lib.kvm_create_store
        check(call(codec._object, byref(room), first, byref(hashes.given()), where, len(ids), byref(made), byref(read)))
        self._object, self._codec, self._read = made.value, codec, read
        self.result = Stored()  # as of the last run(), also of one that raised
        self.full = ""  # why the daemon had no room

    @property
    def read(self) -> bool:
        """Nothing reads the engine's blocks any more, nor will."""
        return self._read[0] != 0

    def run(self, cache: Cache, signals: StoreSignals) -> int:
        """URGENT: to be run again; DECLINED: blocks from result.next on are the caller's to store. After an error, as after DONE and
        DECLINED, nothing is under way."""
        self.full = ""
        check(lib.kvm_run_store(self._object, self._codec._object, cache._object, byref(signals), byref(self.result)))
        self.full = _lib.text().decode()
        return int(self.result.state)

    def stop(self) -> None:
        """No more is copied out of the engine's blocks, but for what the stream of saves was given."""
        check(lib.kvm_stop_store(self._object))


class PagedBlocks:
    """Of one connection's codec and one engine's caches. It belongs to the client's thread."""

    def __init__(
        self, codec: PageCodec, copies: PagedCopy, geometry: Geometry, stores: Extents, calls: int, blocks: int
    ) -> None:
        """stores: what save() is given extents of, and store() uses. calls: to the daemon, of which a load copies blocks at once;
        blocks: of such a call, at most. ValueError: caches that it cannot copy."""
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
            self._counts = torch.zeros(2, dtype=torch.int64, pin_memory=True)  # of loads, of stores: how far streams have come
        torch.cuda.current_stream(copies.device).synchronize()
        codec.set_paged(
            PagedCaches(
                len(views), heads, pieces * piece_tokens, piece_tokens, head_dim * size, 0, *strides[:4], self._table.data_ptr()
            )
        )
        self._rooms: dict[tuple[int, int], BringRoom] = {}  # by the stagings' numbers
        self._stores = stores
        self._stagings = (StoreStaging * stores.stagings)(*map(self._staging, stores.extents))
        self._ranges = (c_void_p * len(stores.ranges))(*(each.host.data_ptr() for each in stores.ranges))
        self._store_room = StoreRoom(
            ctypes.addressof(self._stagings),
            ctypes.addressof(self._ranges),
            self._stores.range_bytes,
            self._counts.data_ptr() + self._counts.element_size(),
            self._copies.save_stream.cuda_stream,
            self._copies.send_stream.cuda_stream,
            len(self._stagings),
            len(self._ranges),
            self._stores.extent_blocks,
            self._part_blocks,
            0,
            0,
            self._stores.tied,
            self._stores.direct,
        )

    def _staging(self, extent: Extent) -> StoreStaging:
        return StoreStaging(
            extent.raw.data_ptr(),
            extent.encoded_pages.data_ptr(),
            self._save_lists[extent.staging].data_ptr(),
            self._device_save_lists[extent.staging].data_ptr(),
            extent.declined_address,
            extent.sums_address,
        )

    def _room(self, stagings: list[Extent]) -> BringRoom:
        return BringRoom(
            (stagings[0].raw.data_ptr(), stagings[1].raw.data_ptr()),
            (stagings[0].encoded_pages.data_ptr(), stagings[1].encoded_pages.data_ptr()),
            stagings[0].blocks,
            len(self._lists),
            self.blocks_max,
            0,
            self._lists.data_ptr(),
            self._device_lists.data_ptr(),
            self._sums.data_ptr(),
            self._lists.stride(0),
            self._sums.stride(0) * self._sums.element_size(),
            self._counts.data_ptr(),
            self._copies.fetch_stream.cuda_stream,
            self._copies.load_stream.cuda_stream,
        )

    def bring(
        self, cache: Cache, hashes: BlockHashes, first: int, ids: list[list[int]], stagings: list[Extent], first_blocks: int
    ) -> tuple[int, str, int]:
        """Loads blocks of `cache`, the first of which is block `first` of its sequence, into the caches' blocks `ids`, by group, 0: not wanted,
        behind what load_stream was given. Returns how many are there, from the first on; why no more, "none": all are, or the next
        may not be mapped; the bytes that were copied. stagings: two that nothing uses. first_blocks: of the first call to the daemon."""
        numbers = stagings[0].staging, stagings[1].staging
        room = self._rooms.get(numbers)
        if room is None:
            room = self._rooms[numbers] = self._room(stagings)
        room.first_blocks = first_blocks
        blocks, reason, nbytes = self._codec.bring_blocks(cache, room, first, hashes, _ids(ids, hashes.count), self._groups)
        return blocks, miss_reason(reason), nbytes

    def store(self, hashes: BlockHashes, first: int, ids: list[list[int]], writes: int, first_blocks: int) -> PagedStore:
        """Of the caches' blocks `ids`, by group, none 0, of which the first is block `first` of its sequence, behind what save_stream was
        given. hashes: from the sequence's first block on. writes: calls to the daemon at once; first_blocks: of the first of them, and
        of the last. Nothing else uses `stores` until it has ended."""
        room = self._store_room
        room.writes, room.first_blocks = writes, first_blocks
        return PagedStore(self._codec, room, hashes, first, ids)

    def save(self, extent: Extent, count: int, first: int, ids: list[list[int]]) -> None:
        """Brings `count` of the caches' blocks `ids`, by group, of which the first is block `first` of its sequence, into the
        extent's range, as extent.encode() does. Only begun, behind what save_stream was given: the blocks are read behind
        copies.saved(), and the range is filled behind copies.sent()."""
        staging, given = self._stagings[extent.staging], _ids(ids, count)
        save = PagedSave(
            extent.raw.data_ptr(),
            extent.encoded_pages.data_ptr(),
            extent.host_address,
            given.buffer_info()[0],
            staging.list,
            staging.list_device,
            staging.declined,
            staging.sums,
            first,
            count,
            self._groups,
            self._part_blocks,
            self._copies.save_stream.cuda_stream,
            self._copies.send_stream.cuda_stream,
        )
        extent.note_encoded(count, first, self._codec.save_blocks(save))


__all__ = ["DECLINED", "DONE", "URGENT", "PagedBlocks", "PagedStore"]
