"""Models and tokenizers as transformers loads them: a Hugging Face folder, a repository's name, or a GGUF file."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch

_UNKNOWN = ("softcap", "s_aux", "position_bias")  # what some models' attention adds: pages know nothing of it


@dataclass(frozen=True)
class Geometry:
    """layers: indices of the model's layers whose keys and values the daemon keeps."""

    layers: tuple[int, ...]
    query_heads: int
    kv_heads: int
    head_dim: int

    @property
    def raw_token_bytes(self) -> int:
        """K and V of a token in fp16."""
        return len(self.layers) * self.kv_heads * self.head_dim * 4


def load(path: str, device: str = "cpu", dtype: str = "float32", attention: str = "sdpa") -> tuple[Any, Any]:
    """(model, tokenizer)."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    extra = {}
    if path.endswith(".gguf"):
        path, extra["gguf_file"] = os.path.split(os.path.abspath(path))
    elif os.path.isdir(path):
        path = os.path.abspath(path)  # the last part of "." is no name
    tokenizer = AutoTokenizer.from_pretrained(path, **extra)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype), attn_implementation=attention, **extra)
    return model.to(device).eval(), tokenizer


def name_of(model: Any) -> str:
    """What its caches and artifacts are known by, as kvmanager.transformers.attach() has it."""
    config = model.config.get_text_config(decoder=True)
    return config._name_or_path.rstrip("/").rpartition("/")[2] or type(model).__name__


def geometry_of(model: Any) -> Geometry:
    config = model.config.get_text_config(decoder=True)
    query_heads = config.num_attention_heads
    kinds = getattr(config, "layer_types", None) or []
    layers = tuple(range(config.num_hidden_layers))
    if "full_attention" in kinds:
        layers = tuple(layer for layer in layers if kinds[layer] == "full_attention")
    return Geometry(layers, query_heads, getattr(config, "num_key_value_heads", None) or query_heads,
                    getattr(config, "head_dim", None) or config.hidden_size // query_heads)


def decoder_layers(model: Any) -> Any:
    """The ModuleList of decoder layers. Errors: ValueError."""
    layers = getattr(model.get_decoder(), "layers", None)
    if layers is None:
        raise ValueError(f"model: {type(model).__name__} has no list of decoder layers; --probe off does without")
    return layers


def check_plain(kwargs: dict[str, Any]) -> None:
    """Errors: ValueError where attention is more than a softmax of scores."""
    for name in _UNKNOWN:
        if kwargs.get(name) is not None:
            raise ValueError(f"model: its attention has {name}, which attention on the daemon's pages has not")
