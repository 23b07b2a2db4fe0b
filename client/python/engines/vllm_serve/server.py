"""A `vllm serve` on a CPU, as a process of its own that is spoken to over HTTP. A context manager."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request

_START_S = 900  # of what takes half a minute on two idle cores
_ANSWER_S = 600
_SUPERVISE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "supervise.py")
_LOG_LINES = 60
NAME = "smollm2"
BLOCK_TOKENS = 64


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


class Server:
    """Begins to start when it is made, in the thread that makes it, which must live as long; ready() waits.

    connector: kv_connector_extra_config of kvmanager's connector; None: vLLM without one."""

    def __init__(self, model: str, connector: dict | None = None) -> None:
        self._url = f"http://127.0.0.1:{free_port()}"
        self._log = tempfile.NamedTemporaryFile("w+", prefix="vllm-serve-", suffix=".log", encoding="utf-8", errors="replace")
        # A folder that goes with the server: vLLM leaves sockets and files for torch.distributed behind.
        self._folder = tempfile.TemporaryDirectory(prefix="vllm")
        command = [os.path.join(sys.prefix, "bin", "vllm"), "serve", model, "--served-model-name", NAME]
        command += ["--host", "127.0.0.1", "--port", self._url.rpartition(":")[2]]
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
            **os.environ,
            "HOME": self._folder.name,
            "TMPDIR": self._folder.name,
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
        self._process = subprocess.Popen(
            [sys.executable, _SUPERVISE, *command], env=environment, stdout=self._log, stderr=subprocess.STDOUT
        )

    def log(self) -> str:
        self._log.flush()
        with open(self._log.name, encoding="utf-8", errors="replace") as file:
            return file.read()

    def kvmanager_lines(self) -> str:
        """What the connector said."""
        return "\n".join(line for line in self.log().splitlines() if "kvmanager:" in line) or "the connector said nothing"

    def ready(self) -> Server:
        end = time.monotonic() + _START_S
        while True:
            with contextlib.suppress(OSError):
                self._get("/health")
                return self
            if self._process.poll() is not None or time.monotonic() > end:
                state = "ended" if self._process.poll() is not None else f"is not ready after {_START_S} s"
                raise AssertionError(f"vllm serve {state}:\n" + "\n".join(self.log().splitlines()[-_LOG_LINES:]))
            time.sleep(0.2)

    def _get(self, path: str) -> str:
        with urllib.request.urlopen(self._url + path, timeout=_ANSWER_S) as answer:
            return answer.read().decode()

    def _post(self, path: str, body: dict) -> str:
        request = urllib.request.Request(self._url + path, json.dumps(body).encode(), {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=_ANSWER_S) as answer:
                return answer.read().decode()
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{path}: {error}: {error.read().decode()[:500]}") from error

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
        end = time.monotonic() + _ANSWER_S
        while not json.loads(self._post("/reset_prefix_cache", {}))["success"]:
            if time.monotonic() > end:
                raise AssertionError(f"vllm refuses to reset its prefix cache for {_ANSWER_S} s")
            time.sleep(0.1)

    def metric(self, name: str) -> float:
        """Sum of a metric's series; 0 if there is none."""
        series = re.findall(rf"^{re.escape(name)}(?:{{.*}})? (\S+)$", self._get("/metrics"), re.MULTILINE)
        return sum(map(float, series))

    def kill(self) -> None:
        """kill -9 of vLLM's process, which supervise.py has the others follow."""
        me = self._process.pid
        with open(f"/proc/{me}/task/{me}/children", encoding="ascii") as file:
            for pid in file.read().split():
                os.kill(int(pid), signal.SIGKILL)
        self._process.wait()
        self.stop()

    def stop(self) -> None:
        """May be called again."""
        self._process.terminate()
        self._process.wait()
        self._log.close()
        self._folder.cleanup()

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
