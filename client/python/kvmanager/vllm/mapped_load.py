"""Loads blocks out of the daemon's own memory, which this process maps: no copy by the daemon, one call for many blocks.

    daemon's memory --copy--> extent, in stored form --decode--> raw pages --copy--> paged cache
                    fetch_stream               load_stream

On a GPU extents take turns, so that the bus is busy while kernels decode. What was copied is compared with the pages' checksums,
and the lease on them is released at the end: only then were they held all the time. Blocks that may not be mapped are copied by
the daemon into an extent's range.
"""

from __future__ import annotations

import collections
from typing import TYPE_CHECKING

from ..cache import BlockNames, BlocksMapped, Cache
from ..paged import Fence
from ..stored import Extent
from .messages import Load

if TYPE_CHECKING:
    from .worker import WorkerHalf

PAGES_MAX = 16384  # of one call


class MappedLoad:
    """One load's, on the link's thread."""

    def __init__(self, half: WorkerHalf, load: Load, cache: Cache, after: Fence) -> None:
        self._half, self._load, self._cache, self._after = half, load, cache, after
        self.done = 0  # blocks of the load, from the first on

    def run(self, names: BlockNames) -> str:
        """Why it ended where it did; empty: all are loaded. Raises kvmanager.Error: what was loaded counts for nothing."""
        half, count = self._half, len(names)
        most = max(1, PAGES_MAX // half.geometry.layers)
        while self.done < count:
            asked = min(most, count - self.done)
            theirs = names[self.done : self.done + asked]
            first = self._load.first + self.done
            mapped = self._cache.map_blocks_async(theirs, None, first, half.copies.index).wait()
            try:
                intact = self._bring(mapped)
                corrupt = intact if intact < mapped.blocks else None
                mapped.release_async(corrupt).wait()
            finally:
                mapped.close()
            self.done += intact
            if corrupt is not None:
                return "checksum"
            if intact < asked and mapped.reason != "none":
                return mapped.reason
            if intact < asked and (reason := self._copy(theirs[intact:], first + intact)):
                return reason
        return ""

    def _copy(self, names: BlockNames, first: int) -> str:
        """The next blocks may not be mapped: the daemon copies an extent of them. Why it ended, or empty."""
        half, copies = self._half, self._half.copies
        extent = half.loads.take()
        assert extent is not None  # loads come one after the other, and give back what they took
        try:
            asked = min(extent.blocks, len(names))
            found = self._cache.read_blocks_async(names[:asked], extent.range, first).wait()
            if found.blocks:
                half.count("loaded_encoded_bytes", found.nbytes)
                if copies.cuda:
                    import torch

                    with torch.cuda.stream(copies.load_stream):
                        extent.decode(found.blocks, found.raw, copies.load_stream.cuda_stream)
                else:
                    extent.decode(found.blocks, found.raw)
                self._scatter(extent, 0, found.blocks).wait()
            self.done += found.blocks
            return found.reason if found.blocks < asked else ""
        finally:
            half.drained().wait()
            extent.close()

    def _bring(self, mapped: BlocksMapped) -> int:
        """Blocks of it that are in the paged cache as they were stored, from the first on."""
        half = self._half
        stagings = [half.loads.take(), half.loads.take()] if half.paged is not None else []
        try:
            if stagings and all(stagings):
                return self._bring_at_once(mapped, stagings)
        finally:
            for extent in filter(None, stagings):
                extent.close()
        filled: collections.deque[tuple[Extent, int, Fence]] = collections.deque()
        begun = 0
        try:
            while begun < mapped.blocks or filled:
                extent = half.loads.take() if begun < mapped.blocks else None
                if extent is None:
                    corrupt = self._end(*filled.popleft())
                    if corrupt is not None:
                        return corrupt
                    continue
                filled.append((extent, begun, Fence()))  # it goes back whatever happens
                size = min(extent.blocks, mapped.blocks - begun)
                filled[-1] = extent, begun, self._fill(extent, mapped, begun, size)
                begun += size
            return begun
        finally:
            if filled:
                half.copies.fetched().wait()
                half.drained().wait()
            for extent, _, _ in filled:
                extent.close()

    def _bring_at_once(self, mapped: BlocksMapped, stagings: list[Extent]) -> int:
        half, copies = self._half, self._half.copies
        if not mapped.blocks:
            return 0
        ids = [group[self.done : self.done + mapped.blocks] for group in self._load.block_ids]
        try:
            import torch

            with torch.cuda.stream(copies.load_stream):
                self._after.hold()
            half.count("loaded_encoded_bytes", half.paged.load(mapped, ids, stagings))
        finally:
            copies.fetched().wait()
            half.drained().wait()
        corrupt = half.paged.corrupt(mapped)
        return mapped.blocks if corrupt is None else corrupt

    def _fill(self, extent: Extent, mapped: BlocksMapped, first: int, count: int) -> Fence:
        """Only begun on a GPU."""
        half, copies = self._half, self._half.copies
        layers = half.geometry.layers
        forms = mapped.raw[first * layers : (first + count) * layers]
        if copies.cuda:
            import torch

            with torch.cuda.stream(copies.fetch_stream):
                half.count("loaded_encoded_bytes", extent.fetch(mapped, first, count, copies.fetch_stream.cuda_stream))
            copies.load_stream.wait_stream(copies.fetch_stream)
            with torch.cuda.stream(copies.load_stream):
                extent.decode(count, forms, copies.load_stream.cuda_stream, fetched=True)
        else:
            half.count("loaded_encoded_bytes", extent.fetch(mapped, first, count))
            extent.decode(count, forms, fetched=True)
        return self._scatter(extent, first, count)

    def _scatter(self, extent: Extent, first: int, count: int) -> Fence:
        """Into the paged cache: blocks of the load from `done` + `first` on."""
        # Of a group with a sliding window some blocks, or all, are not wanted: id 0.
        begin = self.done + first
        ids = [group[begin : begin + count] for group in self._load.block_ids]
        return self._half.copies.load_blocks(extent.raw, count, ids, self._after)

    @staticmethod
    def _end(extent: Extent, first: int, fence: Fence) -> int | None:
        """The first block that is not what was stored."""
        fence.wait()
        corrupt = extent.corrupt()
        extent.close()
        return None if corrupt is None else first + corrupt


__all__ = ["MappedLoad", "PAGES_MAX"]
