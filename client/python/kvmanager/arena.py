"""Memory that the daemon and this process share: tensors in it go to the daemon without a copy."""

from __future__ import annotations

import ctypes
from ctypes import byref, c_int64, c_uint64, c_void_p
from typing import Any, Iterable

from ._lib import Handle, check, lib
from ._tensor import ITEM_BYTES, name_of
from .errors import integer, invalid

_DLPACK = {"float16": (2, 16), "bfloat16": (4, 16), "float32": (2, 32), "uint16": (1, 16), "uint8": (1, 8)}
_TYPESTR = {"float16": "<f2", "bfloat16": "<u2", "float32": "<f4", "uint16": "<u2", "uint8": "|u1"}
_CPU, _CUDA = 1, 2

_python = ctypes.pythonapi
_python.PyCapsule_New.restype = ctypes.py_object
_python.PyCapsule_New.argtypes = [c_void_p, ctypes.c_char_p, c_void_p]
_destroy_capsule = lib.kvm_capsule_destructor(
    ctypes.cast(_python.PyCapsule_IsValid, c_void_p), ctypes.cast(_python.PyCapsule_GetPointer, c_void_p)
)


class Arena(Handle):
    """A lease of shared memory. `nbytes` is a multiple of 4096, `address` where it begins in this process (or on the
    GPU). Closing it ends the lease; tensors that look into it keep its memory, and are copied from then on."""

    __slots__ = ("_owner", "address", "nbytes", "device_index")

    def __init__(self, owner: object, address: int | None, data: Any, nbytes: int, device_index: int = -1) -> None:
        super().__init__(address)
        self._owner = owner
        self.address: int = data
        self.nbytes = nbytes
        self.device_index = device_index

    def tensor(self, shape: int | Iterable[int], dtype: object = "float32", offset: int = 0) -> ArenaTensor:
        """A dense tensor at `offset` bytes, a multiple of 64. dtype: float16, bfloat16, float32, uint16 or uint8."""
        return ArenaTensor(self, shape, dtype, offset)


class ArenaTensor:
    """A view of an arena: `torch.from_dlpack(t)`, `t.numpy()`, or an argument of step as it is.

    numpy has no bfloat16: there it is uint16. Views keep the arena's memory, whatever happens to its lease."""

    __slots__ = ("arena", "shape", "dtype", "offset", "nbytes", "is_cuda")

    def __init__(self, arena: Arena, shape: int | Iterable[int], dtype: object, offset: int) -> None:
        self.arena = arena
        sizes = (shape,) if isinstance(shape, int) else shape
        self.shape = tuple(integer("shape", size, 0, arena.nbytes) for size in sizes)
        self.dtype = name_of(dtype)
        self.offset = offset = integer("offset", offset)
        self.is_cuda = arena.device_index >= 0
        if self.dtype not in _DLPACK:
            raise invalid("dtype", dtype, ", ".join(_DLPACK))
        if len(self.shape) > 8:
            raise invalid("shape", self.shape, "at most 8 dimensions")
        self.nbytes = ITEM_BYTES[self.dtype]
        for size in self.shape:
            self.nbytes *= size
        if offset % 64:
            raise invalid("offset", offset, "a multiple of 64")
        if offset + self.nbytes > arena.nbytes:
            raise invalid("shape", f"{self.nbytes} bytes at offset {offset}", f"inside the arena's {arena.nbytes}")

    def data_ptr(self) -> int:
        return self.arena.address + self.offset

    def is_contiguous(self) -> bool:
        return True

    def numpy(self) -> Any:
        """A numpy array that can be written; of host memory."""
        import numpy

        if self.is_cuda:
            raise invalid("tensor", "on a GPU", "in host memory: use torch.from_dlpack")
        return numpy.asarray(self)

    def torch(self) -> Any:
        """A torch tensor."""
        import torch

        return torch.from_dlpack(self)

    @property
    def __array_interface__(self) -> dict[str, Any]:
        if self.is_cuda:
            raise AttributeError("__array_interface__: this tensor is on a GPU")
        return self._interface()

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        if not self.is_cuda:
            raise AttributeError("__cuda_array_interface__: this tensor is in host memory")
        return self._interface()

    def _interface(self) -> dict[str, Any]:
        return {
            "version": 3,
            "shape": self.shape,
            "typestr": _TYPESTR[self.dtype],
            "data": (self.data_ptr(), False),
            "strides": None,
        }

    def __dlpack_device__(self) -> tuple[int, int]:
        return (_CUDA, self.arena.device_index) if self.is_cuda else (_CPU, 0)

    def __dlpack__(
        self, *, stream: Any = None, max_version: Any = None, dl_device: Any = None, copy: bool | None = None
    ) -> Any:
        """`stream` may be any: nothing is under way on this memory but what the caller began."""
        if dl_device is not None and tuple(dl_device) != self.__dlpack_device__():
            raise BufferError(f"this tensor is on device {self.__dlpack_device__()}")
        if copy:
            raise BufferError("a view of an arena is never a copy; copy it afterwards")
        versioned = max_version is not None and max_version[0] >= 1
        code, bits = _DLPACK[self.dtype]
        shape = (c_int64 * len(self.shape))(*self.shape)
        managed = c_void_p()
        check(
            lib.kvm_dlpack(
                self.arena._object, self.offset, shape, len(self.shape), code, bits, versioned, byref(managed)
            )
        )
        return _python.PyCapsule_New(managed, b"dltensor_versioned" if versioned else b"dltensor", _destroy_capsule)

    def __repr__(self) -> str:
        return f"ArenaTensor(shape={self.shape}, dtype={self.dtype}, offset={self.offset})"


def create(
    owner: object, function: Any, handle: int | None, nbytes: int, multiple: int, device_index: int = -1
) -> Arena:
    """An arena of a client, or of a device. `owner` is kept."""
    nbytes = integer("nbytes", nbytes, 1, 2**63)
    made, data, size = c_void_p(), c_void_p(), c_uint64()
    check(function(handle, -(-nbytes // multiple) * multiple, byref(made), byref(data), byref(size)))
    return Arena(owner, made.value, data.value, size.value, device_index)


__all__ = ["Arena", "ArenaTensor"]
