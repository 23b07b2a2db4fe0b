"""Layers that attend to a window of tokens. Their keys and values are in this process, in torch: of each row the last
`keep_tokens`. The daemon keeps full blocks of theirs for others, each a block of its own in a cache beside the model's:
a prefix that is found needs the blocks of its last window alone, and the daemon may evict the rest."""

from typing import Any

import torch

import kvmanager as kv
from kvmanager._facts import fits

_SLACK_PAGES = 2  # kept beyond the window: publish() finds a whole window that ends with a block, crop() some tokens
_STORE_TOKENS_MAX = 2048  # of one call
_NAMES_MAX = 4096  # of one call
_QUERY_TOKENS = 512  # that are attended at once


def windows_of(config: Any, layers: int) -> tuple[int | None, ...]:
    """Of each layer how many tokens its queries attend to, their own included; None: all. Errors: ValueError."""
    window, types = getattr(config, "sliding_window", None), getattr(config, "layer_types", None)
    if types is None:
        return (window,) * layers
    for layer, kind in enumerate(types[:layers]):
        if kind not in ("full_attention", "sliding_attention"):
            raise ValueError(f"layer_types: layer {layer} is {kind!r}; must be 'full_attention' or 'sliding_attention'")
        if kind == "sliding_attention" and not window:
            raise ValueError(f"sliding_window: {window}; layer {layer} is 'sliding_attention': must be at least 1")
    return tuple(window if kind == "sliding_attention" else None for kind in types[:layers])


class WindowedLayers:
    """What an attachment knows of these layers, and the daemon's cache of their full blocks: raw, in host memory."""

    def __init__(self, windows: tuple[int | None, ...], options: dict[str, Any], torch_device: torch.device):
        layers = [layer for layer, window in enumerate(windows) if window is not None]
        self.windows = {layer: windows[layer] for layer in layers}
        self.places = {layer: place for place, layer in enumerate(layers)}
        self.longest = max(self.windows.values())
        self.page_tokens = options["page_tokens"]
        self.keep_tokens = self.longest - 1 + _SLACK_PAGES * self.page_tokens
        self.shape = (options["kv_heads"], options["head_dim"])
        self.dtype = getattr(torch, options["dtype"])
        self.torch_device = torch_device
        self._cache: Any = None

    def open(self, client: Any, options: dict[str, Any]) -> None:
        """options: of the model's cache. Blocks are named after those of that cache, whose codec made them what they
        are."""
        self._cache = client.open_cache(**options | dict(
            revision=fits(f"windows of {options['revision']}"), layers=len(self.places), codec="raw",
            lag_pages=0, device=-1, calibration_digest=""))

    @property
    def description(self) -> Any:
        return self._cache.refresh()

    def _names(self, names: kv.BlockNames) -> list[kv.BlockNames]:
        return [self._cache.external_names([name]) for name in names]

    def _first_block(self, tokens: int) -> int:
        return max(0, tokens - (self.longest - 1)) // self.page_tokens

    def _there(self, names: list[kv.BlockNames]) -> list[bool]:
        parts = [names[begin : begin + _NAMES_MAX] for begin in range(0, len(names), _NAMES_MAX)]
        return [match.hit_blocks == 1 for part in parts for match in self._cache.match(part)]

    def usable(self, names: kv.BlockNames, tokens: int) -> int:
        """How many of a prefix's first `tokens` tokens, full blocks, have all of their last window in the daemon."""
        there = self._there(self._names(names[: tokens // self.page_tokens]))
        run, best = 0, 0  # blocks in a row that are there and end with this one
        for block in range(tokens // self.page_tokens):
            run = run + 1 if there[block] else 0
            end = (block + 1) * self.page_tokens
            if run >= block + 1 - self._first_block(end):
                best = end
        return best

    def read(self, names: kv.BlockNames, tokens: int) -> tuple[torch.Tensor, torch.Tensor] | None:
        """K and V [layers, tokens, kv_heads, head_dim] of the last of the first `tokens` tokens, whose window is among
        them. names: of blocks up to there at least. None: the daemon has them no longer."""
        first, end = self._first_block(tokens), -(-tokens // self.page_tokens)
        if end > len(names):
            return None
        sequences = self._cache.create_sequences(self._names(names[first:end]))
        try:
            if not all(each.hit_blocks == 1 for each in sequences):
                return None
            entries = kv.Entries([(each, 0, self.page_tokens) for each in sequences])
            k, v = self._read(entries)
        finally:
            _close(sequences)
        taken = tokens - first * self.page_tokens
        return k[:, :taken], v[:, :taken]

    def _read(self, entries: kv.Entries) -> tuple[torch.Tensor, torch.Tensor]:
        k = torch.empty((len(self.places), entries.tokens, *self.shape), dtype=self.dtype)
        v = torch.empty_like(k)
        for place in range(len(self.places)):
            self._cache.read(place, entries, k[place], v[place])
        return k.to(self.torch_device), v.to(self.torch_device)

    def store(self, names: kv.BlockNames, first: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """Others find blocks first.. of `names` from now on. k, v [layers, tokens, kv_heads, head_dim] of these. Where
        the daemon has no room they are not stored: a later prefix is found as far as its windows are there."""
        page, wanted = self.page_tokens, self._names(names[first:])
        missing = [at for at, there in enumerate(self._there(wanted)) if not there]
        size = max(1, _STORE_TOKENS_MAX // page)
        for begin in range(0, len(missing), size):
            some = missing[begin : begin + size]
            try:
                sequences = self._cache.create_sequences([None] * len(some))
            except kv.ResourceExhaustedError:
                return
            try:
                columns = torch.cat([torch.arange(at * page, (at + 1) * page) for at in some]).to(k.device)
                self._append(kv.Entries([(each, 0, page) for each in sequences]), k[:, columns], v[:, columns])
                for each, at in zip(sequences, some):
                    each.publish(wanted[at])
            except kv.ResourceExhaustedError:
                return
            finally:
                _close(sequences)

    def _append(self, entries: kv.Entries, k: torch.Tensor, v: torch.Tensor) -> None:
        k, v = k.cpu().contiguous(), v.cpu().contiguous()
        for place in range(len(self.places)):
            self._cache.step(place, entries, k=k[place], v=v[place])

    def hand_off(self, k: torch.Tensor, v: torch.Tensor, peer: str, options: dict[str, Any]) -> Any:
        """Sends K and V [layers, tokens, kv_heads, head_dim] to the daemon at `peer`, for claim()."""
        sequence = self._cache.create_sequence()
        try:
            self._append(kv.Entries([(sequence, 0, k.shape[1])]), k, v)
            return sequence.hand_off(peer, **options | dict(will_append=False))
        finally:
            sequence.close()

    def claim(self, ticket: bytes) -> tuple[torch.Tensor, torch.Tensor]:
        got = self._cache.claim(ticket)
        try:
            return self._read(kv.Entries([(got.sequence, 0, got.tokens)]))
        finally:
            got.sequence.close()


def _close(sequences: list) -> None:
    for each in sequences:
        each.close()


class Window:
    """Keys and values of the rows of one KvCache: k, v [rows, slots, kv_heads, head_dim] a layer, each row's last
    kept[row] tokens at the end. Tensors are never changed in place: copies of a Window share them."""

    def __init__(self, layers: WindowedLayers, rows: int):
        self.layers = layers
        self.kept = [0] * rows
        empty = torch.empty((rows, 0, *layers.shape), dtype=layers.dtype, device=layers.torch_device)
        self._k = [empty] * len(layers.places)
        self._v = [empty] * len(layers.places)
        self._masks: dict[tuple[int, int], torch.Tensor | None] = {}  # of the step under way

    @property
    def nbytes(self) -> int:
        return sum(each.untyped_storage().nbytes() for each in (*self._k, *self._v))

    def fork(self) -> "Window":
        return self.select(range(len(self.kept)))

    def select(self, sources: Any) -> "Window":
        """Row i goes on from row sources[i]."""
        made = Window(self.layers, 0)
        made.kept = [self.kept[source] for source in sources]
        if list(sources) == list(range(len(self.kept))):
            made._k, made._v = self._k[:], self._v[:]
        else:
            index = torch.tensor(list(sources), dtype=torch.long, device=self.layers.torch_device)
            made._k = [each.index_select(0, index) for each in self._k]
            made._v = [each.index_select(0, index) for each in self._v]
        return made

    def set_rows(self, rows: list[tuple[torch.Tensor, torch.Tensor] | None]) -> None:
        """k, v [layers, tokens, kv_heads, head_dim] of each row; None: it has no token."""
        self.kept = [0 if each is None else each[0].shape[1] for each in rows]
        for side, to in enumerate((self._k, self._v)):
            for place in range(len(to)):
                parts = [to[place].new_empty((0, *self.layers.shape)) if each is None else each[side][place]
                         for each in rows]
                to[place] = _aligned(parts, 0)

    def tokens_of(self, row: int, first: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """k, v [layers, count, kv_heads, head_dim] of a row: of those that it has, from the first'th on."""
        begin = self._k[0].shape[1] - self.kept[row] + first
        k, v = (torch.stack([each[row, begin : begin + count] for each in of]) for of in (self._k, self._v))
        return k, v

    def attend(self, layer: int, new: list[int], q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
               scaling: float | None, sinks: torch.Tensor | None) -> torch.Tensor:
        """Of the step's columns row i has the last new[i]. q [rows, columns, query_heads, head_dim], k and v [rows,
        columns, kv_heads, head_dim]; returns an output like q, zeros in what no row takes. sinks [query_heads]: logits
        that take part in the softmax and have no value."""
        place, window = self.layers.places[layer], self.layers.windows[layer]
        if k.shape[2:] != self.layers.shape or v.shape[2:] != self.layers.shape:
            raise ValueError(f"layer {layer}: its K and V have {tuple(k.shape[2:])} and {tuple(v.shape[2:])} heads and "
                             f"channels; must have {self.layers.shape}, as the model's configuration says")
        self._k[place] = self._appended(self._k[place], k, new)
        self._v[place] = self._appended(self._v[place], v, new)
        slots, columns = self._k[place].shape[1], q.shape[1]
        parts = []
        for begin in range(0, columns, _QUERY_TOKENS):
            end = min(columns, begin + _QUERY_TOKENS)
            last = slots - columns + end
            first = max(0, slots - columns + begin - window + 1)
            mask = self._mask(first, last, end - begin, window, slots, new)
            keys, values = (each[place][:, first:last].to(q.dtype).transpose(1, 2) for each in (self._k, self._v))
            parts.append(_attend(q[:, begin:end].transpose(1, 2), keys, values, mask, scaling, sinks).transpose(1, 2))
        out = parts[0] if len(parts) == 1 else torch.cat(parts, 1)
        if min(new) < columns:
            taken = torch.arange(columns)[None] >= columns - torch.tensor(new)[:, None]
            out = out * taken[..., None, None].to(out.device)
        return out

    def end(self, new: list[int]) -> None:
        """The step's tokens are there, in every layer."""
        self.kept = [kept + n for kept, n in zip(self.kept, new)]
        self._masks = {}

    def trim(self) -> None:
        """Gives back what no later step needs."""
        keep = self.layers.keep_tokens
        slots = min(keep, max(self.kept, default=0))
        self.kept = [min(kept, keep) for kept in self.kept]
        for of in (self._k, self._v):
            for place, each in enumerate(of):
                if each.shape[1] > slots:
                    cut = each[:, each.shape[1] - slots :]
                    of[place] = cut.clone() if each.shape[1] > 2 * slots else cut  # a view keeps all of it

    def can_crop(self, row: int, tokens: int, keep: int) -> bool:
        """Whether a row of `tokens` tokens has what the next token needs behind the first `keep`."""
        return self.kept[row] - (tokens - keep) >= min(keep, self.layers.longest - 1)

    def drop(self, counts: list[int]) -> None:
        """Takes the last counts[i] tokens of row i away."""
        self.kept = [max(0, kept - count) for kept, count in zip(self.kept, counts)]
        for of in (self._k, self._v):
            for place, each in enumerate(of):
                ends = [each.shape[1] - count for count in counts]
                of[place] = _aligned([each[row, max(0, end - kept) : max(0, end)]
                                      for row, (end, kept) in enumerate(zip(ends, self.kept))], 0)

    def _appended(self, past: torch.Tensor, fresh: torch.Tensor, new: list[int]) -> torch.Tensor:
        kept_dtype = fresh.to(past.dtype)
        if past.dtype == torch.float16 and fresh.dtype == torch.float32 and not kept_dtype.isfinite().all():
            raise ValueError("dtype: K or V of a layer with a window is beyond what float16 can have; attach the model "
                             "with dtype='bfloat16'")
        columns = fresh.shape[1]
        if min(new) == columns:
            return torch.cat([past, kept_dtype], 1)
        rows = [torch.cat([past[row, past.shape[1] - self.kept[row] :], kept_dtype[row, columns - n :]])
                for row, n in enumerate(new)]
        return _aligned(rows, columns)

    def _mask(self, first: int, last: int, queries: int, window: int, slots: int,
              new: list[int]) -> torch.Tensor | None:
        """[rows or 1, 1, queries, last - first], true where a query attends; None: all do to all."""
        key = (window, last)
        if key not in self._masks:
            begins = [slots - kept - n for kept, n in zip(self.kept, new)]
            keys = torch.arange(first, last)
            at = torch.arange(last - queries, last)[:, None]
            mask = ((keys <= at) & (keys > at - window))[None]
            if max(begins) > first:
                mask = mask & (keys >= torch.tensor(begins)[:, None, None]) | (keys == at)  # no row of zeros: no NaN
            self._masks[key] = None if bool(mask.all()) else mask[:, None].to(self.layers.torch_device)
        return self._masks[key]


def _aligned(rows: list[torch.Tensor], slots_min: int) -> torch.Tensor:
    """[rows, slots, ...], each row's tokens at the end."""
    slots = max([slots_min, *(len(row) for row in rows)])
    out = rows[0].new_zeros((len(rows), slots, *rows[0].shape[1:])) if rows else torch.empty(0)
    for to, row in zip(out, rows):
        to[slots - len(row) :] = row
    return out


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, scaling: float | None,
            sinks: torch.Tensor | None) -> torch.Tensor:
    """[rows, heads, tokens, head_dim] each."""
    if sinks is not None:  # a key more: its logit is the head's sink, its value 0
        rows, heads, queries, _ = q.shape
        bias = q.new_zeros((rows, heads, queries, k.shape[2] + 1))
        if mask is not None:
            bias[..., :-1].masked_fill_(~mask, float("-inf"))
        bias[..., -1] = sinks.to(q.dtype)[None, :, None]
        nothing = k.new_zeros((*k.shape[:2], 1, k.shape[3]))
        k, v, mask = torch.cat([k, nothing], 2), torch.cat([v, nothing], 2), bias
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scaling,
                                                            enable_gqa=q.shape[1] != k.shape[1])
