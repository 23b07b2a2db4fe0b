"""What else the connector's half in a worker has its link's thread do, but for stores (store_job.py): load blocks, and hand them over.

    LoadJob     reads blocks into extents, decodes them, and copies them into the paged cache; where the daemon's memory may
                be mapped, mapped_load.py does it
    FinishJob   retains a finished request's blocks, and hands them to another daemon
"""

from __future__ import annotations

import collections
import time
from typing import TYPE_CHECKING

from .._link import Session
from ..cache import Cache
from ..errors import (
    DeadlineExceededError,
    Error,
    FailedPreconditionError,
    ResourceExhaustedError,
    UnavailableError,
    UnimplementedError,
)
from ..paged import Fence
from ..stored import Extent
from .mapped_load import MappedLoad
from .messages import Finish, Load
from .retention import Retention, retain

if TYPE_CHECKING:
    from .worker import WorkerHalf

_HAND_OFF_MS = 30000


class LoadJob:
    """Reads blocks from the daemon into extents, decodes them, and copies them into the paged cache."""

    def __init__(self, half: WorkerHalf, load: Load, after: Fence) -> None:
        self._half, self._load, self._after = half, load, after
        self._done = 0  # blocks
        self._began = time.monotonic()

    def run(self, session: Session) -> None:
        half, load = self._half, self._load
        cache = session.cache((load.tenant, half.facts.rank))
        count = len(load.hashes) - load.first
        reason = self._read(cache, count)
        times = half.meter.ended(self._began, time.monotonic())
        half.count("loaded_tokens", self._done * half.facts.block_tokens)
        half.count("loaded_bytes", self._done * half.block_bytes)
        half.observe("load_seconds", time.monotonic() - self._began)
        if self._done < count:
            half.log(f"request {load.request} finds {self._done} of {count} blocks", reason)
        half.loaded(load, self._done, times)

    def _read(self, cache: Cache, count: int) -> str:
        """Why it ended where it did."""
        half, load = self._half, self._load
        if half.maps:
            mapped = MappedLoad(half, load, cache, self._after)
            try:
                reason = mapped.run()
                self._done = mapped.done
                return reason
            except (FailedPreconditionError, UnimplementedError) as error:
                half.stop_mapping(error)
            except ResourceExhaustedError as error:
                half.log(f"the daemon copies what request {load.request} loads", error)
        asked, names = 0, cache.external_names(load.hashes[load.first :])
        reading: collections.deque = collections.deque()  # (extent, first of the load, blocks, the call)
        filled: collections.deque = collections.deque()  # (extent, fence)
        try:
            while reading or asked < count:
                while asked < count and len(reading) < 2:
                    extent = half.loads.take()
                    if extent is None:
                        if not filled:
                            break
                        self._free(*filled.popleft())
                        continue
                    size = min(extent.blocks, count - asked)
                    call = cache.read_blocks_async(names[asked : asked + size], extent.range, load.first + asked)
                    reading.append((extent, asked, size, call))
                    asked += size
                extent, first, size, call = reading.popleft()
                filled.append((extent, Fence()))  # it goes back whatever happens
                found = call.wait()
                if found.blocks:
                    # Of a group with a sliding window some blocks, or all, are not wanted: id 0.
                    ids = [group[first : first + found.blocks] for group in load.block_ids]
                    filled[-1] = (extent, half.unpack(extent, found.blocks, found.raw, ids, self._after))
                    half.count("loaded_encoded_bytes", found.nbytes)
                    self._done += found.blocks
                if found.blocks < size:
                    return found.reason
            return ""
        finally:
            for extent, _, _, call in reading:
                try:
                    call.wait()
                except Error:
                    pass
                extent.close()
            half.drained().wait()
            for each in filled:
                self._free(*each)

    @staticmethod
    def _free(extent: Extent, fence: Fence) -> None:
        fence.wait()
        extent.close()

    def fail(self, error: Error) -> None:
        self._half.log_error(f"a load of request {self._load.request} failed", error)
        self._half.loaded(self._load, 0)


class FinishJob:
    """Retains a finished request's blocks, and hands them to another daemon, where that was asked for."""

    def __init__(self, half: WorkerHalf, finish: Finish, tenant: str, hashes: list[bytes]) -> None:
        self._half, self._finish = half, finish
        self._tenant, self._hashes = tenant, hashes

    def run(self, session: Session) -> None:
        half, name, peer = self._half, self._finish.request, self._finish.peer
        if self._finish.retention is not None and self._hashes:
            self._retain(session, self._finish.retention)
        if not peer or not self._hashes:
            return
        if not half.settings.may_hand_to(peer):
            half.count("hand_offs_failed")
            half.log(f"request {name} is not handed to {peer!r}", f"must be of peers, {', '.join(half.settings.peers)}")
            return
        cache = session.cache((self._tenant, half.facts.rank))
        sequence = cache.create_sequence(cache.external_names(self._hashes))
        if not sequence.hit_blocks:
            sequence.close()
            return

        def done(outcome: object, error: Error | None) -> None:
            half.count("hand_offs" if error is None else "hand_offs_failed")
            if error is not None:
                half.log_error(f"handing request {name} to {peer!r} failed", error)
            sequence.close()

        # The receiver's blocks have the same names: who decodes there finds them.
        session.when_done(sequence.hand_off_async(peer, timeout_ms=_HAND_OFF_MS), done)

    def _retain(self, session: Session, retention: Retention) -> None:
        try:
            retain(session, (self._tenant, self._half.facts.rank), self._hashes, retention)
        except (DeadlineExceededError, UnavailableError):
            raise
        except Error as error:  # of an earlier daemon, for example: they are kept as usual
            self._half.log(f"blocks of request {self._finish.request} are not retained", error)

    def fail(self, error: Error) -> None:
        if self._finish.peer:
            self._half.count("hand_offs_failed")
            self._half.log_error(f"handing request {self._finish.request} to {self._finish.peer!r} failed", error)


__all__ = ["FinishJob", "LoadJob"]
