"""`python -m sglang.launch_server` where there is neither a GPU nor a build of SGLang's kernels for CPUs: launch.py ARGUMENTS...

PyPI has such kernels for NVIDIA's GPUs alone. SGLang computes a Llama with torch's operators on a CPU, and asks for these
kernels only where it is imported, and where HiCache copies pages between the device's pool, which is host memory here, too,
and its host pool. So this is what stands in for them; server, scheduler, caches, storage threads and model are SGLang's own.
Processes that SGLang starts import this file first, as multiprocessing does with a main program.
"""

from __future__ import annotations

import importlib.machinery
import runpy
import sys
import types

import torch


class Kernels(types.ModuleType):
    """Any kernel can be imported, and none called."""

    def __getattr__(self, name: str):
        if name.startswith("__"):
            raise AttributeError(name)

        def missing(*_: object, **__: object) -> None:
            raise RuntimeError(f"sgl_kernel.{name} is called, which there is on GPUs alone")

        return missing


def copy_tokens(src_layers, dst_layers, src_indices, dst_indices, page_size) -> None:
    """sgl_kernel.kvcacheio.transfer_kv_direct: rows of some layers' K and V."""
    for source, target in zip(src_layers, dst_layers, strict=True):
        target[dst_indices] = source[src_indices]


def stand_in() -> None:
    sys.modules["sgl_kernel"] = kernels = Kernels("sgl_kernel")
    kernels.__spec__ = importlib.machinery.ModuleSpec("sgl_kernel", None)
    if not hasattr(torch.ops.torchvision, "nms"):  # torchvision, which SGLang imports, has its operators with CUDA alone
        library = torch.library.Library("torchvision", "DEF")
        for name in ("nms", "qnms"):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        kernels.torchvision = library  # its operators go with it

    from sglang.srt.mem_cache.pool_host import mha

    mha.transfer_kv_direct = copy_tokens
    made = mha.MHATokenToKVPoolHost.__init__

    def unpinned(self, *arguments: object, **options: object) -> None:
        made(self, *arguments, **{**options, "pin_memory": False})

    mha.MHATokenToKVPoolHost.__init__ = unpinned


stand_in()
if __name__ == "__main__":
    runpy.run_module("sglang.launch_server", run_name="__main__")
