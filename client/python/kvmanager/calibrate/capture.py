"""Q, K and V of windows of text, written as a capture (docs/calibration.md): a safetensors shard for each layer.

The shards have their full length from the beginning and are filled window by window through a mapping: memory does not
grow with the text or with the model's depth."""

from __future__ import annotations

import json
import os
import shutil
import struct
from typing import Any

import numpy as np
import torch

from kvmanager.calibrate.attention import visiting
from kvmanager.calibrate.models import Geometry
from kvmanager.calibrate.progress import Progress
from kvmanager.transformers.fold import output_projections

_HALF_MAX = 65504.0
_SPARE_BYTES = 256 << 20  # of the disk, to be left


def capture_bytes(geometry: Geometry, tokens: int, hidden: int) -> int:
    per_layer = (geometry.query_heads + 2 * geometry.kv_heads) * tokens + geometry.query_heads * hidden
    return len(geometry.layers) * per_layer * geometry.head_dim * 2


class _Shard:
    """One layer's file: tensors by name, each a mapping [heads, tokens, head_dim] of fp16."""

    def __init__(self, path: str, tensors: dict[str, tuple[int, ...]], metadata: dict[str, str]):
        header: dict[str, Any] = {"__metadata__": metadata}
        offset = 0
        for name, shape in tensors.items():
            size = int(np.prod(shape)) * 2
            header[name] = {"dtype": "F16", "shape": list(shape), "data_offsets": [offset, offset + size]}
            offset += size
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 64)
        with open(path, "wb") as file:
            file.write(struct.pack("<Q", len(text)) + text)
            file.truncate(8 + len(text) + offset)
        base = 8 + len(text)
        self._maps = {name: np.memmap(path, np.float16, "r+", base + header[name]["data_offsets"][0], shape)
                      for name, shape in tensors.items()}

    def put(self, name: str, first: int, rows: torch.Tensor) -> None:
        """rows [heads, tokens, head_dim] at the tokens from `first` on."""
        self._maps[name][:, first : first + rows.shape[1]] = rows.to("cpu", torch.float16).numpy()

    def put_whole(self, name: str, values: torch.Tensor) -> None:
        self._maps[name][:] = values.to("cpu", torch.float16).numpy()

    def flush(self) -> None:
        for mapping in self._maps.values():
            mapping.flush()


@torch.no_grad()
def write_capture(model: Any, geometry: Geometry, name: str, windows: list[list[int]], sinks: int, folder: str,
                  quiet: bool) -> None:
    """Fills `folder` with the capture of `windows`, all equally long. Errors: OSError; ValueError for too little room,
    and for values that fp16 has not."""
    window = len(windows[0])
    tokens = window * len(windows)
    output = output_projections(model)
    hidden = model.config.get_text_config(decoder=True).hidden_size
    with_output = all(layer in output for layer in geometry.layers)
    needed = capture_bytes(geometry, tokens, hidden if with_output else 0)
    if shutil.disk_usage(folder).free < needed + _SPARE_BYTES:
        raise ValueError(f"--work-dir {folder}: has {shutil.disk_usage(folder).free >> 20} MiB free; the capture takes "
                         f"{needed >> 20} MiB; take fewer --windows, or another --work-dir")
    metadata = {"model": name, "windows": str(window), "sinks": str(sinks)}
    shards = {}
    for place, layer in enumerate(geometry.layers):
        prefix = f"layers.{place}."
        shape = {"q": geometry.query_heads, "k": geometry.kv_heads, "v": geometry.kv_heads}
        tensors = {prefix + side: (heads, tokens, geometry.head_dim) for side, heads in shape.items()}
        if with_output:
            tensors[prefix + "w_o"] = tuple(output[layer].weight.shape)
        shards[layer] = (prefix, _Shard(os.path.join(folder, f"layer-{place:04}.safetensors"), tensors, metadata))
        if with_output:
            shards[layer][1].put_whole(prefix + "w_o", output[layer].weight)
    first = 0

    def put(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        if layer not in shards:
            return
        prefix, shard = shards[layer]
        for side, rows in (("q", q), ("k", k), ("v", v)):
            if not bool((rows.abs() <= _HALF_MAX).all()):  # NaN is not, either
                raise ValueError(f"{side.upper()} of layer {layer} has values beyond fp16's {_HALF_MAX:.0f}, in which "
                                 "pages keep them")
            shard.put(prefix + side, first, rows)

    with Progress(f"running the model on {len(windows)} windows", len(windows), quiet) as progress, visiting(put):
        for at, ids in enumerate(windows):
            first = at * window
            model.get_decoder()(input_ids=torch.tensor([ids], device=model.device), use_cache=False)
            progress.update(at + 1)
    for _, shard in shards.values():
        shard.flush()
