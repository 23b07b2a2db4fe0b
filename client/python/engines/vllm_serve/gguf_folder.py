"""What makers of Hugging Face folders from GGUF files share. Needs gguf, numpy, safetensors, tokenizers and torch."""

from __future__ import annotations

import json
import os
from collections.abc import Callable

import gguf
import numpy
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer

CONTROL, USER_DEFINED = 3, 4  # tokenizer.ggml.token_type


def read(path: str, architecture: str, tokenizer: str) -> tuple[gguf.GGUFReader, dict]:
    """The file and its fields. SystemExit: it is of another architecture, or has another kind of tokenizer."""
    reader = gguf.GGUFReader(path)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    found = fields["general.architecture"], fields["tokenizer.ggml.model"]
    if found != (architecture, tokenizer):
        raise SystemExit(f"{path} is of {found[0]} with a {found[1]} tokenizer, must be of {architecture} with a {tokenizer} one")
    return reader, fields


def tensors_of(
    reader: gguf.GGUFReader,
    model_names: dict[str, str],
    layer_names: dict[str, str],
    changed: Callable[[str, numpy.ndarray], numpy.ndarray],
    layers: int = 0,
) -> dict[str, torch.Tensor]:
    """Weights in bfloat16 under Hugging Face's names. changed(name, weight): as Hugging Face has it, by the last part of
    GGUF's name. layers: how many of the first; 0: all."""
    found = {}
    for tensor in reader.tensors:
        name = tensor.name.removesuffix(".weight")
        if name.startswith("blk."):
            _, layer, part = name.split(".")
            if layers and int(layer) >= layers:
                continue
            name = f"model.layers.{layer}.{layer_names[part]}"
        else:
            part, name = name, model_names[name]
        weight = changed(part, gguf.dequantize(tensor.data, tensor.tensor_type).astype(numpy.float32))
        found[f"{name}.weight"] = torch.from_numpy(numpy.ascontiguousarray(weight)).to(torch.bfloat16)
    return found


def write(out: str, tensors: dict[str, torch.Tensor], tokenizer: Tokenizer, config: dict, tokenizer_config: dict) -> None:
    about = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": config["max_position_embeddings"],
        "clean_up_tokenization_spaces": False,
        **tokenizer_config,
    }
    os.makedirs(out, exist_ok=True)
    save_file(tensors, os.path.join(out, "model.safetensors"), metadata={"format": "pt"})
    tokenizer.save(os.path.join(out, "tokenizer.json"))
    for name, content in (("config.json", config), ("tokenizer_config.json", about)):
        with open(os.path.join(out, name), "w", encoding="utf-8") as file:
            json.dump(content, file, indent=1)
