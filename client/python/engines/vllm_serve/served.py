"""A server of an engine on a CPU, as a process of its own that is spoken to over HTTP. A context manager."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from typing import Self

_START_S = 900  # of what takes half a minute on two idle cores
ANSWER_S = 600
_SUPERVISE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "supervise.py")
_LOG_LINES = 60


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


class Served:
    """Begins to start when it is made, in the thread that makes it, which must live as long; ready() waits.

    command: --host and --port are added. environment: beside this process's own, and HOME and TMPDIR, which are a folder that
    goes with the server: engines leave sockets and files behind."""

    def __init__(self, name: str, command: list[str], environment: dict[str, str]) -> None:
        self._name, port = name, free_port()
        self._url = f"http://127.0.0.1:{port}"
        self._log = tempfile.NamedTemporaryFile("w+", prefix=f"{name}-", suffix=".log", encoding="utf-8", errors="replace")
        self._folder = tempfile.TemporaryDirectory(prefix=name)
        command = [sys.executable, _SUPERVISE, *command, "--host", "127.0.0.1", "--port", str(port)]
        environment = {**os.environ, "HOME": self._folder.name, "TMPDIR": self._folder.name, **environment}
        self._process = subprocess.Popen(command, env=environment, stdout=self._log, stderr=subprocess.STDOUT)

    def log(self) -> str:
        self._log.flush()
        with open(self._log.name, encoding="utf-8", errors="replace") as file:
            return file.read()

    def kvmanager_lines(self) -> str:
        """What the connector said."""
        return "\n".join(line for line in self.log().splitlines() if "kvmanager:" in line) or "the connector said nothing"

    def ready(self, limit_s: float = _START_S) -> Self:
        end = time.monotonic() + limit_s
        while True:
            with contextlib.suppress(OSError):
                self._get("/health")
                return self
            if self._process.poll() is not None or time.monotonic() > end:
                state = "ended" if self._process.poll() is not None else f"is not ready after {limit_s:.0f} s"
                raise AssertionError(f"{self._name} {state}:\n" + "\n".join(self.log().splitlines()[-_LOG_LINES:]))
            time.sleep(0.2)

    def _get(self, path: str) -> str:
        with urllib.request.urlopen(self._url + path, timeout=ANSWER_S) as answer:
            return answer.read().decode()

    def _open(self, path: str, body: dict):
        request = urllib.request.Request(self._url + path, json.dumps(body).encode(), {"Content-Type": "application/json"})
        try:
            return urllib.request.urlopen(request, timeout=ANSWER_S)
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{path}: {error}: {error.read().decode()[:500]}") from error

    def _post(self, path: str, body: dict) -> str:
        with self._open(path, body) as answer:
            return answer.read().decode()

    def kill(self) -> None:
        """kill -9 of the engine's process, which supervise.py has the others follow."""
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

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
