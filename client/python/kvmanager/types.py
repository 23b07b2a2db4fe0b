"""Plain results of calls. Bytes are bytes, times seconds unless a name says otherwise."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

MISS_REASONS = ("none", "not_found", "token_mismatch", "checksum", "incomplete")


class BlocksRead(NamedTuple):
    """Blocks that were copied, from the first name on. reason: why no more, one of MISS_REASONS; "none": all were, or no
    more fit. nbytes: of the range that they take. raw: [blocks][layers], 1 where a page is raw, else 0."""

    blocks: int
    reason: str
    nbytes: int
    raw: bytes


class BlocksWritten(NamedTuple):
    """written: blocks that are stored and named now; present: that the daemon had already."""

    written: int
    present: int


class Retained(NamedTuple):
    """blocks: of the names, that are in a memory or on the disk; nbytes: of these, each copy counted."""

    blocks: int
    nbytes: int


class StepResult(NamedTuple):
    """(query token, context token) pairs read in either form; of a cache on a GPU, `done` is what the word `done` is at
    least when the output is there."""

    encoded_pairs: int
    raw_pairs: int
    done: int


class ReadResult(NamedTuple):
    """Tokens, of all entries, that were decoded, and that were copied from raw pages."""

    encoded_tokens: int
    raw_tokens: int


class PrefixMatch(NamedTuple):
    """hit_blocks: consecutive, from the first. reason: of the first block that was no hit, one of MISS_REASONS.
    in_memory: of hit_blocks, from the first on: in the cache's own memory; the next one is in another, or on the disk."""

    hit_blocks: int
    reason: str
    in_memory: int


class PublishOutcome(NamedTuple):
    """Blocks that others find now, that were there already, and that will be published when they are encoded."""

    published: int
    shared: int
    deferred: int


@dataclass(frozen=True)
class CacheOptions:
    """What a cache is: all of it but `device` is part of every block's name."""

    model: str
    revision: str = ""
    tenant: str = ""
    rope: str = ""
    layers: int = 0
    kv_heads: int = 0
    query_heads: int = 0
    head_dim: int = 0
    page_tokens: int = 64
    dtype: str = "float16"
    codec: str = "raw"
    lag_pages: int = 2
    device: int = -1
    hidden_size: int = 0
    tensor_parallel_rank: int = 0
    tensor_parallel_size: int = 1
    calibration_digest: str = ""


@dataclass(frozen=True)
class CacheDescription:
    """`options.codec` is canonical; page bytes are of one layer, K and V, the mean over layers. encoded: padding included,
    rounded up; payload: without padding. sink_tokens: at the beginning of every context, whose pages stay raw. pool_bytes: of the cache's
    memory, what its tenant may have at most; 0: an earlier daemon does not say."""

    options: CacheOptions
    id: int
    digest: bytes
    raw_page_bytes: int
    encoded_page_bytes: int
    payload_page_bytes: int
    sink_tokens: int
    pool_bytes: int
    resident_raw_bytes: int
    resident_encoded_bytes: int
    resident_activation_bytes: int
    sequences: int
    published_blocks: int

    @classmethod
    def parse(cls, fields: dict[str, Any]) -> CacheDescription:
        options = CacheOptions(**fields.pop("options"))
        return cls(options=options, digest=bytes.fromhex(fields.pop("digest")), **fields)


@dataclass(frozen=True)
class SequenceDescription:
    """client: the name of who holds it, empty if nobody has claimed it; pid: of that process, 0 if unknown."""

    id: int
    cache_id: int
    tokens: int
    hit_blocks: int
    published_blocks: int
    bytes: int
    client: str
    pid: int


@dataclass(frozen=True)
class PoolDescription:
    tier: str
    capacity_bytes: int
    used_bytes: int
    slab_bytes: int
    free_slabs: int
    huge_pages: str


@dataclass(frozen=True)
class DiskDescription:
    """unwritten_blocks: of host memory, that are being written or wait for that. state: "ready", "reading its index",
    or what is wrong."""

    path: str
    capacity_bytes: int
    used_bytes: int
    blocks: int
    unwritten_blocks: int
    state: str


@dataclass(frozen=True)
class KeptMemoryDescription:
    """Host memory that outlives the daemon. state: who keeps it, or why nobody does. pid: of the process that keeps it;
    0: nobody does. unclaimed_blocks: of an earlier daemon, that no cache has taken yet."""

    state_dir: str
    state: str
    pid: int
    unclaimed_blocks: int


@dataclass(frozen=True)
class DaemonDescription:
    """disk: None where the daemon has none. kept_memory: None without --state-dir."""

    version: str
    boot_epoch: int
    uptime_seconds: float
    draining: bool
    pools: list[PoolDescription]
    disk: DiskDescription | None
    kept_memory: KeptMemoryDescription | None
    connections: int
    caches: int
    threads: int
    leases: int
    published_blocks: int
    waiting_hand_offs: int
    cpu_target: str
    listen: str
    peer_listen: str
    metrics_listen: str
    gpus: str
    ucx: str
    pinned_bytes: int
    pin_total_bytes: int
    pin_error: str

    @classmethod
    def parse(cls, fields: dict[str, Any]) -> DaemonDescription:
        pools = [PoolDescription(**pool) for pool in fields.pop("pools")]
        disk, kept = fields.pop("disk"), fields.pop("kept_memory")
        return cls(
            pools=pools,
            disk=None if disk is None else DiskDescription(**disk),
            kept_memory=None if kept is None else KeptMemoryDescription(**kept),
            **fields,
        )


@dataclass(frozen=True)
class PeerLoad:
    capacity_bytes: int
    free_bytes: int
    queued_bytes: int
    waiting_offers: int
    active_transfers: int


@dataclass(frozen=True)
class PeerDescription:
    """load: None where it is not known, and load_error says why."""

    peer: str
    incoming: bool
    transfers: int
    failures: int
    bytes: int
    active: int
    copied_bytes: int
    bytes_per_second: float
    last_error: str
    load: PeerLoad | None
    load_error: str

    @classmethod
    def parse(cls, fields: dict[str, Any]) -> PeerDescription:
        load = fields.pop("load")
        return cls(load=None if load is None else PeerLoad(**load), **fields)


@dataclass(frozen=True)
class LimitDescription:
    """A bound of the daemon. scope: "daemon", "tenant", "connection", "process", "call" or "peer"; used: by the daemon, or
    by the one of its scope that has most, None where it is not counted; flag: from which it follows, "" of a fixed one."""

    name: str
    scope: str
    unit: str
    limit: int
    used: int | None
    flag: str
    bounds: str


@dataclass(frozen=True)
class LayerTimes:
    """Seconds since the offer; negative: no page went."""

    ready_first: float
    ready_last: float
    sent_first: float
    arrived_last: float


@dataclass(frozen=True)
class HandOffOutcome:
    """seconds: from the offer to the receiver's confirmation; sending_seconds: of these, with pages to send."""

    ticket: bytes
    peer: str
    bytes_sent: int
    pages_sent: int
    pages_skipped: int
    bytes_resent: int
    resumes: int
    seconds: float
    sending_seconds: float
    begun_unix_ns: int
    layers: list[LayerTimes] = field(repr=False)

    @classmethod
    def parse(cls, fields: dict[str, Any]) -> HandOffOutcome:
        layers = [LayerTimes(**layer) for layer in fields.pop("layers")]
        return cls(ticket=bytes.fromhex(fields.pop("ticket")), layers=layers, **fields)
