"""A `vllm serve` on a CPU, as a process of its own that is spoken to over HTTP. A context manager."""

from __future__ import annotations

import json
import os
import re
import sys
import time

from served import ANSWER_S, Served

NAME = "smollm2"
BLOCK_TOKENS = 64


class Server(Served):
    """connector: kv_connector_extra_config of kvmanager's connector; None: vLLM without one."""

    def __init__(self, model: str, connector: dict | None = None) -> None:
        command = [os.path.join(sys.prefix, "bin", "vllm"), "serve", model, "--served-model-name", NAME]
        command += ["--max-model-len", "2048", "--block-size", str(BLOCK_TOKENS), "--enforce-eager"]
        if connector is not None:
            transfer = {
                "kv_connector": "KvManagerConnector",
                "kv_connector_module_path": "kvmanager.vllm",
                "kv_role": "kv_both",
                "kv_load_failure_policy": "recompute",
                "kv_connector_extra_config": connector,
            }
            command += ["--kv-transfer-config", json.dumps(transfer)]
        environment = {
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_HOST_IP": "127.0.0.1",
            "VLLM_LOGGING_COLOR": "0",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_SERVER_DEV_MODE": "1",  # reset_prefix_cache
            "GLOO_SOCKET_IFNAME": "lo",
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",  # threads that wait for one another take minutes on a busy machine
            "PYTHONHASHSEED": "0",
            "TORCHDYNAMO_DISABLE": "1",  # log-likelihoods compile a kernel else
        }
        super().__init__("vllm-serve", command, environment)

    # What is asked of it.

    def chat_tokens(self, text: str) -> list[int]:
        """A user's message in the model's chat template, where the answer begins."""
        return json.loads(self._post("/tokenize", {"model": NAME, "messages": [{"role": "user", "content": text}]}))["tokens"]

    def generate(self, prompt: list[int], tokens: int, transfer: dict | None = None) -> tuple[str, list[int]]:
        """Text and token ids that follow, greedily; at most so many. transfer: kv_transfer_params."""
        body = {"model": NAME, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "return_token_ids": True}
        if transfer is not None:
            body["kv_transfer_params"] = transfer
        choice = json.loads(self._post("/v1/completions", body))["choices"][0]
        return choice["text"], choice["token_ids"]

    def log_likelihoods(self, prompt: list[int], answer: list[int]) -> list[float]:
        """Natural logarithm of each token's probability behind the prompt and the answer's tokens before it."""
        body = {"model": NAME, "prompt": prompt + answer, "max_tokens": 1, "temperature": 0, "prompt_logprobs": 0}
        found = json.loads(self._post("/v1/completions", body))["choices"][0]["prompt_logprobs"]
        return [found[len(prompt) + place][str(token)]["logprob"] for place, token in enumerate(answer)]

    def forget(self) -> None:
        """Empties the engine's own prefix cache and leaves the daemon's blocks. vLLM refuses while blocks are in use."""
        end = time.monotonic() + ANSWER_S
        while not json.loads(self._post("/reset_prefix_cache", {}))["success"]:
            if time.monotonic() > end:
                raise AssertionError(f"vllm refuses to reset its prefix cache for {ANSWER_S} s")
            time.sleep(0.1)

    def metric(self, name: str) -> float:
        """Sum of a metric's series; 0 if there is none."""
        series = re.findall(rf"^{re.escape(name)}(?:{{.*}})? (\S+)$", self._get("/metrics"), re.MULTILINE)
        return sum(map(float, series))
