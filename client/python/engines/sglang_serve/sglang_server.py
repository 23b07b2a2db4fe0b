"""A real SGLang server with HiCache on a CPU, over HTTP. A context manager."""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import dataclass

from served import Served

PAGE_TOKENS = 64
_LAUNCH = os.path.join(os.path.dirname(os.path.abspath(__file__)), "launch.py")


@dataclass(frozen=True)
class Answer:
    """found_tokens: of the prompt, that came from the storage backend."""

    text: str
    first_s: float
    found_tokens: int


class SglangServer(Served):
    """storage: extra_config of kvmanager's backend, or the folder of SGLang's own backend for files."""

    def __init__(self, model: str, storage: dict | str) -> None:
        command = [_LAUNCH, "--model-path", model, "--device", "cpu", "--attention-backend", "torch_native"]
        command += ["--grammar-backend", "none", "--page-size", str(PAGE_TOKENS), "--context-length", "4096"]
        command += ["--max-total-tokens", "16384", "--sleep-on-idle", "--enable-hierarchical-cache"]
        command += ["--hicache-ratio", "2", "--hicache-io-backend", "direct", "--hicache-mem-layout", "layer_first"]
        command += ["--hicache-write-policy", "write_through", "--hicache-storage-prefetch-policy", "wait_complete"]
        environment = {
            "SGLANG_USE_CPU_ENGINE": "1",
            "SGLANG_HOST_IP": "127.0.0.1",
            "GLOO_SOCKET_IFNAME": "lo",
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",  # threads that wait for one another take minutes on a busy machine
            "TORCHDYNAMO_DISABLE": "1",
        }
        if isinstance(storage, str):
            command += ["--hicache-storage-backend", "file"]
            environment["SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR"] = storage
        else:
            ours = {"backend_name": "kvmanager", "module_path": "kvmanager.sglang", "class_name": "KvManagerHiCache"}
            extra = json.dumps({**ours, "interface_v1": 1, **storage})
            command += ["--hicache-storage-backend", "dynamic", "--hicache-storage-backend-extra-config", extra]
        super().__init__("sglang", [sys.executable, *command], environment)

    def generate(self, prompt: list[int], tokens: int) -> Answer:
        """So many tokens that follow, greedily."""
        sampling = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
        body = {"input_ids": prompt, "sampling_params": sampling, "stream": True}
        began, first_s, last = time.monotonic(), 0.0, {}
        with self._open("/generate", body) as events:
            for line in events:
                if line.startswith(b"data: {"):
                    first_s = first_s or time.monotonic() - began
                    last = json.loads(line.removeprefix(b"data: "))
        found = last["meta_info"].get("cached_tokens_details") or {}
        return Answer(last["text"], first_s, found.get("storage", 0))

    def forget(self) -> None:
        """Empties the engine's own caches, on the device and the host, and leaves the storage."""
        self._post("/flush_cache?timeout=300", {})
