"""SGLang's HiCache keeps its third level in the daemon:

    python -m sglang.launch_server --model MODEL --page-size 64 --enable-hierarchical-cache
      --hicache-storage-backend dynamic --hicache-storage-backend-extra-config '{"backend_name": "kvmanager",
        "module_path": "kvmanager.sglang", "class_name": "KvManagerHiCache", "interface_v1": 1,
        "address": "unix:/run/kvmanager/kvmanager.sock"}'

A page of SGLang is a block of one page: its key, a hash of all tokens up to its end, is its name. So pages are found,
stored and evicted one by one, and nothing need be known of what comes before them. Nor is it known which page is a
context's first, so that none can be a sink: the codec has ";sinks=0".
"""

from __future__ import annotations

import functools
import logging
import threading
from typing import Any, Callable, List, Optional

import torch
from sglang.srt.mem_cache import hicache_storage as base
from sglang.srt.mem_cache.hicache_storage import HiCacheStorage, HiCacheStorageConfig, HiCacheStorageExtraInfo

from ._link import Link, Session, check_setting, share_lock
from .errors import Error
from .host_pool import PageCopier, Pool, Sides
from .pool_pages import OF_EVICTION, PoolPages

# What versions of SGLang differ in.
PoolTransfer = getattr(base, "PoolTransfer", Any)
PoolTransferResult = getattr(base, "PoolTransferResult", Any)

logger = logging.getLogger("sglang.kvmanager")

_SETTINGS = {
    "address": "unix:/run/kvmanager/kvmanager.sock",
    "codec": "raw",
    "lag_pages": 0,
    "tenant": "",
    "calibration_digest": "",
    "calibration_dir": "",
    "deadline_ms": 10000,
    "staging_mib": 512,
    "retention_priority": OF_EVICTION,
    "retention_ttl_s": 0,
}
_OURS_NOT = ("backend_name", "module_path", "class_name", "interface_v1")  # SGLang's own keys of extra_config
_STAGING_MIB_MAX = 1024
_RETENTION_MAX = {"retention_priority": 100, "retention_ttl_s": 315360000}
_KV = "kv"


def without_sinks(codec: str) -> str:
    """The codec of pages that all begin a sequence: as a sink, each would stay raw. ValueError: it names sinks."""
    for clause in codec.split(";")[1:]:
        key, _, value = clause.partition(">")[0].partition("=")  # a ladder's next rung follows ">"
        if key == "sinks" and value != "0":
            raise ValueError(f"codec is {codec}, must be without sinks: it is not known which page of SGLang's is a first")
        if key == "sinks":
            return codec
    return codec + ";sinks=0"


def check_retention(settings: dict) -> None:
    """ValueError: the settings ask for what Cache.retain does not do."""
    for key, most in _RETENTION_MAX.items():
        if not 0 <= settings[key] <= most:
            raise ValueError(f"{key} is {settings[key]}, must be 0..{most}")
    if settings["retention_ttl_s"] and settings["retention_priority"] == OF_EVICTION:
        raise ValueError(f"retention_ttl_s is {settings['retention_ttl_s']}, must be 0 where no retention_priority is set")


class Call:
    """A job that somebody waits for."""

    def __init__(self, function: Callable[[Session], Any]) -> None:
        self._function = function
        self._done = threading.Event()
        self.result: Any = None
        self.error: Error | None = None

    def run(self, session: Session) -> None:
        self.result = self._function(session)
        self._done.set()

    def fail(self, error: Error) -> None:
        self.error = error
        self._done.set()

    def wait(self) -> None:
        self._done.wait()


class KvManagerHiCache(HiCacheStorage):
    """A storage backend of SGLang's HiCache. Its methods are called by SGLang's own threads for storage, and wait for
    the daemon there, deadline_ms at most for each of its calls; where it is away, pages are misses and are not stored,
    at once. It attaches again by itself.

    storage_config.extra_config: address, codec, lag_pages, tenant, calibration_digest, calibration_dir, deadline_ms,
    staging_mib, retention_priority, retention_ttl_s beside SGLang's own keys; others are a ValueError. The last two are of all pages:
    SGLang says nothing of a request to its storage."""

    def __init__(self, storage_config: HiCacheStorageConfig, kwargs: Optional[dict] = None) -> None:
        given = {key: value for key, value in (storage_config.extra_config or {}).items() if key not in _OURS_NOT}
        unknown = sorted(key for key in given if key not in _SETTINGS)
        if unknown:
            raise ValueError(f"extra_config has {', '.join(unknown)}, must be of {', '.join(_SETTINGS)}")
        self._settings = {**_SETTINGS, **given}
        for key, value in given.items():
            check_setting(key, value, _SETTINGS[key], _STAGING_MIB_MAX)
        self._settings["codec"] = without_sinks(self._settings["codec"])
        check_retention(self._settings)
        self._config = storage_config
        self._pools: dict[str, Pool] = {}
        self._link: Link | None = None
        self._copier = PageCopier()
        self._misses = {"away": 0, "failed": 0}

    # Set-up.

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        super().register_mem_pool_host(mem_pool_host)
        self._register(mem_pool_host, _KV)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        self._register(host_pool, str(host_pool_name))

    def _register(self, host_pool: Any, name: str) -> None:
        config = self._config
        if name == _KV and name in self._pools:
            return
        try:
            if config.is_mla_model or getattr(config, "should_split_heads", False):
                raise ValueError("MLA, and heads split for other tensor-parallel sizes, are not kept")
            self._pools[name] = Pool(host_pool, config, name, self._settings)
        except ValueError as error:
            logger.warning("kvmanager keeps nothing of pool %s: %s", name, error)
            return
        if self._link is None:
            share_lock()
            self._link = Link(
                self._settings["address"],
                f"sglang rank {config.tp_rank}",
                lambda key: self._pools[key].options,
                functools.partial(self._attach, name),
                deadline_ms=self._settings["deadline_ms"],
                log=logger,
                set_by={"page_tokens": "SGLang's --page-size", "dtype": "SGLang's --dtype"},
            )

    def _attach(self, name: str, session: Session) -> None:
        """The link's thread."""
        o = session.cache(name).description
        logger.info("kvmanager: attached to %s: model %s, codec %s", self._settings["address"], o.options.model, o.options.codec)

    @property
    def attached(self) -> bool:
        return self._link is not None and self._link.attached

    # Calls, on SGLang's threads.

    def _call(self, function: Callable[[Session], Any], otherwise: Any, urgent: bool = True) -> Any:
        call = Call(function)
        if self._link is None or not self._link.submit(call, urgent):
            self._misses["failed" if self._link is not None and self._link.off else "away"] += 1
            return otherwise
        call.wait()
        if call.error is not None:
            self._misses["failed"] += 1
            if not self._link.says(call.error):
                logger.warning("kvmanager: %s", call.error.message)
            return otherwise
        return call.result

    def _of(self, session: Session, name: str) -> PoolPages:
        pages, pool = session.state.get(name), self._pools[name]
        if pages is None or pages.pool is not pool:
            urgent = functools.partial(self._link.run_urgent, session)
            pages = session.state[name] = PoolPages(session, name, pool, self._settings, self._copier, urgent)
        return pages

    def _exist(self, name: str, keys: List[str]) -> list[bool]:
        nothing = [False] * len(keys)
        if name not in self._pools or not keys:
            return nothing
        return self._call(lambda session: self._of(session, name).there(keys, prefetch=True), nothing)

    def _set(self, name: str, keys: List[str], page_of: Callable[[int], Sides]) -> list[bool]:
        """page_of(place): K and V that key number `place` names."""
        done = [False] * len(keys)
        if name in self._pools and keys:
            self._call(lambda session: self._of(session, name).store(keys, page_of, done), None, urgent=False)
        return done

    def _get(self, name: str, keys: List[str], page_of: Callable[[int], Sides]) -> list[bool]:
        """page_of(place): where K and V of key number `place` go."""
        nothing = [False] * len(keys)
        if name not in self._pools or not keys:
            return nothing
        pages = [page_of(place) for place in range(len(keys))]
        return self._call(lambda session: self._of(session, name).load(keys, pages), nothing)

    # Version 1: pages of the registered host pool.

    def batch_get_v1(
        self, keys: List[str], host_indices: torch.Tensor, extra_info: Optional[HiCacheStorageExtraInfo] = None
    ) -> List[bool]:
        return self._get_pages(_KV, keys, host_indices)

    def batch_set_v1(
        self, keys: List[str], host_indices: torch.Tensor, extra_info: Optional[HiCacheStorageExtraInfo] = None
    ) -> List[bool]:
        return self._set_pages(_KV, keys, host_indices)

    def _pages(self, name: str, keys: List[str], host_indices: Optional[torch.Tensor]) -> torch.Tensor | None:
        """The numbers of the host pool's pages; None, and said: indices do not fit the keys."""
        pool = self._pools[name]
        expected = len(keys) * pool.page_tokens
        if host_indices is None or host_indices.numel() != expected:
            got = 0 if host_indices is None else host_indices.numel()
            logger.error("kvmanager: host_indices of pool %s has %d tokens, must have %d", name, got, expected)
            return None
        return host_indices.view(-1)[:: pool.page_tokens].cpu() // pool.page_tokens

    def _get_pages(self, name: str, keys: List[str], host_indices: Optional[torch.Tensor]) -> list[bool]:
        pages = self._pages(name, keys, host_indices) if name in self._pools else None
        if pages is None:
            return [False] * len(keys)
        pool, numbers = self._pools[name], pages.tolist()
        return self._get(name, keys, lambda place: pool.page(numbers[place]))

    def _set_pages(self, name: str, keys: List[str], host_indices: Optional[torch.Tensor]) -> list[bool]:
        pages = self._pages(name, keys, host_indices) if name in self._pools else None
        if pages is None:
            return [False] * len(keys)
        pool, numbers = self._pools[name], pages.tolist()
        return self._set(name, keys, lambda place: pool.page(numbers[place]))

    # Version 2: several pools.

    def batch_exists_v2(
        self,
        keys: List[str],
        pool_transfers: Optional[List[PoolTransfer]] = None,
        extra_info: Optional[HiCacheStorageExtraInfo] = None,
    ) -> PoolTransferResult:
        policies = base.PoolHitPolicy
        pages = self.batch_exists(keys, extra_info)
        hits: dict[str, int] = {base.PoolName.KV: pages} if pages else {}
        restorable = list(range(1, pages + 1))
        for transfer in pool_transfers or []:
            if str(transfer.name) == _KV or transfer.hit_policy == getattr(policies, "BLOCK_GROUPS", None):
                continue
            there = self._exist(str(transfer.name), keys[:pages])
            if transfer.hit_policy == policies.TRAILING_PAGES:
                tail = max(1, len(transfer.keys or ()))
                held = {end for end in range(1, pages + 1) if all(there[max(0, end - tail) : end])}
            else:
                held = set(range(1, _leading(there) + 1))
            if held:
                hits[transfer.name] = max(held)
            restorable = [end for end in restorable if end in held]
        result = PoolTransferResult(restorable[-1] if restorable else 0, hits)
        if hasattr(result, "restorable_prefix_pages"):
            result.restorable_prefix_pages = restorable
        return result

    def batch_get_v2(
        self, transfers: List[PoolTransfer], extra_info: Optional[HiCacheStorageExtraInfo] = None
    ) -> dict[str, List[bool]]:
        return {each.name: self._get_pages(str(each.name), each.keys or [], each.host_indices) for each in transfers}

    def batch_set_v2(
        self, transfers: List[PoolTransfer], extra_info: Optional[HiCacheStorageExtraInfo] = None
    ) -> dict[str, List[bool]]:
        return {each.name: self._set_pages(str(each.name), each.keys or [], each.host_indices) for each in transfers}

    # The generic interface: flat pages.

    def get(
        self, key: str, target_location: Optional[Any] = None, target_sizes: Optional[Any] = None
    ) -> torch.Tensor | None:
        return self.batch_get([key], [target_location], target_sizes)[0]

    def batch_get(
        self, keys: List[str], target_locations: Optional[Any] = None, target_sizes: Optional[Any] = None
    ) -> List[torch.Tensor | None] | int:
        pool = self._pools.get(_KV)
        if pool is None:
            return [None] * len(keys)
        targets = list(target_locations or [None] * len(keys))
        for place, each in enumerate(targets):
            if each is None:
                targets[place] = torch.empty(pool.page_bytes // pool.dtype.itemsize, dtype=pool.dtype)

        there = self._get(_KV, keys, lambda place: pool.flat_views(targets[place]))
        return [target if found else None for target, found in zip(targets, there)]

    def set(
        self,
        key: str,
        value: Optional[Any] = None,
        target_location: Optional[Any] = None,
        target_sizes: Optional[Any] = None,
    ) -> bool:
        return self.batch_set([key], [value])

    def batch_set(
        self,
        keys: List[str],
        values: Optional[Any] = None,
        target_locations: Optional[Any] = None,
        target_sizes: Optional[Any] = None,
    ) -> bool:
        pool = self._pools.get(_KV)
        if pool is None or values is None:
            return False

        return all(self._set(_KV, keys, lambda place: pool.flat_views(values[place].contiguous())))

    def exists(self, key: str) -> bool:
        return self._exist(_KV, [key])[0]

    def batch_exists(self, keys: List[str], extra_info: Optional[HiCacheStorageExtraInfo] = None) -> int:
        return _leading(self._exist(_KV, keys))

    # The rest.

    def clear(self) -> None:
        """Purges this model's pages."""

        def purge(session: Session) -> None:
            for name in self._pools:
                session.client.purge(session.cache(name).description.id)

        self._call(purge, None)

    def close(self) -> None:
        if self._link is not None:
            self._link.close()
        self._copier.close()


def _leading(there: list[bool]) -> int:
    return there.index(False) if False in there else len(there)


__all__ = ["KvManagerHiCache"]
