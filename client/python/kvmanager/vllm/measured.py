"""How long loads took, from a worker to the scheduler's planner."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1 import base


@dataclass
class LoadTimes(getattr(base, "KVConnectorWorkerMetadata", object)):
    """by_request: (seconds that it waited for loads before it, seconds from then on) of loads that ended whole. Pickled
    between processes."""

    by_request: dict[str, tuple[float, float]] = field(default_factory=dict)

    def aggregate(self, other: LoadTimes) -> LoadTimes:
        """The slowest rank's."""
        for name, times in other.by_request.items():
            self.by_request[name] = max(times, self.by_request.get(name, times), key=sum)
        return self


class LoadMeter:
    """ended() is for the link's thread, where loads run one after the other, take() for the worker's."""

    def __init__(self) -> None:
        self._last = float("-inf")  # when a load ended; the link's thread
        self._lock = threading.Lock()  # of what follows
        self._times: dict[str, tuple[float, float]] = {}

    def ended(self, name: str, began: float, now: float, whole: bool) -> None:
        """Before the load's end is reported. began: when the link was given it, of time.monotonic(), as now. What the link
        did first, other than loads, is of its own time."""
        waited = max(0.0, self._last - began)
        self._last = now
        if whole:
            with self._lock:
                self._times[name] = (waited, now - began - waited)

    def take(self) -> LoadTimes | None:
        with self._lock:
            taken, self._times = self._times, {}
        return LoadTimes(taken) if taken else None


__all__ = ["LoadMeter", "LoadTimes"]
