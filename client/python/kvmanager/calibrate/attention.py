"""The attention function `kvmanager_calibrate`: torch's, which can hand out Q, K and V of every layer on the way, and can
attend in one layer as if older pages were coded."""

from __future__ import annotations

from contextlib import contextmanager
from typing import Any, Callable, Iterator

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from kvmanager.calibrate.models import check_plain

NAME = "kvmanager_calibrate"

# (layer, q, k, v), q [query_heads, tokens, head_dim] scaled so that scores are q . k / sqrt(head_dim), k and v [kv_heads,
# tokens, head_dim], after RoPE -> attention's output [query_heads, tokens, head_dim], or None for torch's.
Visitor = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], "torch.Tensor | None"]
_visitor: Visitor | None = None


def attention(module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
              attention_mask: torch.Tensor | None, dropout: float = 0.0, scaling: float | None = None,
              **kwargs: Any) -> tuple[torch.Tensor, None]:
    check_plain(kwargs)
    if _visitor is not None:
        default = query.shape[-1] ** -0.5
        scaled = query if scaling is None or abs(scaling / default - 1) < 1e-6 else query * (scaling / default)
        out = _visitor(module.layer_idx, scaled[0], key[0], value[0])
        if out is not None:
            return out.to(query.dtype)[None].transpose(1, 2), None
    return sdpa_attention_forward(module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs)


@contextmanager
def visiting(visitor: Visitor) -> Iterator[None]:
    """Forward passes of one row call `visitor` in every layer. One at a time in a process."""
    global _visitor
    before, _visitor = _visitor, visitor
    try:
        yield
    finally:
        _visitor = before


AttentionInterface.register(NAME, attention)
AttentionMaskInterface.register(NAME, sdpa_mask)
