"""The C interface (client/c/kvmanager.h), loaded: prototypes, results, and handles that give themselves back."""

from __future__ import annotations

import ctypes
import json
import os
from ctypes import POINTER, byref, c_char_p, c_int, c_int32, c_int64, c_size_t, c_uint8, c_uint32, c_uint64, c_void_p
from typing import TYPE_CHECKING, Any, NoReturn

from .errors import from_text

if TYPE_CHECKING:
    from typing import Self

_ABI = 3
_FILE = "libkvmanager_client.so"


class MatchResult(ctypes.Structure):
    _fields_ = [("hit_blocks", c_int32), ("reason", c_int32), ("in_memory", c_int32), ("reserved", c_int32)]


class Created(ctypes.Structure):
    _fields_ = [
        ("sequence", c_void_p),
        ("id", c_uint64),
        ("match", MatchResult),
        ("code", c_int32),
        ("reserved", c_int32),
    ]


class HandOffOptions(ctypes.Structure):
    _fields_ = [("timeout_ms", c_int64), ("room_ms", c_int64), ("will_append", c_int32), ("reserved", c_int32)]


class RunOptions(ctypes.Structure):
    _fields_ = [
        ("stream", c_void_p),
        ("pages_max", c_uint64),
        ("encode_here", c_int32),
        ("sequences_max", c_int32),
        ("tokens_max", c_int32),
        ("reserved", c_int32),
    ]


class TensorRange(ctypes.Structure):
    _fields_ = [("data", c_void_p), ("bytes", c_uint64)]


class PagedCaches(ctypes.Structure):
    _fields_ = [
        *((name, c_uint32) for name in ("layers", "heads", "tokens", "piece_tokens", "row_bytes", "reserved")),
        *((name, c_int64) for name in ("block_stride", "piece_stride", "token_stride", "head_stride")),
        ("layer_table", c_void_p),
    ]


class Hashes(ctypes.Structure):
    _fields_ = [("bytes", c_char_p), ("sizes", c_void_p), ("count", c_uint32)]


class BringRoom(ctypes.Structure):
    _fields_ = [
        ("raw", c_void_p * 2),
        ("stored", c_void_p * 2),
        *((name, c_uint32) for name in ("blocks", "calls", "call_blocks", "first_blocks")),
        *((name, c_void_p) for name in ("lists", "lists_device", "sums")),
        *((name, c_uint64) for name in ("list_bytes", "sums_bytes")),
        *((name, c_void_p) for name in ("copied", "fetch", "load")),
    ]


class Brought(ctypes.Structure):
    _fields_ = [("blocks", c_uint32), ("reason", c_uint32), ("nbytes", c_uint64)]


class PagedSave(ctypes.Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("raw", "stored", "host", "ids", "list", "list_device", "declined", "sums")),
        *((name, c_uint32) for name in ("first_block", "count", "groups", "part")),
        *((name, c_void_p) for name in ("save", "send")),
    ]


class StoreStaging(ctypes.Structure):
    _fields_ = [(name, c_void_p) for name in ("raw", "stored", "list", "list_device", "declined", "sums")]


class StoreRoom(ctypes.Structure):
    _fields_ = [
        ("staging", c_void_p),
        ("range", c_void_p),
        ("range_bytes", c_uint64),
        *((name, c_void_p) for name in ("encoded", "save", "send")),
        *((name, c_uint32) for name in ("stagings", "ranges", "blocks", "part", "writes", "first_blocks")),
        *((name, c_int32) for name in ("tied", "direct")),
    ]


class StoreSignals(ctypes.Structure):
    """For a store that runs, by any thread: how much that is urgent waits, and how many stores do."""

    _fields_ = [("urgent", c_uint32), ("waiting", c_uint32)]


class Stored(ctypes.Structure):
    _fields_ = [
        *((name, c_uint32) for name in ("state", "next", "found", "written", "present", "full")),
        *((name, c_uint64) for name in ("written_bytes", "nanoseconds")),
    ]


class Rows(ctypes.Structure):
    _fields_ = [("k", c_void_p), ("v", c_void_p), *((name, c_int64) for name in ("layer_stride", "token_stride", "head_stride"))]


_OBJECT = POINTER(c_void_p)

# Functions that return a code. Buffers go as addresses (c_void_p takes integers, bytes and ctypes arrays).
_CALLS = {
    "kvm_close": [c_void_p],
    "kvm_connect": [c_char_p, c_size_t, c_char_p, c_size_t, _OBJECT],
    "kvm_reconnect": [c_void_p],
    "kvm_connected": [c_void_p, POINTER(c_int)],
    "kvm_ping": [c_void_p],
    "kvm_status": [c_void_p],
    "kvm_caches": [c_void_p],
    "kvm_sequences": [c_void_p],
    "kvm_peers": [c_void_p, c_char_p, c_size_t],
    "kvm_recompute": [c_void_p],
    "kvm_limits": [c_void_p],
    "kvm_explain": [c_void_p, c_int64, c_char_p, c_uint32],
    "kvm_retain_in_cache": [c_void_p, c_int64, c_char_p, c_uint32, c_int32, c_int64, c_void_p],
    "kvm_drain": [c_void_p, c_int],
    "kvm_purge": [c_void_p, c_int64, POINTER(c_uint64)],
    "kvm_wait_for_news": [c_void_p],
    "kvm_create_arena": [c_void_p, c_uint64, _OBJECT, _OBJECT, POINTER(c_uint64)],
    "kvm_dlpack": [c_void_p, c_uint64, c_void_p, c_int32, c_uint8, c_uint8, c_int, _OBJECT],
    "kvm_open_cache": [c_void_p, c_char_p, c_size_t, _OBJECT],
    "kvm_refresh": [c_void_p],
    "kvm_name_blocks": [c_char_p, c_void_p, c_uint64, c_int32, c_void_p],
    "kvm_name_hashes": [c_char_p, POINTER(Hashes), c_void_p],
    "kvm_match": [c_void_p, c_char_p, c_void_p, c_uint32, c_int32, c_void_p],
    "kvm_prefetch": [c_void_p, c_char_p, c_uint32, POINTER(MatchResult)],
    "kvm_prefetch_in_cache": [c_void_p, c_int64, c_char_p, c_uint32, POINTER(MatchResult)],
    "kvm_retain": [c_void_p, c_char_p, c_uint32, c_int32, c_int64, c_void_p],
    "kvm_create_sequences": [c_void_p, c_char_p, c_void_p, c_void_p, c_uint32, c_void_p],
    "kvm_cache_step": [c_void_p, c_char_p, c_void_p],
    "kvm_cache_step_async": [c_void_p, c_char_p, _OBJECT],
    "kvm_read": [c_void_p, c_int32, c_void_p, c_uint32, POINTER(TensorRange), POINTER(TensorRange), c_void_p],
    "kvm_read_async": [c_void_p, c_int32, c_void_p, c_uint32, POINTER(TensorRange), POINTER(TensorRange), _OBJECT],
    "kvm_read_blocks_async": [c_void_p, c_uint32, c_char_p, c_uint32, POINTER(TensorRange), _OBJECT],
    "kvm_write_blocks_async": [
        c_void_p, c_uint32, c_char_p, c_uint32, c_char_p, c_uint64, c_char_p, POINTER(TensorRange), _OBJECT
    ],
    "kvm_bind_slabs": [c_void_p, c_uint64, c_int32, POINTER(c_uint64)],
    "kvm_map_blocks_async": [
        c_void_p, c_uint32, c_char_p, c_uint32, POINTER(TensorRange), c_int32, _OBJECT
    ],
    "kvm_mapped_pages": [c_void_p, _OBJECT, _OBJECT, _OBJECT, POINTER(c_uint64)],
    "kvm_release_blocks_async": [c_void_p, c_uint32, _OBJECT],
    "kvm_create_page_codec": [c_void_p, c_char_p, c_size_t, c_int32, _OBJECT],
    "kvm_encode_pages": [c_void_p, c_void_p, c_uint32, c_void_p, c_void_p],
    "kvm_decode_pages": [c_void_p, c_void_p, c_uint32, c_void_p],
    "kvm_copy_pages": [c_void_p, c_void_p, c_void_p, c_uint32, c_void_p, c_void_p, POINTER(c_uint64)],
    "kvm_hash_pages": [c_void_p, c_void_p, c_void_p, c_uint32, c_void_p, c_void_p],
    "kvm_set_paged": [c_void_p, POINTER(PagedCaches)],
    "kvm_bring_blocks": [
        c_void_p, c_void_p, POINTER(BringRoom), c_uint32, POINTER(Hashes), c_void_p, c_uint32, POINTER(Brought)
    ],
    "kvm_load_rows": [c_void_p, c_void_p, POINTER(Rows), c_char_p, c_uint32, c_uint32, c_void_p],
    "kvm_save_blocks": [c_void_p, POINTER(PagedSave), POINTER(c_uint64)],
    "kvm_create_store": [
        c_void_p, POINTER(StoreRoom), c_uint32, POINTER(Hashes), c_void_p, c_uint32, _OBJECT, POINTER(POINTER(c_uint32))
    ],
    "kvm_run_store": [c_void_p, c_void_p, c_void_p, POINTER(StoreSignals), POINTER(Stored)],
    "kvm_stop_store": [c_void_p],
    "kvm_ready": [c_void_p, POINTER(c_int)],
    "kvm_wait": [c_void_p, c_void_p, _OBJECT],
    "kvm_output_factors": [c_void_p, c_int32, c_void_p, c_uint64, POINTER(c_int)],
    "kvm_claim": [c_void_p, c_char_p, c_size_t, c_int64, _OBJECT],
    "kvm_fork": [c_void_p, _OBJECT, POINTER(c_uint64)],
    "kvm_crop": [c_void_p, c_uint64],
    "kvm_publish": [c_void_p, c_char_p, c_uint32, c_void_p],
    "kvm_info": [c_void_p],
    "kvm_hand_off": [c_void_p, c_char_p, c_size_t, c_char_p, c_size_t, POINTER(HandOffOptions), _OBJECT],
    "kvm_begin_hand_off": [c_void_p, c_char_p, c_size_t, c_uint64, POINTER(HandOffOptions), _OBJECT],
    "kvm_finish": [c_void_p, c_char_p, c_size_t, _OBJECT],
    "kvm_open_device": [c_void_p, c_int32, _OBJECT],
    "kvm_create_device_arena": [c_void_p, c_uint64, _OBJECT, _OBJECT, POINTER(c_uint64)],
    "kvm_enqueue_ready": [c_void_p, c_void_p, c_uint64],
    "kvm_enqueue_wait_done": [c_void_p, c_void_p, c_uint64],
    "kvm_device_lost": [c_void_p, POINTER(c_int)],
    "kvm_device_copy": [c_void_p, c_void_p, c_void_p, c_uint64, c_uint64, POINTER(c_uint64)],
    "kvm_create_run": [c_void_p, c_void_p, c_char_p, c_size_t, POINTER(RunOptions), _OBJECT],
    "kvm_run_begin": [c_void_p, c_void_p, c_uint32, c_int, c_int],
    "kvm_run_ask": [c_void_p, c_void_p, c_uint32, c_int, c_int],
    "kvm_run_start": [c_void_p],
    "kvm_run_append": [c_void_p, c_int32, c_void_p, c_void_p],
    "kvm_run_attend": [c_void_p, c_int32, c_void_p, c_void_p, c_void_p],
    "kvm_run_end": [c_void_p],
    "kvm_run_launches": [c_void_p, POINTER(c_uint64)],
    "kvm_run_after": [c_void_p, c_void_p],
    "kvm_run_forget": [c_void_p, c_uint64],
}


def _load() -> ctypes.CDLL:
    path = os.environ.get("KVMANAGER_CLIENT_LIBRARY") or os.path.join(os.path.dirname(__file__), _FILE)
    try:
        library = ctypes.CDLL(path)
    except OSError as error:
        raise ImportError(
            f"kvmanager: {path} cannot be loaded ({error}); install the wheel, or build //client/python:package and "
            "put bazel-bin/client/python/package on PYTHONPATH"
        ) from error
    library.kvm_abi.restype = c_uint32
    if library.kvm_abi() != _ABI:
        raise ImportError(f"kvmanager: {path} has interface {library.kvm_abi()}, this package needs {_ABI}")
    for name, arguments in _CALLS.items():
        function = getattr(library, name)
        function.argtypes = arguments
        function.restype = c_int
    library.kvm_text.argtypes = [POINTER(c_uint64)]
    library.kvm_text.restype = c_void_p
    library.kvm_release.argtypes = [c_void_p]
    library.kvm_release.restype = None
    library.kvm_wake.argtypes = [c_void_p]
    library.kvm_wake.restype = None
    library.kvm_allow_many_streams.argtypes = []
    library.kvm_allow_many_streams.restype = None
    library.kvm_capsule_destructor.argtypes = [c_void_p, c_void_p]
    library.kvm_capsule_destructor.restype = c_void_p
    return library


lib = _load()


def text() -> bytes:
    """What this thread's last call left."""
    size = c_uint64()
    address = lib.kvm_text(byref(size))
    return ctypes.string_at(address, size.value)


def check(code: int) -> None:
    """Raises the error that a call returned."""
    if code:
        raise from_text(text())


def result() -> Any:
    """The JSON that this thread's last call left."""
    return json.loads(text())


class Handle:
    """Owns an object of the C interface. Destroyed on another thread, it is given back at its owner's next call."""

    __slots__ = ("_object", "__weakref__")

    def __init__(self, address: int | None) -> None:
        self._object = address

    def close(self) -> None:
        """Gives back what this holds, at once. Again: nothing."""
        check(lib.kvm_close(self._object))

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        # What copy and pickle ask. A second owner of one object would free it twice.
        raise TypeError(f"a {type(self).__name__} of kvmanager is a lease: it cannot be copied or pickled")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self, _release: Any = lib.kvm_release) -> None:
        try:
            address, self._object = self._object, None
        except AttributeError:  # its making failed
            return
        _release(address)
