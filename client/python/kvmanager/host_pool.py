"""A host pool of SGLang's as kvmanager sees it: K and V by page, its cache's identity, and copies of pages by several threads.

Pages of a pool and rows of an arena have their tokens, layers and heads in different orders, so that a page is copied in rows of
some kilobytes. One thread copies 2 to 3 GB/s so; the daemon reads and writes several times as fast.
"""

from __future__ import annotations

import concurrent.futures
import hashlib
import os
from typing import Any, Callable, Iterable, Sequence, Tuple

import numpy
import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig

from .paged import Extent, Staging

_DTYPES = {torch.float16: "float16", torch.bfloat16: "bfloat16"}
_THREADS_MAX = 8  # of copies
PIECE_BYTES = 128 << 20  # of pages that are copied while those before are read or written
PIECE_PAGES_MAX = 4096

Sides = Tuple[torch.Tensor, torch.Tensor]  # K and V of a page, each [layers][page tokens][heads][head_dim]


class Pool:
    """A host pool of SGLang that has K and V: views of it by page, and its cache's identity. ValueError: it has another
    shape."""

    def __init__(self, host_pool: Any, config: HiCacheStorageConfig, name: str, settings: dict) -> None:
        self.layout = getattr(host_pool, "layout", None)
        self.page_tokens = host_pool.page_size
        layers, heads = getattr(host_pool, "layer_num", None), getattr(host_pool, "head_num", None)
        width = getattr(host_pool, "head_dim", None)
        buffer = getattr(host_pool, "kv_buffer", None)
        if None in (layers, heads, width) or not isinstance(buffer, torch.Tensor):
            raise ValueError(f"{type(host_pool).__name__} has no K and V by head")
        if getattr(host_pool, "v_head_dim", width) != width:
            raise ValueError(f"v_head_dim is {host_pool.v_head_dim}, must be {width}")
        if buffer.dtype not in _DTYPES:
            raise ValueError(f"dtype is {buffer.dtype}, must be float16 or bfloat16")
        if self.page_tokens not in range(16, 257, 16):
            raise ValueError(f"page_size is {self.page_tokens}, must be a multiple of 16 in 16..256")
        self.shape = (layers, self.page_tokens, heads, width)
        self.dtype = buffer.dtype
        self.sides = tuple(self._by_page(buffer[side]) for side in range(2))
        self.pages = self.sides[0].shape[0]
        self.page_bytes = 2 * layers * self.page_tokens * heads * width * buffer.dtype.itemsize
        place = f"pp={config.pp_rank}/{config.pp_size}"
        if getattr(config, "attn_cp_size", 1) > 1:
            place += f",cp={config.attn_cp_rank}/{config.attn_cp_size}"
        model = config.model_name or "model"
        if len(model.encode()) > 256 or not model.isprintable():
            model = "sha256:" + hashlib.sha256(model.encode()).hexdigest()
        self.options = {
            "model": model,
            "revision": f"sglang:{place},pool={name}",
            "tenant": settings["tenant"],
            "layers": layers,
            "kv_heads": heads,
            "query_heads": heads,
            "head_dim": width,
            "page_tokens": self.page_tokens,
            "dtype": _DTYPES[buffer.dtype],
            "codec": settings["codec"],
            "lag_pages": settings["lag_pages"],
            "calibration_digest": settings["calibration_digest"],
            "tensor_parallel_rank": config.tp_rank,
            "tensor_parallel_size": config.tp_size,
        }

    def _by_page(self, side: torch.Tensor) -> torch.Tensor:
        """K or V of all pages as a view [pages][layers][page tokens][heads][head_dim]."""
        if self.layout == "layer_first":
            return side.unflatten(1, (-1, self.page_tokens)).transpose(0, 1)
        if self.layout == "page_first":
            return side.unflatten(0, (-1, self.page_tokens)).transpose(1, 2)
        if self.layout == "page_first_direct":
            return side
        if self.layout == "page_head":
            return side.permute(0, 3, 2, 1, 4)
        raise ValueError(f"layout is {self.layout}, must be layer_first, page_first, page_first_direct or page_head")

    def flat_views(self, page: torch.Tensor) -> Sides:
        """Views of a flat page, as SGLang makes and takes them."""
        layers, tokens, heads, width = self.shape
        if self.layout == "page_first":
            both = page.view(2, tokens, layers, heads, width).transpose(1, 2)
        elif self.layout == "page_head":
            both = page.view(2, heads, tokens, layers, width).permute(0, 3, 2, 1, 4)
        else:
            both = page.view(2, layers, tokens, heads, width)
        return both[0], both[1]

    def page(self, number: int) -> Sides:
        """Views of a page of the pool."""
        return self.sides[0][number], self.sides[1][number]

    def rows(self, extent: Extent, place: int) -> Sides:
        """Views of page `place` of an extent."""
        layers, tokens, heads, width = self.shape
        sides = (extent.side(side).view(layers, extent.blocks, tokens, heads, width) for side in range(2))
        key, value = (side[:, place] for side in sides)
        return key, value


def strides_of(pages: Sequence[Sides]) -> tuple[int, int, int] | None:
    """Bytes between layers, tokens and heads of K and V of pages; None: they differ, or heads' rows have gaps."""
    first = pages[0][0]
    strides = first.stride()
    if strides[-1] != 1 or any(side.stride() != strides for page in pages for side in page):
        return None
    layer, token, head = (stride * first.element_size() for stride in strides[:3])
    return layer, token, head


class Copies:
    """Copies of pages under way: wait() before either side is used, or given back."""

    def __init__(self, futures: list[concurrent.futures.Future]) -> None:
        self._futures = futures

    def wait(self) -> None:
        concurrent.futures.wait(self._futures)
        for each in self._futures:
            each.result()


class PageCopier:
    """Threads that copy pages. Python's lock is free meanwhile, and torch's own threads, which the engine uses, are left alone."""

    def __init__(self) -> None:
        cores = len(os.sched_getaffinity(0))
        self.threads = max(1, min(_THREADS_MAX, cores // 2))
        self._pool = concurrent.futures.ThreadPoolExecutor(self.threads, "kvmanager copies")

    def begin(self, pages: Iterable[tuple[Sides, Sides]]) -> Copies:
        """pages: (to, from), in host memory, of one shape; their last dimension is contiguous."""
        pairs = [(_words(to[side]), _words(source[side])) for to, source in pages for side in range(2)]
        size = -(-len(pairs) // self.threads)
        parts = [pairs[begin : begin + size] for begin in range(0, len(pairs), max(1, size))]
        return Copies([self._pool.submit(_copy, part) for part in parts])

    def close(self) -> None:
        self._pool.shutdown()


def _copy(pairs: list[tuple[numpy.ndarray, numpy.ndarray]]) -> None:
    for to, source in pairs:
        numpy.copyto(to, source)


def _words(tensor: torch.Tensor) -> numpy.ndarray:
    """The tensor's memory: numpy neither knows bfloat16 nor refuses tensors that were made in inference mode."""
    return tensor.detach().view(torch.int64 if tensor.shape[-1] % 4 == 0 else torch.int16).numpy()


class Piece:
    """Some pages on their way through an extent. places: their numbers, whoever counts them."""

    def __init__(self, extent: Extent, places: list[int]) -> None:
        self.extent, self.places = extent, places
        self.copies = Copies([])


class Pieces:
    """Pages are cut into pieces. While one is copied, the one before is finished. A context manager: the last is
    finished, too, unless there was an error; nobody copies any more behind it."""

    def __init__(self, staging: Staging, finish: Callable[[Piece], None]) -> None:
        self._staging, self._finish = staging, finish
        self._under_way: list[Piece] = []
        most = min(max(1, PIECE_BYTES // staging.block_bytes), PIECE_PAGES_MAX)
        # Two of a third each: wherever one lies, there is room for the other.
        self._at_once, parts = (2, 3) if staging.blocks >= 3 else (1, 1)
        self._size = min(most, staging.blocks // parts)

    def cut(self, places: Sequence[int]) -> list[list[int]]:
        return [list(places[begin : begin + self._size]) for begin in range(0, len(places), self._size)]

    def take(self, places: list[int]) -> Piece:
        while len(self._under_way) >= self._at_once:
            self._end_first()
        extent = self._staging.take(len(places))
        assert extent is not None  # pieces have at most their part of the staging
        self._under_way.append(Piece(extent, places))
        return self._under_way[-1]

    def _end_first(self) -> None:
        self._finish(self._under_way[0])
        self._under_way.pop(0).extent.close()

    def __enter__(self) -> Pieces:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        try:
            while self._under_way and kind is None:
                self._end_first()
        finally:
            for piece in self._under_way:
                try:
                    piece.copies.wait()
                finally:
                    piece.extent.close()


__all__ = ["Copies", "PageCopier", "Piece", "Pieces", "Pool", "Sides", "strides_of"]
