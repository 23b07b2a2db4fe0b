"""Dense arrays of any library, as addresses: torch's (data_ptr), numpy's (__array_interface__), others' (DLPack).

Nothing is copied, and neither torch nor numpy is imported.
"""

from __future__ import annotations

import ctypes
from typing import Any, NamedTuple

from .errors import invalid

ITEM_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4, "uint16": 2, "uint8": 1, "int64": 8}

_NUMPY = {"<f2": "float16", "<f4": "float32", "<u2": "uint16", "|u1": "uint8", "<i8": "int64"}
_DLPACK = {(2, 16): "float16", (2, 32): "float32", (4, 16): "bfloat16", (1, 16): "uint16", (1, 8): "uint8"}
_CUDA_TYPES = (2, 13)  # kDLCUDA, kDLCUDAManaged
_CPU_TYPES = (1, 3)  # kDLCPU, kDLCUDAHost


class _DlTensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("dimensions", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


class Tensor(NamedTuple):
    """A dense array: `owner` keeps its memory. dtype: a name of ITEM_BYTES, or another library's own."""

    address: int
    shape: tuple[int, ...]
    dtype: str
    on_device: bool
    writable: bool
    owner: object


_dtype_names: dict[object, str] = {}


def name_of(dtype: object) -> str:
    """Of a string, or a type of torch's or numpy's: "torch.float16" is float16, and so is numpy.float16."""
    name = _dtype_names.get(dtype)
    if name is None:
        name = _dtype_names[dtype] = getattr(dtype, "__name__", None) or str(dtype).rpartition(".")[2]
    return name


def view(field: str, tensor: Any) -> Tensor:
    """InvalidArgumentError naming `field` for what is no dense array."""
    data_ptr = getattr(tensor, "data_ptr", None)
    if data_ptr is not None:
        if not tensor.is_contiguous():
            raise invalid(field, f"a tensor with strides {tuple(tensor.stride())}", "contiguous: use .contiguous()")
        return Tensor(data_ptr(), tuple(tensor.shape), name_of(tensor.dtype), tensor.is_cuda, True, tensor)
    interface = getattr(tensor, "__array_interface__", None)
    if interface is not None:
        if interface.get("strides") is not None:
            raise invalid(field, f"an array with strides {interface['strides']}", "contiguous: use ascontiguousarray()")
        address, read_only = interface["data"]
        typestr = interface["typestr"]
        name = _NUMPY.get(typestr)
        if name is None:
            dtype = getattr(tensor, "dtype", typestr)  # bfloat16 of ml_dtypes has no typestr of its own
            name = "bfloat16" if getattr(dtype, "name", "") == "bfloat16" else str(dtype)
        return Tensor(address, interface["shape"], name, False, not read_only, tensor)
    if hasattr(tensor, "__dlpack__"):
        return _from_dlpack(field, tensor)
    raise invalid(field, type(tensor).__name__, "a tensor: data_ptr(), __array_interface__ or __dlpack__")


def _from_dlpack(field: str, tensor: Any) -> Tensor:
    capsule = tensor.__dlpack__()
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    described = _DlTensor.from_address(pointer(capsule, b"dltensor"))
    dimensions = described.dimensions
    shape = tuple(described.shape[:dimensions])
    if described.strides:
        dense = 1
        for size, stride in zip(reversed(shape), reversed(described.strides[:dimensions])):
            if size > 1 and stride != dense:
                raise invalid(field, f"a tensor with strides {tuple(described.strides[:dimensions])}", "contiguous")
            dense *= size
    if described.device_type not in _CPU_TYPES + _CUDA_TYPES:
        raise invalid(field, f"on a device of DLPack's type {described.device_type}", "in host or CUDA memory")
    name = _DLPACK.get((described.code, described.bits), f"DLPack's ({described.code}, {described.bits})")
    address = (described.data or 0) + described.byte_offset
    return Tensor(address, shape, name, described.device_type in _CUDA_TYPES, True, (tensor, capsule))


def rows(field: str, tensor: Any, tokens: int, heads: int, width: int, dtypes: tuple[str, ...]) -> Tensor:
    """`tensor` as [tokens][heads][width] of one of `dtypes`: that shape with any leading dimensions whose product is
    `tokens`, or with the last two as one. InvalidArgumentError otherwise."""
    given = tensor if type(tensor) is Tensor else view(field, tensor)
    if given.dtype not in dtypes:
        raise invalid(f"{field} (dtype)", given.dtype, " or ".join(dtypes))
    shape = given.shape
    if shape == (tokens, heads, width):
        return given
    count = 1
    for size in shape:
        count *= size
    tail_fits = shape[-2:] == (heads, width) or shape[-1:] == (heads * width,)
    if count != tokens * heads * width or not tail_fits:
        raise invalid(f"{field} (shape)", shape, f"[{tokens}][{heads}][{width}]")
    return given
