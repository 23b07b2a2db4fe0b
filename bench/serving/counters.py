"""Counters of an engine and of kvmanagerd, and the rates in them."""

from __future__ import annotations

import re
import urllib.request

_KEPT = ("kvmanager", "kv_offload", "prefix_cache", "prompt_tokens", "preempt")

# Bytes and seconds of loads and stores, by the names that connectors give them; the first pair that an engine has counts.
LOADS = (("kvmanager_loaded_bytes", "kvmanager_load_seconds"), ("kv_offload_load_bytes", "kv_offload_load_time"))
STORES = (("kvmanager_stored_bytes", "kvmanager_store_seconds"), ("kv_offload_store_bytes", "kv_offload_store_time"))


def read(registry) -> dict[str, float]:
    """Counters and sums of histograms of a prometheus_client registry, labels summed, without "vllm:"."""
    found: dict[str, float] = {}
    for metric in registry.collect():
        name = metric.name.removeprefix("vllm:")
        if metric.name == name or not any(part in name for part in _KEPT):
            continue
        suffix = {"counter": "_total", "histogram": "_sum"}.get(metric.type)
        for sample in metric.samples if suffix else ():
            if sample.name == metric.name + suffix:
                found[name] = found.get(name, 0.0) + sample.value
    return found


def daemon_metrics(address: str) -> dict[str, float]:
    """Series of kvmanagerd without labels."""
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as page:
        return {name: float(value) for name, value in re.findall(r"^(\w+) (\S+)$", page.read().decode(), re.MULTILINE)}


def change(before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
    """What moved."""
    moved = {name: value - before.get(name, 0.0) for name, value in after.items()}
    return {name: value for name, value in moved.items() if value}


def total(changes: list[dict[str, float]]) -> dict[str, float]:
    summed: dict[str, float] = {}
    for each in changes:
        for name, value in each.items():
            summed[name] = summed.get(name, 0.0) + value
    return summed


def rate(counted: dict[str, float], pairs: tuple[tuple[str, str], ...]) -> float | None:
    """GB/s over the seconds of all transfers; None if nothing was counted."""
    for size, seconds in pairs:
        if counted.get(size) and counted.get(seconds):
            return counted[size] / counted[seconds] / 1e9
    return None
