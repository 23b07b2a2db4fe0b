"""A model's predictions with its keys and values in a daemon, and what a codec changes of them."""

from __future__ import annotations

import math
import os
import re
import statistics
import tempfile
from dataclasses import dataclass, field
from typing import Any, Callable, Iterator

import torch

import kvmanager.transformers as kvt

_CHUNK_TOKENS = 512  # of a forward pass: logits of that many rows are in memory


@dataclass
class Measured:
    """losses: nats per token of each window."""

    codec: str
    losses: list[float] = field(default_factory=list)
    page_tokens: int = 64
    kv_heads: int = 1
    raw_page_bytes: int = 0
    encoded_page_bytes: int = 0
    payload_page_bytes: int = 0
    sink_tokens: int = 0
    canonical: str = ""
    tasks: dict[str, list[bool]] = field(default_factory=dict)

    @property
    def token_bytes(self) -> float:
        """Per token and KV head of encoded pages, K and V with metadata and padding."""
        return self.encoded_page_bytes / (self.page_tokens * self.kv_heads)

    def context_bytes(self, tokens: int) -> float:
        """Per token and KV head of a context whose sinks are raw; what its newest pages keep raw is not counted."""
        raw = self.raw_page_bytes / (self.page_tokens * self.kv_heads)
        sinks = min(tokens, self.sink_tokens)
        return (sinks * raw + (tokens - sinks) * self.token_bytes) / tokens

    def nats(self) -> float:
        return statistics.fmean(self.losses)

    def perplexity(self) -> float:
        return math.exp(self.nats())

    def change(self, raw: Measured) -> float:
        """Of perplexity, as a share of raw's."""
        return math.exp(self.nats() - raw.nats()) - 1

    def change_error(self, raw: Measured) -> float | None:
        """Standard error of change(), from the windows' paired differences; None with fewer than two."""
        differences = [a - b for a, b in zip(self.losses, raw.losses)]
        if len(differences) < 2:
            return None
        return statistics.stdev(differences) / math.sqrt(len(differences)) * (1 + self.change(raw))


def logits_of(model: Any, attachment: kvt.Attachment, ids: list[int]) -> Iterator[tuple[int, torch.Tensor]]:
    """(position, logits [rows, vocabulary]) of one context from its beginning, piece by piece."""
    row = torch.tensor([ids], device=model.device)
    with torch.no_grad(), attachment.cache() as cache:
        for first in range(0, len(ids), _CHUNK_TOKENS):
            yield first, model(row[:, first : first + _CHUNK_TOKENS], past_key_values=cache, use_cache=True).logits[0]


def loss_of(model: Any, attachment: kvt.Attachment, ids: list[int]) -> float:
    """Mean nats per token of predicting ids[1:]."""
    total = 0.0
    targets = torch.tensor(ids[1:], device=model.device)
    for first, logits in logits_of(model, attachment, ids):
        wanted = targets[first : first + len(logits)]
        total += float(torch.nn.functional.cross_entropy(logits[: len(wanted)].float(), wanted, reduction="sum"))
    return total / len(targets)


def pool_bytes(raw_token_bytes: int, tokens: int) -> int:
    """Of a daemon's host pool that holds one such context in either form, several codecs' one after the other."""
    return max(256 << 20, -(-4 * raw_token_bytes * (tokens + 512) // (2 << 20)) * (2 << 20))


class Artifacts:
    """A folder for a daemon's --calibration-dir in which artifacts given by path lie under names. A context manager."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="kvmanager-artifacts-")
        self._names: dict[str, str] = {}

    @property
    def path(self) -> str:
        return self._folder.name

    def spec(self, codec: str, directory: str = "") -> str:
        """`codec` with every calibration=FILE as the daemon finds it. FILE: a path, or a name in `directory`. Errors:
        FileNotFoundError."""
        def named(match: re.Match[str]) -> str:
            return "calibration=" + self._name(match[1], directory)
        return re.sub(r"calibration=([^,;>]+)", named, codec)

    def _name(self, given: str, directory: str) -> str:
        places = [given, given + ".safetensors"]
        if directory:
            places += [os.path.join(directory, place) for place in places]
        path = next((place for place in places if os.path.isfile(place)), None)
        if path is None:
            raise FileNotFoundError(f"calibration={given}: there is no such file; `python -m kvmanager.calibrate` makes one")
        path = os.path.realpath(path)
        if path not in self._names:
            name = f"{len(self._names)}-{re.sub('[^A-Za-z0-9._-]', '_', os.path.basename(path))}"
            os.symlink(path, os.path.join(self.path, name))
            self._names[path] = name
        return self._names[path]

    def named(self, text: str) -> str:
        """`text` with the files as they were given."""
        for path, name in self._names.items():
            text = text.replace(os.path.join(self.path, name), path).replace(f"calibration={name}", f"calibration={path}")
        return text

    def __enter__(self) -> Artifacts:
        return self

    def __exit__(self, *_: Any) -> None:
        self._folder.cleanup()


def attach(model: Any, address: str, codec: str, *, lag_pages: int, calibration_dir: str = "", tag: str = "",
           name: str = "") -> kvt.Attachment:
    """Without prefixes shared between contexts: each is computed. tag: blocks of other runs are not found."""
    return kvt.attach(model, address, codec=codec, lag_pages=lag_pages, publish_prompts=False, tenant=tag,
                      calibration_dir=calibration_dir, deadline_ms=600_000, model_name=name)


def measure(model: Any, address: str, codec: str, windows: list[list[int]], *, lag_pages: int, label: str = "",
            calibration_dir: str = "", name: str = "", progress: Callable[[], None] = lambda: None,
            also: Callable[[kvt.Attachment, Measured], None] | None = None) -> Measured:
    """Losses of every window through one cache of the daemon. also: what else is asked of the same cache."""
    with attach(model, address, codec, lag_pages=lag_pages, calibration_dir=calibration_dir, name=name) as attachment:
        about = attachment.description
        done = Measured(label or codec, page_tokens=about.options.page_tokens, kv_heads=about.options.kv_heads,
                        raw_page_bytes=about.raw_page_bytes, encoded_page_bytes=about.encoded_page_bytes,
                        payload_page_bytes=about.payload_page_bytes,
                        sink_tokens=getattr(about, "sink_tokens", 0), canonical=about.options.codec)
        for ids in windows:
            done.losses.append(loss_of(model, attachment, ids))
            progress()
        if also is not None:
            also(attachment, done)
    return done
