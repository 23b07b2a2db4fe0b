"""How long loads took, from a worker to the scheduler's planner."""

from __future__ import annotations

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
    """Of one link's thread, where loads run one after the other."""

    def __init__(self) -> None:
        self._last = float("-inf")  # when a load ended

    def ended(self, began: float, now: float) -> tuple[float, float]:
        """As LoadTimes has it. began: when the link was given it, of time.monotonic(), as now. What the link did first, other than
        loads, is of its own time."""
        waited = max(0.0, self._last - began)
        self._last = now
        return waited, now - began - waited


__all__ = ["LoadMeter", "LoadTimes"]
