"""The half of the connector in a vLLM worker: brings blocks of the paged cache to the daemon and back, in stored form.

The engine's thread records events and hands jobs over. What begins copies, and waits for them and for the daemon, is
the link's thread (store_job.py, jobs.py). A store's blocks are copied into raw pages, encoded by the engine's own device
(stored.py), and written to the daemon a few at a time, all layers in one call; loads go the other way. Copies are ordered
by events: a store's begin behind the step that computed its blocks, a load's behind what the engine's stream was given
before.

Stores wait for room, in their order: blocks of a finished request are kept until stores have copied them. Those that are
taken from a preempted one, or that leave a window, are written after the copies that were begun, and others are not stored.
What is not stored is counted by reason, and costs a miss later.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from .._link import Link, Session, share_lock
from ..errors import Error, FailedPreconditionError, NotFoundError, UnavailableError, UnimplementedError
from ..page_codec import PageCodec
from ..paged import Fence, PagedCopy
from ..stored import Extent, Extents, Geometry, range_bytes
from .facts import SET_BY, Facts, Settings
from .jobs import FinishJob, LoadJob
from .load_ends import LoadEnds
from .mapped_load import CALLS, MAPPED_PAGES_MAX
from .measured import LoadMeter, LoadTimes
from .messages import Load, StepPlan, Store
from .metrics import KvManagerStats
from .packing import packing_of
from .store_job import StoreJob

if TYPE_CHECKING:
    import torch

    from .._lib import Handle
    from ..arena import Arena
    from ..cache import Cache
    from ..device import Device
    from ..paged_blocks import PagedBlocks

_EXTENT_BYTES = 64 << 20  # of raw pages: of one call to the daemon, or of one batch of copies
_STORE_BYTES = 128 << 20  # the same of a store that is encoded on a GPU, or that the daemon's copies from there
_EXTENTS = 4  # of an arena, at least, where its size allows
_DIRECT_RANGES = 7  # of an arena on the GPU: calls under way, and what is encoded meanwhile
_DEVICES_MAX = 16  # of a daemon
_PIN_WAIT_S = 120.0  # for the daemon to pin its memory, before it copies out of the GPU's
_PIN_POLL_S = 0.2
_LOG_S = 5.0
_ALL_BYTES = 1 << 62  # more than any pool


class WorkerHalf:
    """Public methods belong to the worker's thread, but for those that say the link's."""

    def __init__(self, facts: Facts, settings: Settings, logger) -> None:
        self.facts, self.settings, self._logger = facts, settings, logger
        self.block_bytes = len(facts.layers) * 2 * facts.block_tokens * facts.heads * facts.head_dim * 2
        self.geometry = Geometry(
            len(facts.layers), facts.block_tokens, facts.heads, facts.head_dim, facts.dtype
        )
        staging_bytes = max(2 * self.block_bytes, settings.staging_mib * (1 << 20) // 2)
        # Several fit, so that one is filled while another is copied.
        fitting = min(_EXTENT_BYTES, staging_bytes // _EXTENTS) // self.block_bytes
        self.extent_blocks = max(1, fitting)
        self._extents = max(2, staging_bytes // (self.extent_blocks * self.block_bytes))
        self._logged = -_LOG_S
        self.meter = LoadMeter()
        self.copies: PagedCopy | None = None
        self._layer_of = {name: layer for layer, name in enumerate(facts.layers)}
        self.stores: Extents | None = None  # while attached, as loads
        self.loads: Extents | None = None
        self.maps = False  # loads read the daemon's memory themselves; the link's thread
        self.paged: PagedBlocks | None = None  # likewise: what copies whole blocks in one call
        self._lent: tuple[Handle, ...] = ()  # by the daemon, of a GPU; the link's thread
        self._step: list[StoreJob] = []  # of this step, their copies not all begun
        self._reading: dict[str, list[StoreJob]] = {}  # whose blocks may still be read, by request
        self._hashes: dict[str, tuple[str, list[bytes]]] = {}  # tenant and hashes of what was stored, by request
        self._reports: set[str] = set()  # requests whose blocks wait for their stores
        self.load_ends = LoadEnds()
        self._load_times: dict[str, tuple[float, float]] = {}  # of loads whose end was said, but not this
        self._lock = threading.Lock()  # of what follows
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
        self.copies = PagedCopy(
            layers, facts.blocks, facts.block_tokens, facts.heads, facts.head_dim, packings, list(facts.groups)
        )
        share_lock()
        if self.link is None:
            self.link = Link(
                settings.address,
                f"vllm worker {facts.rank}",
                facts.describe,
                self._attach,
                self._detach,
                deadline_ms=settings.deadline_ms,
                log=self._logger,
                set_by=SET_BY,
            )

    @property
    def maps_ahead(self) -> bool:
        """Memory is mapped when the link attaches, which an engine's start should wait for. Once the caches are known."""
        return self.copies is not None and self.copies.cuda and self.settings.map_gib != 0

    def _submit(self, job, urgent: bool = False) -> bool:
        return self.link is not None and self.link.submit(job, urgent)

    def _refusal(self) -> Error:
        """Why _submit() says False."""
        return FailedPreconditionError("the caches have no layout that is known") if self.link is None else self.link.refusal()

    def _attach(self, session: Session) -> None:
        """The link's thread: staging of this connection. What the daemon does not accept is an error here."""
        cache = session.cache((self.settings.tenant, self.facts.rank))
        device = self.copies.device
        codec = PageCodec(cache, self.copies.index, self.settings.calibration_dir)
        made: list[Extents] = []
        try:
            for stores in (False, True):
                if stores and (direct := self._direct_stores(session, cache, codec)) is not None:
                    made.append(direct)
                    continue
                arena = session.client.create_arena(self._extents * self.extent_blocks * self.block_bytes)
                if stores and self._encodes_apart(codec):
                    turns, blocks = self._store_turns()
                    made.append(Extents(arena, codec, self.geometry, blocks, device, stagings=turns))
                else:
                    made.append(Extents(arena, codec, self.geometry, self.extent_blocks, device))
            self._begin_session(session, cache, codec, made)
        except BaseException:
            self.loads = self.stores = self.paged = None
            for extents in made:  # pinned
                extents.close()
            self._give_back()
            raise

    def _store_turns(self) -> tuple[int, int]:
        """Extents of a store on a GPU, and their blocks. Two turns: blocks are encoded while others are copied out of there. Windows take
        several at once."""
        turns = min(self._extents, 4 if self.facts.windowed else 2)
        blocks = self._extents * self.extent_blocks // turns
        return turns, max(1, min(blocks, _STORE_BYTES // self.block_bytes))

    def _direct_stores(self, session: Session, cache: Cache, codec: PageCodec) -> Extents | None:
        """Extents in an arena on this GPU, where the daemon has that GPU: its copy engines bring stored blocks to their place, and no
        CPU copies them. None: blocks go by way of host memory."""
        if not self.copies.cuda or not self.settings.direct:
            return None
        try:
            device = self._daemons_device(session)
            if device is None:
                return None
            ranges, turns, blocks = _DIRECT_RANGES, *self._store_turns()
            if codec.identity:  # as much memory, but few calls: each has engine's threads wait for Python's lock
                ranges, turns = -(-_DIRECT_RANGES * self.extent_blocks // blocks), None
            nbytes = ranges * range_bytes(codec, self.geometry, blocks, raw=codec.identity)
            arena = device.create_arena(nbytes)
            self._lent = arena, device
            self._await_pinned(session, cache, arena)
            extents = Extents(arena, codec, self.geometry, blocks, self.copies.device, stagings=turns)
        except (Error, RuntimeError) as error:
            self._give_back()
            if isinstance(error, UnavailableError) and not self._answers(session):
                raise
            self._logger.warning("kvmanager: stores go by way of host memory, which takes longer: %s", error)
            return None
        self._logger.info("kvmanager: the daemon's GPU %d copies what is stored", device.ordinal)
        return extents

    def _give_back(self) -> None:
        """The daemon's arena and stream on this GPU. No tensor is of the arena any more."""
        lent, self._lent = self._lent, ()
        for each in lent:
            each.close()

    def _daemons_device(self, session: Session) -> Device | None:
        """This worker's GPU, if the daemon has it."""
        import torch

        with torch.cuda.device(self.copies.device):
            for ordinal in range(_DEVICES_MAX):
                try:
                    device = session.client.open_device(ordinal)
                except (FailedPreconditionError, NotFoundError, UnimplementedError):  # no GPUs, or no more
                    return None
                except UnavailableError:  # one that this process does not see, or the daemon has gone
                    if not self._answers(session):
                        raise
                    continue
                if device.index == self.copies.index:
                    return device
                device.close()
        return None

    @staticmethod
    def _await_pinned(session: Session, cache: Cache, arena: Arena) -> None:
        """Until the daemon can copy out of the arena. Errors: why it cannot."""
        nothing, until = cache.external_names([]), time.monotonic() + _PIN_WAIT_S
        while True:
            try:
                cache.write_blocks(nothing, b"", arena.tensor((0,), "uint8"))
                return
            except UnavailableError:
                if time.monotonic() > until or not WorkerHalf._answers(session):
                    raise
                time.sleep(_PIN_POLL_S)

    def _encodes_apart(self, codec: PageCodec) -> bool:
        """Stores are encoded in memory that is not the arena's, and take less there than raw."""
        return self.copies.cuda and not codec.identity

    def _begin_session(self, session: Session, cache: Cache, codec: PageCodec, made: list[Extents]) -> None:
        session.state["extents"] = made
        self.loads, self.stores = made
        self.maps = codec.copies
        if self.maps and self.maps_ahead:
            self._map_ahead(session, cache)
        self.paged = self._paged(codec)
        o = cache.description
        fits = o.pool_bytes // max(1, o.encoded_page_bytes * len(self.facts.layers)) * self.facts.block_tokens
        self._logger.info(
            "kvmanager: attached to %s: model %s, codec %s, room for %d tokens", self.settings.address, o.options.model,
            o.options.codec, fits,
        )

    @staticmethod
    def _answers(session: Session) -> bool:
        try:
            session.client.ping()
        except Error:
            return False
        return True

    def _map_ahead(self, session: Session, cache: Cache) -> None:
        """Of the daemon's memory, before there are steps: while memory is mapped and pinned, the GPU's driver lets them wait."""
        gib = self.settings.map_gib
        try:
            mapped = cache.bind_slabs(gib << 30 if gib > 0 else _ALL_BYTES, self.copies.index)
        except UnavailableError as error:
            if not self._answers(session):
                raise
            self._logger.warning("kvmanager: memory is not mapped ahead: %s", error)
        except Error as error:
            self._logger.warning("kvmanager: memory is mapped when loads need it, not ahead: %s", error)
        else:
            self._logger.info("kvmanager: mapped %.1f GiB of the daemon's memory", mapped / 2**30)

    def _paged(self, codec: PageCodec) -> PagedBlocks | None:
        """None: blocks are copied by torch and Triton."""
        if not self.copies.cuda or not codec.copies:
            return None
        from ..paged_blocks import PagedBlocks

        try:
            blocks = max(1, MAPPED_PAGES_MAX // self.geometry.layers)
            return PagedBlocks(codec, self.copies, self.geometry, self.stores, CALLS, blocks)
        except (Error, RuntimeError, ValueError) as error:
            self._logger.warning("kvmanager: blocks are copied layer by layer, which takes longer: %s", error)
            return None

    def _detach(self) -> None:
        """The link's thread."""
        for extents in (self.loads, self.stores):
            if extents is not None:
                self.copies.saved().wait()
                self.copies.sent().wait()
                self.copies.fetched().wait()
                self.copies.loaded().wait()
                extents.close()
        self.loads = self.stores = self.paged = None
        self._give_back()
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
            self.load_ends.begin(load.request, len(load.hashes) - load.first)
            if not self._submit(job, urgent=True):
                job.fail(self._refusal())

    def prepare_stores(self, plan: StepPlan) -> None:
        """Makes the jobs of the step's stores; once per step."""
        if self.copies is None:  # register() said why
            blocks = sum(len(store.block_ids[0]) for store in plan.stores)
            self.count("unstored_failed_tokens", blocks * self.facts.block_tokens)
            self.count("stores_dropped", len(plan.stores))
            return
        for store in plan.stores:
            _, hashes = self._hashes.setdefault(store.request, (store.tenant, []))
            hashes[store.hashes_from :] = store.hashes
            whole = Store(store.request, store.tenant, 0, list(hashes), store.first, store.block_ids)
            job = StoreJob(self, whole)
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
            while self.facts.windowed and job.begin():  # the next step may take blocks, and would stop what has not begun
                pass
            if not self._submit(job):
                job.take_blocks()
                job.fail(self._refusal())

    def finishes(self, plan: StepPlan) -> None:
        for finish in plan.finishes:
            tenant, hashes = self._hashes.pop(finish.request, ("", []))
            if finish.retention is not None or finish.peer:  # a job that waits has stores begin with large parts
                job = FinishJob(self, finish, tenant, hashes)
                if not self._submit(job):
                    job.fail(self._refusal())
            if finish.report:
                self._reports.add(finish.request)
            else:
                self._reading.pop(finish.request, None)

    def wait_for_loads(self, computes: bool) -> None:
        """Of a step that computes nothing: a moment, where some are under way."""
        self.load_ends.wait(computes)

    def results(self) -> tuple[set[str], set[str], dict[str, set[int]]]:
        """Since the last call: requests whose blocks are no longer read; those whose load has ended; of these, what was
        not loaded, by request."""
        for name, jobs in list(self._reading.items()):
            left = [job for job in jobs if not job.read()]
            if left:
                self._reading[name] = left
            else:
                del self._reading[name]
        sent = {name for name in self._reports if name not in self._reading}
        self._reports -= sent
        ended = self.load_ends.take()
        self._load_times.update({name: end.times for name, end in ended.items() if end.missing is None and end.times is not None})
        return sent, set(ended), {name: end.missing for name, end in ended.items() if end.missing is not None}

    def load_times(self) -> LoadTimes | None:
        """Behind results(). None: the scheduler needs not hear of the step."""
        taken, self._load_times = self._load_times, {}
        return LoadTimes(taken) if taken or self.load_ends.pending else None

    # What jobs call, on the link's thread.

    def stop_mapping(self, error: object) -> None:
        """The daemon does not let this process map its memory: it copies what is loaded."""
        if self.maps:
            self.maps = False
            self._logger.info("kvmanager: the daemon copies what is loaded, which takes longer: %s", error)

    def drained(self) -> Fence:
        """Behind all copies of loads."""
        return self.copies.loaded()

    def unpack(self, extent: Extent, count: int, forms: bytes, ids: list[list[int]], after: Fence, fetched: bool = False) -> Fence:
        """Decodes what an extent's range has, or what was fetched into the extent, and copies it into the caches' blocks `ids`, by
        group, behind `after`. Only begun on a GPU."""
        copies = self.copies
        if copies.cuda:
            import torch

            if fetched:
                copies.load_stream.wait_stream(copies.fetch_stream)
            with torch.cuda.stream(copies.load_stream):
                extent.decode(count, forms, copies.load_stream.cuda_stream, fetched)
        else:
            extent.decode(count, forms, fetched=fetched)
        return copies.load_blocks(extent.raw, count, ids, after)

    def loaded(self, load: Load, blocks: int, times: tuple[float, float] | None = None) -> None:
        """Also the worker's thread."""
        missing = None
        if blocks < len(load.hashes) - load.first:
            missing = {each for each in load.block_ids[0][blocks:] if each}
            self.count("loads_failed")
        self.load_ends.end(load.request, missing, times)

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
            self._logger.warning("kvmanager: %s: %s", text, why.message if isinstance(why, Error) else why)

    def log_error(self, text: str, error: Error) -> None:
        """The same of a job, unless the link says it, or the start did: the daemon is away, hangs, or declines everything."""
        if self.link is not None and not self.link.says(error):
            self.log(text, error)

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
