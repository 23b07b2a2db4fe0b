"""Pages of a cache, encoded and decoded in this process: what Cache.read_blocks reads, Cache.map_blocks_async maps and
Cache.write_blocks writes.

    codec = kv.PageCodec(cache, device=torch.cuda.current_device())
    codec.encode(items, declined, stream)

A raw page is [K, V][kv_heads][page_tokens][head_dim] of the cache's dtype. Addresses are integers (tensor.data_ptr())."""

from __future__ import annotations

import array
from ctypes import byref, c_uint64, c_void_p, create_string_buffer
from typing import Any, Sequence

from . import _lib
from ._lib import BringRoom, Brought, Handle, PagedCaches, PagedSave, Rows, check, lib
from .blocks_mapped import warn_unpinned
from .cache import Cache
from .errors import encoded, integer, invalid
from .names import BlockHashes, BlockNames

ENCODE_ITEM_BYTES = 32  # u64 raw, u64 encoded, u64 first token of the page in its context, u32 layer, u32 0
DECODE_ITEM_BYTES = 24  # u64 encoded, u64 raw, u32 layer, u32 0
PAGE_ALIGN = 64  # of pages in a range of read_blocks and write_blocks
LOADED, MISSING, UNMAPPED = 0, 1, 2  # results of load_rows


class PageCodec(Handle):
    """Made from a cache that is open, for this process's GPU `device`, or the CPU (-1).

    identity: pages are stored raw, and neither encode nor decode may be called. copies: copy_pages and hash_pages may be;
    False of identity alone, where this GPU is none of those that are used here. raw_bytes: of a raw page; page_bytes: of
    an encoded page of each layer. UnavailableError: the codec has no kernels for that GPU. calibration_dir: where the
    artifact lies that the codec names. It belongs to its client's thread."""

    __slots__ = ("cache", "device", "raw_bytes", "page_bytes", "identity", "copies", "sink_tokens", "raw_layers")

    def __init__(self, cache: Cache, device: int = -1, calibration_dir: str = "") -> None:
        super().__init__(None)
        self.cache = cache
        self.device = integer("device", device, -1, 2**31 - 1)
        where, made = encoded("calibration_dir", calibration_dir), c_void_p()
        check(lib.kvm_create_page_codec(cache._object, where, len(where), self.device, byref(made)))
        self._object = made.value
        said: dict[str, Any] = _lib.result()
        self.raw_bytes: int = said["raw_bytes"]
        self.page_bytes: list[int] = said["page_bytes"]
        self.identity: bool = said["identity"]
        self.copies: bool = said["copies"]
        self.sink_tokens: int = said["sink_tokens"]
        self.raw_layers: list[bool] = said["raw_layers"]

    def keeps_raw(self, layer: int, first_token: int) -> bool:
        """Whether the page of `layer` that begins at this position of its context is never encoded."""
        if self.identity:
            return False
        return first_token < self.sink_tokens or bool(self.raw_layers and self.raw_layers[layer])

    def encode(self, items: int, count: int, declined: int, stream: int = 0) -> None:
        """items: address of [count] items of ENCODE_ITEM_BYTES; declined: of [count] u32, 1 where the page cannot be
        encoded and stays raw. On a GPU both are in pinned memory, and stay until `stream` has passed them; on the CPU it
        is done when this returns."""
        check(lib.kvm_encode_pages(self._object, items, count, declined, stream))

    def decode(self, items: int, count: int, stream: int = 0) -> None:
        """items: address of [count] items of DECODE_ITEM_BYTES, as encode's."""
        check(lib.kvm_decode_pages(self._object, items, count, stream))

    def copy_pages(self, sources: int, nbytes: int, count: int, to: int, stream: int = 0) -> int:
        """Copies pages from host memory to `to`, one behind the other, each from the next multiple of PAGE_ALIGN bytes on,
        as read_blocks has them. sources, nbytes: addresses of [count] u64 each, where a page begins and its size; both are
        read when this returns. Pages that lie so already are copied at once, with what is between them: how many copies
        were made is returned. On a GPU `to` is its memory and the copies are only begun, on `stream`; on the CPU they are
        done. UnavailableError: not `copies`."""
        runs = c_uint64()
        check(lib.kvm_copy_pages(self._object, sources, nbytes, count, to, stream, byref(runs)))
        return runs.value

    def hash_pages(self, addresses: int, nbytes: int, count: int, out: int, stream: int = 0) -> None:
        """The XXH3-64 of pages, as the daemon keeps them. addresses, nbytes: of [count] u64 each, read when this returns;
        out: of [count] u64. On a GPU on `stream`: pages and `out` are in its memory or pinned memory, pages from a multiple
        of 16 on and of at least 241 bytes. On the CPU it is done when this returns. UnavailableError: not `copies`."""
        check(lib.kvm_hash_pages(self._object, addresses, nbytes, count, out, stream))

    def load_rows(
        self, names: BlockNames, k: Sequence[int], v: Sequence[int], strides: tuple[int, int, int], threads: int
    ) -> bytes:
        """Brings blocks, each the first of a sequence of its own, out of the daemon's memory to rows in host memory, by up to
        `threads` (1..64) threads of its own, without Python's lock: each page is copied, compared with its checksum, decoded
        and spread. k, v: by block the address of layer 0, token 0, head 0; strides: bytes between layers, tokens and heads, each
        of whose rows are head_dim values. A result for each block: LOADED; MISSING, also if its bytes were wrong; UNMAPPED: it
        lies in memory that is not to be mapped, or is still to be encoded, and can be read otherwise. Rows of the last two hold anything.

        Of the CPU alone. Errors: as of Cache.map_blocks_async; then nothing is loaded."""
        if not len(k) == len(v) == len(names):
            raise invalid("k, v (blocks)", f"{len(k)}, {len(v)}", f"{len(names)}, as names")
        addresses = array.array("Q", k), array.array("Q", v)
        results = create_string_buffer(len(names))
        rows = Rows(*(each.buffer_info()[0] for each in addresses), *strides)
        threads = integer("threads", threads, 1, 64)
        check(lib.kvm_load_rows(self._object, self.cache._object, byref(rows), names.data, len(names), threads, results))
        return results.raw

    # Blocks of an engine's paged caches on the codec's GPU, for paged_blocks.py.

    def set_paged(self, caches: PagedCaches) -> None:
        """FailedPreconditionError: of the CPU. InvalidArgumentError: of other pages than the cache's."""
        check(lib.kvm_set_paged(self._object, byref(caches)))

    def bring_blocks(
        self, cache: Cache, room: BringRoom, first: int, hashes: BlockHashes, ids: array.array[int], groups: int
    ) -> tuple[int, int, int]:
        """Of a cache with the same pages. Blocks that were brought, why no more by its number, bytes that were copied. Waits for the daemon
        and the GPU."""
        brought, address = Brought(), ids.buffer_info()[0]
        call = lib.kvm_bring_blocks
        check(call(self._object, cache._object, byref(room), first, byref(hashes.given()), address, groups, byref(brought)))
        if said := _lib.text():
            warn_unpinned(said)
        return brought.blocks, brought.reason, brought.nbytes

    def save_blocks(self, save: PagedSave) -> int:
        """Only begun; returns the bytes of the range that they take."""
        nbytes = c_uint64()
        check(lib.kvm_save_blocks(self._object, byref(save), byref(nbytes)))
        return nbytes.value


__all__ = ["DECODE_ITEM_BYTES", "ENCODE_ITEM_BYTES", "LOADED", "MISSING", "PAGE_ALIGN", "UNMAPPED", "PageCodec"]
