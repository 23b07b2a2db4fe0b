"""vLLM's types that the connector's worker half meets; stand-ins where vLLM is not installed.

With vLLM these are its own. Without it, install() puts into sys.modules what kvmanager.vllm imports: base classes that do
what vLLM's do, as far as the worker half uses it, and nothing of the engine. So that half can run where there is torch
and a GPU, but no vLLM. USED says which of both it is.
"""

from __future__ import annotations

import importlib.util
import logging
import sys
import types
from dataclasses import dataclass, field


class Base:
    """KVConnectorBase_V1."""

    def __init__(self, vllm_config, role, kv_cache_config) -> None:
        self._kv_transfer_config = vllm_config.kv_transfer_config
        self._connector_metadata = None

    def bind_connector_metadata(self, connector_metadata) -> None:
        self._connector_metadata = connector_metadata

    def clear_connector_metadata(self) -> None:
        self._connector_metadata = None

    def _get_connector_metadata(self):
        assert self._connector_metadata is not None
        return self._connector_metadata


class Metadata:
    """KVConnectorMetadata."""


@dataclass
class Stats:
    """KVConnectorStats."""

    data: dict = field(default_factory=dict)


def install() -> None:
    v1 = "vllm.distributed.kv_transfer.kv_connector.v1"
    made = {
        "vllm.logger": {"init_logger": logging.getLogger},
        "vllm.distributed": {"parallel_state": types.SimpleNamespace(get_tensor_model_parallel_rank=lambda: 0)},
        f"{v1}.base": {
            "KVConnectorBase_V1": Base,
            "KVConnectorMetadata": Metadata,
            "KVConnectorRole": types.SimpleNamespace(SCHEDULER=0, WORKER=1),
        },
        f"{v1}.metrics": {"KVConnectorStats": Stats, "KVConnectorPromMetrics": object},
    }
    for name, contents in made.items():
        parts = name.split(".")
        for end in range(1, len(parts) + 1):
            module = sys.modules.setdefault(".".join(parts[:end]), types.ModuleType(".".join(parts[:end])))
            module.__path__ = []
        vars(sys.modules[name]).update(contents)
    sys.modules[v1].base = sys.modules[f"{v1}.base"]


if importlib.util.find_spec("vllm") is None:
    USED = "stand-ins for vLLM's types"
    install()

    class FullAttentionSpec(types.SimpleNamespace):
        pass

    class SlidingWindowSpec(types.SimpleNamespace):
        pass

    KVCacheGroupSpec = KVCacheConfig = types.SimpleNamespace
else:
    USED = "vLLM's own types"
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, SlidingWindowSpec

__all__ = ["USED", "FullAttentionSpec", "KVCacheConfig", "KVCacheGroupSpec", "SlidingWindowSpec"]
