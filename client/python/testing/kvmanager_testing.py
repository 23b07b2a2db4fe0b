"""What tests of the package share: kvmanagerd processes. No dependency but the standard library."""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
import tempfile

_DEADLINE_S = 60  # of what should take milliseconds


def data_path(path: str) -> str:
    """A file of the repository, or a built program, among a test's data; or below the folder it was started in."""
    return os.path.join(os.environ.get("TEST_SRCDIR", "."), os.environ.get("TEST_WORKSPACE", "."), path)


def daemon_program() -> str:
    """$KVMANAGERD, or the one among the test's data."""
    return os.environ.get("KVMANAGERD") or data_path("kvmanager/daemon/kvmanagerd")


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


class Daemon:
    """A kvmanagerd of its own, on a Unix socket in a directory of its own. A context manager.

    listen: where clients connect; admin: where kvctl does; peer, metrics, http: "HOST:PORT"; http only with --http-listen among the flags."""

    def __init__(self, host_pool: str = "64MiB", flags: tuple[str, ...] = (), listen: str = "") -> None:
        self.directory = tempfile.mkdtemp(prefix="kvpy")
        self.listen = listen or f"unix:{self.directory}/kv.sock"
        self.peer = self.metrics = self.http = ""
        self.admin = f"unix:{self.directory}/kv.sock.admin"
        self._flags = ["--host-pool-bytes", host_pool, "--metrics-listen", "127.0.0.1:0"]
        self._flags += ["--peer-listen", "127.0.0.1:0", "--hand-off-peers", "any"]
        self._flags += ["--admin-listen", f"unix:{self.directory}/kv.sock.admin"]
        self.flags = flags  # of the next start, beside these
        self.process: subprocess.Popen | None = None
        self.start()

    def start(self) -> None:
        """Again, at the same address, after it ended."""
        self.process = subprocess.Popen(
            [daemon_program(), "--listen", self.listen, *self._flags, *self.flags],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
            preexec_fn=_die_with_parent,
        )
        for line in self.process.stdout:
            if line.startswith("kvmanagerd ready"):
                words = dict(word.split("=", 1) for word in line.split() if "=" in word)
                self.listen, self.peer, self.metrics = words["listen"], words.get("peer", ""), words.get("metrics", "")
                self.http = words.get("http", "")
                return
        raise RuntimeError(f"kvmanagerd ended with {self.process.wait()} before it was ready")

    def kill(self) -> None:
        """SIGKILL, and waits for its end."""
        self.process.kill()
        self._reap()

    def stop(self) -> None:
        """Ends it, whatever is held."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
            self.process.send_signal(signal.SIGTERM)
        self._reap()

    def _reap(self) -> None:
        self.process.wait(timeout=_DEADLINE_S)
        self.process.stdout.close()

    def __enter__(self) -> Daemon:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        shutil.rmtree(self.directory, ignore_errors=True)
