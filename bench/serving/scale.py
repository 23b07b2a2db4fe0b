"""How much is asked of an engine: lengths, numbers, pools. A scale for a GPU, a small one for a CPU, quick forms of both."""

from __future__ import annotations

import dataclasses
import json
import pathlib

BLOCK_TOKENS = 64
GIB = 1 << 30

# The shape of Llama-3.1-8B, for dummy weights.
LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 128256, "hidden_size": 4096,
    "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
    "rms_norm_eps": 1e-05, "rope_theta": 500000.0, "max_position_embeddings": 131072, "tie_word_embeddings": False,
    "hidden_act": "silu", "bos_token_id": 128000, "eos_token_id": 128001, "torch_dtype": "bfloat16", "initializer_range": 0.02,
}


@dataclasses.dataclass(frozen=True)
class Scale:
    """Tokens, unless a name says otherwise. The prefixes of a length have more tokens together than the engine's own cache, and
    each of them fits."""

    short: int = 8192
    short_prefixes: int = 12
    long: int = 32768
    long_prefixes: int = 4
    suffix: int = 64
    engine_cache: int = 48 * 1024
    model_len: int = 34048
    batch: int = 8192  # vLLM's max_num_batched_tokens
    cycles: int = 5  # passes over all prefixes in one engine
    unique: int = 2048
    unique_prompts: int = 32  # of a batch
    unique_batches: int = 4
    unique_at_once: int = 16
    unique_output: int = 48
    output: int = 2  # of prompts whose first token counts
    pool_bytes: int = 40 * GIB
    capacity_pool_bytes: int = 8 * GIB
    compare_short: int = 3  # prompts whose blocks are compared
    compare_long: int = 1

    def covers(self, other: Scale) -> bool:
        """Whether it is the same, or asks for more of the same."""
        more = all(getattr(self, name) >= getattr(other, name) for name in ("cycles", "unique_batches", "pool_bytes"))
        return more and dataclasses.replace(
            self, cycles=other.cycles, unique_batches=other.unique_batches, pool_bytes=other.pool_bytes) == other

    def check(self) -> None:
        for name, length, count in (("short", self.short, self.short_prefixes), ("long", self.long, self.long_prefixes)):
            if length * (count - 1) < self.engine_cache:
                raise ValueError(f"{count} prefixes of {length} tokens ({name}) may stay in a cache of {self.engine_cache}")
            most = min(self.engine_cache - BLOCK_TOKENS, self.model_len)
            if length + 2 * self.suffix + self.output > most or self.unique + self.unique_output > most:
                raise ValueError(f"a prompt of {length} tokens ({name}), or a unique one, does not fit the engine: {most} tokens")


GPU = Scale()
GPU_QUICK = dataclasses.replace(GPU, short_prefixes=8, cycles=1, unique_batches=1, capacity_pool_bytes=2 * GIB, compare_short=1)
CPU = Scale(
    short=1024, short_prefixes=8, long=2048, long_prefixes=4, engine_cache=6144, model_len=4096, batch=2048, cycles=5,
    unique=256, unique_prompts=16, unique_batches=3, unique_output=16, pool_bytes=GIB, capacity_pool_bytes=GIB // 8,
)
CPU_QUICK = dataclasses.replace(CPU, cycles=1, unique_batches=1, compare_short=1)


def write_shape(folder: pathlib.Path) -> pathlib.Path:
    """A model's folder with nothing but its config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(LLAMA_8B, indent=1), encoding="utf-8")
    return folder


def token_bytes(config: dict) -> int:
    """Bytes of a token's K and V in all layers, 2 a value, of a model's config.json."""
    heads = config["num_attention_heads"]
    width = config.get("head_dim") or config["hidden_size"] // heads
    return config["num_hidden_layers"] * 2 * config.get("num_key_value_heads", heads) * width * 2
