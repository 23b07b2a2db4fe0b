"""Stores blocks of a request: the client's library in one call, where it knows the engine's caches (paged_blocks.py), else by parts.

    engine's blocks --copy, encode--> extent's range --write--> daemon
                     save_stream
"""

from __future__ import annotations

import collections
import dataclasses
import threading
import time
from typing import TYPE_CHECKING

from .._lib import StoreSignals
from .._link import Session
from ..cache import BlockNames, BlocksWritten, Cache
from ..errors import Error, ResourceExhaustedError, UnavailableError
from ..names import BlockHashes
from ..paged import Fence
from ..paged_blocks import DECLINED, URGENT, PagedStore
from ..pending import Pending
from ..stored import Extent, Extents, Range
from .messages import Store

if TYPE_CHECKING:
    from .worker import WorkerHalf

_WRITES = 3  # calls that write blocks at once: the daemon copies on many cores, and a call alone leaves them idle between two
_DIRECT_WRITES = 4  # the same where its GPU copies, beside which it checks what was copied before
_FIRST_BLOCKS = 4  # of a store, so that the first copies begin soon, and of its last, so that little comes behind them


def _writes(extents: Extents) -> int:
    return _DIRECT_WRITES if extents.direct else _WRITES


class Stored:
    """Some blocks of a store on their way to the daemon."""

    def __init__(self, extent: Extent, first: int, count: int) -> None:
        self.extent, self.first, self.count = extent, first, count
        self.fences: list[Fence] = []  # of the copies, by layer: then nothing reads the engine's blocks
        self.encodes = False
        self.failed = False  # not all was copied: it is not written
        self.done = Fence()  # the range is filled


@dataclasses.dataclass
class Writing:
    """Blocks that the daemon was given, and takes out of a range."""

    room: Range | Extent | None  # to be closed then
    count: int
    nbytes: int
    call: Pending[BlocksWritten]


class StoreJob:
    """Copies blocks that the daemon does not have into extents, encodes them, and writes them to the daemon.

    The link's thread begins the copies, so that the engine's spends nothing on them; they are behind `after`. Whoever
    takes the blocks away calls take_blocks() before."""

    def __init__(self, half: WorkerHalf, store: Store) -> None:
        self.store = store
        self.after: list[Fence | None] = [None] * len(half.facts.layers)  # by layer: what computed it; the worker's thread
        self._half = half
        self._lock = threading.Lock()  # of what follows
        self._next = 0  # blocks of the store whose copies were begun, or are not needed
        self._count = len(store.block_ids[0])
        self._begun: collections.deque[Stored] = collections.deque()
        self._begun_fences: collections.deque[Fence] = collections.deque()  # that may not have passed; asking takes time
        self._spoilt = ""  # why not all copies were begun, or will be
        self._held = False  # the stream of saves is behind `after`
        self._began = 0.0  # of the transfer
        self._computed = not half.copies.cuda  # what is stored; on a GPU the job runs before
        self._whole: PagedStore | None = None  # the client's library runs it

    def begin(self, at_once: bool = False) -> bool:
        """Begins the copies of the next blocks; whether there were some, and room for them. at_once: encodes them, too, on the link's
        thread."""
        half, store = self._half, self.store
        with self._lock:
            while self._next < self._count and not all(group[self._next] for group in store.block_ids):
                self._next += 1  # id 0: vLLM has given the block up
                half.count("unstored_preempted_tokens", half.facts.block_tokens)
            if self._spoilt or self._next >= self._count or half.stores is None:
                return False
            extent = half.stores.take()
            if extent is None:
                return False
            begin = self._next
            end = begin + extent.fits(store.first + begin, self._count - begin)
            while end > begin + 1 and not all(all(group[begin:end]) for group in store.block_ids):
                end -= 1
            part = Stored(extent, store.first + begin, end - begin)
            self._begun.append(part)
            self._next = end
            try:
                ids = [group[begin:end] for group in store.block_ids]
                if at_once and half.paged is not None:
                    if not self._held:
                        self._held = True  # what comes later on that stream is behind them, too
                        half.copies.hold_saves(self.after)
                    part.encodes = True
                    half.paged.save(extent, part.count, part.first, ids)
                    part.done = half.copies.sent()
                    part.fences.append(half.copies.saved())
                else:
                    part.fences += half.copies.save_blocks(extent.raw, part.count, ids, self.after)
            except (RuntimeError, Error) as error:  # a GPU without memory for the copy, for example
                self._spoilt = f"{type(error).__name__}: {error}"
                part.fences += half.copies.saved(), half.copies.sent()
                part.failed, self._next = True, begin
            self._begun_fences.extend(part.fences)
        return not part.failed

    def skip(self, blocks: int) -> None:
        """The daemon has the blocks before `blocks` of the request."""
        with self._lock:
            there = min(max(blocks - self.store.first, 0), self._count)
            if there > self._next:
                self._half.count("stores_present", (there - self._next) * self._half.facts.block_tokens)
                self._next = there

    def take_blocks(self) -> None:
        """What the engine's stream does from now on to the blocks comes after the copies; those not begun never are."""
        with self._lock:
            if self._next < self._count:
                self._spoilt = self._spoilt or "its blocks were taken away"
            if self._whole is not None:
                self._whole.stop()
                self._half.copies.saved().hold()
            for part in self._begun:
                for fence in part.fences:
                    fence.hold()

    def read(self) -> bool:
        """Whether nothing reads the engine's blocks any more, nor will. Never waits: while copies are being begun, no."""
        whole = self._whole
        if whole is not None:
            return whole.read
        if not self._lock.acquire(blocking=False):
            return False
        try:
            if self._next < self._count and not self._spoilt:
                return False
            while self._begun_fences and self._begun_fences[0].passed():
                self._begun_fences.popleft()
            return not self._begun_fences
        finally:
            self._lock.release()

    def run(self, session: Session) -> None:
        half, store = self._half, self.store
        self._began = time.monotonic()
        cache = session.cache((store.tenant, half.facts.rank))
        if not self._run_whole(session, cache):
            self._run_by_parts(session, cache)
        with self._lock:
            failed, left = list(self._begun), self._count - self._next
            self._begun.clear()
            if left:
                self._spoilt = self._spoilt or "no staging is free: raise staging_mib"
        for part in failed:
            for fence in part.fences:
                fence.wait()
            part.extent.close()
        if self._spoilt:
            half.log(f"blocks of request {store.request} were not all stored", self._spoilt)
            self._unstored("preempted" if "taken" in self._spoilt else "failed", left)
            half.count("stores_dropped")
        half.observe("store_seconds", time.monotonic() - self._began)

    def _run_whole(self, session: Session, cache: Cache) -> bool:
        """By the client's library, without Python's lock. False: blocks from `_next` on are to be stored by parts."""
        half, store = self._half, self.store
        extents = half.stores
        if half.paged is None or half.facts.windowed or extents is None or not extents.idle or not all(map(all, store.block_ids)):
            return False
        hashes = BlockHashes(store.hashes)
        with self._lock:
            if self._spoilt:
                return True
            half.copies.hold_saves(self.after)
            whole = self._whole = half.paged.store(hashes, store.first, store.block_ids, _writes(extents), _FIRST_BLOCKS)
        try:
            while (state := whole.run(cache, half.link.signals)) == URGENT:
                half.link.run_urgent(session)
        except Exception as error:  # also of an urgent job, which ends the connection
            self._give_up(whole, cache)
            self._count_whole(whole, lost=True)
            self._end(collections.deque(), error)
            raise
        self._count_whole(whole)
        return state != DECLINED

    @staticmethod
    def _give_up(whole: PagedStore, cache: Cache) -> None:
        """Until nobody reads the engine's blocks, nor the ranges: what was begun is written, as far as that goes."""
        whole.stop()
        try:
            while whole.run(cache, StoreSignals()) == URGENT:
                pass
        except Error:  # then nothing is under way
            pass

    def _count_whole(self, whole: PagedStore, lost: bool = False) -> None:
        """lost: of blocks that were begun, those that are not known to be stored are to be counted as such."""
        half, of = self._half, whole.result
        half.count("stored_tokens", of.written * half.facts.block_tokens)
        half.count("stores_present", (of.found + of.present) * half.facts.block_tokens)
        half.count("stored_bytes", of.written * half.block_bytes)
        half.count("stored_encoded_bytes", of.written_bytes)
        if of.full:
            self._no_room(of.full, whole.full or "its memory is full")
        if of.nanoseconds:
            self._computed, self._began = True, time.monotonic() - of.nanoseconds * 1e-9
        with self._lock:
            self._next = of.found + of.written + of.present + of.full if lost else of.next
            if self._next == self._count:
                self._spoilt = ""
            self._whole = None

    def _no_room(self, blocks: int, why: object) -> None:
        self._unstored("full", blocks)
        self._half.count("stores_dropped")
        self._half.log("the daemon has no room: raise its --host-pool-bytes, or what --tenants allows", why)

    def _run_by_parts(self, session: Session, cache: Cache) -> None:
        half = self._half
        filling: collections.deque[Stored] = collections.deque()
        writing: collections.deque[Writing] = collections.deque()
        try:
            self._skip_present(cache)
            part = self._next_part()
            names = cache.external_names(self.store.hashes)  # the first copies are under way
            while True:
                if part is not None:
                    if not part.encodes:
                        self._encode(part)
                    filling.append(part)
                    half.link.run_urgent(session)
                # One is copied while the one before is written.
                if filling and (part is None or len(filling) > 1):
                    self._write(cache, names, filling.popleft(), writing)
                elif writing and part is None:
                    self._written(writing.popleft())
                elif part is None:
                    break
                if len(writing) > _writes(half.stores):
                    self._written(writing.popleft())
                part = self._next_part()
        except Exception as error:  # a GPU's, too: ranges that the daemon reads are closed behind that
            self._end(writing, error)
            raise

    def _skip_present(self, cache: Cache) -> None:
        """Leaves out what the daemon has."""
        hashes, first = self.store.hashes, self.store.first
        # It has a block only with those before it: mostly it lacks the first, and the others need not be named for that.
        hit = cache.match([cache.external_names(hashes[: first + 1])])[0].hit_blocks
        if hit > first:
            hit = cache.match([cache.external_names(hashes)])[0].hit_blocks
        self.skip(hit)

    def _next_part(self) -> Stored | None:
        """The oldest whose copies were begun and that is not encoded, or else the next."""
        with self._lock:
            waiting = [part for part in self._begun if not part.encodes and not part.failed]
        if not waiting and self.begin(at_once=True):
            waiting = [self._begun[-1]]
        return waiting[0] if waiting else None

    def _encode(self, part: Stored) -> None:
        """Behind the copies, on their stream; on a CPU now."""
        copies, part.encodes = self._half.copies, True
        if copies.cuda:
            import torch

            with torch.cuda.stream(copies.save_stream):
                part.extent.encode(part.count, part.first, copies.save_stream.cuda_stream)
            part.done = copies.saved()
        else:
            for fence in part.fences:
                fence.wait()
            part.extent.encode(part.count, part.first)

    def _write(self, cache: Cache, names: BlockNames, part: Stored, writing: collections.deque[Writing]) -> None:
        part.done.wait()
        if not self._computed:
            self._computed, self._began = True, time.monotonic()
        pieces = part.extent.encoded()
        for number, piece in enumerate(pieces):
            while number > 0 and writing:  # what is in the extent's range
                self._written(writing.popleft())
            first = part.first + piece.first
            theirs = names[first : first + piece.count]
            call = cache.write_blocks_async(theirs, piece.forms, part.extent.bring(piece), first, piece.checksums)
            writing.append(Writing(None, piece.count, piece.nbytes, call))
        with self._lock:
            self._begun.remove(part)
        writing[-1].room = part.extent.detach()

    def _written(self, writing: Writing) -> None:
        half, count = self._half, writing.count
        try:
            written = writing.call.wait()
        except ResourceExhaustedError as error:
            self._no_room(count, error)
        except Error:
            self._unstored("failed", count)
            raise
        else:
            half.count("stored_tokens", written.written * half.facts.block_tokens)
            half.count("stores_present", written.present * half.facts.block_tokens)
            half.count("stored_bytes", written.written * half.block_bytes)
            half.count("stored_encoded_bytes", writing.nbytes * written.written // count)
        finally:
            if writing.room is not None:
                writing.room.close()

    def _end(self, writing: collections.deque[Writing], error: Exception) -> None:
        """Gives up: nobody writes to the extents any more, nor reads them."""
        with self._lock:
            self._spoilt = self._spoilt or (error.message if isinstance(error, Error) else str(error))
            begun, self._begun = list(self._begun), collections.deque()
            lost = self._count - self._next
            self._next = self._count
        for each in writing:
            try:
                each.call.wait()
            except Error:
                pass
            if each.room is not None:
                each.room.close()
        for part in begun:
            for fence in (*part.fences, part.done):
                fence.wait()
            part.extent.close()
        lost += sum(part.count for part in begun) + sum(each.count for each in writing)
        self._unstored("away" if isinstance(error, UnavailableError) else "failed", lost)

    def _unstored(self, why: str, blocks: int) -> None:
        self._half.count(f"unstored_{why}_tokens", blocks * self._half.facts.block_tokens)

    def fail(self, error: Error) -> None:
        """Also the worker's thread, of a job that the link did not take."""
        self._half.log_error(f"a store of request {self.store.request} failed", error)
        self._end(collections.deque(), error)
        self._half.count("stores_dropped")


__all__ = ["StoreJob"]
