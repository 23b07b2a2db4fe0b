"""How long a request wants its blocks kept: two members of its kv_transfer_params, which whoever sends requests may set.

    kvmanager_retention_priority   0..100, as Cache.retain's: 0 will not return, 50 as usual, 100 goes last of all
    kvmanager_retention_ttl_s      seconds from the request's end on, above 0; absent: no end
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .._link import Session
    from ..errors import Error

PRIORITY = "kvmanager_retention_priority"
TTL_S = "kvmanager_retention_ttl_s"
PRIORITY_MAX, TTL_S_MAX = 100, 315360000  # ten years
OF_EVICTION = 50


@dataclass(frozen=True)
class Retention:
    """first: the block of the request from which on it counts. Below OF_EVICTION that is the first one that the request
    did not find: what it shares with others is not theirs to be lost."""

    priority: int
    ttl_ms: int
    first: int = 0


def retention_of(params: dict[str, Any], found_blocks: int) -> Retention | None:
    """What a request asks for; None: nothing. ValueError: what no request may."""
    priority, ttl_s = params.get(PRIORITY), params.get(TTL_S)
    if priority is None and ttl_s is None:
        return None
    if not isinstance(priority, int) or isinstance(priority, bool) or not 0 <= priority <= PRIORITY_MAX:
        raise ValueError(f"{PRIORITY} is {_shown(priority)}, must be an integer of 0..{PRIORITY_MAX}")
    ttl_ms = 0
    if ttl_s is not None:
        number = isinstance(ttl_s, (int, float)) and not isinstance(ttl_s, bool)
        if not number or not 0 < ttl_s <= TTL_S_MAX:  # NaN is neither
            raise ValueError(f"{TTL_S} is {_shown(ttl_s)}, must be a number above 0, at most {TTL_S_MAX}")
        ttl_ms = max(1, round(ttl_s * 1000))
    return Retention(priority, ttl_ms, found_blocks if priority < OF_EVICTION else 0)


def _shown(value: Any) -> str:
    try:
        return repr(value)[:64]
    except ValueError:  # of an integer of thousands of digits
        return type(value).__name__


class Retain:
    """Retains blocks of a request that stored none. A job of the scheduler's link."""

    def __init__(self, tenant: str, hashes: list[bytes], ranks: int, retention: Retention) -> None:
        self._tenant, self._hashes, self._ranks, self._retention = tenant, hashes, ranks, retention

    def run(self, session: Session) -> None:
        for rank in range(self._ranks):
            retain(session, (self._tenant, rank), self._hashes, self._retention)

    def fail(self, error: Error) -> None:
        pass  # what is not retained goes as usual


def retain(session: Session, of: tuple[str, int], hashes: list[bytes], retention: Retention) -> None:
    """Of blocks with these hashes, the first of which is the request's."""
    cache = session.cache(of)
    names = cache.external_names(hashes[retention.first :])
    if len(names):
        cache.retain(names, retention.priority, retention.ttl_ms)
