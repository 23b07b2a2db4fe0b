"""A connection to the daemon."""

from __future__ import annotations

import json
from ctypes import byref, c_int, c_uint64, c_void_p
from typing import Any

from . import _lib, arena
from ._lib import Handle, check, lib
from ._tensor import name_of
from .cache import Cache, _prefetched, _retained
from .device import Device
from .errors import UnavailableError, encoded, integer, invalid
from .names import BlockNames
from .types import (
    CacheDescription,
    DaemonDescription,
    LimitDescription,
    PeerDescription,
    PrefixMatch,
    Retained,
    SequenceDescription,
)

_ARENA_MULTIPLE = 4096


def _reached(code: int) -> None:
    """check() of a call that connects: nothing was there to be lost."""
    try:
        check(code)
    except UnavailableError as error:
        error.advice = "start kvmanagerd, or name the address where it listens, then retry"
        raise


def connect(
    address: str,
    name: str = "python",
    deadline_ms: int = 30000,
    connect_ms: int = 5000,
    hello_ms: int = 0,
    busy_poll_us: int = 0,
    admin_address: str = "",
    token: str = "",
    tls_ca: str = "",
    tls_cert: str = "",
    tls_key: str = "",
    tls_name: str = "",
) -> Client:
    """A client of the daemon at "unix:PATH", "tcp:HOST:PORT" or "tls:HOST:PORT".

    name: for listings. deadline_ms: of every call, 1..3600000. connect_ms: for connecting, which is tried again until
    then. hello_ms: for the first answer once connected; 0: what is left of connect_ms. busy_poll_us: spin this long for
    an answer before blocking. admin_address: where status() and the like are asked, the daemon's --admin-listen; empty:
    "PATH.admin" of "unix:PATH". token: shows who this is to a daemon whose --tenants knows it, 16..1024 bytes.
    tls_ca, tls_cert, tls_key: files in PEM, of "tls:": who signed the daemon's certificate (empty: an authority that the
    system knows), and this client's own. tls_name: what the daemon's certificate must be for; empty: HOST. Errors:
    InvalidArgumentError, UnavailableError, PermissionDeniedError (token), UnauthenticatedError (a certificate),
    FailedPreconditionError (API version, TLS on one side alone)."""
    options: dict[str, str | int] = {
        "name": name,
        "deadline_ms": deadline_ms,
        "connect_ms": connect_ms,
        "hello_ms": hello_ms,
        "busy_poll_us": busy_poll_us,
    }
    if admin_address:
        options["admin_address"] = admin_address
    given = {"token": token, "tls_ca": tls_ca, "tls_cert": tls_cert, "tls_key": tls_key, "tls_name": tls_name}
    options |= {field: value for field, value in given.items() if value}
    to, made = encoded("address", address), c_void_p()
    said = _json(options)
    _reached(lib.kvm_connect(to, len(to), said, len(said), byref(made)))
    return Client(made.value, address, _lib.result())


class Client(Handle):
    """A connection, and the leases made through it. It belongs to the thread that connected: a call from another, or in
    a forked child, is FailedPreconditionError. As a context manager it gives back all of its leases at the end.

    boot_epoch: another after the daemon was started anew; peer_address: where other daemons hand sequences to."""

    __slots__ = ("address", "boot_epoch", "peer_address")

    def __init__(self, handle: int | None, address: str, hello: dict[str, Any]) -> None:
        super().__init__(handle)
        self.address = address
        self._greeted(hello)

    def _greeted(self, hello: dict[str, Any]) -> None:
        self.boot_epoch = hello["boot_epoch"]
        self.peer_address = hello["peer_address"]

    @property
    def connected(self) -> bool:
        connected = c_int()
        check(lib.kvm_connected(self._object, byref(connected)))
        return connected.value != 0

    def reconnect(self) -> None:
        """After UnavailableError: connects again. Handles from before are void; arenas' memory stays readable."""
        _reached(lib.kvm_reconnect(self._object))
        self._greeted(_lib.result())

    def ping(self) -> None:
        """An empty round trip."""
        check(lib.kvm_ping(self._object))

    def open_cache(
        self,
        *,
        model: str,
        revision: str = "",
        tenant: str = "",
        rope: str = "",
        layers: int,
        kv_heads: int,
        query_heads: int,
        head_dim: int,
        page_tokens: int = 64,
        dtype: str = "float16",
        codec: str = "raw",
        lag_pages: int = 2,
        device: int = -1,
        hidden_size: int = 0,
        tensor_parallel_rank: int = 0,
        tensor_parallel_size: int = 1,
        calibration_digest: str = "",
    ) -> Cache:
        """The cache of a model. All but `device` is part of every block's name: caches that differ share nothing.

        tenant: a salt. dtype: of K and V, float16 or bfloat16. codec: "NAME[:key=value,...]", a policy or a ladder;
        without ";sinks=N" a lossy one keeps the first page of every context raw. lag_pages: newest full pages that are read raw.
        device: -1: host memory, else a GPU of the daemon. hidden_size: values per token of activations that steps may
        give; 0: none."""
        options = {
            "model": model,
            "revision": revision,
            "tenant": tenant,
            "rope": rope,
            "layers": layers,
            "kv_heads": kv_heads,
            "query_heads": query_heads,
            "head_dim": head_dim,
            "page_tokens": page_tokens,
            "dtype": name_of(dtype),
            "codec": codec,
            "lag_pages": lag_pages,
            "device": device,
            "hidden_size": hidden_size,
            "tensor_parallel_rank": tensor_parallel_rank,
            "tensor_parallel_size": tensor_parallel_size,
            "calibration_digest": calibration_digest,
        }
        said, made = _json(options), c_void_p()
        check(lib.kvm_open_cache(self._object, said, len(said), byref(made)))
        return Cache(self, made.value, CacheDescription.parse(_lib.result()))

    def create_arena(self, nbytes: int) -> arena.Arena:
        """Zeroed memory that both sides see, rounded up to 4096 bytes; at most 1 GiB. Unix sockets only
        (FailedPreconditionError: use tensors of your own, which are copied)."""
        return arena.create(self, lib.kvm_create_arena, self._object, nbytes, _ARENA_MULTIPLE)

    def open_device(self, ordinal: int = 0) -> Device:
        """A GPU of the daemon, by its number there; the same GPU here becomes this thread's current device. Errors:
        FailedPreconditionError where the daemon uses no GPU or over TCP; NotFoundError; UnavailableError where this
        process cannot use that GPU, or was built without CUDA."""
        made = c_void_p()
        check(lib.kvm_open_device(self._object, integer("ordinal", ordinal, 0, 2**31 - 1), byref(made)))
        return Device(self, made.value, _lib.result())

    # Administration, through admin_address: for the daemon's user and root (else PermissionDeniedError).

    def status(self) -> DaemonDescription:
        check(lib.kvm_status(self._object))
        return DaemonDescription.parse(_lib.result())

    def caches(self) -> list[CacheDescription]:
        check(lib.kvm_caches(self._object))
        return [CacheDescription.parse(each) for each in _lib.result()]

    def sequences(self) -> list[SequenceDescription]:
        check(lib.kvm_sequences(self._object))
        return [SequenceDescription(**each) for each in _lib.result()]

    def peers(self, peers: list[str] | None = None) -> list[PeerDescription]:
        """The daemons that sequences were handed to or came from; if `peers` ("HOST:PORT") is not empty, of these
        alone, in this order. Those handed to are asked how much they have to do, for at most half a second."""
        said = _json(list(peers or []))
        check(lib.kvm_peers(self._object, said, len(said)))
        return [PeerDescription.parse(each) for each in _lib.result()]

    def recompute(self) -> dict[str, Any]:
        """What the daemon plans reloads by, as client/client.h, RecomputeDescription, has it."""
        check(lib.kvm_recompute(self._object))
        plans: dict[str, Any] = _lib.result()
        return plans

    def limits(self) -> list[LimitDescription]:
        """Every bound of the daemon, with its use now. UnimplementedError of daemons of earlier versions."""
        check(lib.kvm_limits(self._object))
        return [LimitDescription(**each) for each in _lib.result()]

    def explain(self, names: BlockNames, cache_id: int = 0) -> dict[str, Any]:
        """Why these blocks are found, or not: "blocks", one for each name, and "others", caches that have the tokens of
        missing ones under other names. cache_id: whose names they are (CacheDescription.id); 0: of any open cache, by
        their keys alone. Members as in client/client.h, Explanation. UnimplementedError of daemons of earlier
        versions."""
        if not isinstance(names, BlockNames):
            raise invalid("names", type(names).__name__, "BlockNames: block_names() or external_names() makes them")
        check(lib.kvm_explain(self._object, integer("cache_id", cache_id, 0, 2**32 - 1), names.data, len(names)))
        explanation: dict[str, Any] = _lib.result()
        return explanation

    def retain(self, cache_id: int, names: BlockNames, priority: int, ttl_ms: int = 0) -> Retained:
        """Cache.retain of any tenant's cache: cache_id is its CacheDescription.id. NotFoundError: there is none."""
        cache_id = integer("cache_id", cache_id, 0, 2**32 - 1)
        call = lib.kvm_retain_in_cache
        return _retained(call, self._object, cache_id, names=names, priority=priority, ttl_ms=ttl_ms)

    def prefetch(self, cache_id: int, names: BlockNames) -> PrefixMatch:
        """Cache.prefetch of any tenant's cache: cache_id is its CacheDescription.id. NotFoundError: there is none."""
        cache_id = integer("cache_id", cache_id, 0, 2**32 - 1)
        return _prefetched(lib.kvm_prefetch_in_cache, self._object, cache_id, names=names)

    def drain(self, on: bool = True) -> None:
        """Refuses new sequences, forks and incoming hand-offs; on=False: no longer."""
        check(lib.kvm_drain(self._object, bool(on)))

    def purge(self, cache_id: int | None = None) -> int:
        """Drops published blocks that nothing pins, of one cache or of all. Returns how many."""
        blocks = c_uint64()
        which = -1 if cache_id is None else integer("cache_id", cache_id, 0, 2**32 - 2)
        check(lib.kvm_purge(self._object, which, byref(blocks)))
        return blocks.value


def _json(options: object) -> bytes:
    try:
        return json.dumps(options, allow_nan=False, ensure_ascii=False).encode()
    except (TypeError, ValueError) as error:
        raise invalid("options", error, "strings and integers") from error
