"""How vLLM's attention on a CPU packs blocks: asked of the layer that wrote them. On a GPU strides say it."""

from __future__ import annotations

import torch

from ..packing import Packing, learn_packing


def packing_of(layer: object | None, cache: torch.Tensor) -> Packing | None:
    """Of an attention layer of vLLM's and its cache [blocks][heads][tokens][2 * head_dim]; None: strides say it, or there is no
    layer to ask. ValueError: the layer cannot be asked."""
    if layer is None or cache.device.type != "cpu":
        return None
    update = getattr(getattr(layer, "impl", None), "do_kv_cache_update", None)
    if update is None or cache.dim() != 4 or not cache.is_contiguous():
        raise ValueError(f"{type(getattr(layer, 'impl', layer)).__name__} does not say how it packs blocks on a CPU")
    _, heads, tokens, both = cache.shape

    def write(k: torch.Tensor, v: torch.Tensor, block: torch.Tensor, slots: torch.Tensor) -> None:
        with torch.inference_mode():
            update(layer, k, v, block, slots)

    with torch.inference_mode(False):  # places are used outside of the engine's mode, too
        return learn_packing(write, tokens, heads, both // 2, cache.dtype)
