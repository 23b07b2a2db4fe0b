"""One protocol for every variant of a codec: the same windows of text, the same cases, differences paired with raw.

    subject = load(model_folder, attn_implementation="kvmanager")
    parts = windows(subject, text, count=8, tokens=2048)
    losses = text_losses(subject, forward, parts)           # nats per token, of each window
    change, error = perplexity_change(raw_losses, losses)   # e.g. +0.012 +- 0.003

A Forward is what differs between variants: it takes the ids of one sequence from its beginning and gives the decoder's
last hidden states. Windows and prompts are independent of one another; nothing is carried over.
"""

from __future__ import annotations

import json
import math
import os
import pathlib
from dataclasses import dataclass
from typing import Any, Callable, Sequence

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from . import tasks as _tasks

Forward = Callable[[torch.Tensor], torch.Tensor]  # ids [1, tokens] -> hidden states [tokens, hidden_size]
_LOGIT_ROWS = 256  # rows of logits at once: a vocabulary of 262,144 in fp32 takes 256 MiB so


class ByteTokenizer:
    """Of models whose tokens are bytes."""

    def encode(self, text: str) -> list[int]:
        return list(text.encode("utf-8"))

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(ids).decode("utf-8", "replace")


class _Plain:
    """A tokenizer of transformers, without special tokens."""

    def __init__(self, tokenizer: Any):
        self._tokenizer = tokenizer

    def encode(self, text: str) -> list[int]:
        return self._tokenizer(text, add_special_tokens=False, verbose=False).input_ids

    def decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids)


@dataclass
class Subject:
    """A model that is measured. prefix: what each of its sequences begins with, a BOS token or nothing."""

    name: str
    model: torch.nn.Module
    tokenizer: Any
    prefix: list[int]

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    @property
    def decoder(self) -> torch.nn.Module:
        return getattr(self.model, self.model.base_model_prefix)

    @property
    def config(self) -> Any:
        return self.model.config.get_text_config(decoder=True)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[rows, vocabulary] in fp32."""
        logits = self.model.get_output_embeddings()(hidden).float()
        cap = getattr(self.config, "final_logit_softcapping", None)
        return torch.tanh(logits / cap) * cap if cap else logits


def load(folder: str | os.PathLike, attn_implementation: str, *, device: str = "cpu",
         dtype: torch.dtype = torch.float32) -> Subject:
    """A model of a Hugging Face folder. One without a tokenizer whose vocabulary is 256 reads bytes; one in several
    safetensors files needs no index of them."""
    folder = pathlib.Path(folder)
    shards = sorted(folder.glob("model-*-of-*.safetensors"))
    if shards and not (folder / "model.safetensors.index.json").exists():
        config = AutoConfig.from_pretrained(folder)
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attn_implementation)
        model.load_state_dict({name: tensor for shard in shards for name, tensor in load_file(shard).items()})
        model.config._name_or_path = str(folder)
    else:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation=attn_implementation)
    model = model.to(device).eval().requires_grad_(False)
    name = folder.resolve().name
    if any((folder / file).exists() for file in ("tokenizer.json", "tokenizer.model")):
        tokenizer = AutoTokenizer.from_pretrained(folder)
        begin = tokenizer("").input_ids[:1]
        return Subject(name, model, _Plain(tokenizer), begin if begin == [tokenizer.bos_token_id] else [])
    if model.config.get_text_config(decoder=True).vocab_size != 256:
        raise ValueError(f"{folder}: has no tokenizer.json or tokenizer.model; without one the vocabulary must be 256 bytes")
    return Subject(name, model, ByteTokenizer(), [])


def windows(subject: Subject, text: str, *, count: int, tokens: int) -> list[torch.Tensor]:
    """`count` sequences [1, tokens] at equal distances over the text, each behind the model's prefix."""
    ids = subject.tokenizer.encode(text)
    own = tokens - len(subject.prefix)
    if len(ids) < count * own:
        raise ValueError(f"text: has {len(ids)} tokens; {count} windows of {tokens} need {count * own}")
    stride = len(ids) // count
    return [torch.tensor([subject.prefix + ids[at * stride : at * stride + own]], device=subject.device)
            for at in range(count)]


@torch.no_grad()
def window_loss(subject: Subject, forward: Forward, ids: torch.Tensor) -> float:
    """Nats per token of one window; what predicts the prefix is not counted."""
    first = max(1, len(subject.prefix))
    hidden, target = forward(ids)[first - 1 : -1], ids[0, first:]
    total = 0.0
    for at in range(0, len(target), _LOGIT_ROWS):
        some = slice(at, at + _LOGIT_ROWS)
        total += F.cross_entropy(subject.logits(hidden[some]), target[some], reduction="sum").item()
    return total / len(target)


def text_losses(subject: Subject, forward: Forward, parts: list[torch.Tensor]) -> list[float]:
    return [window_loss(subject, forward, ids) for ids in parts]


@torch.no_grad()
def prompt_scores(subject: Subject, forward: Forward, prompt: _tasks.Prompt) -> list[bool]:
    """Of each of the prompt's cases whether the model gets it right."""
    hidden = forward(torch.tensor([prompt.ids], device=subject.device))
    places = torch.tensor([at - 1 for first, last in prompt.answers for at in range(first, last)], device=subject.device)
    best = subject.logits(hidden[places]).argmax(-1).tolist()
    predicted, taken = [], 0
    for first, last in prompt.answers:
        predicted.append(best[taken : taken + last - first])
        taken += last - first
    return _tasks.score(prompt, predicted)


# Statistics. A pair is one window, or one prompt with all of its cases: cases of one prompt share a context, so they are
# not independent, and the error is that of prompts' means.


def paired(base: Sequence[float], other: Sequence[float]) -> tuple[float, float]:
    """Mean and standard error of other - base, element by element. The error of one pair alone is NaN."""
    if len(base) != len(other) or not base:
        raise ValueError(f"paired: {len(base)} and {len(other)} values; must be equally many, at least one")
    differences = [b - a for a, b in zip(base, other)]
    mean = math.fsum(differences) / len(differences)
    if len(differences) == 1:
        return mean, math.nan
    variance = math.fsum((each - mean) ** 2 for each in differences) / (len(differences) - 1)
    return mean, math.sqrt(variance / len(differences))


def perplexity_change(base: Sequence[float], other: Sequence[float]) -> tuple[float, float]:
    """Relative change of perplexity per token from losses in nats, with its standard error: 0.01 is +1%."""
    mean, error = paired(base, other)
    return math.exp(mean) - 1, math.exp(mean) * error


def accuracy(prompts: Sequence[Sequence[bool]]) -> float:
    """Of all cases of all prompts."""
    return sum(map(sum, prompts)) / sum(map(len, prompts))


def accuracy_change(base: Sequence[Sequence[bool]], other: Sequence[Sequence[bool]]) -> tuple[float, float]:
    """Difference of accuracy with its standard error over prompts: -0.04 is four points less."""
    return paired([sum(each) / len(each) for each in base], [sum(each) / len(each) for each in other])


class Results:
    """Measurements on disk, by key: what was measured is not measured again. One process writes a file."""

    def __init__(self, path: str | os.PathLike | None):
        self._path = pathlib.Path(path) if path else None
        self._entries: dict[str, Any] = {}
        if self._path and self._path.exists():
            self._entries = json.loads(self._path.read_text())["results"]

    def get(self, key: str) -> Any:
        return self._entries.get(key)

    def put(self, key: str, value: Any) -> None:
        """Also to disk, at once and whole."""
        self._entries[key] = value
        if self._path:
            beside = self._path.with_name(self._path.name + ".new")
            beside.write_text(json.dumps({"results": self._entries}, indent=0, sort_keys=True) + "\n")
            beside.replace(self._path)


def percent(change: tuple[float, float], digits: int = 2) -> str:
    """'+1.20 ±0.30', in percent or points."""
    value, error = change
    return f"{100 * value:+.{digits}f}" + ("" if math.isnan(error) else f" ±{100 * error:.{digits}f}")


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """A table; the first row is the head."""
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([lines[0], "|" + " --- |" * len(rows[0]), *lines[1:]]) + "\n"
