"""Pages of a cache, encoded and decoded in this process: what Cache.read_blocks reads and Cache.write_blocks writes.

    codec = kv.PageCodec(cache, device=torch.cuda.current_device())
    codec.encode(items, declined, stream)

A raw page is [K, V][kv_heads][page_tokens][head_dim] of the cache's dtype. Addresses are integers (tensor.data_ptr())."""

from __future__ import annotations

from ctypes import byref, c_void_p
from typing import Any

from . import _lib
from ._lib import Handle, check, lib
from .cache import Cache
from .errors import encoded, integer

ENCODE_ITEM_BYTES = 32  # u64 raw, u64 encoded, u64 first token of the page in its context, u32 layer, u32 0
DECODE_ITEM_BYTES = 24  # u64 encoded, u64 raw, u32 layer, u32 0
PAGE_ALIGN = 64  # of pages in a range of read_blocks and write_blocks


class PageCodec(Handle):
    """Made from a cache that is open, for this process's GPU `device`, or the CPU (-1).

    identity: pages are stored raw, and neither encode nor decode may be called. raw_bytes: of a raw page; page_bytes: of
    an encoded page of each layer. UnavailableError: the codec has no kernels for that GPU. calibration_dir: where the
    artifact lies that the codec names. It belongs to its client's thread."""

    __slots__ = ("cache", "device", "raw_bytes", "page_bytes", "identity", "sink_tokens", "raw_layers")

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


__all__ = ["DECODE_ITEM_BYTES", "ENCODE_ITEM_BYTES", "PAGE_ALIGN", "PageCodec"]
