"""Coroutines over a client: the same methods, awaited.

    async with await kvmanager.aio.connect("unix:/run/kvmanager/kvmanager.sock") as client:
        cache = await client.open_cache(model="m", layers=32, kv_heads=8, query_heads=32, head_dim=128)
        sequence = await cache.create_sequence(names)
        await cache.step(layer, [(sequence, position, tokens)], k, v, q, out)

A thread of the client's own owns the connection. Steps, claims and hand-offs of many tasks are under way at once;
other calls are short, and made one behind the other. A call whose task is cancelled is cancelled in the daemon.
Arguments must stay as they are until a call is done. The thread ends when its client is closed, or when the client and
all handles made through it were let go.
"""

from __future__ import annotations

import asyncio
import collections
import functools
import os
import threading
from typing import TYPE_CHECKING, Any, Callable, Concatenate, Iterable, Literal, NamedTuple, ParamSpec, TypeVar
from typing import overload

from . import arena, client as blocking_client
from ._lib import check, lib
from .cache import Entries as Entries
from .errors import Error, FailedPreconditionError
from .names import BlockNames
from .pending import Pending
from .types import (
    CacheDescription,
    CacheOptions,
    DaemonDescription,
    HandOffOutcome,
    LimitDescription,
    PeerDescription,
    PrefixMatch,
    PublishOutcome,
    ReadResult,
    Retained,
    SequenceDescription,
    StepResult,
)

if TYPE_CHECKING:
    import array
    from typing import Self

    from .cache import StepEntries

_P = ParamSpec("_P")
_R = TypeVar("_R")
_Self = TypeVar("_Self")


def _arguments_of(
    method: Callable[Concatenate[Any, _P], object],
) -> Callable[[Callable[Concatenate[_Self, ...], _R]], Callable[Concatenate[_Self, _P], _R]]:
    """For type checkers: what is decorated takes what `method` of the blocking client takes."""
    return lambda function: function


class _Call(NamedTuple):
    make: Callable[[], Any]  # its result, or a Pending of it
    loop: asyncio.AbstractEventLoop
    future: asyncio.Future[Any]


class _Thread:
    """Owns a blocking client. Calls come in any thread, and are answered in their own event loop."""

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._calls: collections.deque[_Call] = collections.deque()  # as many as tasks wait for
        self._lock = threading.RLock()  # the garbage collector may let a lease go anywhere
        self._client: blocking_client.Client | None = None  # while calls are taken
        self._closed: _Call | None = None  # who waits for the end
        self._abandoned = False  # nobody waits for the connection

    def start(self, connect: Callable[[], blocking_client.Client]) -> asyncio.Future[Any]:
        call = _call(connect)
        threading.Thread(target=self._run, args=(call,), name="kvmanager", daemon=True).start()
        return call.future

    def call(self, make: Callable[[], Any]) -> asyncio.Future[Any]:
        self._must_be_here()
        call = _call(make)
        with self._lock:
            if self._client is None:
                raise _closed()
            self._calls.append(call)
            lib.kvm_wake(self._client._object)
        call.future.add_done_callback(self._cancelled)
        return call.future

    def close(self) -> asyncio.Future[Any] | None:
        """Takes no more calls; None: it did not before."""
        self._must_be_here()
        with self._lock:
            if self._client is None:
                return None
            self._closed = _call(lambda: None)
            lib.kvm_wake(self._client._object)
            self._client = None
        return self._closed.future

    def _must_be_here(self) -> None:
        """A forked child has no such thread, and its lock is as it was when the parent forked."""
        if self._pid != os.getpid():
            raise FailedPreconditionError(
                "this process was forked from the client's; it must connect a client of its own"
            )

    def abandon(self) -> None:
        if self._pid != os.getpid():
            return
        with self._lock:
            self._abandoned = True
            if self._client is not None:
                lib.kvm_wake(self._client._object)

    def _cancelled(self, future: asyncio.Future[Any]) -> None:
        if future.cancelled() and self._pid == os.getpid():
            with self._lock:
                if self._client is not None:
                    lib.kvm_wake(self._client._object)

    def _ends(self) -> bool:
        return self._closed is not None or self._abandoned

    def _run(self, first: _Call) -> None:
        try:
            client = first.make()
        except Exception as error:
            _answer(first, None, error)
            return
        with self._lock:
            self._client = client
        _answer(first, client, None)
        under_way: list[tuple[_Call, Pending[Any]]] = []
        failure: Exception = _closed()
        try:
            while not self._ends():
                while self._calls:
                    _begin(self._calls.popleft(), under_way)
                under_way = [each for each in under_way if not _finished(*each)]
                if not self._calls and not self._ends():
                    check(lib.kvm_wait_for_news(client._object))
        except Exception as error:  # nothing can be waited for any more
            failure = error
        with self._lock:
            self._client = None
        client.close()
        for call in [call for call, _ in under_way] + list(self._calls):
            _answer(call, None, failure)
        if self._closed is not None:
            _answer(self._closed, None, None)


def _closed() -> FailedPreconditionError:
    return FailedPreconditionError("this client is closed; connect another")


def _call(make: Callable[[], Any]) -> _Call:
    loop = asyncio.get_running_loop()
    return _Call(make, loop, loop.create_future())


def _begin(call: _Call, under_way: list[tuple[_Call, Pending[Any]]]) -> None:
    if call.future.cancelled():
        return
    try:
        made = call.make()
    except Exception as error:
        _answer(call, None, error)
        return
    if isinstance(made, Pending):
        under_way.append((call, made))
    else:
        _answer(call, made, None)


def _finished(call: _Call, pending: Pending[Any]) -> bool:
    if call.future.cancelled():
        pending.close()
        return True
    if not pending.ready():
        return False
    try:
        _answer(call, pending.wait(), None)
    except Exception as error:
        _answer(call, None, error)
    return True


def _answer(call: _Call, result: object, error: Exception | None) -> None:
    def deliver() -> None:
        if call.future.done():
            return  # cancelled meanwhile; what was made is let go
        if error is None:
            call.future.set_result(result)
        else:
            call.future.set_exception(error)

    try:
        call.loop.call_soon_threadsafe(deliver)
    except RuntimeError:  # the loop is closed: nobody waits
        pass


class _Lease:
    """What handles have of their client's thread: the thread ends with the last of them."""

    __slots__ = ("thread",)

    def __init__(self, thread: _Thread) -> None:
        self.thread = thread

    def __del__(self) -> None:
        self.thread.abandon()


class _Owned:
    """A blocking handle, and the thread that owns it."""

    __slots__ = ("_lease", "blocking")

    def __init__(self, lease: _Lease, handle: Any) -> None:
        self._lease = lease
        self.blocking = handle

    async def _call(self, function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        return await self._lease.thread.call(functools.partial(function, *arguments, **named))

    async def close(self) -> None:
        """Gives back what this holds, at once."""
        await self._call(self.blocking.close)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


async def connect(
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
    """As kvmanager.connect."""
    lease = _Lease(_Thread())
    options = (address, name, deadline_ms, connect_ms, hello_ms, busy_poll_us, admin_address, token)
    tls = (tls_ca, tls_cert, tls_key, tls_name)
    return Client(lease, await lease.thread.start(functools.partial(blocking_client.connect, *options, *tls)))


class Client(_Owned):
    """As kvmanager.Client. Any task of any event loop may use it."""

    __slots__ = ()

    @property
    def address(self) -> str:
        return self.blocking.address

    @property
    def boot_epoch(self) -> int:
        return self.blocking.boot_epoch

    @property
    def peer_address(self) -> str:
        return self.blocking.peer_address

    async def close(self) -> None:
        """Gives back all leases, and ends the thread. Calls under way are cancelled, FailedPreconditionError."""
        closed = self._lease.thread.close()
        if closed is not None:
            await closed

    async def connected(self) -> bool:
        return await self._call(lambda: self.blocking.connected)

    async def reconnect(self) -> None:
        await self._call(self.blocking.reconnect)

    async def ping(self) -> None:
        await self._call(self.blocking.ping)

    @_arguments_of(blocking_client.Client.open_cache)
    async def open_cache(self, **options: Any) -> Cache:
        return Cache(self._lease, await self._call(self.blocking.open_cache, **options))

    async def create_arena(self, nbytes: int) -> arena.Arena:
        """The arena's tensors may be made and used anywhere; it is given back when it is let go."""
        return await self._call(self.blocking.create_arena, nbytes)

    async def status(self) -> DaemonDescription:
        return await self._call(self.blocking.status)

    async def caches(self) -> list[CacheDescription]:
        return await self._call(self.blocking.caches)

    async def sequences(self) -> list[SequenceDescription]:
        return await self._call(self.blocking.sequences)

    async def peers(self, peers: list[str] | None = None) -> list[PeerDescription]:
        return await self._call(self.blocking.peers, peers)

    async def recompute(self) -> dict[str, Any]:
        return await self._call(self.blocking.recompute)

    async def limits(self) -> list[LimitDescription]:
        return await self._call(self.blocking.limits)

    async def explain(self, names: BlockNames, cache_id: int = 0) -> dict[str, Any]:
        return await self._call(self.blocking.explain, names, cache_id)

    async def retain(self, cache_id: int, names: BlockNames, priority: int, ttl_ms: int = 0) -> Retained:
        return await self._call(self.blocking.retain, cache_id, names, priority, ttl_ms)

    async def prefetch(self, cache_id: int, names: BlockNames) -> PrefixMatch:
        return await self._call(self.blocking.prefetch, cache_id, names)

    async def drain(self, on: bool = True) -> None:
        await self._call(self.blocking.drain, on)

    async def purge(self, cache_id: int | None = None) -> int:
        return await self._call(self.blocking.purge, cache_id)


class Cache(_Owned):
    """As kvmanager.Cache."""

    __slots__ = ()

    @property
    def description(self) -> CacheDescription:
        return self.blocking.description

    @property
    def options(self) -> CacheOptions:
        return self.blocking.options

    def block_names(self, token_ids: object) -> BlockNames:
        return self.blocking.block_names(token_ids)

    def external_names(self, hashes: Iterable[bytes]) -> BlockNames:
        return self.blocking.external_names(hashes)

    async def refresh(self) -> CacheDescription:
        return await self._call(self.blocking.refresh)

    async def match(self, prefixes: Iterable[BlockNames], prefetch: bool = False) -> list[PrefixMatch]:
        return await self._call(self.blocking.match, prefixes, prefetch)

    async def prefetch(self, names: BlockNames) -> PrefixMatch:
        return await self._call(self.blocking.prefetch, names)

    async def retain(self, names: BlockNames, priority: int, ttl_ms: int = 0) -> Retained:
        return await self._call(self.blocking.retain, names, priority, ttl_ms)

    async def create_sequence(self, names: BlockNames | None = None, prompt_tokens: int = 0) -> Sequence:
        return Sequence(self._lease, await self._call(self.blocking.create_sequence, names, prompt_tokens))

    @overload
    async def create_sequences(
        self,
        prefixes: Iterable[BlockNames | None],
        prompt_tokens: Iterable[int] | None = None,
        partial: Literal[False] = False,
    ) -> list[Sequence]: ...

    @overload
    async def create_sequences(
        self, prefixes: Iterable[BlockNames | None], prompt_tokens: Iterable[int] | None = None, partial: bool = False
    ) -> list[Sequence | Error]: ...

    async def create_sequences(
        self,
        prefixes: Iterable[BlockNames | None],
        prompt_tokens: Iterable[int] | None = None,
        partial: bool = False,
    ) -> Any:
        made = await self._call(self.blocking.create_sequences, prefixes, prompt_tokens, partial)
        return [each if isinstance(each, Error) else Sequence(self._lease, each) for each in made]

    async def claim(self, ticket: bytes, deadline_ms: int = 0) -> Claimed:
        claimed = await self._call(self.blocking.claim_async, ticket, deadline_ms)
        return Claimed(Sequence(self._lease, claimed.sequence), claimed.tokens, claimed.blob)

    async def step(
        self,
        layer: int,
        entries: StepEntries,
        k: object = None,
        v: object = None,
        q: object = None,
        out: object = None,
        lse: object = None,
        x: object = None,
        scale: float = 0.0,
        ready: int = 0,
    ) -> StepResult:
        return await self._call(self.blocking.step_async, layer, entries, k, v, q, out, lse, x, scale, ready)

    async def read(self, layer: int, entries: StepEntries, k: object, v: object) -> ReadResult:
        return await self._call(self.blocking.read_async, layer, entries, k, v)

    async def output_factors(self, layer: int) -> array.array[float] | None:
        return await self._call(self.blocking.output_factors, layer)


class Sequence(_Owned):
    """As kvmanager.Sequence."""

    __slots__ = ()

    @property
    def id(self) -> int:
        return self.blocking.id

    @property
    def hit_blocks(self) -> int:
        return self.blocking.hit_blocks

    @property
    def miss_reason(self) -> str:
        return self.blocking.miss_reason

    def __int__(self) -> int:
        return self.blocking.id

    __index__ = __int__

    async def fork(self) -> Sequence:
        return Sequence(self._lease, await self._call(self.blocking.fork))

    async def crop(self, tokens: int) -> None:
        await self._call(self.blocking.crop, tokens)

    async def publish(self, names: BlockNames) -> PublishOutcome:
        return await self._call(self.blocking.publish, names)

    async def info(self) -> SequenceDescription:
        return await self._call(self.blocking.info)

    async def hand_off(
        self, peer: str, blob: bytes = b"", timeout_ms: int = 30000, room_ms: int = 0, will_append: bool = False
    ) -> HandOffOutcome:
        return await self._call(self.blocking.hand_off_async, peer, blob, timeout_ms, room_ms, will_append)

    async def begin_hand_off(
        self, peer: str, tokens: int, timeout_ms: int = 30000, room_ms: int = 0, will_append: bool = False
    ) -> HandOff:
        made = await self._call(self.blocking.begin_hand_off_async, peer, tokens, timeout_ms, room_ms, will_append)
        return HandOff(self._lease, made)


class HandOff(_Owned):
    """As kvmanager.HandOff."""

    __slots__ = ()

    @property
    def ticket(self) -> bytes:
        return self.blocking.ticket

    @property
    def peer(self) -> str:
        return self.blocking.peer

    async def finish(self, blob: bytes = b"") -> HandOffOutcome:
        return await self._call(self.blocking.finish_async, blob)


class Claimed(NamedTuple):
    """As kvmanager.Claimed."""

    sequence: Sequence
    tokens: int
    blob: bytes
