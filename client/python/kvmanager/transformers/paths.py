"""How a step's keys, values and queries get to the daemon's pages: through shared memory to a daemon that attends on
the host, or by this process's own kernels on the daemon's GPU.

A path is told of a step's entries (begin), waits for what it asked of the daemon (start; behind an error the step has
not begun), is told layer by layer of [1 or rows, tokens, heads, head_dim] in their order
(attend, which returns an output like q), then of its end.

Attention sinks [query_heads], logits that take part in the softmax and have no value, scale an output by the share of
the softmax that is not theirs: by sigmoid(lse - sink)."""

from typing import Any

import torch

import kvmanager as kv

Entries = list[tuple[Any, int, int]]  # (sequence, position, tokens)


def chunks_of(entries: Entries, tokens_max: int) -> list[tuple[int, int, kv.Entries]]:
    """(first token, tokens, entries) of parts that have at most tokens_max tokens; what a query attends to does not
    depend on where a step is cut."""
    chunks: list[tuple[int, int, kv.Entries]] = []
    first, count, part = 0, 0, []
    for sequence, position, tokens in entries:
        while tokens:
            taken = min(tokens, tokens_max - count)
            part.append((sequence, position, taken))
            position, tokens, count = position + taken, tokens - taken, count + taken
            if count == tokens_max:
                chunks.append((first, count, kv.Entries(part)))
                first, count, part = first + count, 0, []
    if part:
        chunks.append((first, count, kv.Entries(part)))
    return chunks


def with_sinks(out: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor) -> torch.Tensor:
    """out [tokens, query_heads, head_dim], lse [tokens, query_heads], the natural logarithm."""
    return (out * torch.sigmoid(lse - sinks.float())[..., None]).to(out.dtype)


class _Staging:
    """An arena with room for chunk_tokens tokens' k, v, q, out and lse, as torch sees it."""

    def __init__(self, owner: Any, chunk_tokens: int, kv_heads: int, query_heads: int, head_dim: int, dtype: str,
                 q_dtype: str):
        def nbytes(heads: int, name: str) -> int:
            return -(-chunk_tokens * heads * head_dim * (4 if name == "float32" else 2) // 64) * 64

        parts = [(kv_heads, dtype), (kv_heads, dtype), (query_heads, q_dtype), (query_heads, q_dtype)]
        lse_bytes = -(-chunk_tokens * query_heads * 4 // 64) * 64
        self.arena = owner.create_arena(sum(nbytes(*part) for part in parts) + lse_bytes)
        views, offset = [], 0
        for heads, name in parts:
            view = self.arena.tensor((chunk_tokens, heads, head_dim), name, offset=offset)
            views.append(torch.from_dlpack(view))
            offset += nbytes(heads, name)
        self.k, self.v, self.q, self.out = views
        self.lse = torch.from_dlpack(self.arena.tensor((chunk_tokens, query_heads), "float32", offset=offset))


class HostPath:
    """The daemon appends and attends: one call a layer and chunk."""

    def __init__(self, client: Any, cache: Any, shape: dict[str, Any], chunk_tokens: int):
        self._cache = cache
        self._staging = _Staging(client, chunk_tokens, **shape, q_dtype="float32")
        self._chunk_tokens = chunk_tokens
        self._chunks: list[tuple[int, int, kv.Entries]] = []

    def begin(self, entries: Entries) -> None:
        self._chunks = chunks_of(entries, self._chunk_tokens)

    def start(self) -> None:
        pass

    def attend(self, layer: int, k: torch.Tensor, v: torch.Tensor, q: torch.Tensor,
               sinks: torch.Tensor | None = None) -> torch.Tensor:
        k, v, rows = k.flatten(0, 1), v.flatten(0, 1), q.flatten(0, 1)
        out = torch.empty(rows.shape, dtype=q.dtype)
        there = self._staging
        for first, count, entries in self._chunks:
            parts = [x[:count] for x in (there.k, there.v, there.q, there.out)]
            for part, of in zip(parts, (k, v, rows)):
                part.copy_(of[first : first + count])
            lse = None if sinks is None else there.lse[:count]
            self._cache.step(layer, entries, k=parts[0], v=parts[1], q=parts[2], out=parts[3], lse=lse)
            out[first : first + count] = parts[3] if sinks is None else with_sinks(parts[3], lse, sinks)
        return out.view(q.shape)

    def end(self) -> None:
        pass

    def abandon(self) -> None:
        pass

    def copied(self, sequence: Any) -> None:
        pass

    def forget(self, sequence: Any) -> None:
        pass

    def close(self) -> None:
        pass


class DevicePath:
    """Steps of few tokens, decode above all, run in this process: one call of the daemon a step, none a layer. Those
    that fill more pages of a sequence than its lag run in the daemon, behind torch's stream: no host waits for it."""

    SEQUENCES_MAX = 256
    TOKENS_MAX = 8192

    def __init__(self, client: Any, cache: Any, shape: dict[str, Any], chunk_tokens: int, ordinal: int,
                 torch_device: torch.device, calibration_dir: str):
        self._client, self._cache = client, cache
        self._device = client.open_device(ordinal)
        if self._device.index != torch_device.index:
            raise ValueError(f"device: {ordinal} of the daemon is cuda:{self._device.index} here; the model is on "
                             f"{torch_device}")
        self._torch_device = torch_device
        self._dtype = getattr(torch, shape["dtype"])
        self._shape, self._chunk_tokens = shape, chunk_tokens
        self._staging: _Staging | None = None  # made with the first step of many tokens
        self._stream = torch.cuda.current_stream(torch_device).cuda_stream
        options = cache.description.options
        self._page_tokens, self._lag_tokens = options.page_tokens, options.lag_pages * options.page_tokens
        self._run = kv.InProcess(self._device, cache, stream=self._stream, encode_here=True,
                                 sequences_max=self.SEQUENCES_MAX, tokens_max=self.TOKENS_MAX,
                                 calibration_dir=calibration_dir)
        self._append, self._attend = self._run.append, self._run.attend
        self._copied: list[Any] = []
        self._here = False  # the step under way is this process's
        self._chunks: list[tuple[int, int, kv.Entries]] = []
        self._ready = 0

    def _fits(self, entries: Entries) -> bool:
        if len(entries) > self.SEQUENCES_MAX or sum(entry[2] for entry in entries) > self.TOKENS_MAX:
            return False
        page = self._page_tokens
        return all(tokens <= self._lag_tokens + page - position % page for _, position, tokens in entries)

    def begin(self, entries: Entries) -> None:
        if self._run is None:
            raise kv.FailedPreconditionError("this cache is of an earlier connection, whose leases are gone")
        stream = torch.cuda.current_stream(self._torch_device).cuda_stream
        if stream != self._stream:
            raise ValueError(f"stream: torch's current one is {stream:#x}; must be {self._stream:#x}, which was when "
                             "the model was attached")
        copied, self._copied = self._copied, []
        for sequence in copied:
            self._run.after(sequence)
        if self._fits(entries):
            self._run.ask(entries, append=True, attend=True)
            self._here = True
        else:
            self._chunks = chunks_of(entries, self._chunk_tokens)

    def start(self) -> None:
        if self._here:
            try:
                self._run.start()
            except BaseException:
                self._here = False
                raise

    def attend(self, layer: int, k: torch.Tensor, v: torch.Tensor, q: torch.Tensor,
               sinks: torch.Tensor | None = None) -> torch.Tensor:
        if not self._here:
            return self._attend_there(layer, k, v, q, sinks)
        dtype = self._dtype
        k, v, rows = k.to(dtype).contiguous(), v.to(dtype).contiguous(), q.to(dtype).contiguous()
        out = torch.empty_like(rows)
        self._append(layer, k.data_ptr(), v.data_ptr())
        if sinks is None:
            self._attend(layer, rows.data_ptr(), out.data_ptr())
            return out.to(q.dtype)
        lse = torch.empty(rows.shape[:-1], dtype=torch.float32, device=rows.device)
        self._attend(layer, rows.data_ptr(), out.data_ptr(), lse.data_ptr())
        return with_sinks(out, lse, sinks).to(q.dtype)

    def _attend_there(self, layer: int, k: torch.Tensor, v: torch.Tensor, q: torch.Tensor,
                      sinks: torch.Tensor | None) -> torch.Tensor:
        k, v, rows = k.flatten(0, 1), v.flatten(0, 1), q.flatten(0, 1)
        out = torch.empty(rows.shape, dtype=q.dtype, device=q.device)
        if self._staging is None:
            self._staging = _Staging(self._device, self._chunk_tokens, **self._shape, q_dtype=self._shape["dtype"])
        there = self._staging
        for first, count, entries in self._chunks:
            parts = [x[:count] for x in (there.k, there.v, there.q, there.out)]
            for part, of in zip(parts, (k, v, rows)):
                part.copy_(of[first : first + count])
            self._ready += 1
            self._device.enqueue_ready(self._stream, self._ready)
            lse = None if sinks is None else there.lse[:count]
            done = self._cache.step(layer, entries, k=parts[0], v=parts[1], q=parts[2], out=parts[3], lse=lse,
                                    ready=self._ready).done
            self._device.enqueue_wait_done(self._stream, done)
            out[first : first + count] = parts[3] if sinks is None else with_sinks(parts[3], lse, sinks)
        return out.view(q.shape)

    def end(self) -> None:
        if self._here:
            self._here = False
            self._run.end()
        elif self._device.lost:
            self._client.ping()  # says why: what was waited for may not be there

    def abandon(self) -> None:
        if self._here:
            self._here = False
            try:
                self._run.end()
            except kv.Error:
                pass  # the cause is raised already

    def copied(self, sequence: Any) -> None:
        """The daemon copies open pages for a sequence that was cropped or forked: the next step comes behind."""
        self._copied.append(sequence)

    def forget(self, sequence: Any) -> None:
        self._copied = [kept for kept in self._copied if kept is not sequence]
        if self._run is not None:
            self._run.forget(sequence)

    def close(self) -> None:
        run, self._run, self._staging = self._run, None, None
        if run is not None:
            run.close()
            self._device.close()
