"""transformers' attention with K and V of older tokens through a codec's arithmetic, the newest and the first ones raw.

    paged = PagedAttention.register()                    # attn_implementation="quality_paged"
    paged.use(Decoded(peer("kivi2"), sinks=64, near=pages_near(2)))

One sequence a call, from its beginning: a query attends to all keys up to its own, as in decode, so one forward pass
gives what token-by-token decoding would. K and V are rounded to fp16 first, as pages hold them.
"""

from __future__ import annotations

import math
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from transformers import AttentionInterface, AttentionMaskInterface

from quantisers import PAGE, Hack, Near, Peer, hadamard

NAME = "quality_paged"
_LEAST = 1e-30  # what a row's largest value is divided by where all are zero
_QUERIES = {"cpu": 256, "cuda": 1024}  # of a chunk: scores of all keys are held for that many


class Arithmetic(Protocol):
    """How queries of one layer attend. prepare() once per layer and forward pass, attend() per chunk of queries."""

    def prepare(self, k: torch.Tensor, v: torch.Tensor) -> Any: ...

    def attend(self, prepared: Any, q: torch.Tensor, first: int, scale: float, window: int | None) -> torch.Tensor:
        """q [kv_heads][group][queries][d] at positions first... -> outputs of the same shape. window: tokens that a query
        of a sliding layer sees, its own included."""


def _positions(q: torch.Tensor, first: int, keys: int) -> tuple[torch.Tensor, torch.Tensor]:
    return (torch.arange(first, first + q.size(2), device=q.device)[:, None], torch.arange(keys, device=q.device)[None])


def _hidden(query: torch.Tensor, key: torch.Tensor, window: int | None) -> torch.Tensor:
    hidden = key > query
    return hidden if window is None else hidden | (query - key >= window)


def _times(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """q [kv_heads][group][queries][d], k [kv_heads][keys][d] -> [kv_heads][group][queries][keys]"""
    heads, group, queries, d = q.shape
    return (q.reshape(heads, group * queries, d) @ k.transpose(-1, -2)).view(heads, group, queries, -1)


def _weighted(p: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    heads, group, queries, keys = p.shape
    return (p.reshape(heads, group * queries, keys) @ v).view(heads, group, queries, -1)


class Decoded:
    """A peer: attention on what its codes decode to. sinks: tokens that stay raw at the beginning."""

    def __init__(self, peer: Peer, *, sinks: int, near: tuple[Near, Near]):
        self._peer, self._sinks, self._near = peer, sinks, near

    def prepare(self, k: torch.Tensor, v: torch.Tensor) -> Any:
        sinks, tokens = min(self._sinks, k.size(1)), k.size(1)
        k_end = tokens - (tokens - sinks) % self._peer.k_group
        coded_k, coded_v = k.clone(), v.clone()
        if k_end > sinks:
            coded_k[:, sinks:k_end] = self._peer.k(k[:, sinks:k_end].contiguous())
        if tokens > sinks:
            coded_v[:, sinks:] = self._peer.v(v[:, sinks:].contiguous())
        return k, v, coded_k, coded_v

    def attend(self, prepared: Any, q: torch.Tensor, first: int, scale: float, window: int | None) -> torch.Tensor:
        end = first + q.size(2)
        k, v, coded_k, coded_v = (each[:, :end] for each in prepared)
        query, key = _positions(q, first, end)
        near_k, near_v = (near(query, key) for near in self._near)
        scores = torch.where(near_k, _times(q, k), _times(q, coded_k)) * scale
        p = scores.masked_fill(_hidden(query, key, window), -math.inf).softmax(-1)
        return _weighted(torch.where(near_v, 0.0, p), coded_v) + _weighted(torch.where(near_v, p, 0.0), v)


class Homomorphic:
    """hack, as the daemon attends: per page, steps folded into q and q coded in s8; P, times V's norms, coded in u8 against
    the page's largest; integer products; one rotation of q before and of the output behind."""

    def __init__(self, codec: Hack, *, sinks: int, lag: int):
        self._codec, self._sinks, self._lag = codec, sinks, lag

    def prepare(self, k: torch.Tensor, v: torch.Tensor) -> Any:
        end = k.size(1) - k.size(1) % PAGE
        if end <= self._sinks:
            return k, v, None, None
        return k, v, self._codec.encode(k[:, self._sinks : end], False), self._codec.encode(v[:, self._sinks : end], True)

    def attend(self, prepared: Any, q: torch.Tensor, first: int, scale: float, window: int | None) -> torch.Tensor:
        k, v, coded_k, coded_v = prepared
        end = first + q.size(2)
        query, key = _positions(q, first, end)
        scores = _times(q, k[:, :end])
        pages = 0 if coded_k is None else max(0, (end - 1) // PAGE - self._lag - self._sinks // PAGE)
        far = (query // PAGE - key // PAGE > self._lag) & (key >= self._sinks)
        coded = slice(self._sinks, self._sinks + pages * PAGE)
        if pages:
            scores[..., coded] = torch.where(far[:, coded], self._scores(q, coded_k, pages), scores[..., coded])
        p = (scores * scale).masked_fill(_hidden(query, key, window), -math.inf).softmax(-1)
        out = _weighted(torch.where(far, 0.0, p), v[:, :end])
        if pages:
            out += self._outputs(torch.where(far, p, 0.0)[..., coded], coded_v, pages)
        return out

    def _scores(self, q: torch.Tensor, side: Any, pages: int) -> torch.Tensor:
        heads, group, queries, d = q.shape
        rows = q.reshape(heads, 1, -1, d)
        if self._codec.rotation:
            rows = rows @ hadamard(d).to(q.device)
        folded = rows * side.steps[:, :pages, None]  # [heads][pages][rows][d]
        top = folded.abs().amax(-1, keepdim=True)
        folded.mul_(127 / top.clamp_min(_LEAST)).round_()
        products = folded @ side.codes[:, :pages].transpose(-1, -2) * (top / 127)
        scores = products + (rows[:, 0] @ side.minima[:, :pages].transpose(-1, -2)).transpose(-1, -2)[..., None]
        return scores.transpose(1, 2).reshape(heads, group, queries, pages * PAGE)

    def _outputs(self, p: torch.Tensor, side: Any, pages: int) -> torch.Tensor:
        heads, group, queries, _ = p.shape
        rows = p.reshape(heads, group * queries, pages, PAGE)
        if side.norms is not None:
            rows = rows * side.norms[:, None, :pages]
        unit = rows.amax(-1, keepdim=True) / 255
        coded = (rows / unit.clamp_min(_LEAST)).round_().mul_(unit).flatten(2)
        # What the integers add up to: code * step + minimum, each times coded p.
        out = coded @ (side.codes * side.steps[:, :, None] + side.minima[:, :, None])[:, :pages].flatten(1, 2)
        if self._codec.rotation:
            out = out @ hadamard(out.size(-1)).to(out.device)
        return out.view(heads, group, queries, -1)


class PagedAttention:
    """The attention function; `use(None)` is raw."""

    def __init__(self) -> None:
        self._arithmetic: Arithmetic | None = None

    @classmethod
    def register(cls) -> PagedAttention:
        made = cls()
        AttentionInterface.register(NAME, made)
        AttentionMaskInterface.register(NAME, lambda **_: None)
        return made

    def use(self, arithmetic: Arithmetic | None) -> None:
        self._arithmetic = arithmetic

    def __call__(self, module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any,
                 dropout: float = 0.0, scaling: float | None = None, sliding_window: int | None = None,
                 **_: Any) -> tuple[torch.Tensor, None]:
        """query [1][heads][tokens][d], key and value [1][kv_heads][tokens][d]. Returns [1][tokens][heads][d]."""
        if query.size(0) != 1 or query.size(2) != key.size(2):
            raise ValueError(f"query: {list(query.shape)} beside keys {list(key.shape)}; must be one whole sequence")
        dtype, (_, heads, tokens, d) = query.dtype, query.shape
        q, k, v = query[0].float(), key[0].half().float(), value[0].half().float()
        if not (torch.isfinite(k).all() and torch.isfinite(v).all()):
            raise ValueError(f"layer {module.layer_idx}: K or V does not fit fp16")
        scale, kv_heads = d**-0.5 if scaling is None else scaling, k.size(0)
        if self._arithmetic is None and sliding_window is None:
            out = F.scaled_dot_product_attention(q[None], *(x.repeat_interleave(heads // kv_heads, 0)[None] for x in (k, v)),
                                                 is_causal=True, scale=scale)
            return out.transpose(1, 2).to(dtype), None
        arithmetic = self._arithmetic or _Raw()
        prepared, q = arithmetic.prepare(k, v), q.view(kv_heads, heads // kv_heads, tokens, d)
        step = _QUERIES.get(query.device.type, 256)
        out = torch.cat([arithmetic.attend(prepared, q[:, :, at : at + step], at, scale, sliding_window)
                         for at in range(0, tokens, step)], 2)
        return out.reshape(1, heads, tokens, d).transpose(1, 2).to(dtype), None


class _Raw:
    def prepare(self, k: torch.Tensor, v: torch.Tensor) -> Any:
        return k, v

    def attend(self, prepared: Any, q: torch.Tensor, first: int, scale: float, window: int | None) -> torch.Tensor:
        k, v = (each[:, : first + q.size(2)] for each in prepared)
        query, key = _positions(q, first, k.size(1))
        return _weighted((_times(q, k) * scale).masked_fill(_hidden(query, key, window), -math.inf).softmax(-1), v)
