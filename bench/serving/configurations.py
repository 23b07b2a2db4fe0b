"""What is compared: vLLM alone, with its own offload to host memory, and with kvmanager under a codec."""

from __future__ import annotations

import dataclasses

ALONE, OFFLOAD = "vllm", "offload"
VLLM = {ALONE: "vLLM alone", OFFLOAD: "vLLM's own offload"}  # an engine's own ways, and how tables call them
CODECS = {"raw": "raw", "k4v3": "hack:k_bits=4,v_bits=3", "k3v2": "hack:k_bits=3,v_bits=2"}
# Raw bytes over a codec's, at most: how many prompts fill a pool for certain.
_COMPRESSION_MAX = {None: 1.0, "raw": 1.0, CODECS["k4v3"]: 5.0, CODECS["k3v2"]: 7.0}
_COMPRESSION_MAX_OTHERS = 12.0


@dataclasses.dataclass(frozen=True)
class Configuration:
    """codec: of kvmanager; None: without it."""

    name: str
    label: str
    codec: str | None = None

    @property
    def lossless(self) -> bool:
        return self.codec in (None, "raw")

    @property
    def compression_max(self) -> float:
        return _COMPRESSION_MAX.get(self.codec, _COMPRESSION_MAX_OTHERS)

    def transfer(self, address: str, pool_bytes: int, settings: dict) -> dict | None:
        """vLLM's kv_transfer_config; address, settings: of kvmanager's daemon and connector."""
        if self.name == ALONE:
            return None
        if self.codec is None:
            return {"kv_connector": "OffloadingConnector", "kv_role": "kv_both",
                    "kv_connector_extra_config": {"cpu_bytes_to_use": pool_bytes}}
        return {"kv_connector": "KvManagerConnector", "kv_connector_module_path": "kvmanager.vllm", "kv_role": "kv_both",
                "kv_load_failure_policy": "recompute",
                "kv_connector_extra_config": {"address": address, "codec": self.codec, **settings}}


def parse(text: str, own: dict[str, str] = VLLM) -> Configuration:
    """A name of `--configs`, or NAME=CODEC. own: the engine's own ways."""
    if text in own:
        return Configuration(text, own[text])
    name, _, codec = text.partition("=")
    codec = codec or CODECS.get(name, "")
    if not name or not codec or name in own:
        known = ", ".join((*own, *CODECS))
        raise ValueError(f"configuration is {text!r}, must be one of {known}, or NAME=CODEC")
    return Configuration(name, f"kvmanager {name}", codec)
