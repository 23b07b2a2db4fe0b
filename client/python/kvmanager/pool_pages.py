"""Pages of one of SGLang's host pools in the daemon, over one connection: which are there, storing and loading them. Needs torch.

    daemon's memory --codec.load_rows--> host pool                  where this process may map it: copied once, compared, decoded
    daemon --arena--> Staging --PageCopier--> host pool             else: the daemon decodes
    host pool --PageCopier--> Staging --arena--> daemon             what is stored: the daemon encodes
"""

from __future__ import annotations

import hashlib
import logging
from typing import Callable, Sequence as Keys

import torch

from ._link import Session
from .arena import Arena
from .cache import BlockNames, Cache, Entries
from .errors import (
    DeadlineExceededError,
    Error,
    FailedPreconditionError,
    ResourceExhaustedError,
    UnavailableError,
    UnimplementedError,
)
from .host_pool import PageCopier, Piece, Pieces, Pool, Sides, strides_of
from .page_codec import LOADED, UNMAPPED, PageCodec
from .paged import Extent, Staging
from .pending import Pending
from .sequence import Sequence

logger = logging.getLogger("sglang.kvmanager")

OF_EVICTION = 50  # the priority of what nobody retains
_BATCH_MAX = 4096  # pages of one call
_BOUND_PARTS = 8  # of the pool one is bound to the tenant, and mapped, before it has pages


class PoolPages:
    """Belongs to the link's thread. Errors of the daemon are raised; pages that are not there are none.

    settings: the backend's. run_urgent(): does what waits meanwhile, between pieces of a store."""

    def __init__(self, session: Session, name: str, pool: Pool, settings: dict, copier: PageCopier, run_urgent: Callable[[], None]) -> None:
        self._session, self._name, self.pool = session, name, pool
        self._settings, self._copier, self._run_urgent = settings, copier, run_urgent
        self.codec: PageCodec | None = None  # None, once there was a store or a load: the daemon decodes pages
        self._codec_tried = False
        self._stagings: dict[str, tuple[Staging, Arena]] = {}
        self._unmapped_said = self._unretained_said = False

    @property
    def _cache(self) -> Cache:
        return self._session.cache(self._name)

    def there(self, keys: Keys[str], prefetch: bool) -> list[bool]:
        names = self._names(keys)
        parts = [names[begin : begin + _BATCH_MAX] for begin in range(0, len(names), _BATCH_MAX)]
        return [match.hit_blocks == 1 for part in parts for match in self._cache.match(part, prefetch)]

    def store(self, keys: Keys[str], page_of: Callable[[int], Sides], done: list[bool]) -> None:
        """page_of(place): K and V that key number `place` names. done: by place, whether the daemon has it; also where this raises."""
        self._make_codec()
        names = self._names(keys)
        done[:] = self.there(keys, prefetch=False)
        if self._kept_longer:
            self._retain([key for key, there in zip(keys, done) if there])
        missing = [place for place in range(len(keys)) if not done[place]]

        def write(piece: Piece) -> None:
            self._run_urgent()  # who waits for a prompt does not wait for what is stored
            piece.copies.wait()
            self._append(piece.extent, [names[place] for place in piece.places])
            for place in piece.places:
                done[place] = True
            self._retain([keys[place] for place in piece.places])

        with Pieces(self._staging("stores"), write) as pieces:
            for places in pieces.cut(missing):
                piece = pieces.take(places)
                piece.copies = self._copier.begin(
                    (self.pool.rows(piece.extent, at), page_of(place)) for at, place in enumerate(places)
                )

    def load(self, keys: Keys[str], pages: list[Sides]) -> list[bool]:
        """pages: where K and V of each key go."""
        self._make_codec()
        done, left = self._load_rows(keys, pages)
        if left:
            self._read_pages(keys, pages, left, done)
        if self._kept_longer:
            self._retain([key for key, there in zip(keys, done) if there])
        return done

    def _make_codec(self) -> None:
        """Once."""
        if self._codec_tried:
            return
        try:
            codec = PageCodec(self._cache, calibration_dir=self._settings["calibration_dir"])
            # Of whole slabs: what a tenant stores first lies in small ones otherwise, which are not mapped.
            self._cache.bind_slabs(self._cache.description.pool_bytes // _BOUND_PARTS)
            self.codec = codec
        except (DeadlineExceededError, UnavailableError):
            raise
        except Error as error:
            self._say_slower(error)
        self._codec_tried = True

    @staticmethod
    def _say_slower(error: Error) -> None:
        logger.info("kvmanager: the daemon copies what is loaded, which takes longer: %s", error)

    def _load_rows(self, keys: Keys[str], pages: list[Sides]) -> tuple[list[bool], list[int]]:
        """Copies pages out of the daemon's memory, which this process maps. Which are there, and places of those that can be read
        otherwise alone."""
        nothing, every, strides = [False] * len(keys), list(range(len(keys))), strides_of(pages)
        if self.codec is None or strides is None:
            return nothing, every
        names = BlockNames(b"".join(each.data for each in self._names(keys)))
        k, v = ([page[side].data_ptr() for page in pages] for side in range(2))
        try:
            results = self.codec.load_rows(names, k, v, strides, self._copier.threads)
        except (FailedPreconditionError, UnimplementedError) as error:
            self.codec = None
            self._say_slower(error)
            return nothing, every
        except ResourceExhaustedError as error:
            logger.warning("kvmanager: the daemon copies %d pages, which takes longer: %s", len(keys), error)
            return nothing, every
        left = [place for place in every if results[place] == UNMAPPED]
        if left and not self._unmapped_said:
            self._unmapped_said = True
            logger.info(
                "kvmanager: the daemon copies %d of %d pages, which takes longer: their memory is not to be mapped, or they are "
                "still to be encoded (said once)", len(left), len(keys),
            )
        return [each == LOADED for each in results], left

    def _read_pages(self, keys: Keys[str], pages: list[Sides], places: list[int], done: list[bool]) -> None:
        """By way of the arena, where the daemon decodes them."""

        def end(piece: Piece) -> None:
            piece.copies.wait()
            for place in piece.places:
                done[place] = True

        with Pieces(self._staging("loads"), end) as pieces:
            for some in pieces.cut(places):
                sequences = self._cache.create_sequences(self._names([keys[place] for place in some]))
                try:
                    found = [(place, each) for place, each in zip(some, sequences) if each.hit_blocks == 1]
                    if not found:
                        continue
                    piece = pieces.take([place for place, _ in found])
                    self._read(piece.extent, [each for _, each in found])
                    piece.copies = self._copier.begin(
                        (pages[place], self.pool.rows(piece.extent, at)) for at, place in enumerate(piece.places)
                    )
                finally:
                    for each in sequences:
                        each.close()

    def _staging(self, use: str) -> Staging:
        """Half of the settings' for each use."""
        if use not in self._stagings:
            arena = self._session.client.create_arena(max(self.pool.page_bytes, self._settings["staging_mib"] << 19))
            layers, tokens, heads, width = self.pool.shape
            memory = torch.from_dlpack(arena.tensor((arena.nbytes,), "uint8"))
            self._stagings[use] = Staging(memory, layers, tokens, heads, width, self.pool.dtype), arena
        return self._stagings[use][0]

    def _append(self, extent: Extent, names: list[BlockNames]) -> None:
        """A sequence of one page for each name, published and given back."""
        sequences: list[Sequence] = self._cache.create_sequences([None] * len(names))
        try:
            entries = Entries((each, 0, self.pool.page_tokens) for each in sequences)
            layers = range(self.pool.shape[0])
            _wait([self._cache.step_async(layer, entries, *extent.rows(layer)) for layer in layers])
            for each, name in zip(sequences, names):
                each.publish(name)
        finally:
            for each in sequences:
                each.close()

    def _read(self, extent: Extent, sequences: list[Sequence]) -> None:
        entries = Entries((each, 0, self.pool.page_tokens) for each in sequences)
        _wait([self._cache.read_async(layer, entries, *extent.rows(layer)) for layer in range(self.pool.shape[0])])

    @property
    def _kept_longer(self) -> bool:
        """Then each use of a page counts, whoever stored it. Below OF_EVICTION only what is stored here does: others may
        want what was there."""
        return self._settings["retention_priority"] > OF_EVICTION

    def _retain(self, keys: Keys[str]) -> None:
        priority, ttl_ms = self._settings["retention_priority"], self._settings["retention_ttl_s"] * 1000
        if priority == OF_EVICTION:
            return
        try:
            for begin in range(0, len(keys), _BATCH_MAX):
                some = [_digest(key) for key in keys[begin : begin + _BATCH_MAX]]
                self._cache.retain(self._cache.external_names(some), priority, ttl_ms)
        except (DeadlineExceededError, UnavailableError):
            raise
        except Error as error:  # of an earlier daemon, for example: they are kept as usual
            if not self._unretained_said:
                logger.warning("kvmanager: pages are not retained: %s", error)
            self._unretained_said = True

    def _names(self, keys: Keys[str]) -> list[BlockNames]:
        """Each of a sequence of one block."""
        cache = self._cache
        return [cache.external_names([_digest(key)]) for key in keys]


def _digest(key: str) -> bytes:
    """SGLang's keys are hexadecimal digests, perhaps with a suffix."""
    try:
        digest = bytes.fromhex(key)
    except ValueError:
        digest = b""
    if len(digest) != 32:
        digest = hashlib.sha256(key.encode(errors="surrogatepass")).digest()
    return digest


def _wait(calls: list[Pending]) -> None:
    """For all, whatever becomes of them: they read or write the same extent."""
    failed: Error | None = None
    for each in calls:
        try:
            each.wait()
        except Error as error:
            failed = failed or error
    if failed is not None:
        raise failed


__all__ = ["OF_EVICTION", "PoolPages"]
