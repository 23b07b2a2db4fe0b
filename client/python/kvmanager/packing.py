"""Where an engine's attention on a CPU keeps K and V within a block. Needs torch alone.

Its kernels pack blocks for the instructions of the machine: vLLM's reads a head of a block as the rows of K and then those of V,
with channels and tokens interleaved for AMX or vectors. No stride of its tensors says so. So the engine itself is asked, once per
layer: it writes rows of known numbers into a block of ours, and where they are found is the packing.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

_BASE = 128  # digits below it are exact in float16 and bfloat16


class Strided:
    """K or V of a block's head whose values lie at sums of strides: each axis, tokens and channels, is one or more of them."""

    def __init__(self, places: torch.Tensor) -> None:
        """places: [tokens][head_dim]. ValueError: they are no such sums."""
        self._begin = int(places[0, 0])
        self._tokens, self._channels = _axes(places[:, 0].tolist()), _axes(places[0].tolist())
        expected = torch.full((), self._begin)
        for size, stride in self._tokens + self._channels:
            expected = expected.unsqueeze(-1) + torch.arange(size) * stride
        if not torch.equal(expected.reshape(places.shape), places):
            raise ValueError("the places of tokens depend on the channel")

    def __call__(self, packed: torch.Tensor) -> torch.Tensor:
        """A view of [...][2 * tokens * head_dim]: [...], the tokens' axes, the channels'."""
        axes = self._tokens + self._channels
        sizes, strides = [size for size, _ in axes], [stride for _, stride in axes]
        begin = packed.storage_offset() + self._begin
        return packed.as_strided([*packed.shape[:-1], *sizes], [*packed.stride()[:-1], *strides], begin)

    def unpack(self, packed: torch.Tensor) -> torch.Tensor:
        view, lead = self(packed), packed.dim() - 1
        return view.flatten(lead, lead + len(self._tokens) - 1).flatten(lead + 1)

    def pack(self, rows: torch.Tensor, packed: torch.Tensor) -> None:
        """Of [...][tokens][head_dim]."""
        rows = rows.unflatten(-1, [size for size, _ in self._channels])
        axis = -1 - len(self._channels)
        self(packed).copy_(rows.unflatten(axis, [size for size, _ in self._tokens]))


def _axes(places: list[int]) -> list[tuple[int, int]]:
    """Sizes and strides whose sums these are, less the first, with the last stride the innermost."""
    axes: list[tuple[int, int]] = []
    while len(places) > 1:
        stride, size = places[1] - places[0], 2
        while size < len(places) and places[size] - places[size - 1] == stride:
            size += 1
        if len(places) % size:
            raise ValueError(f"{size} of {len(places)} places are {stride} apart")
        axes.insert(0, (size, stride))
        places = places[::size]
    return axes or [(1, 1)]


class Packing:
    """k, v: [tokens][head_dim], the place of each value among the 2 * tokens * head_dim of a block's head. Every place is
    taken once."""

    def __init__(self, k: torch.Tensor, v: torch.Tensor) -> None:
        self.tokens, self.head_dim = k.shape
        self._places = torch.cat([k.flatten(), v.flatten()])
        self._inverse = torch.argsort(self._places)
        self._sides: list[Strided] | None = None  # of K, of V; else values are moved one by one, which takes ten times as long
        try:
            self._sides = [Strided(k), Strided(v)]
        except ValueError:
            pass

    @property
    def strided(self) -> bool:
        return self._sides is not None

    def unpack(self, packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Of [...][2 * tokens * head_dim] K and V, each [...][tokens][head_dim]; perhaps views."""
        if self._sides is not None:
            return self._sides[0].unpack(packed), self._sides[1].unpack(packed)
        both = packed.index_select(-1, self._places).unflatten(-1, (2, self.tokens, self.head_dim))
        return both[..., 0, :, :], both[..., 1, :, :]

    def pack(self, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """The inverse of unpack()."""
        if self._sides is None:
            return torch.stack([k, v], -3).flatten(-3).index_select(-1, self._inverse)
        packed = k.new_empty((*k.shape[:-2], len(self._places)))
        for side, rows in zip(self._sides, (k, v)):
            side.pack(rows, packed)
        return packed


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
