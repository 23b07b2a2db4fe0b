"""A model and the daemon that keeps its keys and values."""

import functools
import inspect
import struct
import weakref
from array import array
from typing import Any, NamedTuple

import torch

import kvmanager as kv
from kvmanager._facts import position_facts
from kvmanager.transformers.cache import KvCache
from kvmanager.transformers.fold import factors_digest, fingerprint, folded_with
from kvmanager.transformers.paths import DevicePath, HostPath
from kvmanager.transformers.rows import Row, leads_of_mask
from kvmanager.transformers.windows import Window, WindowedLayers, windows_of

# Magic, ids in the cache, ids chosen beyond them, bytes of the windowed layers' ticket, bytes of the caller.
_BLOB = struct.Struct("<4sIIII")
_MAGIC = b"kvT2"


class Claimed(NamedTuple):
    """What was handed off, ready for generate(): rows padded on the left to one length."""

    cache: KvCache
    input_ids: torch.Tensor
    attention_mask: torch.Tensor
    blobs: list[bytes]


def attach(model: torch.nn.Module, address: str, **options: Any) -> "Attachment":
    """See Attachment."""
    return Attachment(model, address, **options)


class Attachment:
    """model: a decoder loaded with attn_implementation="kvmanager". It is not changed, but for a hook that tells caches
    of a forward pass. Layers that attend to a window of tokens (Gemma 3, gpt-oss) keep their last keys and values in
    this process, the daemon's cache has the others: see KvCache.window_bytes, window_description.

    address: "unix:PATH" of the daemon on this host.
    codec, lag_pages, page_tokens, tenant, calibration_digest: as Client.open_cache takes them.
    model_name, revision: what the cache's blocks are known by; default: the last part of the name or directory that
        the model was loaded from, as `kvctl calibrate` has it, and a digest of samples of the weights, which is taken
        for each cache: when weights have changed, caches made before are void. A codec's artifact may want its own
        revision (`kvctl calibrate --json` has it); a revision of yours is yours to change with the weights. Processes
        share blocks where these, the tenant and the codec are equal.
    dtype: of keys and values in pages: "float16" or "bfloat16"; default: the model's, float16 for float32.
    device: the daemon's GPU, for a model on a GPU; default: the one with the model's ordinal. -1: the host.
    calibration_dir: where the artifact lies that the codec names, for a model on a GPU: its kernels run here.
    publish_prompts: others find the full blocks of a prompt once it is prefilled.
    chunk_tokens: of a call of a long prefill, 64..16384: the staging memory is that many tokens' k, v, q and output.
    deadline_ms, name: of the connection.

    Errors: ValueError (the model); those of kvmanager. Belongs to the thread that made it."""

    def __init__(self, model: torch.nn.Module, address: str, *, codec: str = "raw", lag_pages: int = 2,
                 page_tokens: int = 64, tenant: str = "", calibration_digest: str = "", calibration_dir: str = "",
                 model_name: str = "", revision: str = "", dtype: str = "", device: int | None = None,
                 publish_prompts: bool = True, chunk_tokens: int = 2048, deadline_ms: int = 30000,
                 name: str = "transformers"):
        config = model.config.get_text_config(decoder=True)
        if config._attn_implementation != "kvmanager":
            raise ValueError(f"attn_implementation: {config._attn_implementation!r}; must be 'kvmanager' where the "
                             "model is loaded, or model.set_attn_implementation('kvmanager')")
        if not 64 <= chunk_tokens <= 16384:
            raise ValueError(f"chunk_tokens: {chunk_tokens}; must be 64..16384")
        parameter = next(model.parameters())
        self.torch_device = parameter.device
        if self.torch_device.type not in ("cpu", "cuda"):
            raise ValueError(f"model: is on {self.torch_device}; must be on the CPU or a CUDA device")
        if device is None:
            device = -1 if self.torch_device.type == "cpu" else self.torch_device.index or 0
        if (device >= 0) != (self.torch_device.type == "cuda"):
            raise ValueError(f"device: {device}; the model is on {self.torch_device}")
        self.layers = config.num_hidden_layers
        self.query_heads = config.num_attention_heads
        self.kv_heads = getattr(config, "num_key_value_heads", None) or self.query_heads
        self._vocabulary = config.vocab_size
        self.head_dim = getattr(config, "head_dim", None) or config.hidden_size // self.query_heads
        self.default_scale_inverse = self.head_dim**0.5
        windows = windows_of(config, self.layers)
        if all(window is not None for window in windows):
            windows = (None,) * self.layers  # contexts up to the window are attended in the daemon: attention() says so
        self.windows = windows
        self.daemon_layers = {layer: place for place, layer in enumerate(
            layer for layer, window in enumerate(windows) if window is None)}
        self.page_tokens = page_tokens
        self.publish_prompts = publish_prompts
        self.tokens_computed = 0  # tokens whose queries were attended, in each layer
        if not dtype:
            dtype = "bfloat16" if parameter.dtype == torch.bfloat16 else "float16"
        self._chunk_tokens, self._calibration_dir = chunk_tokens, calibration_dir
        self._model = weakref.ref(model)
        self._samples_weights = not revision
        self._options = dict(
            model=model_name or config._name_or_path.rstrip("/").rpartition("/")[2] or type(model).__name__,
            revision=revision or fingerprint(model), tenant=tenant, rope=position_facts(config),
            layers=len(self.daemon_layers), kv_heads=self.kv_heads, query_heads=self.query_heads, head_dim=self.head_dim, page_tokens=page_tokens,
            dtype=dtype, codec=codec, lag_pages=lag_pages, device=device, calibration_digest=calibration_digest)
        self.windowed: WindowedLayers | None = None
        if len(self.daemon_layers) < self.layers:
            self.windowed = WindowedLayers(windows, self._options, self.torch_device)
        self._connect = functools.partial(kv.connect, address, name=name, deadline_ms=deadline_ms)
        self.client = self._connect()
        self.path: HostPath | DevicePath
        self._whole = False  # what _open() makes belongs to the client's connection
        self._gave_up = False
        self._open()
        decoder = getattr(model, model.base_model_prefix, model)
        self._decoder = weakref.ref(decoder)
        self._names = list(inspect.signature(decoder.forward).parameters)
        self._hook = decoder.register_forward_pre_hook(self._before_forward, with_kwargs=True)

    def _open(self) -> None:
        self._cache = self.client.open_cache(**self._options)
        if self.windowed is not None:
            self.windowed.open(self.client, self._options)
        shape = dict(kv_heads=self.kv_heads, query_heads=self.query_heads, head_dim=self.head_dim,
                     dtype=self._options["dtype"])
        device = self._options["device"]
        if device < 0:
            self.path = HostPath(self.client, self._cache, shape, self._chunk_tokens)
        else:
            self.path = DevicePath(self.client, self._cache, shape, self._chunk_tokens, device, self.torch_device,
                                   self._calibration_dir)
        self._factors: list | None = None
        self._whole = True

    def _attach_again(self) -> None:
        """If the connection was lost, or given up, or the weights are not those that earlier blocks were made with."""
        model = self._model()
        if self._samples_weights and model is not None and (now := fingerprint(model)) != self._options["revision"]:
            self._options["revision"] = now
            self._gave_up = True
        if not self._gave_up and self._whole and self.client.connected:
            return
        self._whole = False
        self.path.close()
        if self._gave_up:
            client = self._connect()
            self.client.close()
            self.client, self._gave_up = client, False
        else:
            self.client.reconnect()
        self._open()

    @property
    def description(self) -> Any:
        """Of the daemon's cache: kvmanager.CacheDescription."""
        return self._cache.description

    @property
    def window_description(self) -> Any:
        """Of the daemon's cache of blocks of layers with a window: kvmanager.CacheDescription; None: there is none."""
        return None if self.windowed is None else self.windowed.description

    def output_factors(self) -> list:
        """Of each layer, Cache.output_factors(); None of layers with a window."""
        if self._factors is None:
            self._factors = [None] * self.layers
            for layer, place in self.daemon_layers.items():
                self._factors[layer] = self._cache.output_factors(place)
        return self._factors

    def cache(self, input_ids: torch.Tensor | None = None, attention_mask: torch.Tensor | None = None, *,
              rows: int = 1, expand: int = 1) -> KvCache:
        """A cache for one generation. With the input_ids [rows, columns] that generate() will get, and their
        attention_mask, each row begins with the blocks of its prompt that the daemon has, and the model computes the
        rest: generate() cuts the input as it does for any cache that is not empty. Without, `rows` empty rows.
        expand: num_beams or num_return_sequences of generate(), which repeats each row so often: they are one sequence
        until the prompt is prefilled, then forks. Connects again if the daemon was gone meanwhile."""
        if expand < 1 or rows < 1:
            raise ValueError(f"rows, expand: {rows}, {expand}; must be at least 1")
        self._attach_again()
        self._check_folded()
        if input_ids is None:
            return self.empty_cache(rows, expand)
        count, width = input_ids.shape
        leads = [0] * count if attention_mask is None else leads_of_mask(attention_mask, width)
        prompts = [array("I", ids[lead:]) for ids, lead in zip(input_ids.tolist(), leads)]
        # The last token is computed in any case: the next one comes from its logits.
        names = [self.block_names(ids[: max(0, len(ids) - 1)]) for ids in prompts]
        made = self.new_sequences(names, [len(ids) for ids in prompts])
        row_list, states = [], []
        for sequence, ids, lead, named in zip(made, prompts, leads, names):
            hit = sequence.hit_blocks * self.page_tokens
            if self.windowed is not None:
                state = None
                if tokens := self.windowed.usable(named, hit):
                    state = self.windowed.read(named, tokens)
                states.append(state)
                if state is None:  # none is usable, or it was evicted since
                    tokens = 0
                if tokens < hit:
                    sequence.crop(tokens)
                    self.path.copied(sequence)
                    hit = tokens
            row_list.append(Row(sequence, lead, hit, ids[:hit]))
        columns = min((row.lead + row.tokens for row in row_list), default=0)
        return KvCache(self, row_list, columns, expand, self._window(len(row_list), states))

    def _window(self, rows: int, states: list) -> Window | None:
        if self.windowed is None:
            return None
        window = Window(self.windowed, rows)
        if any(state is not None for state in states):
            window.set_rows(states)
        return window

    def claim(self, tickets: list, pad_token_id: int = 0) -> Claimed:
        """Takes over the rows of a cache that KvCache.hand_off() sent to this daemon, once. Connects again if the
        daemon was gone meanwhile; what it had received then is lost. Errors: those of Cache.claim(); ValueError for
        what is no such row."""
        self._attach_again()
        self._check_folded()
        rows, sequences, blobs, states = [], [], [], []
        for ticket in tickets:
            got = self._cache.claim(ticket)
            ids, chosen, window_ticket, blob = _unpack(bytes(got.blob))
            if len(ids) != got.tokens:
                raise ValueError(f"blob: names {len(ids)} tokens; the sequence has {got.tokens}")
            if max(ids + chosen, default=0) >= self._vocabulary:
                raise ValueError(f"blob: names token {max(ids + chosen)}; the vocabulary has {self._vocabulary}")
            states.append(self._claim_window(window_ticket, got.tokens))
            rows.append(Row(got.sequence, 0, got.tokens, ids))
            sequences.append(ids + chosen)
            blobs.append(blob)
        width = max(len(ids) for ids in sequences)
        input_ids = torch.full((len(rows), width), pad_token_id, dtype=torch.long)
        mask = torch.zeros((len(rows), width), dtype=torch.long)
        for at, (row, ids) in enumerate(zip(rows, sequences)):
            row.lead = width - len(ids)
            input_ids[at, row.lead :] = torch.tensor(ids.tolist(), dtype=torch.long)
            mask[at, row.lead :] = 1
        window = self._window(len(rows), states)
        cache = KvCache(self, rows, min(row.lead + row.tokens for row in rows), 1, window)
        return Claimed(cache, input_ids.to(self.torch_device), mask.to(self.torch_device), blobs)

    def _claim_window(self, ticket: bytes, tokens: int) -> Any:
        if bool(ticket) != (self.windowed is not None and tokens > 0):
            raise ValueError("blob: comes from a model whose layers have windows where this one's have not, or the "
                             "other way round")
        if not ticket:
            return None
        state = self.windowed.claim(ticket)
        wanted = min(tokens, self.windowed.longest - 1)
        if state[0].shape[1] < wanted or state[0].shape[1] > tokens:
            raise ValueError(f"blob: the windowed layers have {state[0].shape[1]} tokens; must have {wanted}..{tokens}")
        return state

    def close(self) -> None:
        """Gives back everything: caches made here are void."""
        self._hook.remove()
        self.path.close()
        self.client.close()

    def __enter__(self) -> "Attachment":
        return self

    def __exit__(self, *exception: Any) -> None:
        self.close()

    def __deepcopy__(self, memo: dict) -> "Attachment":
        """Of a model that is copied with its hooks: the copy is not attached, see _before_forward."""
        return self

    # For KvCache.

    def give_up(self) -> None:
        """A step was not answered in time. The daemon may yet write its output into memory that this connection shares:
        the next cache begins another."""
        self._gave_up = True

    def empty_cache(self, rows: int, expand: int = 1) -> KvCache:
        made = [Row(sequence) for sequence in self.new_sequences([None] * rows, [0] * rows)]
        return KvCache(self, made, 0, expand, self._window(rows, []))

    def new_sequences(self, names: list, prompt_tokens: list[int]) -> list:
        return self._cache.create_sequences(names, prompt_tokens)

    def block_names(self, ids: array) -> Any:
        return self._cache.block_names(ids)

    def send(self, row: Row, chosen: list[int], blob: bytes, peer: str, options: dict[str, Any], state: Any) -> Any:
        """state: k and v of the layers with windows, or None."""
        if row.ids is None:
            raise ValueError("hand_off: a row was fed embeddings, whose ids the other side could not know")
        ticket = b""
        if state is not None:
            sent = self.windowed.hand_off(*state, peer, options)
            ticket, peer = sent.ticket, sent.peer  # of several peers the one that took it
        head = _BLOB.pack(_MAGIC, len(row.ids), len(chosen), len(ticket), len(blob))
        packed = head + row.ids.tobytes() + array("I", chosen).tobytes() + ticket + blob
        return row.sequence.hand_off(peer, packed, **options).ticket

    def _check_folded(self) -> None:
        digest = folded_with(self._model())
        if digest is None and "fold=1" not in self._cache.description.options.codec:
            return
        factors = self.output_factors()
        wanted = None if all(layer is None for layer in factors) else factors_digest(factors)
        if digest != wanted:
            raise ValueError("model: its W_O does not fit the codec: call fold_output_weights(model, attachment)"
                             if digest is None else "model: its W_O is folded for another codec; load it again")

    def _before_forward(self, module: torch.nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
        given = dict(zip(self._names, args)) | kwargs
        cache = given.get("past_key_values")
        if not isinstance(cache, KvCache) or cache.attachment is not self:
            return None
        if module is not self._decoder():
            raise ValueError("model: is a copy of the one that was attached; attach it, too")
        ids, embeddings = given.get("input_ids"), given.get("inputs_embeds")
        batch, columns = (ids if ids is not None else embeddings).shape[:2]
        positions = given.get("position_ids")
        wanted = cache.begin(batch, columns, ids, given.get("attention_mask"), positions)
        return None if wanted is positions else ((), given | {"position_ids": wanted})


def _unpack(blob: bytes) -> tuple[array, array, bytes, bytes]:
    """What Attachment.send packed; another client may have sent anything."""
    if len(blob) < _BLOB.size:
        raise ValueError(f"blob: {len(blob)} bytes; must be at least {_BLOB.size}: KvCache.hand_off() makes them")
    magic, count, chosen_count, ticket_bytes, extra = _BLOB.unpack_from(blob)
    if magic != _MAGIC:
        raise ValueError(f"blob: begins with {magic!r}; must be {_MAGIC!r}: KvCache.hand_off() of this version makes "
                         "them")
    wanted = _BLOB.size + 4 * (count + chosen_count) + ticket_bytes + extra
    if len(blob) != wanted:
        raise ValueError(f"blob: {len(blob)} bytes; its head says {wanted}")
    ids, chosen = array("I"), array("I")
    ids.frombytes(blob[_BLOB.size : _BLOB.size + 4 * count])
    end = _BLOB.size + 4 * (count + chosen_count)
    chosen.frombytes(blob[_BLOB.size + 4 * count : end])
    return ids, chosen, blob[end : end + ticket_bytes], blob[end + ticket_bytes :]
