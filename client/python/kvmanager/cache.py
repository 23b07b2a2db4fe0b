"""Caches: what they hold, and what is done to many sequences or blocks of one at once."""

from __future__ import annotations

import array
import ctypes
import struct
from ctypes import byref, c_int, c_uint32, c_uint64, c_void_p
from typing import TYPE_CHECKING, Any, Iterable, Literal, SupportsIndex, overload

from . import _lib
from ._lib import Handle, check, lib
from ._tensor import ITEM_BYTES, rows
from .blocks_mapped import BlocksMapped, warn_unpinned
from .errors import Error, InvalidArgumentError, data, from_fields, integer, invalid
from .names import NAME_BYTES, BlockHashes, BlockNames, checked
from .pending import Pending
from .sequence import Claimed, Sequence
from .types import (
    MISS_REASONS,
    BlocksRead,
    BlocksWritten,
    CacheDescription,
    CacheOptions,
    PrefixMatch,
    ReadResult,
    Retained,
    StepResult,
)

if TYPE_CHECKING:
    from .arena import ArenaTensor
    from .client import Client

_Q_DTYPES = {"float16": 0, "bfloat16": 1, "float32": 2}
_INT32_MAX = 2**31 - 1
_INT64_MAX = 2**63 - 1
_UINT32_MAX = 2**32 - 1
_UINT64_MAX = 2**64 - 1
_Q_NAMES = ("float32", "float16", "bfloat16", "uint16")
# kvm_step: layer, q_dtype, scale, entry_count, entries, address and bytes of k, v, x, q, out, lse, ready.
_pack_step = struct.Struct("<iifIQ12QQ").pack
_NONE = (0, 0)


class Entries:
    """What a step does, for each sequence of a batch: (sequence, position of its first token, tokens). Made once, it
    serves all layers of a step."""

    __slots__ = ("address", "count", "tokens", "_words")

    def __init__(self, entries: Iterable[tuple[SupportsIndex, int, int]]) -> None:
        words: list[int] = []
        try:
            for sequence, position, tokens in entries:
                words += (sequence if type(sequence) is int else sequence.__index__(), position, tokens)
            self._words = array.array("Q", words)
        except (AttributeError, OverflowError, TypeError, ValueError) as error:
            raise InvalidArgumentError(f"entries: {error}; integers from 0 on are expected", "entries") from error
        self.address, size = self._words.buffer_info()
        self.count = size // 3
        self.tokens = sum(self._words[2::3])


StepEntries = Entries | Iterable[tuple[SupportsIndex, int, int]]  # what steps and reads take


class Cache(Handle):
    """A lease of one model's cache. Made by Client.open_cache."""

    __slots__ = ("client", "description", "_factors")

    def __init__(self, client: Client, address: int | None, description: CacheDescription) -> None:
        super().__init__(address)
        self.client = client
        self.description = description

    @property
    def options(self) -> CacheOptions:
        """With the codec's canonical form."""
        return self.description.options

    def refresh(self) -> CacheDescription:
        """Asks the daemon for the description as it is now, and keeps it."""
        check(lib.kvm_refresh(self._object))
        self.description = CacheDescription.parse(_lib.result())
        return self.description

    # Names.

    def block_names(self, token_ids: object) -> BlockNames:
        """The names of the full pages of `token_ids` (integers of 0..2**32-1; a list, an array, or a tensor)."""
        ids = _token_ids(token_ids)
        page_tokens = self.description.options.page_tokens
        blocks = len(ids) // page_tokens
        names = ctypes.create_string_buffer(max(1, blocks * NAME_BYTES))
        address, count = ids.buffer_info()
        check(lib.kvm_name_blocks(self.description.digest, address, count, page_tokens, names))
        return BlockNames(names.raw[: blocks * NAME_BYTES])

    def external_names(self, hashes: Iterable[bytes]) -> BlockNames:
        """Names of consecutive blocks by an engine's own hashes of them (1..64 bytes each), which must depend on all
        that comes before a block, and on nothing that differs between equal ones. A name is SHA-256 of this cache's
        digest and the hash; so is the digest that a hit is compared with."""
        given = BlockHashes(hashes)
        nbytes = given.count * NAME_BYTES
        names = ctypes.create_string_buffer(max(1, nbytes))
        check(lib.kvm_name_hashes(self.description.digest, byref(given.given()), names))
        return BlockNames(names.raw[:nbytes])

    # Prefixes and sequences.

    def match(self, prefixes: Iterable[BlockNames], prefetch: bool = False) -> list[PrefixMatch]:
        """How much of each prefix the daemon has. It may be evicted before it is asked for. prefetch: what only the disk
        has of the hits begins to come to host memory; nothing waits for it, and it ends with the connection."""
        names, blocks, count = _prefixes(prefixes)
        results = (_lib.MatchResult * count)()
        check(lib.kvm_match(self._object, names, blocks, count, bool(prefetch), results))
        return [_match(each) for each in results]

    def prefetch(self, names: BlockNames) -> PrefixMatch:
        """Brings blocks of a prefix ahead of need, at most 65,536: from the disk into host memory and, of a cache on a
        GPU, on to that GPU. Waits until all is there that has room; what has come when the deadline is over stays, and
        the next call goes on. Nothing is pinned: they are the blocks that were used last, and retain() keeps them
        longer. Returns what there is of the names then. InvalidArgumentError; UnimplementedError of daemons of earlier
        versions."""
        return _prefetched(lib.kvm_prefetch, self._object, names=names)

    def retain(self, names: BlockNames, priority: int, ttl_ms: int = 0) -> Retained:
        """How long these blocks are kept when memory is short, in every memory of the daemon and on its disk; published
        ones, in any order, at most 65,536. priority, 0..100: below 50 they go before all others of who pays for them (0:
        they will not return); 50: as the daemon's eviction decides, which takes an earlier call back; above 50 they go
        after all others, the lowest priority first. ttl_ms: then the eviction decides again, 0..315360000000; 0: with the
        block, or the daemon. Nothing is kept for good: a tenant that retains all that it has loses of that. The last call
        for a block counts. A block is of no use without those before it: retain them as well. What is nowhere is not
        counted, and no error. InvalidArgumentError; UnimplementedError of daemons of earlier versions."""
        return _retained(lib.kvm_retain, self._object, names=names, priority=priority, ttl_ms=ttl_ms)

    def create_sequence(self, names: BlockNames | None = None, prompt_tokens: int = 0) -> Sequence:
        """A sequence that begins with the blocks of `names` that were found (seq.hit_blocks). prompt_tokens: of its
        prompt, the prefix included, for codecs whose queries choose what they read behind it ("pq"); 0: unknown."""
        return self.create_sequences([names], [prompt_tokens])[0]

    @overload
    def create_sequences(
        self,
        prefixes: Iterable[BlockNames | None],
        prompt_tokens: Iterable[int] | None = None,
        partial: Literal[False] = False,
    ) -> list[Sequence]: ...

    @overload
    def create_sequences(
        self, prefixes: Iterable[BlockNames | None], prompt_tokens: Iterable[int] | None = None, partial: bool = False
    ) -> list[Sequence | Error]: ...

    def create_sequences(
        self,
        prefixes: Iterable[BlockNames | None],
        prompt_tokens: Iterable[int] | None = None,
        partial: bool = False,
    ) -> Any:
        """A sequence for each prefix. An error of any of them is raised, and the others given back; with `partial` it
        stands in its place of the list instead."""
        names, blocks, count = _prefixes(prefixes)
        prompts = None
        if prompt_tokens is not None:
            prompts = (c_uint64 * count)(*_counted("prompt_tokens", prompt_tokens, count))
        created = (_lib.Created * count)()
        check(lib.kvm_create_sequences(self._object, names, blocks, prompts, count, created))
        errors = _lib.result() if any(each.code for each in created) else [None] * count
        sequences: list[Sequence | Error] = [
            Sequence(self, each.sequence, each.id, each.match.hit_blocks, miss_reason(each.match.reason))
            if error is None
            else from_fields(error)
            for each, error in zip(created, errors)
        ]
        for each in sequences:
            if isinstance(each, Error) and not partial:
                for other in sequences:
                    if isinstance(other, Sequence):
                        other.close()
                raise each
        return sequences

    def claim(self, ticket: bytes, deadline_ms: int = 0) -> Claimed:
        """Takes over a sequence that was handed off, once. deadline_ms: of this call; 0: the client's."""
        return self.claim_async(ticket, deadline_ms).wait()

    def claim_async(self, ticket: bytes, deadline_ms: int = 0) -> Pending[Claimed]:
        ticket, pending = data("ticket", ticket), c_void_p()
        deadline_ms = integer("deadline_ms", deadline_ms, 0, _INT64_MAX)
        check(lib.kvm_claim(self._object, ticket, len(ticket), deadline_ms, byref(pending)))

        def finish(values: Any, made: Any) -> Claimed:
            blob = bytes.fromhex(_lib.result()["blob"])
            return Claimed(Sequence(self, made, values[1], 0, "none"), values[0], blob)

        return Pending(pending.value, finish)

    # Steps.

    def step(
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
        """One layer's step of a batch: appends k and v, attends q into out, or both.

        entries: Entries, or an iterable of (sequence, position, tokens). k, v: [tokens][kv_heads][head_dim] of the
        cache's dtype, tokens being the sum; q, out: [tokens][query_heads][head_dim] of one dtype; lse: [tokens]
        [query_heads] float32; x: activations, [tokens][hidden_size]. scale 0: 1/sqrt(head_dim). ready: of a cache on a
        GPU (Device). Tensors in arenas are read and written in place, others copied. Errors change nothing."""
        entries, packed, keep = self._pack(layer, entries, k, v, q, out, lse, x, scale, ready)
        values = (c_uint64 * 3)()
        check(lib.kvm_cache_step(self._object, packed, values))
        return StepResult(*values)

    def step_async(
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
    ) -> Pending[StepResult]:
        """The same, to be waited for later: it is under way when this returns. Tensors in arenas must stay as they are
        until then; out and lse that are not are written by wait()."""
        entries, packed, keep = self._pack(layer, entries, k, v, q, out, lse, x, scale, ready)
        pending = c_void_p()
        check(lib.kvm_cache_step_async(self._object, packed, byref(pending)))
        return Pending(pending.value, _step_result, (keep, self))

    def _pack(
        self, layer: Any, entries: Any, k: Any, v: Any, q: Any, out: Any, lse: Any, x: Any, scale: Any, ready: Any
    ) -> Any:
        if type(entries) is not Entries:
            entries = Entries(entries)
        o = self.description.options
        at = _Places(entries.tokens, o.device >= 0)
        kv_dtypes = (o.dtype, "uint16")
        places: tuple[int, ...] = at.of("k", k, o.kv_heads, o.head_dim, kv_dtypes)
        places += at.of("v", v, o.kv_heads, o.head_dim, kv_dtypes)
        places += at.of("x", x, 1, o.hidden_size, kv_dtypes)
        q_dtype = 2
        if q is not None:
            if out is None:
                raise invalid("out", "None", "given where q is")
            places += at.of("q", q, o.query_heads, o.head_dim, _Q_NAMES)
            name = at.dtype if at.dtype != "uint16" else o.dtype
            q_dtype = _Q_DTYPES[name]
            places += at.of("out", out, o.query_heads, o.head_dim, (name, "uint16") if q_dtype < 2 else (name,), True)
        elif out is not None:
            raise invalid("q", "None", "given where out is")
        else:
            places += _NONE + _NONE
        places += at.of("lse", lse, 1, o.query_heads, ("float32",), True)
        try:
            packed = _pack_step(layer, q_dtype, scale, entries.count, entries.address, *places, ready)
        except struct.error as error:
            wrong = f"layer {layer!r}, scale {scale!r} or ready {ready!r}: {error}"
            raise InvalidArgumentError(wrong, "layer") from error
        return entries, packed, at.owners

    def read(self, layer: int, entries: StepEntries, k: object, v: object) -> ReadResult:
        """Writes K and V of tokens of a layer as dense rows: of each entry (sequence, position, tokens) the tokens
        from `position` on, which must be there, into k and v, [sum of tokens][kv_heads][head_dim] of the cache's dtype.
        Pages that are raw for the sequence give what was appended, others what their codec decodes. Of caches in host
        memory. DataLossError: a page could not be decoded, and what k and v hold is of no use."""
        layer = integer("layer", layer, 0, _INT32_MAX)
        given, k_range, v_range, keep = self._places_to_read(entries, k, v)
        values = (c_uint64 * 3)()
        check(lib.kvm_read(self._object, layer, given.address, given.count, k_range, v_range, values))
        return ReadResult(values[0], values[1])

    def read_async(self, layer: int, entries: StepEntries, k: object, v: object) -> Pending[ReadResult]:
        """The same, to be waited for later; k and v that are not in arenas are written by wait()."""
        layer = integer("layer", layer, 0, _INT32_MAX)
        given, k_range, v_range, keep = self._places_to_read(entries, k, v)
        pending = c_void_p()
        check(
            lib.kvm_read_async(self._object, layer, given.address, given.count, k_range, v_range, byref(pending))
        )
        return Pending(pending.value, _read_result, (keep, self))

    def _places_to_read(self, entries: Any, k: Any, v: Any) -> Any:
        if type(entries) is not Entries:
            entries = Entries(entries)
        o = self.description.options
        at = _Places(entries.tokens, False)
        places = [
            _lib.TensorRange(*at.of(field, tensor, o.kv_heads, o.head_dim, (o.dtype, "uint16"), True))
            for field, tensor in (("k", k), ("v", v))
        ]
        return entries, *places, at.owners

    # Whole blocks, for engines that encode and decode pages themselves (page_codec.py). Of caches in host memory.

    def read_blocks(self, names: BlockNames, pages: ArenaTensor, first: int = 0) -> BlocksRead:
        """Copies the blocks of `names`, of which the first is block `first` of its sequence, into `pages`: as many as are
        found, one behind the other, and fit. Pages follow one another block by block, and of a block layer by layer, each
        from the next multiple of 64 bytes on, in the form in which they are stored."""
        return self.read_blocks_async(names, pages, first).wait()

    def read_blocks_async(self, names: BlockNames, pages: ArenaTensor, first: int = 0) -> Pending[BlocksRead]:
        """The same, to be waited for later: `pages` is written until then, and a little longer if nobody waits."""
        place, pending = _range_of(pages), c_void_p()
        first = integer("first", first, 0, _UINT32_MAX)
        check(lib.kvm_read_blocks_async(self._object, first, checked(names).data, len(names), place, byref(pending)))

        def finish(values: Any, made: Any) -> BlocksRead:
            raw = bytes(digit == "1" for digit in _lib.result()["raw"])
            return BlocksRead(values[0], miss_reason(values[1]), values[2], raw)

        return Pending(pending.value, finish, (pages, self))

    def map_blocks_async(
        self, names: BlockNames, pages: ArenaTensor | None = None, first: int = 0, device: int = -1
    ) -> Pending[BlocksMapped]:
        """read_blocks without copying what lies in the daemon's memory that this process may map: its addresses are given
        instead, and the pages held there meanwhile. `pages` gets the others; without it, blocks end at the first of these.
        device: this process's GPU, by its number here, for which mapped memory is pinned (the first that a client names;
        0.06 s a GiB, once); -1: none. RuntimeWarning, once: it cannot be pinned, and copies are slower.

        UnimplementedError: the daemon lacks the feature "map-blocks". FailedPreconditionError: no Unix socket, or memory
        that is not to be mapped (any more). Of both, use read_blocks_async."""
        place, pending = None if pages is None else _range_of(pages), c_void_p()
        first, device = integer("first", first, 0, _UINT32_MAX), integer("device", device, -1, _INT32_MAX)
        call = lib.kvm_map_blocks_async
        check(call(self._object, first, checked(names).data, len(names), place, device, byref(pending)))

        def finish(values: Any, made: Any) -> BlocksMapped:
            said = _lib.text()
            mapped = BlocksMapped((pages, self), made, values[0], miss_reason(values[1]), values[2])
            if said:
                warn_unpinned(said)
            return mapped

        return Pending(pending.value, finish, (pages, self))

    def bind_slabs(self, nbytes: int, device: int = -1) -> int:
        """Maps up to `nbytes` of the daemon's memory for this cache's tenant before it is needed, pinned as by
        map_blocks_async, so that loads need not wait for that: of a daemon that nobody else uses 7/8 of its pool, else half.
        Returns how many bytes are mapped now. Memory that is mapped stays the tenant's.

        UnimplementedError, FailedPreconditionError: as of map_blocks_async. ResourceExhaustedError: this process cannot map,
        or not pin, as much."""
        mapped = c_uint64()
        nbytes, device = integer("nbytes", nbytes, 0, _UINT64_MAX), integer("device", device, -1, _INT32_MAX)
        check(lib.kvm_bind_slabs(self._object, nbytes, device, byref(mapped)))
        return mapped.value

    def write_blocks(
        self, names: BlockNames, raw: bytes, pages: ArenaTensor, first: int = 0, checksums: bytes = b""
    ) -> BlocksWritten:
        """Stores and names the blocks of `names` that the daemon does not have, from `pages`, where they lie as in
        read_blocks; also on a GPU of the daemon (Device.create_arena), whose copy engines then bring them to their place: UnavailableError
        until the daemon has pinned its memory, also for no names. raw: [names][layers], 1 where a page is raw, else 0. The daemon
        checks its own copy of what it takes: InvalidArgumentError or DataLossError name a page that is wrong, and nothing is stored
        then. checksums: of pages on a GPU, [names][layers] XXH3-64 of 8 bytes each, which the daemon then need not make of encoded
        pages, and compares when they are first used; or empty."""
        return self.write_blocks_async(names, raw, pages, first, checksums).wait()

    def write_blocks_async(
        self, names: BlockNames, raw: bytes, pages: ArenaTensor, first: int = 0, checksums: bytes = b""
    ) -> Pending[BlocksWritten]:
        """The same, to be waited for later; `pages` must stay as it is until then."""
        place, pending, raw = _range_of(pages), c_void_p(), data("raw", raw)
        checksums = data("checksums", checksums)
        if len(checksums) not in (0, 8 * len(raw)):
            raise invalid("checksums", f"{len(checksums)} bytes", f"empty, or {8 * len(raw)} bytes")
        first = integer("first", first, 0, _UINT32_MAX)
        check(
            lib.kvm_write_blocks_async(
                self._object, first, checked(names).data, len(names), raw, len(raw), checksums or None, place, byref(pending)
            )
        )
        return Pending(pending.value, lambda values, made: BlocksWritten(values[0], values[1]), (pages, self))

    def output_factors(self, layer: int) -> array.array[float] | None:
        """[kv_heads][head_dim][head_dim] float32 where steps of this layer leave outputs in the codec's space: an
        output o' of a query head stands for A o', A being its KV head's. None: outputs are as usual."""
        o, layer = self.description.options, integer("layer", layer, 0, _INT32_MAX)
        factors = array.array("f", bytes(4 * o.kv_heads * o.head_dim * o.head_dim))
        folds = c_int()
        address, count = factors.buffer_info()
        check(lib.kvm_output_factors(self._object, layer, address, count, byref(folds)))
        return factors if folds.value else None


class _Places:
    """Where a call's tensors lie, once they were found right. `dtype` is the last one's."""

    __slots__ = ("tokens", "on_device", "owners", "dtype")

    def __init__(self, tokens: int, on_device: bool) -> None:
        self.tokens = tokens
        self.on_device = on_device
        self.owners: list[object] = []  # of the tensors' memory

    def of(
        self, field: str, tensor: Any, heads: int, width: int, dtypes: tuple[str, ...], written: bool = False
    ) -> tuple[int, int]:
        """(address, bytes) of [tokens][heads][width]; none of None."""
        if tensor is None:
            return _NONE
        address, _, self.dtype, on_device, writable, owner = rows(field, tensor, self.tokens, heads, width, dtypes)
        if on_device != self.on_device:
            bound = "in a device arena, as its cache is on a GPU" if self.on_device else "in host memory, as its cache is"
            raise invalid(field, "on a GPU" if on_device else "in host memory", bound)
        if not address and self.tokens:  # torch's meta and fake tensors
            raise invalid(field, "a tensor without memory", "in memory")
        if written and not writable:
            raise invalid(field, "read-only", "writable")
        self.owners.append(owner)
        return address, self.tokens * heads * width * ITEM_BYTES[self.dtype]


def _read_result(values: Any, made: Any) -> ReadResult:
    return ReadResult(values[0], values[1])


def _step_result(values: Any, made: Any) -> StepResult:
    return StepResult(*values)


def miss_reason(number: int) -> str:
    return MISS_REASONS[number] if 0 <= number < len(MISS_REASONS) else "not_found"


def _counted(field: str, values: Iterable[int], count: int) -> list[int]:
    given = [integer(field, value) for value in values]
    if len(given) != count:
        raise invalid(f"{field} (length)", len(given), f"{count}, one per prefix")
    return given


def _range_of(pages: ArenaTensor) -> _lib.TensorRange:
    if not hasattr(pages, "arena"):
        raise invalid("pages", type(pages).__name__, "a tensor of an arena: arena.tensor((nbytes,), 'uint8')")
    return _lib.TensorRange(pages.data_ptr(), pages.nbytes)


def _retained(call: Any, *of: Any, names: BlockNames, priority: int, ttl_ms: int) -> Retained:
    """What kvm_retain or its like, of what `of` says, answers."""
    values = (c_uint64 * 3)()
    priority, ttl_ms = integer("priority", priority, 0, 100), integer("ttl_ms", ttl_ms, 0, _INT64_MAX)
    check(call(*of, checked(names).data, len(names), priority, ttl_ms, values))
    return Retained(values[0], values[1])


def _match(result: _lib.MatchResult) -> PrefixMatch:
    return PrefixMatch(result.hit_blocks, miss_reason(result.reason), result.in_memory)


def _prefetched(call: Any, *of: Any, names: BlockNames) -> PrefixMatch:
    """What kvm_prefetch or its like, of what `of` says, answers."""
    result = _lib.MatchResult()
    check(call(*of, checked(names).data, len(names), result))
    return _match(result)


def _prefixes(prefixes: Iterable[BlockNames | None]) -> tuple[bytes, ctypes.Array[c_uint32], int]:
    given = [BlockNames() if each is None else checked(each) for each in prefixes]
    return b"".join(each.data for each in given), (c_uint32 * len(given))(*map(len, given)), len(given)


def _token_ids(token_ids: Any) -> array.array[int]:
    tolist = getattr(token_ids, "tolist", None)
    if tolist is not None:
        token_ids = tolist()
    try:
        return array.array("I", token_ids)
    except (OverflowError, TypeError) as error:
        raise InvalidArgumentError(f"token_ids: {error}; integers of 0..2**32-1 are expected", "token_ids") from error
