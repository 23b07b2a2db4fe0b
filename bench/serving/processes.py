"""Processes that a measurement starts: kvmanagerd, and engines, which end with all that they started."""

from __future__ import annotations

import ctypes
import os
import pathlib
import signal
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
_SUPERVISE = ROOT / "client" / "python" / "engines" / "vllm_serve" / "supervise.py"
_END_S = 60


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


class Daemon:
    """A kvmanagerd on a Unix socket in `folder`. A context manager. address, metrics: where clients and HTTP are answered."""

    def __init__(self, program: str, folder: pathlib.Path, pool_bytes: int, flags: list[str], log: pathlib.Path) -> None:
        self.address, self.metrics = f"unix:{folder}/kv.sock", ""
        command = [program, "--listen", self.address, "--host-pool-bytes", str(pool_bytes)]
        command += ["--metrics-listen", "127.0.0.1:0", *flags]
        with log.open("w") as said:
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=said, text=True,
                                             preexec_fn=_die_with_parent)
        for line in self._process.stdout:
            if line.startswith("kvmanagerd ready"):
                self.metrics = dict(word.split("=", 1) for word in line.split() if "=" in word)["metrics"]
                return
        self._process.stdout.close()
        raise RuntimeError(f"kvmanagerd ended with {self._process.wait()} before it was ready: {log.read_text()[-500:]}")

    def __enter__(self) -> Daemon:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()


def run(command: list[str], environment: dict[str, str], log: pathlib.Path, limit_s: float) -> str:
    """Runs it to its end; output goes to `log`. Returns what went wrong, or nothing."""
    with log.open("w") as said:
        process = subprocess.Popen([sys.executable, str(_SUPERVISE), *command], stdin=subprocess.DEVNULL, stdout=said,
                                   stderr=subprocess.STDOUT, env={**os.environ, **environment})
        try:
            status = process.wait(limit_s)
            return f"ended with {status}" if status else ""
        except subprocess.TimeoutExpired:
            return f"took more than {limit_s:.0f} s"
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait()
