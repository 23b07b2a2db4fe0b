"""vLLM keeps its prefixes in the daemon:

    vllm serve MODEL --kv-transfer-config '{"kv_connector": "KvManagerConnector",
      "kv_connector_module_path": "kvmanager.vllm", "kv_role": "kv_both", "kv_load_failure_policy": "recompute",
      "kv_connector_extra_config": {"address": "unix:/run/kvmanager/kvmanager.sock"}}'
"""

from .connector import KvManagerConnector

__all__ = ["KvManagerConnector"]
