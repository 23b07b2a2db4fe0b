"""Sequences of a cache, and hand-offs of them to other daemons."""

from __future__ import annotations

from ctypes import byref, c_int32, c_uint64, c_void_p
from typing import TYPE_CHECKING, Any, NamedTuple

from . import _lib
from ._lib import Handle, check, lib
from .errors import data, encoded, integer
from .names import BlockNames, checked
from .pending import Pending
from .types import HandOffOutcome, PublishOutcome, SequenceDescription

if TYPE_CHECKING:
    from .cache import Cache

_INT64_MAX = 2**63 - 1


def _outcome(values: Any, made: Any) -> HandOffOutcome:
    return HandOffOutcome.parse(_lib.result())


def _options(timeout_ms: int, room_ms: int, will_append: bool) -> _lib.HandOffOptions:
    waits = (integer("timeout_ms", timeout_ms, 0, _INT64_MAX), integer("room_ms", room_ms, 0, _INT64_MAX))
    return _lib.HandOffOptions(*waits, bool(will_append))


class Sequence(Handle):
    """A lease of one sequence: closing it, or letting it go, gives its pages back. Published blocks stay.

    id: what entries name it by; hit_blocks, miss_reason: what was found of its prefix when it was made."""

    __slots__ = ("cache", "id", "hit_blocks", "miss_reason")

    def __init__(self, cache: Cache, address: int | None, id: int, hit_blocks: int, miss_reason: str) -> None:
        super().__init__(address)
        self.cache = cache
        self.id = id
        self.hit_blocks = hit_blocks
        self.miss_reason = miss_reason

    def __int__(self) -> int:
        return self.id

    __index__ = __int__

    def __repr__(self) -> str:
        return f"Sequence(id={self.id}, hit_blocks={self.hit_blocks})"

    def fork(self) -> Sequence:
        """A second sequence with the same tokens: full blocks are shared, open pages copied."""
        made, id = c_void_p(), c_uint64()
        check(lib.kvm_fork(self._object, byref(made), byref(id)))
        return Sequence(self.cache, made.value, id.value, self.hit_blocks, self.miss_reason)

    def crop(self, tokens: int) -> None:
        """Gives back all but the first `tokens` tokens."""
        check(lib.kvm_crop(self._object, integer("tokens", tokens)))

    def publish(self, names: BlockNames) -> PublishOutcome:
        """From now on others find the full blocks that this names, from the first on."""
        outcome = (c_int32 * 3)()
        check(lib.kvm_publish(self._object, checked(names).data, len(names), outcome))
        return PublishOutcome(*outcome)

    def info(self) -> SequenceDescription:
        check(lib.kvm_info(self._object))
        return SequenceDescription(**_lib.result())

    def hand_off(
        self, peer: str, blob: bytes = b"", timeout_ms: int = 30000, room_ms: int = 0, will_append: bool = False
    ) -> HandOffOutcome:
        """Sends the sequence to another daemon; outcome.ticket is what its clients claim it with. It stays here, too.

        peer: "HOST:PORT" of its --peer-listen, or several, "HOST:PORT,HOST:PORT": the one that would have it first gets
        it. blob: the engine's, at most 1 MiB. timeout_ms: of the transfer; this waits a second longer for the daemon's
        word, whatever the client's deadline_ms. room_ms: how long a receiver that is full may let it wait. will_append:
        whoever claims it appends before it reads or crops."""
        return self.hand_off_async(peer, blob, timeout_ms, room_ms, will_append).wait()

    def hand_off_async(
        self, peer: str, blob: bytes = b"", timeout_ms: int = 30000, room_ms: int = 0, will_append: bool = False
    ) -> Pending[HandOffOutcome]:
        to, blob, pending = encoded("peer", peer), data("blob", blob), c_void_p()
        options = _options(timeout_ms, room_ms, will_append)
        check(lib.kvm_hand_off(self._object, to, len(to), blob, len(blob), byref(options), byref(pending)))
        return Pending(pending.value, _outcome, self)

    def begin_hand_off(
        self, peer: str, tokens: int, timeout_ms: int = 30000, room_ms: int = 0, will_append: bool = False
    ) -> HandOff:
        """The same while the sequence still grows to `tokens` tokens in every layer: pages go as they are made."""
        return self.begin_hand_off_async(peer, tokens, timeout_ms, room_ms, will_append).wait()

    def begin_hand_off_async(
        self, peer: str, tokens: int, timeout_ms: int = 30000, room_ms: int = 0, will_append: bool = False
    ) -> Pending[HandOff]:
        to, tokens, pending = encoded("peer", peer), integer("tokens", tokens), c_void_p()
        options = _options(timeout_ms, room_ms, will_append)
        check(lib.kvm_begin_hand_off(self._object, to, len(to), tokens, byref(options), byref(pending)))

        def finish(values: Any, made: Any) -> HandOff:
            said = _lib.result()
            return HandOff(self, made, bytes.fromhex(said["ticket"]), said["peer"])

        return Pending(pending.value, finish)


class HandOff(Handle):
    """A hand-off of a sequence that still grows; it keeps the sequence. Closed before finish(), it is cancelled.

    ticket: the receiver's clients may claim the sequence with it from now on; peer: who has it."""

    __slots__ = ("sequence", "ticket", "peer")

    def __init__(self, sequence: Sequence, address: int, ticket: bytes, peer: str) -> None:
        super().__init__(address)
        self.sequence = sequence
        self.ticket = ticket
        self.peer = peer

    def finish(self, blob: bytes = b"") -> HandOffOutcome:
        """Every layer has its tokens: sends the rest, and waits until the receiver has all of it."""
        return self.finish_async(blob).wait()

    def finish_async(self, blob: bytes = b"") -> Pending[HandOffOutcome]:
        blob, pending = data("blob", blob), c_void_p()
        check(lib.kvm_finish(self._object, blob, len(blob), byref(pending)))
        return Pending(pending.value, _outcome, self)


class Claimed(NamedTuple):
    """tokens: how many the sequence has; blob: what the sender's engine said."""

    sequence: Sequence
    tokens: int
    blob: bytes
