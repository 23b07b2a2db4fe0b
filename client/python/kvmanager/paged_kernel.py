"""One kernel that copies blocks of all layers between an engine's paged caches and raw pages, on a GPU. Needs Triton, which
comes with torch there.

Layer by layer, torch takes four kernels for K and V of a layer, and the engine's thread waits for Python's lock meanwhile.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_WORD = 8  # bytes that a thread moves at a time
_TOKENS = 16  # that a program moves


@triton.jit(do_not_specialize=["count"])
def _move(
    raw,  # [count][layers][2][heads][tokens][words]
    sides,  # [layers][2] addresses of K and V of block 0
    groups,  # [layers]
    ids,  # [groups][count]; 0: no block, which is left alone
    count,
    layers,
    heads,
    tokens,
    piece_tokens,
    words,
    block_stride,  # strides of a cache, in words
    piece_stride,
    token_stride,
    head_stride,
    INTO_CACHE: tl.constexpr,
    TOKENS: tl.constexpr,
    WORDS: tl.constexpr,
):
    page = tl.program_id(0)  # of a head
    head = page % heads
    side = page // heads % 2
    layer = page // heads // 2 % layers
    block = page // heads // 2 // layers
    place = tl.load(ids + tl.load(groups + layer) * count + block)
    token = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    word = tl.arange(0, WORDS)
    mask = (token < tokens)[:, None] & (word < words)[None, :] & (place != 0)
    cache = tl.load(sides + layer * 2 + side).to(tl.pointer_type(tl.int64))
    row = place * block_stride + token // piece_tokens * piece_stride + token % piece_tokens * token_stride
    there = cache + (row + head * head_stride)[:, None] + word[None, :]
    here = raw + page.to(tl.int64) * tokens * words + token[:, None] * words + word[None, :]
    if INTO_CACHE:
        tl.store(there, tl.load(here, mask=mask), mask=mask)
    else:
        tl.store(here, tl.load(there, mask=mask), mask=mask)


class PagedKernel:
    """Of one set of caches.

    views: per layer (K, V), each [blocks][pieces][tokens of a piece][heads][head_dim]. groups: per layer its group of block
    ids. ValueError: caches that it cannot copy."""

    def __init__(self, views: list[tuple[torch.Tensor, torch.Tensor]], groups: list[int]) -> None:
        first = views[0][0]
        size = first.element_size()
        _, pieces, piece_tokens, heads, head_dim = first.shape
        strides = first.stride()
        for side in (side for both in views for side in both):
            if side.shape != first.shape or side.stride() != strides or side.dtype != first.dtype:
                raise ValueError("layers have caches of different shapes")
            if side.data_ptr() % _WORD:
                raise ValueError("a cache begins within a word")
        if strides[-1] != 1 or any(stride * size % _WORD for stride in strides[:-1]) or head_dim * size % _WORD:
            raise ValueError("rows of the caches are no whole words")
        device = first.device
        self._sides = torch.tensor([[side.data_ptr() for side in both] for both in views], dtype=torch.int64, device=device)
        self._groups = torch.tensor(groups, dtype=torch.int64, device=device)
        words = head_dim * size // _WORD
        self._layers, self._heads, self._tokens = len(views), heads, pieces * piece_tokens
        self._shape = (piece_tokens, words, *(stride * size // _WORD for stride in strides[:-1]))
        self._words = triton.next_power_of_2(words)
        # Compiled now, not in the first step: a block that is none.
        nothing = torch.zeros((max(groups) + 1, 1), dtype=torch.int64, device=device)
        page = torch.zeros(len(views) * 2 * heads * self._tokens * words, dtype=torch.int64, device=device)
        for into_cache in (False, True):
            self(page, nothing, 1, into_cache)
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()

    def __call__(self, raw: torch.Tensor, ids: torch.Tensor, count: int, into_cache: bool) -> None:
        """Copies `count` blocks on the current stream. raw: [blocks][layers][2][heads][tokens][head_dim], contiguous, on the
        device. ids: [groups][count] of int64 there; 0: none."""
        grid = (count * self._layers * 2 * self._heads, triton.cdiv(self._tokens, _TOKENS))
        _move[grid](
            raw.view(torch.int64),
            self._sides,
            self._groups,
            ids,
            count,
            self._layers,
            self._heads,
            self._tokens,
            *self._shape,
            INTO_CACHE=into_cache,
            TOKENS=_TOKENS,
            WORDS=self._words,
        )


__all__ = ["PagedKernel"]
