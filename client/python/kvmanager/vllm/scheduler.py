"""The half of the connector in vLLM's scheduler: looks prompts up, plans loads and stores. It waits for the daemon for two
milliseconds of each lookup, at most.

A request, as this half knows it:

    looking   a lookup is under way; the scheduler is told to ask again
    looked    so many blocks are in the daemon
    loading   blocks were allocated for them; the workers load
    barred    a load failed, or the cache was reset: this request is computed

What is looked up and computed nevertheless, since that is faster (planner.py), is not stored again.

A reset begins an era: blocks have other names from then on, whatever is still under way under the earlier ones. vLLM
asks for it when weights have changed, which no name knows.
"""

from __future__ import annotations

import secrets
import threading
import time
from typing import TYPE_CHECKING, Any

from .._link import Link, Session
from ..errors import Error
from .facts import SET_BY, Facts, Settings, tenant_of
from .load_ends import LoadEnds
from .measured import LoadTimes
from .messages import Finish, Load, StepPlan, Store
from .metrics import KvManagerStats
from .planner import Choice, Planner
from .retention import Retain, Retention, retention_of

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

_LOOKUP_KEEP_S = 1.0  # a lookup older than that is made again: blocks may have been evicted, or come
_LOOKUP_WAIT_S = 0.002  # from its beginning on, for its answer: to ask again takes an engine with nothing to compute as long
_LOOKUP_AGAIN_S = 0.005  # between lookups that wait for a prefill elsewhere
_ERA_MAX = 64  # characters
_LOG_S = 5.0
_DECODES_MAX = 1 / 16  # of a step's tokens, where it is to say how long a prompt's take


class Lookup:
    """How many blocks of a prompt every rank has. A job of the link."""

    def __init__(self, tenant: str, hashes: list[bytes], ranks: int) -> None:
        self._tenant, self._hashes, self._ranks = tenant, hashes, ranks
        self.began = time.monotonic()
        self.blocks: int | None = None
        self.failed = False
        self._ended = threading.Event()

    def wait(self) -> None:
        """For what is left of _LOOKUP_WAIT_S, unless it is answered."""
        left = self.began + _LOOKUP_WAIT_S - time.monotonic()
        if left > 0:
            self._ended.wait(left)

    def run(self, session: Session) -> None:
        blocks = len(self._hashes)
        for rank in range(self._ranks):
            cache = session.cache((self._tenant, rank))
            blocks = min(blocks, cache.match([cache.external_names(self._hashes[:blocks])], prefetch=True)[0].hit_blocks)
            if not blocks:
                break
        self.blocks = blocks
        self._ended.set()

    def fail(self, error: Error) -> None:
        self.failed, self.blocks = True, 0
        self._ended.set()


class Purge:
    """Drops the published blocks of the model's caches."""

    def __init__(self, tenant: str, ranks: int) -> None:
        self._tenant, self._ranks = tenant, ranks

    def run(self, session: Session) -> None:
        for rank in range(self._ranks):
            session.client.purge(session.cache((self._tenant, rank)).description.id)

    def fail(self, error: Error) -> None:
        pass


class RequestState:
    def __init__(self, request: Request, era: str, tenant: str) -> None:
        self.request = request
        self.era, self.tenant = era, tenant
        self.lookup: Lookup | None = None
        self.unanswered = False  # a lookup had no answer, and was counted so
        self.local_tokens = 0  # computed here, when vLLM last asked
        self.loading = False
        self.load_ids: set[int] = set()  # blocks that are loaded into
        self.barred = False
        self.earlier = False  # of an era that has ended: nothing more is stored
        self.table: list[list[int]] = []  # block ids by group
        self.found: int | None = None  # blocks that it began with, of the engine's or the daemon's
        self.stored = 0  # blocks that are in the daemon, or were planned to be
        self.sent = 0  # hashes that the workers were told
        self.any_store = False
        self.preempted = False
        self.choice: Choice | None = None  # of what the last lookup found
        self.remote = False  # a prefill elsewhere was for this request
        self.wait_until = 0.0  # for blocks that a prefill elsewhere promised
        self.promised = 0


class SchedulerHalf:
    """Belongs to the scheduler's thread."""

    def __init__(
        self, facts: Facts, settings: Settings, producer: bool, consumer: bool, logger, chunk_tokens: int = 1 << 31
    ) -> None:
        self._facts, self._settings, self._logger = facts, settings, logger
        self._warned = False  # of a retention that no request may ask for
        self._producer, self._consumer = producer, consumer
        self._requests: dict[str, RequestState] = {}
        self._loads: list[Load] = []
        self._finishes: list[Finish] = []
        self._sending: set[str] = set()
        self._era = ""
        self._stats = KvManagerStats()
        # A decode engine loads what was computed for it; ranks of one engine load at different speeds.
        plans = settings.plan == "cheaper" and producer and consumer and facts.ranks == 1
        self._planner = Planner(facts.block_tokens, chunk_tokens) if plans else None
        self._computing: dict[str, tuple[int, int]] = {}  # parts of running requests' prompts that no step has had yet
        self._load_times: dict[str, tuple[float, float]] = {}  # of loads whose end is not reported yet
        self._clock = time.monotonic  # of the planner
        self._logged = -_LOG_S
        self.link = Link(
            settings.address, "vllm scheduler", facts.describe, deadline_ms=settings.deadline_ms, log=logger, set_by=SET_BY
        )

    # Lookups.

    def new_request(self, request: Request) -> None:
        """Begins the lookup before the scheduler asks."""
        if self._consumer and not getattr(request, "skip_reading_prefix_cache", False):
            state = self._state(request)
            if state.lookup is None:
                self._look(state)

    def matched(self, request: Request, computed_tokens: int) -> tuple[int | None, bool]:
        """KVConnectorBase_V1.get_num_new_matched_tokens."""
        block = self._facts.block_tokens
        state = self._state(request)
        state.local_tokens, state.choice = computed_tokens, None
        if state.found is None:  # later, after a preemption, its own blocks would be among them
            state.found = computed_tokens // block
        if not self._consumer or state.barred or state.loading or computed_tokens % block:
            return 0, False
        usable = (request.num_tokens - 1) // block * block
        if computed_tokens >= usable:
            return 0, False
        now = time.monotonic()
        lookup = state.lookup
        if lookup is None or (lookup.blocks is not None and now - lookup.began > _LOOKUP_KEEP_S):
            lookup = self._look(state)
        if lookup is None:
            return 0, False
        if lookup.blocks is None:
            lookup.wait()
        if lookup.blocks is None:
            if now - lookup.began < self._settings.lookup_ms / 1000:
                return None, False
            self._count_unanswered(state)
            return 0, False
        if lookup.blocks < state.promised and now < state.wait_until and not lookup.failed:
            if now - lookup.began >= _LOOKUP_AGAIN_S:
                self._look(state)
            return None, False
        tokens = min(lookup.blocks * block, usable) - computed_tokens
        if tokens <= 0:
            return 0, False
        loads = self._choose(state, computed_tokens, computed_tokens + tokens)
        return loads, loads > 0

    def _choose(self, state: RequestState, local: int, hit: int) -> int:
        """How many of the tokens local .. hit to load."""
        if self._planner is None or state.remote:
            return hit - local
        ahead = self._computing.values()
        state.choice = self._planner.choose(self._clock(), local, hit, state.request.num_tokens, ahead)
        return state.choice.loads

    def _chosen(self, state: RequestState) -> None:
        """What was chosen is done."""
        choice, state.choice = state.choice, None
        if choice is None:
            return
        self._planner.took(choice)
        if choice.computes:
            self._stats.add("loads_not_worth_tokens", choice.computes)
            self._stats.add("lookup_hit_tokens", choice.computes)
            if not state.any_store:
                state.found = choice.hit // self._facts.block_tokens
        now = self._clock()
        if choice.measured and now - self._logged >= _LOG_S:
            self._logged = now
            self._logger.info(
                "kvmanager: request %s loads %d of %d tokens%s: first token expected in %.1f ms; %.1f ms with all of them "
                "loaded, %.1f ms with none; %s", state.request.request_id, choice.loads, choice.hit - choice.local,
                " to measure it again" if choice.probe else "", 1e3 * choice.seconds, 1e3 * choice.all_s,
                1e3 * choice.none_s, self._planner.rates(),
            )

    def _look(self, state: RequestState) -> Lookup | None:
        hashes = self._hashes(state.request)
        if not hashes:
            return None
        lookup = Lookup(state.tenant, hashes, self._facts.ranks)
        if not self.link.submit(lookup, urgent=True):
            if not state.unanswered:
                self._stats.add("lookups")
            self._count_unanswered(state)
            state.lookup = None
            return None
        self._stats.add("lookups")
        state.lookup = lookup
        return lookup

    def _count_unanswered(self, state: RequestState) -> None:
        """Once for a request, however often vLLM asks until there is room for it."""
        if not state.unanswered:
            state.unanswered = True
            self._stats.add("lookups_unanswered")

    def _hashes(self, request: Request, first: int = 0, last: int | None = None) -> list[bytes]:
        """Of blocks first .. last: vLLM's hashes may be of fewer tokens, each covering all that comes before."""
        per_block = self._facts.hashes_per_block
        last = len(request.block_hashes) // per_block if last is None else last
        return [bytes(each) for each in request.block_hashes[(first + 1) * per_block - 1 : last * per_block : per_block]]

    def _state(self, request: Request) -> RequestState:
        state = self._requests.get(request.request_id)
        if state is None:
            params, era = request.kv_transfer_params or {}, self._era
            if params.get("do_remote_prefill"):  # whoever sends requests may say anything
                said = params.get("kvmanager_era")
                era = said if isinstance(said, str) and len(said) <= _ERA_MAX else era
            state = RequestState(request, era, tenant_of(self._settings, request.cache_salt, era))
            if params.get("do_remote_prefill"):
                state.remote = True
                blocks = params.get("kvmanager_blocks")
                state.promised = blocks if isinstance(blocks, int) else 0
                state.wait_until = time.monotonic() + self._settings.prefill_wait_ms / 1000
            self._requests[request.request_id] = state
        return state

    # Steps.

    def allocated(self, request: Request, blocks: KVCacheBlocks, external_tokens: int) -> None:
        """KVConnectorBase_V1.update_state_after_alloc."""
        state = self._state(request)
        lookup, state.lookup = state.lookup, None
        if lookup is not None and lookup.blocks is not None:
            state.stored = max(state.stored, lookup.blocks)
            if external_tokens or not lookup.blocks:
                self._stats.add("lookup_hit_tokens" if lookup.blocks else "lookup_misses", external_tokens or 1)
            self._chosen(state)
        if self._planner is not None and not external_tokens:
            first = max(state.local_tokens, request.num_computed_tokens)  # the latter of a load that has ended
            self._computing[request.request_id] = (first, request.num_tokens)
        elif self._planner is not None:
            self._planner.load_began(self._clock(), request.request_id, external_tokens)
        if not external_tokens:
            return
        block = self._facts.block_tokens
        first, count = state.local_tokens // block, external_tokens // block
        ids = tuple(list(group[first : first + count]) for group in blocks.get_block_ids())
        self._loads.append(
            Load(request.request_id, state.tenant, self._hashes(request, 0, first + count), first, ids)
        )
        if not state.any_store:
            state.found = max(state.found or 0, first + count)
        state.loading, state.load_ids = True, {each for group in ids for each in group}

    def plan(self, output: SchedulerOutput) -> StepPlan:
        """KVConnectorBase_V1.build_connector_meta."""
        plan = StepPlan(
            loads=self._loads,
            finishes=self._finishes,
            preempted=self._preempted(output),
            computes=output.total_num_scheduled_tokens > 0,
        )
        self._loads, self._finishes = [], []
        cached = output.scheduled_cached_reqs
        computed = dict(zip(cached.req_ids, cached.num_computed_tokens))
        for new in output.scheduled_new_reqs:
            computed[new.req_id] = new.num_computed_tokens
            if new.req_id in self._requests:
                self._requests[new.req_id].table = [list(ids) for ids in new.block_ids]
        for name, ids in zip(cached.req_ids, cached.new_block_ids):
            if name in self._requests:
                self._append_ids(self._requests[name], ids, name in cached.resumed_req_ids)
        self._begin_step(output, computed)
        if self._producer:
            for name, tokens in output.num_scheduled_tokens.items():
                if name in self._requests and name in computed:
                    store = self._store(name, computed[name] + tokens, output)
                    if store is not None:
                        plan.stores.append(store)
        return plan

    def _begin_step(self, output: SchedulerOutput, computed: dict[str, int]) -> None:
        """Tells the planner."""
        if self._planner is None:
            return
        chunks, decodes, total = [], 0, 0
        for name, tokens in output.num_scheduled_tokens.items():
            first, state = computed.get(name), self._requests.get(name)
            drafts = len(output.scheduled_spec_decode_tokens.get(name, ()))
            if first is None or tokens - drafts <= 1:
                decodes += tokens
            else:
                chunks.append((first, first + tokens))
            total += tokens
            if first is not None and state is not None and first + tokens < state.request.num_tokens:
                self._computing[name] = (first + tokens, state.request.num_tokens)
            else:
                self._computing.pop(name, None)
        odd = decodes > _DECODES_MAX * total or output.scheduled_encoder_inputs
        self._planner.step_began(self._clock(), () if odd else chunks)

    def _append_ids(self, state: RequestState, ids, whole: bool) -> None:
        if whole or not state.table:
            state.table = [list(each) for each in ids or ()]
        elif ids is not None:
            for group, more in zip(state.table, ids):
                group.extend(more)

    def _store(self, name: str, computed_tokens: int, output: SchedulerOutput) -> Store | None:
        state = self._requests[name]
        if state.earlier:
            return None
        tokens = computed_tokens
        if not self._settings.store_output:
            tokens = min(tokens, state.request.num_prompt_tokens)
        full = min(tokens // self._facts.block_tokens, len(state.request.block_hashes) // self._facts.hashes_per_block)
        if full <= state.stored:
            return None
        now = getattr(output, "kv_connector_block_state", None)
        table = (now.get_block_ids(name) if now is not None else None) or state.table
        ids = tuple(list(group[state.stored : full]) for group in table)
        if any(len(group) < full - state.stored for group in ids):
            return None
        hashes = self._hashes(state.request, state.sent, full)
        store = Store(name, state.tenant, state.sent, hashes, state.stored, ids)
        state.stored, state.sent, state.any_store = full, full, True
        return store

    def _preempted(self, output: SchedulerOutput) -> bool:
        """Whether blocks that workers may still read were taken from a request."""
        found = bool(output.preempted_req_ids)
        for state in self._requests.values():
            status = state.request.status
            preempted = status is type(status).PREEMPTED
            found |= preempted and not state.preempted and state.any_store
            if preempted:
                self._computing.pop(state.request.request_id, None)
            state.preempted = preempted
        return found

    # Ends.

    def finished(self, request: Request) -> tuple[bool, dict[str, Any] | None]:
        """KVConnectorBase_V1.request_finished."""
        state = self._requests.pop(request.request_id, None)
        self._computing.pop(request.request_id, None)
        if state is None:
            return False, None
        params = request.kv_transfer_params or {}
        remote_decode = bool(params.get("do_remote_decode")) and self._producer
        retention = self._retention(params, state)
        if not state.any_store:
            if retention is not None and state.stored > 0:
                hashes = self._hashes(request, 0, state.stored)
                self.link.submit(Retain(state.tenant, hashes, self._facts.ranks, retention))
            return False, self._promise(state) if remote_decode else None
        # Blocks of a request that loads are kept until the load is reported; blocks that were preempted are gone.
        report = not state.loading and not state.preempted
        peer = str(params.get("kvmanager_peer") or self._settings.peer) if remote_decode else ""
        self._finishes.append(Finish(request.request_id, report, peer, retention))
        if report:
            self._sending.add(request.request_id)
        return report, self._promise(state) if remote_decode else None

    def _retention(self, params: dict[str, Any], state: RequestState) -> Retention | None:
        try:
            return None if state.earlier else retention_of(params, state.found or 0)
        except ValueError as error:
            if not self._warned:
                self._logger.warning("kvmanager: a request is served, and its blocks are kept as usual: %s", error)
            self._warned = True
            return None

    def _promise(self, state: RequestState) -> dict[str, Any]:
        """kv_transfer_params of the request that decodes."""
        told = {"do_remote_prefill": True, "do_remote_decode": False}
        if state.earlier:
            return {**told, "kvmanager_blocks": 0, "kvmanager_era": self._era}
        return {**told, "kvmanager_blocks": state.stored, "kvmanager_era": state.era}

    def worked(self, output: KVConnectorOutput, ends: LoadEnds | None = None) -> None:
        """KVConnectorBase_V1.update_connector_output, behind which vLLM reads `output`. ends: of this engine's worker, if it is in this
        process: what has ended since the output was made is added to it."""
        self._sending.difference_update(output.finished_sending or ())
        whole = ends.take_whole() if ends is not None else {}
        if whole:
            output.finished_recving = {*(output.finished_recving or ()), *whole}
        self._measure(output, whole)
        invalid = getattr(output, "invalid_block_ids", None) or set()
        failed = getattr(output, "failed_recving", None) or set()
        for name, state in self._requests.items():
            if name in failed or (state.loading and not invalid.isdisjoint(state.load_ids)):
                state.barred, state.stored, state.sent = True, 0, 0
        for name in output.finished_recving or ():
            if name in self._requests:
                self._requests[name].loading = False

    def _measure(self, output: KVConnectorOutput, whole: dict[str, tuple[float, float] | None]) -> None:
        """A step has ended, and with it what loads it reports, of which `whole` came with their times."""
        if self._planner is None:
            return
        now = self._clock()
        self._planner.step_ended(now)
        times = getattr(output, "kv_connector_worker_meta", None)
        if isinstance(times, LoadTimes):
            self._load_times.update(times.by_request)
        self._load_times.update({name: each for name, each in whole.items() if each is not None})
        for name in output.finished_recving or ():
            self._planner.load_ended(now, name, *self._load_times.pop(name, ()))

    def sending(self) -> bool:
        return bool(self._sending)

    def take_stats(self) -> KvManagerStats | None:
        if self._stats.is_empty():
            return None
        taken, self._stats = self._stats, KvManagerStats()
        return taken

    def reset(self) -> bool:
        """KVConnectorBase_V1.reset_cache. True, also where the daemon is away: nothing from before is found again."""
        self.link.submit(Purge(tenant_of(self._settings, None, self._era), self._facts.ranks))
        self._era = secrets.token_hex(16)
        for state in self._requests.values():
            state.lookup, state.barred, state.earlier = None, True, True
        return True

    def close(self) -> None:
        self.link.close()
