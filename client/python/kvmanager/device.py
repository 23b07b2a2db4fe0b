"""A GPU of the daemon, shared with this process; and attention by this process's own kernels on the daemon's pages.

Streams are integers: torch.cuda.current_stream().cuda_stream.
"""

from __future__ import annotations

from ctypes import byref, c_int, c_uint64, c_void_p
from typing import TYPE_CHECKING, Any

from . import _lib, arena
from ._lib import Handle, check, lib
from ._tensor import rows
from .cache import Cache, Entries, StepEntries
from .errors import encoded, integer, invalid
from .sequence import Sequence

if TYPE_CHECKING:
    from .client import Client

_ARENA_MULTIPLE = 2 << 20


def allow_many_streams() -> None:
    """Lets 32 streams of this process wait at once without holding up others, and has kernels loaded at once: both
    matter where a stream waits for the daemon's. Before the process first uses CUDA, while it has one thread; it sets
    CUDA_DEVICE_MAX_CONNECTIONS and CUDA_MODULE_LOADING."""
    lib.kvm_allow_many_streams()


class Device(Handle):
    """A lease of a GPU of the daemon. Made by Client.open_device.

    ordinal: the daemon's number; index: this process's (torch's); uuid, name, pool_bytes, slab_bytes, slabs."""

    __slots__ = ("client", "ordinal", "index", "uuid", "name", "pool_bytes", "slab_bytes", "slabs")

    def __init__(self, client: Client, handle: int | None, said: dict[str, Any]) -> None:
        super().__init__(handle)
        self.client = client
        self.ordinal: int = said["ordinal"]
        self.index: int = said["here"]
        self.uuid = bytes.fromhex(said["uuid"])
        self.name: str = said["name"]
        self.pool_bytes: int = said["pool_bytes"]
        self.slab_bytes: int = said["slab_bytes"]
        self.slabs: int = said["slabs"]

    def create_arena(self, nbytes: int) -> arena.Arena:
        """Zeroed GPU memory that both processes map, rounded up to 2 MiB: for steps of caches on this GPU."""
        return arena.create(self, lib.kvm_create_device_arena, self._object, nbytes, _ARENA_MULTIPLE, self.index)

    def enqueue_ready(self, stream: int, value: int) -> None:
        """Behind all work on `stream` so far, the daemon's stream may pass `value`: step(ready=value). Values grow."""
        check(lib.kvm_enqueue_ready(self._object, stream, integer("value", value)))

    def enqueue_wait_done(self, stream: int, value: int) -> None:
        """What comes later on `stream` waits for the daemon's to reach `value` (StepResult.done), or to be lost."""
        check(lib.kvm_enqueue_wait_done(self._object, stream, integer("value", value)))

    def copy(self, source: arena.ArenaTensor, to: arena.ArenaTensor, ready: int = 0) -> int:
        """The daemon copies between two tensors of device arenas. Returns what `done` will be. To try the wiring."""
        if source.nbytes != to.nbytes:
            raise invalid("to (bytes)", to.nbytes, f"{source.nbytes}, as source")
        done = c_uint64()
        check(lib.kvm_device_copy(self._object, source.data_ptr(), to.data_ptr(), to.nbytes, ready, byref(done)))
        return done.value

    @property
    def lost(self) -> bool:
        """The connection has ended: what streams waited for may not be there."""
        lost = c_int()
        check(lib.kvm_device_lost(self._object, byref(lost)))
        return lost.value != 0


class InProcess(Handle):
    """Attention in this process on the pages of a cache on the daemon's GPU: one call to the daemon per step, none per
    layer.

        run = kv.InProcess(device, cache, stream)
        run.begin(entries)
        for layer in range(layers):
            run.append(layer, k, v)
            run.attend(layer, q, out)
        run.end()

    append and attend launch kernels on `stream` and return; they may be captured in a CUDA graph, and replayed between
    later begin and end of a step of that shape, while `launches` is what it was. One InProcess per client.

    encode_here: pages that a step fills are encoded by this process, at the lowest priority; else by the daemon.
    pages_max: in each layer, of all sequences; 0: what the daemon's pool can hold. calibration_dir: where the artifact
    lies that the cache's codec names."""

    __slots__ = ("device", "cache", "stream", "_tokens", "_seen", "_kv", "_q")

    def __init__(
        self,
        device: Device,
        cache: Cache,
        stream: int = 0,
        encode_here: bool = True,
        sequences_max: int = 256,
        tokens_max: int = 8192,
        pages_max: int = 0,
        calibration_dir: str = "",
    ) -> None:
        super().__init__(None)
        self.device = device
        self.cache = cache
        self.stream = stream
        o = cache.options
        self._kv = (o.kv_heads, o.head_dim, (o.dtype, "uint16"))
        self._q = (o.query_heads, o.head_dim, (o.dtype, "uint16"))
        self._tokens = 0
        self._seen: dict[str, tuple[Any, ...]] = {}  # shape and dtype of the step's tensors, once they were found right
        where, made = encoded("calibration_dir", calibration_dir), c_void_p()
        limits = [integer(*each) for each in (("sequences_max", sequences_max, 0, 2**31 - 1),
                                              ("tokens_max", tokens_max, 0, 2**31 - 1))]
        pages_max = integer("pages_max", pages_max)
        options = _lib.RunOptions(stream, pages_max, bool(encode_here), *limits, 0)
        check(
            lib.kvm_create_run(device._object, cache._object, where, len(where), byref(options), byref(made))
        )
        self._object = made.value

    def begin(self, entries: StepEntries, append: bool = True, attend: bool = True) -> None:
        """Begins a step of all layers: asks the daemon, uploads the plan. Without `append` the tokens are there."""
        self.ask(entries, append, attend)
        self.start()

    def ask(self, entries: StepEntries, append: bool = True, attend: bool = True) -> None:
        """begin in two: sends the question and waits for nothing. start() goes before the first append or attend; end()
        without it gives up the step, and its sequences cannot be published."""
        given = entries if isinstance(entries, Entries) else Entries(entries)
        if given.tokens != self._tokens:
            self._tokens = given.tokens
            self._seen.clear()
        check(lib.kvm_run_ask(self._object, given.address, given.count, append, attend))

    def start(self) -> None:
        """Waits for the answer and uploads the plan. Behind an error no step has begun."""
        check(lib.kvm_run_start(self._object))

    def append(self, layer: int, k: Any, v: Any, _call: Any = lib.kvm_run_append) -> None:
        """k, v: [tokens][kv_heads][head_dim] of the cache's dtype on the GPU, 16-byte aligned; tensors, or addresses
        that are taken as they are."""
        if type(k) is not int:
            k = self._address("k", k, self._kv)
        if type(v) is not int:
            v = self._address("v", v, self._kv)
        code = _call(self._object, layer, k, v)
        if code:
            check(code)

    def attend(self, layer: int, q: Any, out: Any, lse: Any = None, _call: Any = lib.kvm_run_attend) -> None:
        """q, out: [tokens][query_heads][head_dim], the same; lse: [tokens][query_heads] float32, or None. After the
        layer's append, if the step appends."""
        if type(q) is not int:
            q = self._address("q", q, self._q)
        if type(out) is not int:
            out = self._address("out", out, self._q)
        if lse is not None and type(lse) is not int:
            lse = self._address("lse", lse, (1, self.cache.options.query_heads, ("float32",)))
        code = _call(self._object, layer, q, out, lse)
        if code:
            check(code)

    def _address(self, field: str, tensor: Any, of: tuple[Any, ...]) -> int:
        """A tensor's address. What shape and dtype decide is looked at once per step shape."""
        try:
            looks = (tensor.shape, tensor.dtype)
            if self._seen.get(field) == looks and tensor.is_contiguous() and tensor.is_cuda:
                return int(tensor.data_ptr())
        except AttributeError:
            looks = None  # of another library
        given = rows(field, tensor, self._tokens, *of)
        if not given.on_device:
            raise invalid(field, "in host memory", "on the cache's GPU")
        if looks is not None:
            self._seen[field] = looks
        return given.address

    def end(self) -> None:
        """The step's kernels are in the stream."""
        check(lib.kvm_run_end(self._object))

    @property
    def launches(self) -> int:
        """Of the step that has begun: equal where attend launches the same for a shape."""
        launches = c_uint64()
        check(lib.kvm_run_launches(self._object, byref(launches)))
        return launches.value

    def after(self, sequence: Sequence) -> None:
        """What comes later on the stream waits for the daemon's copies of open pages for this sequence, which fork or
        crop began."""
        check(lib.kvm_run_after(self._object, sequence._object))

    def forget(self, sequence: Sequence | int) -> None:
        """Before a sequence is closed."""
        check(lib.kvm_run_forget(self._object, int(sequence)))
