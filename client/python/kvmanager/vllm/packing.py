"""How vLLM's attention on a CPU packs blocks: asked of the layer that wrote them. On a GPU strides say it."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ..packing import Packing, learn_packing


def attention_layers(config: object) -> Mapping[str, object]:
    """vLLM's attention layers by name; empty where nothing attends. ValueError: its configuration does not have them where it
    did."""
    compilation = getattr(config, "compilation_config", None)
    if compilation is None:
        return {}
    layers = getattr(compilation, "static_forward_context", None)
    if not isinstance(layers, Mapping):
        raise ValueError("compilation_config has no static_forward_context, whose layers say how they pack blocks")
    return layers


def packing_of(layers: Mapping[str, object], name: str, cache: torch.Tensor) -> Packing | None:
    """Of an attention layer's cache [blocks][heads][tokens][2 * head_dim]; None: strides say it. ValueError: there is no such
    layer among those there are, or it cannot be asked."""
    if cache.device.type != "cpu" or not layers:
        return None
    layer = layers.get(name)
    update = getattr(getattr(layer, "impl", None), "do_kv_cache_update", None)
    if update is None or cache.dim() != 4 or not cache.is_contiguous():
        raise ValueError(f"layer {name} ({type(getattr(layer, 'impl', layer)).__name__}) does not say how it packs blocks on a CPU")
    _, heads, tokens, both = cache.shape

    def write(k: torch.Tensor, v: torch.Tensor, block: torch.Tensor, slots: torch.Tensor) -> None:
        with torch.inference_mode():
            update(layer, k, v, block, slots)

    with torch.inference_mode(False):  # places are used outside of the engine's mode, too
        return learn_packing(write, tokens, heads, both // 2, cache.dtype)
