"""kvmanager: attention keys and values in a daemon of their own.

    import kvmanager as kv

    with kv.connect("unix:/run/kvmanager/kvmanager.sock") as client:
        cache = client.open_cache(model="m", layers=32, kv_heads=8, query_heads=32, head_dim=128)
        names = cache.block_names(token_ids)
        seq = cache.create_sequence(names)                    # begins with the blocks that were found
        cache.step(layer, [(seq, position, tokens)], k, v, q, out)
        seq.publish(names)                                    # others find them now

Handles are leases. A client and its handles belong to the thread that connected; kvmanager.aio has coroutines.
Neither numpy nor torch is needed: tensors of both, and whatever has __dlpack__, are arguments.
"""

from .arena import Arena, ArenaTensor
from .blocks_mapped import BlocksMapped
from .cache import Cache, Entries
from .client import Client, connect
from .device import Device, InProcess, allow_many_streams
from .errors import (
    AbortedError,
    AlreadyExistsError,
    CancelledError,
    DataLossError,
    DeadlineExceededError,
    Error,
    FailedPreconditionError,
    InternalError,
    InvalidArgumentError,
    NotFoundError,
    OutOfRangeError,
    PermissionDeniedError,
    ResourceExhaustedError,
    UnauthenticatedError,
    UnavailableError,
    UnimplementedError,
)
from .names import BlockNames
from .page_codec import PageCodec
from .pending import Pending
from .sequence import Claimed, HandOff, Sequence
from .types import (
    BlocksRead,
    BlocksWritten,
    CacheDescription,
    CacheOptions,
    DaemonDescription,
    DiskDescription,
    HandOffOutcome,
    KeptMemoryDescription,
    LayerTimes,
    LimitDescription,
    PeerDescription,
    PeerLoad,
    PoolDescription,
    PrefixMatch,
    PublishOutcome,
    ReadResult,
    Retained,
    SequenceDescription,
    StepResult,
)

__version__ = "0.1.0"

__all__ = [
    "AbortedError",
    "allow_many_streams",
    "AlreadyExistsError",
    "Arena",
    "ArenaTensor",
    "BlockNames",
    "BlocksMapped",
    "BlocksRead",
    "BlocksWritten",
    "Cache",
    "CacheDescription",
    "CacheOptions",
    "CancelledError",
    "Claimed",
    "Client",
    "connect",
    "DaemonDescription",
    "DiskDescription",
    "DataLossError",
    "DeadlineExceededError",
    "Device",
    "Entries",
    "Error",
    "FailedPreconditionError",
    "HandOff",
    "HandOffOutcome",
    "InProcess",
    "InternalError",
    "InvalidArgumentError",
    "KeptMemoryDescription",
    "LayerTimes",
    "LimitDescription",
    "NotFoundError",
    "OutOfRangeError",
    "PeerDescription",
    "PeerLoad",
    "PageCodec",
    "Pending",
    "PermissionDeniedError",
    "PoolDescription",
    "PrefixMatch",
    "PublishOutcome",
    "ReadResult",
    "ResourceExhaustedError",
    "Retained",
    "Sequence",
    "SequenceDescription",
    "StepResult",
    "UnauthenticatedError",
    "UnavailableError",
    "UnimplementedError",
]
