"""A real SGLang server with HiCache on a CPU or a GPU, over HTTP. A context manager."""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import dataclass

from served import Served

PAGE_TOKENS = 64
_LAUNCH = os.path.join(os.path.dirname(os.path.abspath(__file__)), "launch.py")
_FLUSH_S = 300

_FLAGS = ["--page-size", str(PAGE_TOKENS), "--enable-hierarchical-cache", "--hicache-ratio", "2"]
_FLAGS += ["--hicache-write-policy", "write_through", "--hicache-storage-prefetch-policy", "wait_complete"]
_FLAGS += ["--hicache-mem-layout", "layer_first"]
_GPU_FLAGS = ["--hicache-io-backend", "kernel"]
_CPU_FLAGS = ["--device", "cpu", "--attention-backend", "torch_native", "--grammar-backend", "none", "--context-length", "4096"]
_CPU_FLAGS += ["--max-total-tokens", "16384", "--sleep-on-idle", "--hicache-io-backend", "direct"]
_CPU_ENVIRONMENT = {
    "SGLANG_USE_CPU_ENGINE": "1",
    "SGLANG_HOST_IP": "127.0.0.1",
    "GLOO_SOCKET_IFNAME": "lo",
    "OMP_NUM_THREADS": "1",  # threads that wait for one another take minutes on a busy machine
    "TORCHDYNAMO_DISABLE": "1",
}


@dataclass(frozen=True)
class Answer:
    """text: empty without a tokenizer. ids: of the tokens that follow. cached_tokens: of the prompt, that were not computed;
    found_tokens: those of them that came from the storage backend."""

    text: str
    ids: list[int]
    first_s: float
    total_s: float
    cached_tokens: int
    found_tokens: int


def hit(prompt: list[int]) -> int:
    """Tokens that all pages of it have: SGLang computes the last one always."""
    return (len(prompt) - 1) // PAGE_TOKENS * PAGE_TOKENS


def leave_page_cache(folder: str) -> None:
    """So that the files of SGLang's own storage are read from the disk."""
    for file in os.scandir(folder):
        with open(file.path, "rb") as opened:
            os.fsync(opened.fileno())
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


class SglangServer(Served):
    """storage: extra_config of kvmanager's backend, the folder of SGLang's own backend for files, or None: without one.
    python: has sglang. flags, environment: further ones; they overrule those that are here."""

    def __init__(self, model: str, storage: dict | str | None, *, gpu: bool = False, python: str = sys.executable,
                 flags: list[str] | None = None, environment: dict[str, str] | None = None) -> None:
        set_here = {"HF_HUB_OFFLINE": "1", **({} if gpu else _CPU_ENVIRONMENT)}
        if gpu and "HOME" in os.environ:
            set_here["HOME"] = os.environ["HOME"]  # kernels that were compiled once lie there
        command = [python, *(["-m", "sglang.launch_server"] if gpu else [_LAUNCH]), "--model-path", model]
        command += _FLAGS + (_GPU_FLAGS if gpu else _CPU_FLAGS)
        if isinstance(storage, str):
            command += ["--hicache-storage-backend", "file"]
            set_here["SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR"] = storage
        elif storage is not None:
            ours = {"backend_name": "kvmanager", "module_path": "kvmanager.sglang", "class_name": "KvManagerHiCache"}
            extra = json.dumps({**ours, "interface_v1": 1, **storage})
            command += ["--hicache-storage-backend", "dynamic", "--hicache-storage-backend-extra-config", extra]
        super().__init__("sglang", command + (flags or []), {**set_here, **(environment or {})})

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
        total_s = time.monotonic() - began
        if "meta_info" not in last:
            raise AssertionError(f"/generate: {str(last)[:500] or 'no answer'}")
        facts = last["meta_info"]
        found = (facts.get("cached_tokens_details") or {}).get("storage", 0)
        return Answer(last.get("text") or "", last["output_ids"], first_s, total_s, facts.get("cached_tokens", 0), found)

    def forget(self) -> None:
        """Empties the engine's own caches, on the device and the host, and leaves the storage. Waits for what is stored."""
        end = time.monotonic() + _FLUSH_S
        while True:
            try:
                self._post(f"/flush_cache?timeout={_FLUSH_S}", {})
                return
            except AssertionError:  # some versions take no timeout, and refuse at once
                if time.monotonic() > end:
                    raise
            time.sleep(0.5)
