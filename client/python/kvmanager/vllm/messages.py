"""What the scheduler's half tells the workers' halves, step by step. Pickled between processes."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata

from .retention import Retention


@dataclass
class Load:
    """Blocks first .. first + len(block_ids[g]) of a request, for each group g, from the daemon. Id 0: not wanted."""

    request: str
    tenant: str
    hashes: list[bytes]  # of all blocks from the first of the prompt on
    first: int
    block_ids: tuple[list[int], ...]


@dataclass
class Store:
    """Blocks from `first` on to the daemon, full once this step has run. hashes: from block hashes_from on."""

    request: str
    tenant: str
    hashes_from: int
    hashes: list[bytes]
    first: int
    block_ids: tuple[list[int], ...]


@dataclass
class Finish:
    """No more stores of a request. report: its blocks are kept until the workers say that they were read. peer: hand
    what was stored to the daemon there. retention: of its blocks in the daemon; None: as usual."""

    request: str
    report: bool
    peer: str = ""
    retention: Retention | None = None


@dataclass
class StepPlan(KVConnectorMetadata):
    loads: list[Load] = field(default_factory=list)
    stores: list[Store] = field(default_factory=list)
    finishes: list[Finish] = field(default_factory=list)
    preempted: bool = False  # blocks that are being read may be given to others in this step
    computes: bool = True  # else the engine does nothing in this step, and little before the next
