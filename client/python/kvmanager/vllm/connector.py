"""KvManagerConnector: what vLLM's factory makes, in its scheduler and in each of its workers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1 import base
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata, KVConnectorRole
from vllm.logger import init_logger

from . import load_ends
from .facts import Settings, chunk_tokens_of, facts_of
from .messages import StepPlan
from .metrics import KvManagerPromMetrics, KvManagerStats
from .packing import attention_layers
from .scheduler import SchedulerHalf
from .worker import WorkerHalf

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import PromMetric, PromMetricT
    from vllm.forward_context import ForwardContext
    from vllm.v1.attention.backend import AttentionMetadata
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

logger = init_logger("vllm.kvmanager")
_MAP_S = 60.0  # an engine's start waits so long for memory to be mapped ahead

# What versions of vLLM differ in.
_TransferResults = getattr(base, "KVConnectorTransferResults", None)
_Hybrid = getattr(base, "SupportsHMA", object)
try:
    from vllm.v1.metrics.cache_hit_source import CacheHitSource

    _SOURCE = CacheHitSource.HOST
except ImportError:
    _SOURCE = None


def _rank() -> int:
    """Of this worker among its tensor-parallel group; 0 where there is no group."""
    from vllm.distributed import parallel_state

    try:
        return parallel_state.get_tensor_model_parallel_rank()
    except AssertionError:
        return 0


class KvManagerConnector(KVConnectorBase_V1, _Hybrid):
    """Keeps blocks of prompts and outputs in kvmanagerd, and loads them for prompts that begin the same.

    Everything is asynchronous, and nothing of the daemon reaches the engine: where it is away, full or slow, lookups
    are misses, stores are dropped, and loads fail, which vLLM recomputes (kv_load_failure_policy "recompute"). A model
    whose cache cannot be kept is said once in the log, and served without. A wrong kv_connector_extra_config is a
    ValueError when the engine starts."""

    _cache_hit_source = _SOURCE

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        transfer = self._kv_transfer_config
        self._settings = Settings.of(transfer.kv_connector_extra_config or {})
        rank = _rank() if role == KVConnectorRole.WORKER else 0
        self._facts = facts_of(vllm_config, kv_cache_config, self._settings, rank)
        self._scheduler: SchedulerHalf | None = None
        self._worker: WorkerHalf | None = None
        self._config = vllm_config
        if self._facts.off:
            self._off(self._facts.off)
            return
        if getattr(transfer, "kv_load_failure_policy", "recompute") != "recompute":
            logger.warning('kv_load_failure_policy is not "recompute": a load that fails will end its request')
        if role == KVConnectorRole.SCHEDULER:
            self._scheduler = SchedulerHalf(
                self._facts, self._settings, transfer.is_kv_producer, transfer.is_kv_consumer, logger,
                chunk_tokens_of(vllm_config),
            )
        else:
            self._worker = WorkerHalf(self._facts, self._settings, logger)
            if self._facts.ranks == 1:
                load_ends.show(transfer, self._worker.load_ends)

    def _off(self, why: object) -> None:
        if self._settings.required:
            raise RuntimeError(f"kvmanager: OFF, because {why} (\"required\": true)")
        logger.error("kvmanager: OFF, because %s", why)

    @property
    def requires_kv_delivery(self) -> bool:
        """No: a store that was dropped is a miss."""
        return False

    @property
    def attached(self) -> bool:
        """Whether the daemon is there."""
        half = self._scheduler or self._worker
        return half is not None and half.link is not None and half.link.attached

    # The worker's half.

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        if self._worker is None:
            return
        try:
            self._worker.register(kv_caches, attention_layers(self._config))
        except ValueError as error:
            self._off(error)  # loads that the scheduler plans fail at once; stores are dropped
            return
        link = self._worker.link
        if self._worker.maps_ahead:
            link.wait_tried(_MAP_S)
        if self._settings.required and not link.wait(True, self._settings.deadline_ms / 1000):
            self._off(link.why)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        if self._worker is not None:
            self._worker.begin(connector_metadata)
            self._worker.prepare_stores(connector_metadata)
            self._worker.finishes(connector_metadata)

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        if self._worker is not None:
            self._worker.begin(kv_connector_metadata)

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        if self._worker is not None:
            plan = self._get_connector_metadata()
            self._worker.start_loads(plan)
            self._worker.wait_for_loads(plan.computes)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing to wait for: a request is scheduled once all of its layers are there."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: AttentionMetadata, **kwargs: Any
    ) -> None:
        if self._worker is not None and self._settings.layerwise_saves:
            self._worker.save_layer(layer_name)

    def wait_for_save(self) -> None:
        """Begins what layers have not begun; waits for nothing."""
        if self._worker is not None:
            self._worker.finish_saves()

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        if self._worker is None:
            return None, None
        sent, received, failed = self._worker.results()
        for block_ids in failed.values():
            self._load_errors = self._load_errors | block_ids
        return sent or None, received or None

    _load_errors: frozenset[int] | set[int] = frozenset()

    def get_block_ids_with_load_errors(self) -> set[int]:
        errors, self._load_errors = self._load_errors, frozenset()
        return set(errors)

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        """The newest protocol. With one cache group, failures are said by block, so that what was loaded stays; with
        several, block ids are ambiguous, and failures are said by request."""
        if self._worker is None:
            return _TransferResults()
        sent, received, failed = self._worker.results()
        if self._facts.group_count > 1:
            return _TransferResults(sent, received, set(failed))
        for block_ids in failed.values():
            self._load_errors = self._load_errors | block_ids
        return _TransferResults(sent, received)

    def build_connector_worker_meta(self) -> Any:
        """What the scheduler's planner goes by. Behind the ends of loads, in a step."""
        return self._worker.load_times() if self._worker is not None else None

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        half = self._worker or self._scheduler
        return half.take_stats() if half is not None else None

    def shutdown(self) -> None:
        for half in (self._scheduler, self._worker):
            if half is not None:
                half.close()

    # The scheduler's half.

    def on_new_request(self, request: Request) -> None:
        if self._scheduler is not None:
            self._scheduler.new_request(request)

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        return self._scheduler.matched(request, num_computed_tokens) if self._scheduler is not None else (0, False)

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        if self._scheduler is not None:
            self._scheduler.allocated(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        return self._scheduler.plan(scheduler_output) if self._scheduler is not None else StepPlan()

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        if self._scheduler is not None:
            self._scheduler.worked(connector_output, load_ends.shown(self._kv_transfer_config))

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self._scheduler.finished(request) if self._scheduler is not None else (False, None)

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self._scheduler.finished(request) if self._scheduler is not None else (False, None)

    def has_pending_push_work(self) -> bool:
        return self._scheduler is not None and self._scheduler.sending()

    def reset_cache(self) -> bool | None:
        """Nothing that was stored is found any more, with or without salts; blocks without one are purged, too."""
        return self._scheduler.reset() if self._scheduler is not None else None

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        return bool(extra_config.get("layerwise_saves", False))

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats | None:
        return KvManagerStats(data=data) if data is not None else KvManagerStats()

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[type[PromMetric], type[PromMetricT]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KVConnectorPromMetrics | None:
        return KvManagerPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)
