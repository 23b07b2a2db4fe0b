"""Arithmetic of codecs in torch, with the bytes that they store: published methods, and `hack` as docs/codecs.md has it.

A Peer maps K and V to what decoding would give back, so attention on it is ordinary attention. Metadata is rounded to
the precision that is counted, and codes are chosen against the rounded metadata. Shapes are [kv_heads][tokens][d], fp32.

    fp8      e4m3, one scale of 1 for everything, as engines' default
    kivi4/2  arXiv 2402.02750: K per channel in groups of 32 tokens, V per token in groups of 32 channels, fp16 scale and
             zero; the newest raw: of K what does not fill 128 tokens yet, of V 128 tokens
    int4     one fp16 scale and zero per token, head and side
    tq4/3/2  TurboQuant, arXiv 2504.19874, algorithm 1 (the one for mean squared error, on K and V alike): fp16 norm,
             random rotation, Lloyd-Max levels of a coordinate of a random unit vector
"""

from __future__ import annotations

import functools
import math
import re
from dataclasses import dataclass
from typing import Callable

import torch

PAGE = 64
_KIVI_GROUP, _KIVI_RESIDUAL = 32, 128
_FP8_MAX = 448.0

Near = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]  # positions of queries and keys -> what is read raw


def half(x: torch.Tensor) -> torch.Tensor:
    return x.half().float()


def minmax(x: torch.Tensor, bits: int, group: int) -> torch.Tensor:
    """Groups of `group` neighbours along the last axis, 2^bits levels from the least to the largest; scale and zero in fp16."""
    y = x.reshape(*x.shape[:-1], -1, group)
    zero = half(y.amin(-1, keepdim=True))
    scale = half((y.amax(-1, keepdim=True) - zero) / (2**bits - 1)).clamp_min(0)
    inverse = torch.where(scale > 0, 1 / scale, 0.0)
    return (((y - zero) * inverse).round().clamp(0, 2**bits - 1) * scale + zero).reshape(x.shape)


@functools.cache
def lloyd_max(bits: int, d: int) -> torch.Tensor:
    """Levels for one coordinate of a random unit vector of d dimensions, whose density is (1 - x^2)^((d - 3) / 2)."""
    x = torch.linspace(-1, 1, 100001, dtype=torch.float64)
    weight = (1 - x * x).clamp_min(0) ** ((d - 3) / 2)
    weight /= weight.sum()
    cumulated, count = weight.cumsum(0), 2**bits
    wanted = (torch.arange(count, dtype=torch.float64) + 0.5) / count
    levels = x[torch.searchsorted(cumulated, wanted).clamp_max(len(x) - 1)]
    for _ in range(200):
        cell = torch.bucketize(x, (levels[1:] + levels[:-1]) / 2)
        mass = torch.zeros(count, dtype=torch.float64).index_add_(0, cell, weight)
        levels = torch.zeros(count, dtype=torch.float64).index_add_(0, cell, weight * x) / mass.clamp_min(1e-300)
    return ((levels - levels.flip(0)) / 2).float()  # symmetric, as the density is


@functools.cache
def random_rotation(d: int, seed: int = 1) -> torch.Tensor:
    q, r = torch.linalg.qr(torch.randn(d, d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64))
    return (q * r.diagonal().sign()).float()


def turboquant(x: torch.Tensor, bits: int) -> torch.Tensor:
    d = x.size(-1)
    levels, rotation = lloyd_max(bits, d).to(x.device), random_rotation(d).to(x.device)
    norm = x.norm(dim=-1, keepdim=True).clamp_min(1e-8)
    return levels[torch.bucketize(x / norm @ rotation, (levels[1:] + levels[:-1]) / 2)] @ rotation.T * half(norm)


def _transposed(x: torch.Tensor, bits: int, group: int) -> torch.Tensor:
    return minmax(x.transpose(-1, -2).contiguous(), bits, group).transpose(-1, -2)


@dataclass(frozen=True)
class Peer:
    """k, v: what decoding gives back; of a number of tokens that is a multiple of k_group. bytes: of d, per token and KV
    head, K and V together. own_near: what is read raw where the method's own rule holds, for K and for V."""

    name: str
    k: Callable[[torch.Tensor], torch.Tensor]
    v: Callable[[torch.Tensor], torch.Tensor]
    bytes: Callable[[int], float]
    own_near: tuple[Near, Near]
    k_group: int = 1


def pages_near(lag: int) -> tuple[Near, Near]:
    """As caches here: the query's own page and `lag` before it."""
    near = lambda query, key: query // PAGE - key // PAGE <= lag
    return near, near


def _itself(query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    return query == key


def peer(name: str) -> Peer:
    """Errors: ValueError."""
    match = re.fullmatch(r"fp8|(kivi|tq|int)(\d)", name)
    if match is None:
        raise ValueError(f"peer: {name!r}; must be fp8, kivi4, kivi2, int4, tq4, tq3 or tq2")
    kind, bits = match[1], int(match[2] or 8)
    if name == "fp8":
        cast = lambda x: x.clamp(-_FP8_MAX, _FP8_MAX).to(torch.float8_e4m3fn).float()
        return Peer(name, cast, cast, lambda d: 2 * d, (_itself, _itself))
    if kind == "tq":
        code = lambda x: turboquant(x, bits)
        return Peer(name, code, code, lambda d: 2 * (d * bits / 8 + 2), (_itself, _itself))
    if kind == "int":
        code = lambda x: minmax(x, bits, x.size(-1))
        return Peer(name, code, code, lambda d: 2 * (d * bits / 8 + 4), (_itself, _itself))
    near = (lambda query, key: query // _KIVI_RESIDUAL == key // _KIVI_RESIDUAL,
            lambda query, key: query - key < _KIVI_RESIDUAL)
    return Peer(name, lambda x: _transposed(x, bits, _KIVI_GROUP), lambda x: minmax(x, bits, _KIVI_GROUP),
                lambda d: 2 * (d * bits / 8 + d * 4 / _KIVI_GROUP), near, _KIVI_GROUP)


# hack (docs/codecs.md): K and V coded along the 64 tokens of a page, one step and minimum per channel in 8 bits.


def hadamard(d: int) -> torch.Tensor:
    """The normalised Walsh-Hadamard matrix, its own inverse."""
    if d & (d - 1):
        raise ValueError(f"rotation=hadamard: head_dim is {d}; must be a power of two")
    h = torch.ones(1, 1)
    while h.size(0) < d:
        h = torch.cat([torch.cat([h, h], 1), torch.cat([h, -h], 1)])
    return h / math.sqrt(d)


@dataclass
class Side:
    """K or V of one layer as pages hold it. codes [heads][pages][64][d]; steps, minima [heads][pages][d] and norms
    [heads][pages][64], or None, as attention reads them."""

    codes: torch.Tensor
    steps: torch.Tensor
    minima: torch.Tensor
    norms: torch.Tensor | None

    def values(self) -> torch.Tensor:
        """What the codes stand for, in the codec's space, [heads][tokens][d]."""
        x = self.codes * self.steps[:, :, None] + self.minima[:, :, None]
        if self.norms is not None:
            x = x * self.norms[..., None]
        return x.flatten(1, 2)


@dataclass(frozen=True)
class Hack:
    """The parameters of `hack` that are emulated: rotation of K and V by Hadamard, V's norm per token in a byte. Min-max
    ranges, so v_bits is at least 2. A readable copy of the daemon's arithmetic (page version 2) for machines without it;
    the daemon's numbers are what counts."""

    k_bits: int = 3
    v_bits: int = 2
    rotation: bool = True
    v_norm: bool = True

    def bytes(self, d: int) -> float:
        """As stored: codes, u8 step and s8 minimum per channel, an fp16 pair per page and side, V's norms in u8 with their fp16
        top; each array is padded to 16 bytes, a head's record to 64."""
        def padded(size: int, to: int) -> int:
            return -(-size // to) * to

        sides = [PAGE * d * bits // 8 + padded(d, 16) * 2 + 16 for bits in (self.k_bits, self.v_bits)]
        return padded(sum(sides) + (PAGE if self.v_norm else 0), 64) / PAGE

    def encode(self, x: torch.Tensor, value_side: bool) -> Side:
        """x [heads][tokens][d], whole pages."""
        heads, tokens, d = x.shape
        y = x @ hadamard(d).to(x.device) if self.rotation else x
        y = y.reshape(heads, tokens // PAGE, PAGE, d)
        norms = None
        if value_side and self.v_norm:
            norms = y.abs().amax(-1)
            top = _half_up(norms.amax(-1, keepdim=True))
            norms = torch.where(top > 0, (norms * 255 / top).ceil().clamp(1, 255) * top / 255, 0.0)
            y = torch.where(norms[..., None] > 0, y * (1 / norms[..., None]), 0.0)
        return Side(*_coded(y, self.v_bits if value_side else self.k_bits), norms)


def _half_up(x: torch.Tensor) -> torch.Tensor:
    """x >= 0 rounded up to fp16."""
    near = x.half()
    return torch.where(near.float() < x, torch.nextafter(near.cpu(), torch.tensor(math.inf, dtype=torch.float16)).to(x.device),
                       near).float()


def _coded(y: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """docs/codecs.md, hack, from the range to the codes with meta=8 and min-max."""
    n = 2**bits - 1
    low, high = y.amin(-2), y.amax(-2)
    minimum = half(low)
    step = half((high - minimum) / n).clamp_min(0)
    top_step, top_min = step.amax(-1, keepdim=True), minimum.abs().amax(-1, keepdim=True)
    step = torch.where(top_step > 0, (step * 255 / top_step).round().clamp_min(1) * top_step / 255, 0.0)
    minimum = torch.where(top_min > 0, (minimum * 127 / top_min).round() * top_min / 127, 0.0)
    inverse = torch.where(step > 0, 1 / step, 0.0)
    codes = ((y - minimum[..., None, :]) * inverse[..., None, :]).round().clamp(0, n)
    return codes, step, minimum


def parse_hack(spec: str) -> tuple[Hack, int]:
    """'hack:k_bits=4,v_bits=3,rotation=none,v_norm=0;sinks=64' -> the codec and its sinks, with the daemon's defaults.
    Errors: ValueError."""
    body, *clauses = spec.split(";")
    name, _, text = body.partition(":")
    given = dict(part.partition("=")[::2] for part in text.split(",") if part)
    sinks = dict(part.partition("=")[::2] for part in clauses)
    known = {"k_bits": ("2", "3", "4", "8"), "v_bits": ("2", "3", "4", "8"), "rotation": ("hadamard", "none"), "v_norm": ("1", "0")}
    wrong = [f"{key}={value}" for key, value in given.items() if value not in known.get(key, ())]
    if name != "hack" or wrong or set(sinks) - {"sinks"}:
        raise ValueError(f"emulate: {spec!r}; must be hack with k_bits, v_bits (2, 3, 4 or 8), rotation (hadamard or none), v_norm (1 "
                         "or 0) and ;sinks=N")
    codec = Hack(int(given.get("k_bits", 3)), int(given.get("v_bits", 2)), given.get("rotation", "hadamard") == "hadamard",
                 given.get("v_norm", "1") == "1")
    return codec, -(-int(sinks.get("sinks", PAGE)) // PAGE) * PAGE
