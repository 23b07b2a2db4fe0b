"""Loads blocks out of the daemon's own memory, which this process maps: no copy by the daemon, one call for many blocks.

    daemon's memory --copy--> extent, in stored form --decode--> raw pages --copy--> paged cache
                    fetch_stream               load_stream

Blocks are mapped some at a time: while the GPU copies some, the daemon is asked for the next. On a GPU the client's library does all of
that in one call (client/block_load.h), and extents take turns, so that the bus is busy while kernels decode. What was copied is
compared with the pages' checksums, and the lease on them is released at the end: only then were they held all the time. Blocks that
may not be mapped are copied by the daemon into an extent's range.
"""

from __future__ import annotations

import collections
from typing import TYPE_CHECKING

from ..blocks_mapped import BlocksMapped
from ..cache import Cache
from ..names import BlockHashes
from ..paged import Fence
from ..pending import Pending
from ..stored import Extent
from .messages import Load

if TYPE_CHECKING:
    from .worker import WorkerHalf

MAPPED_PAGES_MAX = 4096  # of one call to the daemon
CALLS = 4  # whose blocks are on their way at once
_ASKED = 2  # calls that are ahead of what is copied
_FIRST_BLOCKS = 16  # so that the first copies begin soon


class ByExtents:
    """Mapped blocks come extent by extent: on a CPU, and for caches that paged_blocks.py does not know."""

    def __init__(self, half: WorkerHalf, after: Fence) -> None:
        self._half, self._after = half, after

    def bring(self, mapped: BlocksMapped, ids: list[list[int]]) -> int | None:
        """Until all are there; the first block that is not what was stored."""
        half, layers = self._half, self._half.geometry.layers
        filled: collections.deque[tuple[Extent, int, Fence]] = collections.deque()
        first, corrupt = 0, None
        try:
            while corrupt is None and (first < mapped.blocks or filled):
                extent = half.loads.take() if first < mapped.blocks else None
                if extent is None:
                    corrupt = self._end(*filled.popleft())
                    continue
                filled.append((extent, first, Fence()))  # it goes back whatever happens
                count = min(extent.blocks, mapped.blocks - first)
                half.count("loaded_encoded_bytes", self._fetch(extent, mapped, first, count))
                forms = mapped.raw[first * layers : (first + count) * layers]
                of_extent = [group[first : first + count] for group in ids]
                filled[-1] = extent, first, half.unpack(extent, count, forms, of_extent, self._after, fetched=True)
                first += count
        finally:
            if filled:
                half.copies.fetched().wait()
                half.drained().wait()
            for extent, _, _ in filled:
                extent.close()
        return corrupt

    def _fetch(self, extent: Extent, mapped: BlocksMapped, first: int, count: int) -> int:
        copies = self._half.copies
        if not copies.cuda:
            return extent.fetch(mapped, first, count)
        import torch

        with torch.cuda.stream(copies.fetch_stream):
            return extent.fetch(mapped, first, count, copies.fetch_stream.cuda_stream)

    @staticmethod
    def _end(extent: Extent, first: int, fence: Fence) -> int | None:
        fence.wait()
        corrupt = extent.corrupt()
        extent.close()
        return None if corrupt is None else first + corrupt


class MappedLoad:
    """One load's, on the link's thread."""

    def __init__(self, half: WorkerHalf, load: Load, cache: Cache, after: Fence) -> None:
        self._half, self._load, self._cache, self._after = half, load, cache, after
        self._count = len(load.hashes) - load.first
        self.done = 0  # blocks of the load, from the first on

    def run(self) -> str:
        """Why it ended where it did; empty: all are loaded. Raises kvmanager.Error: what was loaded counts for nothing."""
        while self.done < self._count:
            reason = self._bring()
            if reason or self.done == self._count:
                return reason
            if reason := self._copy():
                return reason
        return ""

    def _ask(self, first: int, count: int) -> Pending[BlocksMapped]:
        begin = self._load.first + first
        names = self._cache.external_names(self._load.hashes[begin : begin + count])
        return self._cache.map_blocks_async(names, None, begin, self._half.copies.index)

    def _bring(self) -> str:
        """Why the next block is not there; empty: all are, or it may not be mapped."""
        half = self._half
        stagings = [half.loads.take(), half.loads.take()] if half.paged is not None else []
        try:
            if stagings and all(stagings):
                return self._bring_at_once(stagings)
        finally:
            for extent in filter(None, stagings):
                extent.close()
        return self._bring_by_extents()

    def _bring_at_once(self, stagings: list[Extent]) -> str:
        half, load, done = self._half, self._load, self.done
        hashes = BlockHashes(load.hashes[load.first + done :])
        self._after.hold(half.copies.load_stream)
        ids = [group[done:] for group in load.block_ids]
        blocks, reason, nbytes = half.paged.bring(self._cache, hashes, load.first + done, ids, stagings, _FIRST_BLOCKS)
        half.count("loaded_encoded_bytes", nbytes)
        self.done += blocks
        return "" if reason == "none" else reason

    def _bring_by_extents(self) -> str:
        half = self._half
        way = ByExtents(half, self._after)
        most = max(1, MAPPED_PAGES_MAX // half.geometry.layers)
        asked: collections.deque[tuple[int, int, Pending[BlocksMapped]]] = collections.deque()
        released: collections.deque[tuple[int, Pending[None], BlocksMapped]] = collections.deque()
        first, size = self.done, min(_FIRST_BLOCKS, most)
        reason: str | None = None  # why the daemon gives no more
        corrupt: int | None = None
        try:
            while corrupt is None and reason is None:
                if first < self._count and len(asked) < _ASKED:
                    count = min(size, self._count - first)
                    asked.append((first, count, self._ask(first, count)))
                    first, size = first + count, min(2 * size, most)
                    continue
                if not asked:
                    break
                begin, count, pending = asked.popleft()
                mapped = pending.wait()
                if mapped.blocks < count:
                    reason = "" if mapped.reason == "none" else mapped.reason
                if mapped.blocks:
                    corrupt = way.bring(mapped, [group[begin : begin + mapped.blocks] for group in self._load.block_ids])
                    blocks = mapped.blocks if corrupt is None else corrupt
                    released.append((blocks, mapped.release_async(corrupt), mapped))
                if len(released) > CALLS:
                    self._end(released)
            while released:
                self._end(released)
            return "checksum" if corrupt is not None else reason or ""
        finally:
            half.copies.fetched().wait()
            half.drained().wait()
            for *_, pending in asked:
                pending.close()
            for *_, mapped in released:
                mapped.close()

    def _end(self, released: collections.deque[tuple[int, Pending[None], BlocksMapped]]) -> None:
        blocks, pending, mapped = released[0]
        pending.wait()
        self.done += blocks
        mapped.close()
        released.popleft()

    def _copy(self) -> str:
        """The next blocks may not be mapped: the daemon copies an extent of them. Why it ended, or empty."""
        half, first = self._half, self.done
        extent = half.loads.take()
        assert extent is not None  # loads come one after the other, and give back what they took
        try:
            asked = min(extent.blocks, self._count - first)
            begin = self._load.first + first
            names = self._cache.external_names(self._load.hashes[begin : begin + asked])
            found = self._cache.read_blocks_async(names, extent.range, begin).wait()
            if found.blocks:
                half.count("loaded_encoded_bytes", found.nbytes)
                ids = [group[first : first + found.blocks] for group in self._load.block_ids]
                half.unpack(extent, found.blocks, found.raw, ids, self._after).wait()
            self.done += found.blocks
            return found.reason if found.blocks < asked else ""
        finally:
            half.drained().wait()
            extent.close()


__all__ = ["CALLS", "MAPPED_PAGES_MAX", "MappedLoad"]
