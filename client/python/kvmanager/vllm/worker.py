"""The half of the connector in a vLLM worker: copies blocks between the paged cache and the daemon.

The engine's thread records events and hands jobs over. What begins copies, and waits for them and for the daemon, is
the link's thread. Copies are ordered by events: a store's begin behind the step that computed its blocks, a load's behind
what the engine's stream was given before. Blocks of a finished request are kept until stores have read them; those that
are taken from a preempted one, or that leave a window, are written after the copies that were begun, and others are not.
A store for which there is no room is dropped, and costs a miss later.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from typing import TYPE_CHECKING

from .._link import Link, Session
from ..cache import BlockNames, Cache, Sequence
from ..errors import Error, UnavailableError
from ..paged import Extent, Fence, PagedCopy, Staging
from .facts import Facts, Settings
from .messages import Finish, Load, StepPlan, Store
from .metrics import KvManagerStats
from .packing import packing_of

if TYPE_CHECKING:
    import torch

_EXTENT_TOKENS = 2048  # of one copy
_SEQUENCES_MAX = 256  # of requests that store; the one that stored longest ago is closed, its blocks stay published
_HAND_OFF_MS = 30000
_LOG_S = 5.0


class Kept:
    """A request's sequence in the daemon. Of the link's thread."""

    def __init__(self, sequence: Sequence, names: BlockNames, blocks: int) -> None:
        self.sequence, self.names, self.blocks = sequence, names, blocks


class StoreJob:
    """Copies blocks into an extent, appends them to the request's sequence, and publishes them.

    The link's thread begins the copies, so that the engine's spends nothing on them; they are behind `after`. Whoever
    takes the blocks away calls take_blocks() before."""

    def __init__(self, half: WorkerHalf, store: Store, extent: Extent) -> None:
        layers = len(half.facts.layers)
        self.store, self.extent = store, extent
        self.after: list[Fence | None] = [None] * layers  # by layer: what computed it; the worker's thread
        self._fences: list[Fence | None] = [None] * layers
        self._spoilt = ""  # why not all copies were begun, or will be
        self._lock = threading.Lock()  # of _fences and _spoilt
        self._half = half
        self._began = time.monotonic()

    def begin(self) -> None:
        """Begins all copies that are not."""
        half = self._half
        with self._lock:
            indices = [half.copies.indices(ids) for ids in self.store.block_ids]
            for layer, group in enumerate(half.facts.groups):
                if self._fences[layer] is not None or self._spoilt:
                    continue
                try:
                    rows = self.extent.rows(layer)
                    self._fences[layer] = half.copies.save(layer, indices[group], *rows, self.after[layer])
                except RuntimeError as error:  # a GPU without memory for the copy, for example
                    self._spoilt = f"{type(error).__name__}: {error}"
                    self._fences[layer] = half.copies.saved()

    def take_blocks(self) -> None:
        """What the engine's stream does from now on to the blocks comes after the copies; those not begun never are."""
        with self._lock:
            if any(fence is None for fence in self._fences):
                self._spoilt = self._spoilt or "its blocks were taken away"
            for fence in self._fences:
                if fence is not None:
                    fence.hold()

    def read(self) -> bool:
        """Whether nothing reads the engine's blocks any more, nor will. Never waits: while copies are being begun, no."""
        if not self._lock.acquire(blocking=False):
            return False
        try:
            begun = [fence for fence in self._fences if fence is not None]
            return (len(begun) == len(self._fences) or bool(self._spoilt)) and all(fence.passed() for fence in begun)
        finally:
            self._lock.release()

    def run(self, session: Session) -> None:
        half, store = self._half, self.store
        self.begin()
        if self._spoilt:
            half.forget(session, store.request, barred=True)
            half.log(f"a store of request {store.request} was given up", self._spoilt)
            self._dropped()
            return
        cache = session.cache((store.tenant, half.facts.rank))
        kept = half.keep(session, cache, store)
        count = self.extent.blocks
        if kept is None:
            self._dropped()
            return
        skip = kept.blocks - store.first
        half.count("stores_present", max(0, min(skip, count)) * half.facts.block_tokens)
        if skip < count:
            try:
                self._append(cache, kept, skip)
            except Error:
                half.forget(session, store.request, barred=True)
                raise
        self._close()
        half.observe("store_seconds", time.monotonic() - self._began)

    def _append(self, cache: Cache, kept: Kept, skip: int) -> None:
        page, facts = self._half.facts.block_tokens, self._half.facts
        blocks = self.extent.blocks - skip
        for layer in range(len(facts.layers)):
            self._fences[layer].wait()
            k, v = self.extent.rows(layer)
            cache.step(layer, [(kept.sequence, kept.blocks * page, blocks * page)], k[skip * page :], v[skip * page :])
        kept.blocks += blocks
        kept.sequence.publish(kept.names[: kept.blocks])
        self._half.count("stored_tokens", blocks * page)
        self._half.count("stored_bytes", blocks * self._half.block_bytes)

    def fail(self, error: Error) -> None:
        self._half.log(f"a store of request {self.store.request} failed", error)
        self._dropped()

    def _dropped(self) -> None:
        self._half.count("stores_dropped")
        self._close()

    def _close(self) -> None:
        with self._lock:
            if any(fence is None for fence in self._fences):
                self._spoilt = self._spoilt or "given up"
        for fence in self._fences:  # nobody writes to the extent any more
            if fence is not None:
                fence.wait()
        self.extent.close()


class LoadJob:
    """Reads blocks from the daemon into staging, layer by layer, and copies them into the paged cache."""

    def __init__(self, half: WorkerHalf, load: Load, after: Fence) -> None:
        self._half, self._load, self._after = half, load, after
        self._done = 0  # blocks
        self._began = time.monotonic()

    def run(self, session: Session) -> None:
        half, load = self._half, self._load
        cache = session.cache((load.tenant, half.facts.rank))
        wanted = len(load.hashes)
        count = wanted - load.first
        with cache.create_sequence(cache.external_names(load.hashes)) as sequence:
            found = max(0, min(sequence.hit_blocks - load.first, count))
            extents: list[tuple[Extent, list[Fence]]] = []
            try:
                self._copy(session, cache, sequence, found, extents)
            finally:
                half.drained().wait()
                for extent, fences in extents:
                    self._free(extent, fences)
        half.count("loaded_tokens", self._done * half.facts.block_tokens)
        half.count("loaded_bytes", self._done * half.block_bytes)
        half.observe("load_seconds", time.monotonic() - self._began)
        if found < count:
            half.log(f"request {load.request} finds {found} of {count} blocks", sequence.miss_reason)
        half.loaded(load, self._done)

    def _copy(self, session, cache: Cache, sequence: Sequence, blocks: int, extents: list) -> None:
        half, load, page = self._half, self._load, self._half.facts.block_tokens
        staging: Staging = session.state["loads"]
        while self._done < blocks:
            size = min(half.extent_blocks, blocks - self._done)
            while (extent := staging.take(size)) is None:
                self._free(*extents.pop(0))
            fences: list[Fence] = []
            extents.append((extent, fences))
            begin = load.first + self._done
            for layer, group in enumerate(half.facts.groups):
                ids = load.block_ids[group][self._done : self._done + size]
                if not any(ids):
                    continue  # outside of a sliding window
                k, v = extent.rows(layer)
                cache.read(layer, [(sequence, begin * page, size * page)], k, v)
                fences.append(half.scatter(layer, ids, k, v, self._after))
            self._done += size

    @staticmethod
    def _free(extent: Extent, fences: list[Fence]) -> None:
        for fence in fences:
            fence.wait()
        extent.close()

    def fail(self, error: Error) -> None:
        self._half.log(f"a load of request {self._load.request} failed", error)
        self._half.loaded(self._load, 0)


class FinishJob:
    """Gives a request's sequence back, handing it off before where that was asked for."""

    def __init__(self, half: WorkerHalf, finish: Finish) -> None:
        self._half, self._finish = half, finish

    def run(self, session: Session) -> None:
        half, name = self._half, self._finish.request
        kept = half.kept(session).get(name)
        half.barred(session).discard(name)
        if kept is None:
            return
        peer = self._finish.peer
        allowed = half.settings.may_hand_to(peer)
        if peer and not allowed:
            half.count("hand_offs_failed")
            half.log(f"request {name} is not handed to {peer!r}", f"must be of peers, {', '.join(half.settings.peers)}")
        if not peer or not allowed or not kept.blocks:
            half.forget(session, name)
            return
        half.kept(session).pop(name)

        def done(outcome: object, error: Error | None) -> None:
            half.count("hand_offs" if error is None else "hand_offs_failed")
            if error is not None:
                half.log(f"handing request {name} to {peer!r} failed", error)
            kept.sequence.close()

        # The receiver's blocks have the same names: who decodes there finds them.
        session.when_done(kept.sequence.hand_off_async(peer, timeout_ms=_HAND_OFF_MS), done)

    def fail(self, error: Error) -> None:
        if self._finish.peer:
            self._half.count("hand_offs_failed")
            self._half.log(f"handing request {self._finish.request} to {self._finish.peer!r} failed", error)


class WorkerHalf:
    """Public methods belong to the worker's thread, but for those that say the link's."""

    def __init__(self, facts: Facts, settings: Settings, logger) -> None:
        self.facts, self.settings, self._logger = facts, settings, logger
        self.block_bytes = len(facts.layers) * 2 * facts.block_tokens * facts.heads * facts.head_dim * 2
        self._staging_bytes = max(2 * self.block_bytes, settings.staging_mib * (1 << 20) // 2)
        # Two of them fit, so that one is filled while the other is copied.
        fitting = self._staging_bytes // (2 * self.block_bytes)
        self.extent_blocks = max(1, min(_EXTENT_TOKENS // facts.block_tokens, fitting))
        self._logged = -_LOG_S
        self.copies: PagedCopy | None = None
        self._layer_of = {name: layer for layer, name in enumerate(facts.layers)}
        self._stores: Staging | None = None  # while attached
        self._step: list[StoreJob] = []  # of this step, their copies not all begun
        self._reading: dict[str, list[StoreJob]] = {}  # whose blocks may still be read, by request
        self._abandoned: list[StoreJob] = []  # that the link refused, whose copies may still run
        self._hashes: dict[str, list[bytes]] = {}
        self._reports: set[str] = set()  # requests whose blocks wait for their stores
        self._lock = threading.Lock()  # of what follows
        self._received: set[str] = set()
        self._failed: dict[str, set[int]] = {}  # block ids of group 0 that were not loaded, by request
        self._stats = KvManagerStats()
        self.link: Link | None = None  # once the caches are known

    # Set-up.

    def register(self, caches: dict[str, torch.Tensor], modules: dict[str, object]) -> None:
        """modules: vLLM's attention layers. ValueError: the caches have no layout that is known; then loads fail and stores
        are dropped."""
        facts, settings = self.facts, self.settings
        missing = [name for name in facts.layers if name not in caches]
        if missing:
            raise ValueError(f"kv_caches lacks {', '.join(missing)}")
        layers = [caches[name] for name in facts.layers]
        packings = [packing_of(modules, name, cache) for name, cache in zip(facts.layers, layers)]
        self.copies = PagedCopy(layers, facts.blocks, facts.block_tokens, facts.heads, facts.head_dim, packings)
        if self.link is None:
            self.link = Link(
                settings.address,
                f"vllm worker {facts.rank}",
                facts.describe,
                self._attach,
                self._detach,
                deadline_ms=settings.deadline_ms,
            )

    def _submit(self, job, urgent: bool = False) -> bool:
        return self.link is not None and self.link.submit(job, urgent)

    def _attach(self, session: Session) -> None:
        """The link's thread: staging of this connection. What the daemon does not accept is an error here."""
        session.cache((self.settings.tenant, self.facts.rank))
        session.state["loads"] = self._staging(session)
        self._stores = self._staging(session)

    def _staging(self, session: Session) -> Staging:
        from torch import from_dlpack

        facts = self.facts
        arena = session.client.create_arena(self._staging_bytes)
        session.state.setdefault("arenas", []).append(arena)
        memory = from_dlpack(arena.tensor((self._staging_bytes,), "uint8"))
        shape = (len(facts.layers), facts.block_tokens, facts.heads, facts.head_dim)
        return Staging(memory, *shape, facts.dtype, self.copies.device)

    def _detach(self) -> None:
        """The link's thread."""
        self._stores = None
        self.count("detachments")

    # A step.

    def begin(self, plan: StepPlan) -> None:
        """Before the step runs, and before blocks of preempted requests are written."""
        if plan.preempted or self.facts.windowed:
            for jobs in self._reading.values():
                for job in jobs:
                    job.take_blocks()

    def start_loads(self, plan: StepPlan) -> None:
        after = self.copies.here() if plan.loads and self.copies is not None else Fence()
        for load in plan.loads:
            job = LoadJob(self, load, after)
            if not self._submit(job, urgent=True):
                job.fail(UnavailableError("the daemon is away"))

    def prepare_stores(self, plan: StepPlan) -> None:
        """Takes staging for the step's stores; once per step."""
        for store in plan.stores:
            hashes = self._hashes.setdefault(store.request, [])
            hashes[store.hashes_from :] = store.hashes
            self._take(store, hashes)

    def _take(self, store: Store, hashes: list[bytes]) -> None:
        staging, count = self._stores, len(store.block_ids[0])
        for begin in range(0, count, self.extent_blocks):
            size = min(self.extent_blocks, count - begin)
            ids = tuple(group[begin : begin + size] for group in store.block_ids)
            whole = all(all(group) for group in ids)  # id 0: vLLM has given the block up
            extent = staging.take(size) if staging is not None and whole else None
            if extent is None:
                self.count("stores_dropped")
                return  # what follows could not be appended
            first = store.first + begin
            part = Store(store.request, store.tenant, 0, hashes[: first + size], first, ids)
            job = StoreJob(self, part, extent)
            self._step.append(job)
            self._reading.setdefault(store.request, []).append(job)

    def save_layer(self, name: str) -> None:
        """A layer is computed, behind what the engine's stream was given so far."""
        layer = self._layer_of.get(name)
        if self._step and layer is not None:
            after = self.copies.here()
            for job in self._step:
                job.after[layer] = after

    def finish_saves(self) -> None:
        """All layers are; hands the jobs over."""
        if not self._step:
            return
        after = self.copies.here()
        jobs, self._step = self._step, []
        for job in jobs:
            job.after = [each or after for each in job.after]
            if self.facts.windowed:  # the next step may take blocks, and would stop what has not begun
                job.begin()
            if not self._submit(job):
                job.take_blocks()
                self.count("stores_dropped")
                self._abandoned.append(job)

    def finishes(self, plan: StepPlan) -> None:
        for finish in plan.finishes:
            self._hashes.pop(finish.request, None)
            job = FinishJob(self, finish)
            if not self._submit(job):
                job.fail(UnavailableError("the daemon is away"))
            if finish.report:
                self._reports.add(finish.request)
            else:
                self._reading.pop(finish.request, None)

    def results(self) -> tuple[set[str], set[str], dict[str, set[int]]]:
        """Since the last call: requests whose blocks are no longer read; those whose load has ended; of these, what was
        not loaded, by request."""
        for job in [job for job in self._abandoned if job.read()]:
            self._abandoned.remove(job)
            job.extent.close()
        for name, jobs in list(self._reading.items()):
            left = [job for job in jobs if not job.read()]
            if left:
                self._reading[name] = left
            else:
                del self._reading[name]
        sent = {name for name in self._reports if name not in self._reading}
        self._reports -= sent
        with self._lock:
            received, self._received = self._received, set()
            failed, self._failed = self._failed, {}
        return sent, received, failed

    # What jobs call, on the link's thread.

    def kept(self, session: Session) -> OrderedDict[str, Kept]:
        return session.state.setdefault("kept", OrderedDict())

    def barred(self, session: Session) -> set[str]:
        """Requests that are stored no further: a block of theirs is missing."""
        return session.state.setdefault("barred", set())

    def keep(self, session: Session, cache: Cache, store: Store) -> Kept | None:
        """The request's sequence, with all blocks before store.first; None: it cannot be had."""
        kept, name = self.kept(session), store.request
        if name in self.barred(session):
            return None
        if name not in kept:
            names = cache.external_names(store.hashes)
            sequence = cache.create_sequence(names)
            kept[name] = Kept(sequence, names, sequence.hit_blocks)
            while len(kept) > _SEQUENCES_MAX:
                kept.popitem(last=False)[1].sequence.close()
        found = kept[name]
        kept.move_to_end(name)
        if len(found.names) < len(store.hashes):
            found.names = found.names + cache.external_names(store.hashes[len(found.names) :])
        if found.blocks < store.first:
            self.forget(session, name, barred=True)
            return None
        return found

    def forget(self, session: Session, name: str, barred: bool = False) -> None:
        kept = self.kept(session).pop(name, None)
        if kept is not None:
            kept.sequence.close()
        if barred:
            self.barred(session).add(name)

    def scatter(self, layer: int, ids: list[int], k, v, after: Fence) -> Fence:
        """Copies rows into the blocks of `ids` but for those that are 0."""
        if not all(ids):
            places = [place for place, each in enumerate(ids) if each]
            shape = (len(ids), self.facts.block_tokens, self.facts.heads, self.facts.head_dim)
            k, v = (rows.view(shape)[places].flatten(0, 1) for rows in (k, v))
            ids = [each for each in ids if each]
        return self.copies.load(layer, self.copies.indices(ids), k, v, after)

    def drained(self) -> Fence:
        """Behind all copies of loads."""
        return self.copies.loaded()

    def loaded(self, load: Load, blocks: int) -> None:
        """Also the worker's thread."""
        missing = {each for each in load.block_ids[0][blocks:] if each}
        with self._lock:
            self._received.add(load.request)
            if blocks < len(load.hashes) - load.first:
                self._failed[load.request] = missing
                self._stats.add("loads_failed")

    def count(self, name: str, amount: float = 1) -> None:
        if amount:
            with self._lock:
                self._stats.add(name, amount)

    def observe(self, name: str, seconds: float) -> None:
        with self._lock:
            self._stats.observe(name, seconds)

    def log(self, text: str, why: object) -> None:
        """At most one line in _LOG_S; metrics count the others."""
        now = time.monotonic()
        if now - self._logged >= _LOG_S:
            self._logged = now
            self._logger.warning("kvmanager: %s: %s", text, why)

    # Ends.

    def take_stats(self) -> KvManagerStats | None:
        with self._lock:
            if self._stats.is_empty():
                return None
            taken, self._stats = self._stats, KvManagerStats()
            return taken

    def close(self) -> None:
        if self.link is not None:
            self.link.close()
