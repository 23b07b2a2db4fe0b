"""What is compared: each variant gives a model's forward pass with K and V through one codec, and says what it stores.

Raw, peers and the emulation of hack attend in torch (paged_attention.py); the daemon's codecs through
kvmanager.transformers and a kvmanagerd."""

from __future__ import annotations

import argparse
import contextlib
import pathlib
import subprocess
import tempfile
from dataclasses import dataclass
from typing import Any, Iterator

import paged_attention
import torch
from kvmanager.quality.protocol import Forward, Subject
from paged_attention import Arithmetic, Decoded, Homomorphic, PagedAttention
from quantisers import PAGE, pages_near, parse_hack, peer


@dataclass(frozen=True)
class Variant:
    """kind: raw, peer (our sinks and window), own (the peer's own), emulated, daemon. name: of the peer, or the codec's spec."""

    kind: str
    name: str

    @property
    def label(self) -> str:
        return {"raw": "raw fp16", "peer": self.name, "own": f"{self.name}, its own window", "emulated": f"{self.name} (torch)",
                "daemon": self.name}[self.kind]

    @property
    def key(self) -> str:
        return f"{self.kind} {self.name}"


def daemon_flags(options: argparse.Namespace) -> list[str]:
    """Of the daemon that a program starts: --daemon-flag, and what --calibration-dir and --device ask for."""
    flags = [f"--calibration-dir={options.calibration_dir}"] if options.calibration_dir else []
    if options.device != "cpu" and not any(flag.startswith("--device-pool-bytes") for flag in options.daemon_flag):
        flags.append("--device-pool-bytes=4GiB")
    return flags + options.daemon_flag


@contextlib.contextmanager
def daemon(program: pathlib.Path, flags: list[str]) -> Iterator[str]:
    """A kvmanagerd for the time of the context; its address. flags: a pool's size among them replaces that of 2 GiB."""
    if not any(flag.startswith("--host-pool-bytes") for flag in flags):
        flags = ["--host-pool-bytes=2GiB", *flags]
    with tempfile.TemporaryDirectory(prefix="kvq") as folder:
        process = subprocess.Popen([program, "--listen", f"unix:{folder}/kv.sock", *flags], stdout=subprocess.PIPE, text=True)
        try:
            for line in process.stdout:
                if line.startswith("kvmanagerd ready"):
                    break
            else:
                raise RuntimeError(f"{program} ended with {process.wait()} before it was ready")
            yield f"unix:{folder}/kv.sock"
        finally:
            process.terminate()
            process.terminate()
            process.communicate(timeout=60)


class Bench:
    """One model and how its variants run. paged: registered before the model was loaded. address: of a daemon, or ''."""

    def __init__(self, subject: Subject, paged: PagedAttention, *, sinks: int, lag: int, address: str = "",
                 attach: dict[str, Any] | None = None):
        self.subject, self._paged, self._sinks, self._lag = subject, paged, sinks, lag
        self._address, self._attach = address, attach or {}
        config = subject.config
        self.head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self.kv_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads

    def bytes(self, variant: Variant) -> float | None:
        """Per token and KV head, K and V together, of encoded pages; None: only the daemon knows."""
        if variant.kind == "raw":
            return 4.0 * self.head_dim
        if variant.kind in ("peer", "own"):
            return float(peer(variant.name).bytes(self.head_dim))
        return parse_hack(variant.name)[0].bytes(self.head_dim) if variant.kind == "emulated" else None

    def _arithmetic(self, variant: Variant) -> Arithmetic | None:
        if variant.kind == "raw":
            return None
        if variant.kind == "emulated":
            codec, sinks = parse_hack(variant.name)
            return Homomorphic(codec, sinks=sinks, lag=self._lag)
        chosen = peer(variant.name)
        own = variant.kind == "own"
        return Decoded(chosen, sinks=0 if own else self._sinks, near=chosen.own_near if own else pages_near(self._lag))

    @contextlib.contextmanager
    def running(self, variant: Variant) -> Iterator[tuple[Forward, float]]:
        """The forward pass, and the bytes."""
        if variant.kind != "daemon":
            self.subject.model.set_attn_implementation(paged_attention.NAME)
            self._paged.use(self._arithmetic(variant))
            yield self._plain, self.bytes(variant)
            return
        import kvmanager.transformers as kvt

        self.subject.model.set_attn_implementation("kvmanager")
        with kvt.attach(self.subject.model, self._address, codec=variant.name, lag_pages=self._lag, publish_prompts=False,
                        deadline_ms=600_000, **self._attach) as kv:
            size = kv.description.encoded_page_bytes / PAGE / self.kv_heads

            def forward(ids: torch.Tensor) -> torch.Tensor:
                with kv.cache() as cache:
                    return self.subject.decoder(ids, past_key_values=cache, use_cache=True).last_hidden_state[0]

            yield forward, size

    def _plain(self, ids: torch.Tensor) -> torch.Tensor:
        return self.subject.decoder(ids, use_cache=False).last_hidden_state[0]
