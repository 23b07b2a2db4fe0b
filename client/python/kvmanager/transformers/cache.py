"""A transformers Cache whose keys and values are the daemon's: a row of the batch is a sequence there."""

import weakref
from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

import kvmanager as kv
from kvmanager.transformers.rows import Row, Step, check_positions, leads_of_mask
from kvmanager.transformers.windows import Window


class _Layer(CacheLayerMixin):
    """What transformers asks of a layer; what is kept is KvCache's."""

    is_croppable = True
    supports_early_init = False
    is_sliding = False

    def __init__(self, cache: "KvCache", index: int):
        super().__init__()
        self._cache, self._index = weakref.proxy(cache), index  # no cycle: a cache that is let go gives back at once

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        pass

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any):
        return self._cache.update(key_states, value_states, self._index)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._cache.get_seq_length() + query_length, 0

    def get_seq_length(self) -> int:
        return self._cache.get_seq_length()

    def get_max_length(self) -> int:
        return -1


class KvCache(Cache):
    """Made by Attachment.cache() or .claim(). A context manager; closing it, or letting it go, gives its pages back;
    what was published stays for others until the daemon evicts it.

    Its length is in columns of the batch, padding included. Rows may differ in what the daemon has of them: of a step's
    columns each takes those that are tokens and that it has not got."""

    def __init__(self, attachment, rows: list[Row], columns: int, expand: int, window: Window | None):
        super().__init__(layers=[_Layer(self, index) for index in range(attachment.layers)])
        self.attachment = attachment
        self._path = attachment.path
        self._rows, self._columns, self._expand = rows, columns, expand
        self._window = window  # of the layers that the daemon's cache has not
        self._step: Step | None = None
        self._new_ids: list[tuple[torch.Tensor | None, list[int]]] = []  # of steps, not in Row.ids yet
        self._void = ""  # why it cannot be used any more

    # What transformers asks.

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Columns that the cache has, padding included."""
        return self._columns

    @property
    def batch_size(self) -> int:
        return len(self._rows) * self._expand

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any):
        """Gives both back, marked: the attention function `kvmanager` appends them where it attends, in one call."""
        key_states.kvmanager_cache = self
        return key_states, value_states

    def crop(self, tokens_to_remove: int) -> None:
        """Removes that many columns from the end (a negative number; a positive one is the length to keep). Errors:
        FAILED_PRECONDITION where the new end is inside an encoded page: within lag_pages pages all are raw."""
        tokens_to_remove = int(tokens_to_remove)
        remove = max(0, self._columns - tokens_to_remove) if tokens_to_remove > 0 else -tokens_to_remove
        if remove == 0:
            return
        self._use()
        self._settle()
        columns = max(0, self._columns - remove)
        keeps = [min(row.tokens, max(0, columns - row.lead)) for row in self._rows]
        if self._window is not None:
            self._crop_window(keeps)
        self._columns = columns
        for row, keep in zip(self._rows, keeps):
            if keep < row.tokens:
                row.sequence.crop(keep)
                self._path.copied(row.sequence)
                row.tokens = keep
                if row.ids is not None:
                    del row.ids[keep:]

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Row i goes on from row beam_idx[i]: the first that does takes it over, others are forks."""
        self._select(beam_idx.tolist())

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        self._select(indices.nonzero().flatten().tolist() if indices.dtype == torch.bool else indices.tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._select([row for row in range(len(self._rows)) for _ in range(repeats)])

    def reset(self) -> None:
        """Empty again, as many rows."""
        self._use()
        count = len(self._rows)
        self._close_rows(self._rows)
        empty = self.attachment.empty_cache(count)
        self._rows, self._window, empty._rows = empty._rows, empty._window, []
        self._columns, self._new_ids = 0, []

    def __deepcopy__(self, memo: dict) -> "KvCache":
        return self.fork()

    # What kvmanager adds.

    @property
    def longest(self) -> int:
        """Tokens of the longest row, those of the step under way included."""
        new = self._step.new if self._step else [0] * len(self._rows)
        return max((row.tokens + n for row, n in zip(self._rows, new)), default=0)

    @property
    def row_tokens(self) -> list[int]:
        """Tokens that the daemon has of each row."""
        return [row.tokens for row in self._rows]

    @property
    def window_bytes(self) -> int:
        """Of keys and values in this process: of layers that attend to a window of tokens."""
        return 0 if self._window is None else self._window.nbytes

    def fork(self) -> "KvCache":
        """A second continuation of every row; full pages are shared."""
        self._use()
        self._settle()
        window = self._window and self._window.fork()
        return KvCache(self.attachment, [self._fork(row) for row in self._rows], self._columns, self._expand, window)

    def publish(self) -> int:
        """Others find the full blocks of all rows from now on. Returns how many blocks are new to the daemon. On a GPU
        it waits for what was appended. Rows that were fed embeddings have no names and are passed over."""
        self._use()
        self._settle()
        published = 0
        for at, row in enumerate(self._rows):
            if row.ids is not None and row.tokens >= self.attachment.page_tokens:
                names = self.attachment.block_names(row.ids)
                published += row.sequence.publish(names).published
                if self._window is not None:
                    self._store_window(at, row.tokens, names)
        return published

    def _store_window(self, at: int, tokens: int, names: kv.BlockNames) -> None:
        """The full blocks that are here of layers with a window."""
        page, kept = self.attachment.page_tokens, self._window.kept[at]
        first = -(-(tokens - kept) // page)
        if len(names) > first:
            skipped = first * page - (tokens - kept)
            state = self._window.tokens_of(at, skipped, (len(names) - first) * page)
            self.attachment.windowed.store(names, first, *state)

    def hand_off(self, peer: str, next_tokens: torch.Tensor | None = None, blob: bytes = b"", **options: Any) -> list:
        """Sends every row to the daemon at `peer` ("HOST:PORT", or several: Sequence.hand_off). next_tokens [rows, n]:
        already chosen, not in the cache yet. Returns the tickets that Attachment.claim() takes there, one a row; the
        rows stay here until the cache is closed."""
        self._use()
        self._settle()
        chosen = [[]] * len(self._rows) if next_tokens is None else next_tokens.tolist()
        if len(chosen) != len(self._rows):
            raise ValueError(f"next_tokens: has {len(chosen)} rows; the cache has {len(self._rows)}")
        options.setdefault("will_append", bool(chosen[0]))
        tickets = []
        for at, (row, ids) in enumerate(zip(self._rows, chosen)):
            state = None
            if self._window is not None and row.tokens:
                state = self._window.tokens_of(at, 0, self._window.kept[at])
            tickets.append(self.attachment.send(row, ids, blob, peer, options, state))
        return tickets

    def close(self) -> None:
        self._void, self._window = self._void or "it was closed", None
        rows, self._rows = self._rows, []
        self._close_rows(rows)

    def __enter__(self) -> "KvCache":
        return self

    def __exit__(self, *exception: Any) -> None:
        self.close()

    # A step: begin() before the first layer, which asks the daemon; attend() in each, the first of which waits for its
    # answer.

    def begin(self, batch: int, columns: int, ids: torch.Tensor | None, mask: torch.Tensor | None,
              positions: torch.Tensor | None) -> torch.Tensor | None:
        """A forward pass of `columns` new columns begins. mask [batch, all columns so far]; None: every new one is a
        token. Returns the positions to run with. Errors: ValueError; those of the daemon."""
        self._use()
        if self._step is not None:
            raise self._fail(f"a forward pass ended before layer {self._step.layer}")
        every = self._expand
        if batch != self.batch_size:
            raise ValueError(f"input_ids: {batch} rows; the cache has {self.batch_size}"
                             + (": say expand=num_beams where it is made" if every == 1 else ""))
        total = self._columns + columns
        if mask is not None:
            if mask.dim() == 4:
                raise ValueError("attention_mask: has 4 dimensions; must have 2: the daemon's attention is causal")
            self._look_at_mask(mask[::every], total, columns)
        new = [max(0, total - row.lead - row.tokens) for row in self._rows]
        if max(new) > columns:
            row = new.index(max(new))
            raise ValueError(f"input_ids: {columns} columns; row {row} has {self._rows[row].tokens} tokens and lacks "
                             f"{new[row]} to have {total} columns, {self._rows[row].lead} of them padding")
        plain = every == 1 and min(new) == columns
        entries = [(row.sequence, row.tokens, n) for row, n in zip(self._rows, new) if n]
        step = Step(columns, new, entries, plain, None)
        if positions is not None:
            if columns > 1 or not plain:
                check_positions(positions[::every] if positions.shape[0] > 1 else positions, self._rows, step,
                                self._columns)
            elif self._columns % self.attachment.page_tokens == 0:  # decode: now and then, since it waits for a GPU
                check_positions(positions, self._rows, step, self._columns)
        elif any(row.lead for row in self._rows):
            at = torch.arange(self._columns, total, device=self.attachment.torch_device)[None]
            leads = torch.tensor([row.lead for row in self._rows for _ in range(every)], device=at.device)[:, None]
            positions = (at - leads).clamp(min=0)
        if not plain:
            places = [row * columns + column for row, n in enumerate(new) for column in range(columns - n, columns)]
            step.places = torch.tensor(places, dtype=torch.long, device=self.attachment.torch_device)
        if ids is not None and every > 1:
            ids = ids[::every]
        if entries:
            self._path.begin(entries)
        self._new_ids.append((ids, new))
        self._step = step
        return positions

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scaling: float | None,
               sinks: torch.Tensor | None = None) -> torch.Tensor:
        """q [batch, query_heads, columns, head_dim], k and v [batch, kv_heads, columns, head_dim] of the step's layer.
        Appends and attends; returns [batch, columns, query_heads, head_dim], zeros in what no row takes. sinks
        [query_heads]: logits that take part in the softmax and have no value."""
        step = self._step
        if step is None or step.layer != layer:
            self._use()
            came = "before a forward pass began" if step is None else f"for {step.layer}"
            raise self._fail(f"layer {layer} came {came}; is it the model that was attached?")
        if q.requires_grad:
            raise self._fail("a forward pass asked for gradients, which the daemon has not: use torch.no_grad()")
        k, v, q = k.transpose(1, 2), v.transpose(1, 2), q.transpose(1, 2)
        if layer == 0:
            self._start()
        try:
            place = self.attachment.daemon_layers.get(layer)
            if place is None:
                out = self._attend_window(step, layer, k, v, q, scaling, sinks)
            else:
                factor = 1.0 if scaling is None else scaling * self.attachment.default_scale_inverse
                if abs(factor - 1.0) > 1e-6:
                    q = q * factor
                if step.plain:
                    out = self._path.attend(place, k, v, q, sinks)
                else:
                    out = self._attend_some(step, place, k, v, q, sinks)
            step.layer += 1
            if step.layer == self.attachment.layers:
                self._end(step)
        except BaseException as error:
            if isinstance(error, kv.DeadlineExceededError):
                self.attachment.give_up()
            self._fail(f"{type(error).__name__} in layer {layer}: {error}")
            raise
        return out

    def _start(self) -> None:
        """The daemon has reserved the step, or refuses it: then nothing has changed, and the pass may be tried again."""
        try:
            self._path.start()
        except BaseException as error:
            if isinstance(error, kv.DeadlineExceededError):
                self.attachment.give_up()
                self._fail(f"{type(error).__name__} as a forward pass began: {error}")
            self._step = None
            self._new_ids.pop()
            raise

    def _attend_window(self, step: Step, layer: int, k: torch.Tensor, v: torch.Tensor, q: torch.Tensor,
                       scaling: float | None, sinks: torch.Tensor | None) -> torch.Tensor:
        every = self._expand
        if every > 1:
            k, v, q = k[::every], v[::every], q[::every]
        out = self._window.attend(layer, step.new, q, k, v, scaling, sinks)
        return out.repeat_interleave(every, 0) if every > 1 else out

    def _attend_some(self, step: Step, place: int, k: torch.Tensor, v: torch.Tensor, q: torch.Tensor,
                     sinks: torch.Tensor | None) -> torch.Tensor:
        every = self._expand
        k, v, q = (x[::every].flatten(0, 1).index_select(0, step.places)[None] for x in (k, v, q))
        out = q.new_zeros((len(self._rows) * step.columns, *q.shape[2:]))
        if step.entries:
            out.index_copy_(0, step.places, self._path.attend(place, k, v, q, sinks)[0])
        out = out.view(len(self._rows), step.columns, *q.shape[2:])
        return out.repeat_interleave(every, 0) if every > 1 else out

    def _end(self, step: Step) -> None:
        if step.entries:
            self._path.end()
        self._step = None
        self._columns += step.columns
        for row, n in zip(self._rows, step.new):
            row.tokens += n
        if self._window is not None:
            self._window.end(step.new)
        self.attachment.tokens_computed += sum(step.new)
        if len(self._new_ids) >= self.attachment.page_tokens:
            self._settle()
        if step.columns > 1 and self.attachment.publish_prompts:
            self.publish()
        if self._window is not None:
            self._window.trim()
        if self._expand > 1:  # the rows of a group were one until now
            every, self._expand = self._expand, 1
            self.batch_repeat_interleave(every)

    def _look_at_mask(self, mask: torch.Tensor, total: int, columns: int) -> None:
        """Sets the rows' leads."""
        if columns == 1 and mask.shape == (len(self._rows), total) and all(row.tokens for row in self._rows):
            if not bool(mask[:, -1].all()):
                raise ValueError("attention_mask: a row has padding behind its first token; pad on the left")
            return
        for at, (row, lead) in enumerate(zip(self._rows, leads_of_mask(mask, total))):
            if row.tokens and lead != row.lead:
                raise ValueError(f"attention_mask: row {at} has {lead} columns of padding; it had {row.lead} where "
                                 "its first tokens came")
            row.lead = lead

    # Rows.

    def _select(self, sources: list[int]) -> None:
        if sources == list(range(len(self._rows))):
            return
        self._use()
        self._settle()
        rows, taken = [], set()
        for source in sources:
            rows.append(self._fork(self._rows[source]) if source in taken else self._rows[source])
            taken.add(source)
        dropped = [row for at, row in enumerate(self._rows) if at not in taken]
        self._rows = rows
        if self._window is not None:
            self._window = self._window.select(sources)
        self._close_rows(dropped)

    def _crop_window(self, keeps: list[int]) -> None:
        """Before anything else of crop(): layers with a window have their last tokens alone here. Errors: kvmanager.
        FailedPreconditionError where those before the new end are not in the daemon either."""
        window, layers = self._window, self.attachment.windowed
        states: list[Any] = []
        for at, (row, keep) in enumerate(zip(self._rows, keeps)):
            state = None
            if not window.can_crop(at, row.tokens, keep):
                if row.ids is not None:
                    state = layers.read(self.attachment.block_names(row.ids), keep)
                if state is None:
                    most = window.kept[at] - (layers.longest - 1)
                    raise kv.FailedPreconditionError(
                        f"crop: row {at} would go from {row.tokens} tokens to {keep}, and a layer with a window of "
                        f"{layers.longest} has its last {window.kept[at]} here: remove {max(0, most)} at most, or "
                        "publish blocks before they leave the window")
            states.append(state)
        drops = [row.tokens - keep for row, keep in zip(self._rows, keeps)]
        if any(state is not None for state in states):
            states = [window.tokens_of(at, 0, max(0, window.kept[at] - drop)) if state is None else state
                      for at, (state, drop) in enumerate(zip(states, drops))]
            window.set_rows(states)
        else:
            window.drop(drops)

    def _fork(self, row: Row) -> Row:
        forked = row.sequence.fork()
        self._path.copied(forked)
        return Row(forked, row.lead, row.tokens, None if row.ids is None else row.ids[:])

    def _settle(self) -> None:
        """Brings the ids of the steps so far into their rows: waits for a GPU."""
        steps, self._new_ids = self._new_ids, []
        for ids, new in steps:
            values = [None] * len(new) if ids is None else ids.tolist()
            for row, fed, n in zip(self._rows, values, new):
                if n and fed is None:
                    row.ids = None
                elif n and row.ids is not None:
                    row.ids.extend(fed[-n:])

    def _close_rows(self, rows: list[Row]) -> None:
        for row in rows:
            self._path.forget(row.sequence)
            row.sequence.close()

    def _fail(self, why: str) -> RuntimeError:
        self._void = self._void or why
        self._step = None
        self._path.abandon()
        return RuntimeError(f"this cache cannot be used any more: {self._void}. Make another: attachment.cache(...)")

    def _use(self) -> None:
        if self._void:
            raise self._fail(self._void)

    def __del__(self) -> None:
        try:
            if getattr(self, "_rows", None):
                self.close()
        except kv.Error:
            pass  # the connection was closed before, or this is another thread: sequences give themselves back
