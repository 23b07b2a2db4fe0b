"""Where an engine's attention on a CPU keeps K and V within a block. Needs torch alone.

Its kernels pack blocks for the instructions of the machine: vLLM's reads a head of a block as the rows of K and then those of V,
with channels and tokens interleaved for AMX or vectors. No stride says so. So the engine itself is asked, once per layer:
it writes rows of known numbers into a block of ours, and where they are found is the packing.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

_BASE = 128  # digits below it are exact in float16 and bfloat16


class Packing:
    """k, v: [tokens][head_dim], the place of each value among the 2 * tokens * head_dim of a block's head. Every place is
    taken once."""

    def __init__(self, k: torch.Tensor, v: torch.Tensor) -> None:
        self.tokens, self.head_dim = k.shape
        self._places = torch.cat([k.flatten(), v.flatten()])
        self._inverse = torch.argsort(self._places)

    def unpack(self, packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Of [...][2 * tokens * head_dim] K and V, each [...][tokens][head_dim]."""
        both = packed.index_select(-1, self._places).unflatten(-1, (2, self.tokens, self.head_dim))
        return both[..., 0, :, :], both[..., 1, :, :]

    def pack(self, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """The inverse of unpack()."""
        return torch.stack([k, v], -3).flatten(-3).index_select(-1, self._inverse)


def learn_packing(
    write: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], None],
    tokens: int,
    heads: int,
    head_dim: int,
    dtype: torch.dtype,
) -> Packing:
    """write(k, v, cache, slots): the engine's own, of rows [tokens][heads][head_dim] at slots [tokens] into a cache
    [1][heads][tokens][2 * head_dim]. ValueError: what it writes are not the rows, each value once."""
    size = 2 * tokens * head_dim
    numbers = torch.arange(size).view(2, tokens, 1, head_dim).expand(2, tokens, heads, head_dim)
    found = torch.zeros(heads, size, dtype=torch.int64)
    unit = 1
    while unit < size:
        k, v = (numbers // unit % _BASE).to(dtype)
        cache = torch.full((1, heads, tokens, 2 * head_dim), -1, dtype=dtype)
        write(k.contiguous(), v.contiguous(), cache, torch.arange(tokens))
        digits = cache.view(heads, size)
        if not bool(((digits >= 0) & (digits < _BASE)).all()):
            raise ValueError("the engine does not write each value of a block")
        found += digits.to(torch.int64) * unit
        unit *= _BASE
    if not torch.equal(found.sort(-1).values, torch.arange(size).expand(heads, size)):
        raise ValueError("the engine does not write each value of a block once")
    if not torch.equal(found, found[:1].expand(heads, size)):
        raise ValueError("the engine packs heads of a block in different ways")
    places = torch.argsort(found[0]).view(2, tokens, head_dim)
    return Packing(places[0], places[1])


__all__ = ["Packing", "learn_packing"]
