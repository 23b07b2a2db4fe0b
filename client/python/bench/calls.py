#!/usr/bin/env python3
"""What Python adds to a call: calls.py ADDRESS

Times, in microseconds, the median of ROUNDS rounds: a round trip, a decode step of one sequence of 64 tokens by arena and
inline, the part of it that is Python's, and what an in-process append or attend costs before it reaches C++: the call goes to a
function of the C library that returns at once, since kernels need a GPU. Tensors are torch's where torch is installed.
"""
from __future__ import annotations

import ctypes
import statistics
import sys
import time

import kvmanager as kv
import numpy
from kvmanager import _lib, device

ROUNDS, CALLS = 15, 300


def microseconds(function) -> float:
    """Of one call."""
    times = []
    for _ in range(ROUNDS):
        began = time.perf_counter()
        for _ in range(CALLS):
            function()
        times.append((time.perf_counter() - began) / CALLS * 1e6)
    return statistics.median(times)


class OnGpu:
    """What torch's tensors have; a GPU is not needed to look at it."""

    is_cuda = True
    dtype = "torch.float16"

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.shape = shape

    def data_ptr(self) -> int:
        return 64

    def is_contiguous(self) -> bool:
        return True


def tensor(shape: tuple[int, ...]):
    try:
        import torch
    except ImportError:
        return OnGpu(shape)

    class SaysOnGpu(torch.Tensor):
        is_cuda = True
        __torch_function__ = torch._C._disabled_torch_function_impl

    return torch.zeros(shape, dtype=torch.float16).as_subclass(SaysOnGpu)


def in_process_costs(cache: kv.Cache) -> tuple[float, float]:
    """append and attend of a run whose C++ side answers at once."""
    run = object.__new__(device.InProcess)
    run._object, run.cache, run._tokens, run._seen = None, cache, 1, {}
    o = cache.options
    run._kv, run._q = (o.kv_heads, o.head_dim, (o.dtype,)), (o.query_heads, o.head_dim, (o.dtype,))
    k, q = tensor((1, o.kv_heads, o.head_dim)), tensor((1, o.query_heads, o.head_dim))

    def returns(arguments: int):
        function = ctypes.CDLL(None)["abs"]  # of its first argument, NULL
        function.argtypes = [ctypes.c_void_p, ctypes.c_int32] + [ctypes.c_void_p] * (arguments - 2)
        return function

    append, attend = returns(4), returns(5)
    return (microseconds(lambda: run.append(0, k, k, append)), microseconds(lambda: run.attend(0, q, q, None, attend)))


def main() -> None:
    with kv.connect(sys.argv[1], name="bench") as client:
        cache = client.open_cache(model="bench", layers=1, kv_heads=8, query_heads=32, head_dim=128)
        sequence = cache.create_sequence()
        k = numpy.zeros((64, 8, 128), numpy.float16)
        cache.step(0, [(sequence, 0, 64)], k, k)
        arena = client.create_arena(1 << 20)
        q, out = arena.tensor((1, 32, 128)), arena.tensor((1, 32, 128), offset=1 << 16)
        own_q, own_out = numpy.zeros((1, 32, 128), numpy.float32), numpy.zeros((1, 32, 128), numpy.float32)
        entries = kv.Entries([(sequence, 63, 1)])
        append, attend = in_process_costs(cache)
        for what, cost in (
            ("empty call through ctypes", microseconds(lambda: _lib.lib.kvm_release(None))),
            ("ping", microseconds(client.ping)),
            ("step by arena", microseconds(lambda: cache.step(0, entries, q=q, out=out))),
            ("step inline", microseconds(lambda: cache.step(0, entries, q=own_q, out=own_out))),
            ("of a step, Python's part, by arena", microseconds(
                lambda: cache._pack(0, entries, None, None, q, out, None, None, 0.0, 0))),
            ("in-process append, Python's part", append),
            ("in-process attend, Python's part", attend),
        ):
            print(f"{what:40} {cost:8.2f} us")


if __name__ == "__main__":
    main()
