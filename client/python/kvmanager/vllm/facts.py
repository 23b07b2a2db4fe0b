"""What the connector must know of a vLLM engine, from its configuration: both halves derive the same."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from .._facts import fits, position_facts
from .._link import check_setting

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

_DTYPES = {torch.float16: "float16", torch.bfloat16: "bfloat16"}
_PAGE_TOKENS = range(16, 257, 16)
_PLANS = ("cheaper", "load")
SET_BY = {"page_tokens": "vLLM's --block-size", "dtype": "vLLM's --dtype"}  # fields of open_cache
_MAP_GIB_MAX = 2048  # a pool's most
_STAGING_MIB_MAX = 2048  # two arenas of 1 GiB


@dataclass(frozen=True)
class Settings:
    """kv_connector_extra_config; an unknown key, a value of another type or beyond its range is a ValueError."""

    address: str = "unix:/run/kvmanager/kvmanager.sock"
    codec: str = "raw"
    lag_pages: int = 0
    tenant: str = ""
    calibration_digest: str = ""
    deadline_ms: int = 10000  # of a call to the daemon
    lookup_ms: int = 1000  # a lookup without an answer by then is a miss
    prefill_wait_ms: int = 10000  # how long a decode engine waits for blocks that a prefill engine promised
    staging_mib: int = 512  # per rank: half for stores, half for loads
    layerwise_saves: bool = False  # copies a layer when it is computed; CUDA graphs become piecewise
    store_output: bool = True  # blocks of generated tokens, too
    calibration_dir: str = ""  # where the artifact lies that the codec names: pages are encoded in the engine's process
    map_gib: int = -1  # of the daemon's memory that a GPU's worker maps when it attaches; -1: what it gives; 0: none
    direct: bool = True  # the daemon's GPU, where it has this worker's, copies what is stored
    plan: str = "cheaper"  # what is found is loaded where that is faster than computing it; "load": always
    required: bool = False  # an engine that cannot keep its blocks does not start
    peer: str = ""  # "HOST:PORT[,HOST:PORT]": where prefills of do_remote_decode are handed to; empty: nowhere
    peers: tuple[str, ...] = ()  # "HOST:PORT" each, in JSON a list: what requests may name instead; empty: anything

    @classmethod
    def of(cls, given: dict) -> Settings:
        unknown = set(given) - set(cls.__dataclass_fields__)
        if unknown:
            known = ", ".join(cls.__dataclass_fields__)
            raise ValueError(f"kv_connector_extra_config has {', '.join(sorted(unknown))}, must be of {known}")
        for key, value in given.items():
            if key == "peers":
                if not isinstance(value, list) or not all(_is_address(each) for each in value):
                    raise ValueError(f'peers is {value!r}, must be a list of "HOST:PORT"')
            else:
                check_setting(key, value, cls.__dataclass_fields__[key].default, _STAGING_MIB_MAX)
                if key == "map_gib" and not -1 <= value <= _MAP_GIB_MAX:
                    raise ValueError(f"map_gib is {value}, must be -1..{_MAP_GIB_MAX}")
                if key == "plan" and value not in _PLANS:
                    raise ValueError(f"plan is {value!r}, must be {' or '.join(_PLANS)}")
        return cls(**{**given, "peers": tuple(given.get("peers", ()))})

    def may_hand_to(self, peer: str) -> bool:
        """Whether a finished request's blocks may go to "HOST:PORT[,HOST:PORT]"."""
        return not self.peers or peer == self.peer or all(each in self.peers for each in peer.split(","))


def _is_address(value: object) -> bool:
    return isinstance(value, str) and re.fullmatch(r"[^\s,]+:\d{1,5}", value) is not None


@dataclass(frozen=True)
class Facts:
    """off: why nothing can be kept of this model; empty: it can. groups: per layer the cache group whose block tables
    name its blocks."""

    off: str = ""
    layers: tuple[str, ...] = ()
    groups: tuple[int, ...] = ()
    windowed: bool = False  # some group gives blocks back while their request runs
    group_count: int = 1
    block_tokens: int = 0
    hashes_per_block: int = 1
    blocks: int = 0
    heads: int = 0
    head_dim: int = 0
    dtype: torch.dtype = torch.float16
    ranks: int = 1
    rank: int = 0  # of this process, in a worker
    options: dict = field(default_factory=dict)  # Client.open_cache's, but for tenant and rank

    def describe(self, key: tuple[str, int]) -> dict:
        """Client.open_cache's arguments of (tenant, tensor-parallel rank)."""
        tenant, rank = key
        return {**self.options, "tenant": tenant, "tensor_parallel_rank": rank, "tensor_parallel_size": self.ranks}


def tenant_of(settings: Settings, salt: str | None, era: str = "") -> str:
    """A salt may be a secret, and of any length: its digest stands for it. era: of the weights, empty until they may
    have changed."""
    if not salt and not era:
        return settings.tenant
    both = f"{settings.tenant}\0{salt or ''}" + (f"\0{era}" if era else "")
    return f"{settings.tenant[:150]}/salt:{hashlib.sha256(both.encode(errors='surrogatepass')).hexdigest()}"


def chunk_tokens_of(config: VllmConfig) -> int:
    """Of a prompt that a step computes at most."""
    scheduler = config.scheduler_config
    return min(filter(None, (scheduler.max_num_batched_tokens, getattr(scheduler, "long_prefill_token_threshold", 0))))


def facts_of(config: VllmConfig, caches: KVCacheConfig, settings: Settings, rank: int = 0) -> Facts:
    try:
        return _facts_of(config, caches, settings, rank)
    except _Off as off:
        return Facts(off=str(off))


class _Off(Exception):
    pass


def _natural(name: str) -> list:
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)]


def _rope(model) -> str:
    """Position facts of the model's own configuration, whatever it is called there."""
    return position_facts(getattr(model, "hf_text_config", None) or getattr(model, "hf_config", None))


def _keeps_all(spec: object) -> bool:
    return any(kind.__name__ == "FullAttentionSpec" for kind in type(spec).__mro__)


def _facts_of(config: VllmConfig, caches: KVCacheConfig, settings: Settings, rank: int) -> Facts:
    parallel = config.parallel_config
    for name in ("pipeline_parallel_size", "decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, name, 1) != 1:
            raise _Off(f"{name} is {getattr(parallel, name)}, must be 1")
    layers: dict[str, tuple[int, object]] = {}
    for index, group in enumerate(caches.kv_cache_groups):
        specs = getattr(group.kv_cache_spec, "kv_cache_specs", None)
        for name in group.layer_names:
            layers[name] = (index, specs[name] if specs else group.kv_cache_spec)
    if not layers:
        raise _Off("the model has no KV cache")
    shapes = set()
    for name, (_, spec) in layers.items():
        heads, width = getattr(spec, "num_kv_heads", None), getattr(spec, "head_size", None)
        if not heads or not width or "MLA" in type(spec).__name__:
            raise _Off(f"layer {name} is {type(spec).__name__}, must be attention with K and V")
        odd = getattr(spec, "head_size_v", None) not in (None, width) or getattr(spec, "num_head_slots", None)
        if odd or getattr(spec, "tokens_per_state", 1) != 1 or getattr(spec, "page_size_padded", None):
            raise _Off(f"layer {name} does not keep K and V of {width} values for each token and head")
        shapes.add((heads, width, spec.dtype, spec.block_size))
    if len(shapes) > 1:
        raise _Off(f"layers differ in KV heads, head size, dtype or block size: {sorted(map(str, shapes))}")
    ((heads, width, dtype, block_tokens),) = shapes
    if dtype not in _DTYPES:
        raise _Off(f"kv_cache_dtype is {dtype}, must be float16 or bfloat16")
    if block_tokens not in _PAGE_TOKENS:
        raise _Off(f"block_size is {block_tokens}, must be a multiple of 16 in 16..256")
    hash_tokens = getattr(caches, "hash_block_size", None) or block_tokens
    if block_tokens % hash_tokens:
        raise _Off(f"block hashes are of {hash_tokens} tokens, must divide {block_tokens}")
    names = sorted(layers, key=_natural)
    model = config.model_config
    query_heads = model.get_num_attention_heads(parallel)
    return Facts(
        layers=tuple(names),
        groups=tuple(layers[name][0] for name in names),
        windowed=any(not _keeps_all(spec) for _, spec in layers.values()),
        group_count=len(caches.kv_cache_groups),
        block_tokens=block_tokens,
        hashes_per_block=block_tokens // hash_tokens,
        blocks=caches.num_blocks,
        heads=heads,
        head_dim=width,
        dtype=dtype,
        ranks=parallel.tensor_parallel_size,
        rank=rank,
        options={
            "model": fits(model.model),
            "revision": fits(model.revision or ""),
            "rope": _rope(model),
            "layers": len(names),
            "kv_heads": heads,
            "query_heads": query_heads if query_heads % heads == 0 else heads,
            "head_dim": width,
            "page_tokens": block_tokens,
            "dtype": _DTYPES[dtype],
            "codec": settings.codec,
            "lag_pages": settings.lag_pages,
            "calibration_digest": settings.calibration_digest,
        },
    )
