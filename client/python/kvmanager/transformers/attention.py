"""The attention function `kvmanager` and its mask function, as transformers calls them."""

from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface

_UNKNOWN = ("softcap", "position_bias")  # what some models' attention adds: pages know nothing of it


def attention(module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
              attention_mask: torch.Tensor | None, dropout: float = 0.0, scaling: float | None = None,
              **kwargs: Any) -> tuple[torch.Tensor, None]:
    """query [batch, query_heads, tokens, head_dim], key and value [batch, kv_heads, tokens, head_dim], of the step's
    tokens alone, as KvCache.update() returned them. s_aux [query_heads]: attention sinks, logits that take part in
    the softmax and have no value (gpt-oss). Returns [batch, tokens, query_heads, head_dim]."""
    cache = getattr(key, "kvmanager_cache", None)
    if cache is None:
        raise ValueError("past_key_values: not a cache of kvmanager. A model with attn_implementation='kvmanager' "
                         "attends in the daemon: give past_key_values=kvmanager.transformers.attach(...).cache(...)")
    if dropout:
        raise ValueError(f"dropout: {dropout}; must be 0: call model.eval()")
    for name in _UNKNOWN:
        if kwargs.get(name) is not None:
            raise ValueError(f"{name}: given; attention on the daemon's pages is plain softmax attention")
    layer, window = module.layer_idx, kwargs.get("sliding_window")
    own = cache.attachment.windows[layer]
    if own is None and window is not None and cache.longest > window:
        raise ValueError(f"sliding_window: {window}; the context has {cache.longest} tokens, and a query of layer "
                         f"{layer} attends to all of them in the daemon. Windows are for models that have layers "
                         "without one, too, as layer_types says (Gemma 3, gpt-oss)")
    if own is not None and window != own:
        raise ValueError(f"sliding_window: {window} in layer {layer}; must be {own}, as the model's configuration says")
    return cache.attend(layer, query, key, value, scaling, kwargs.get("s_aux")), None


def mask(*, use_vmap: bool = False, allow_is_causal_skip: bool = True, **kwargs: Any) -> None:
    """No mask: attention is causal in each row, whose padding never gets into the daemon (KvCache.begin)."""
    if use_vmap or not allow_is_causal_skip:
        raise ValueError("mask: the model asks for more than causal attention over one sequence a row, which the "
                         "daemon does not know")
    return None


def register() -> None:
    AttentionInterface.register("kvmanager", attention)
    AttentionMaskInterface.register("kvmanager", mask)
