"""Counts of the connector, as vLLM collects, logs and exports them."""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

COUNTERS = {
    "lookups": "Lookups of prompts in the daemon",
    "lookup_misses": "Lookups that found nothing",
    "lookup_hit_tokens": "Tokens that lookups found",
    "loads_not_worth_tokens": "Tokens that lookups found and that were computed, which is faster",
    "lookups_unanswered": "Requests whose lookup had no answer: the daemon was away or late",
    "loaded_tokens": "Tokens loaded from the daemon",
    "loaded_bytes": "Bytes of K and V loaded",
    "loads_failed": "Loads that failed; vLLM recomputed them",
    "loaded_encoded_bytes": "Bytes that came from the daemon for them",
    "stored_tokens": "Tokens stored in the daemon",
    "stored_bytes": "Bytes of K and V stored",
    "stored_encoded_bytes": "Bytes that went to the daemon for them",
    "stores_present": "Tokens that the daemon had when they were to be stored",
    "stores_dropped": "Stores of which not everything was stored",
    "unstored_full_tokens": "Tokens not stored: the daemon had no room",
    "unstored_preempted_tokens": "Tokens not stored: vLLM took their blocks away before",
    "unstored_away_tokens": "Tokens not stored: the daemon was away",
    "unstored_failed_tokens": "Tokens not stored: an error that the log names",
    "hand_offs": "Prefills handed to another daemon",
    "hand_offs_failed": "Hand-offs that failed",
    "detachments": "Connections to the daemon lost",
}
SECONDS = ("load_seconds", "store_seconds")
_SECONDS_MAX = 1024  # observations of an interval


class KvManagerStats(KVConnectorStats):
    """data: a number by name for COUNTERS, a list of observations for SECONDS; what is 0 or empty is absent."""

    def add(self, name: str, amount: float = 1) -> None:
        self.data[name] = self.data.get(name, 0) + amount

    def observe(self, name: str, seconds: float) -> None:
        observed = self.data.setdefault(name, [])
        if len(observed) < _SECONDS_MAX:
            observed.append(seconds)

    def reset(self) -> None:
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        for name, value in other.data.items():
            if name in SECONDS:
                self.data[name] = (self.data.get(name, []) + list(value))[:_SECONDS_MAX]
            else:
                self.add(name, value)
        return self

    def reduce(self) -> dict[str, int | float]:
        reduced: dict[str, int | float] = {name: self.data[name] for name in COUNTERS if name in self.data}
        for name in SECONDS:
            if observed := self.data.get(name):
                reduced[f"{name}_mean"] = round(sum(observed) / len(observed), 6)
        return reduced

    def is_empty(self) -> bool:
        return not self.data


class KvManagerPromMetrics(KVConnectorPromMetrics):
    """vllm:kvmanager_<name>_total and vllm:kvmanager_{load,store}_seconds."""

    def __init__(self, vllm_config, metric_types, labelnames, per_engine_labelvalues) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        buckets = (1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.3, 1, 3, 10)
        self._metrics: dict[str, dict[int, Any]] = {}
        for name, text in COUNTERS.items():
            metric = self._counter_cls(f"vllm:kvmanager_{name}", documentation=text, labelnames=labelnames)
            self._metrics[name] = self._per_engine(metric)
        for name in SECONDS:
            text = f"Seconds of one {name.partition('_')[0]} of consecutive blocks"
            metric = self._histogram_cls(
                f"vllm:kvmanager_{name}", documentation=text, buckets=buckets, labelnames=labelnames
            )
            self._metrics[name] = self._per_engine(metric)

    def _per_engine(self, metric) -> dict[int, Any]:
        return {engine: metric.labels(*values) for engine, values in self.per_engine_labelvalues.items()}

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for name, value in transfer_stats_data.items():
            metric = self._metrics.get(name, {}).get(engine_idx)
            if metric is None:
                continue
            if name in SECONDS:
                for seconds in value:
                    metric.observe(seconds)
            else:
                metric.inc(value)


__all__ = ["COUNTERS", "SECONDS", "KvManagerPromMetrics", "KvManagerStats"]
