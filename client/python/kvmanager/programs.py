"""kvmanagerd and kvctl as this package brings them, and a daemon of one's own for as long as something is measured."""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from typing import Any

_HERE = os.path.dirname(os.path.abspath(__file__))
_READY_S = 120  # a daemon takes all its memory before it is ready


def program(name: str, given: str = "") -> str:
    """The path of `kvmanagerd` or `kvctl`: `given`, or $KVMANAGERD or $KVCTL, or the wheel's, or $PATH's. Errors:
    FileNotFoundError."""
    variable = name.upper()
    for path, source in ((given, f"--{name}"), (os.environ.get(variable, ""), f"${variable}")):
        if path:
            if not os.access(path, os.X_OK):
                raise FileNotFoundError(f"{source}: {path!r}; must be a program")
            return path
    bundled = os.path.join(_HERE, "bin", name)
    found = bundled if os.access(bundled, os.X_OK) else shutil.which(name)
    if not found:
        raise FileNotFoundError(f"{name}: not beside this package ({bundled}) nor in PATH; install the wheel, which has "
                                f"it, or give --{name} PROGRAM")
    return found


def kvctl() -> None:
    """The command `kvctl` of an installed wheel."""
    _replace_by("kvctl")


def kvmanagerd() -> None:
    """The command `kvmanagerd` of an installed wheel."""
    _replace_by("kvmanagerd")


def _replace_by(name: str) -> None:
    path = os.path.join(_HERE, "bin", name)
    try:
        os.execv(path, [path, *sys.argv[1:]])
    except OSError as error:
        raise SystemExit(f"{name}: {path}: {error.strerror}; this package was built without programs") from None


def _end_with_parent() -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG


class Daemon:
    """A kvmanagerd on a temporary Unix socket, in a folder of its own. A context manager.

    address: where clients connect. Errors: RuntimeError with what the daemon said, if it does not get ready."""

    def __init__(self, executable: str, *, host_pool_bytes: int, calibration_dir: str = "", flags: tuple[str, ...] = ()):
        self._folder = tempfile.mkdtemp(prefix="kvmanager-")
        self.address = f"unix:{self._folder}/daemon.sock"
        self._log = open(os.path.join(self._folder, "log"), "w+", encoding="utf-8", errors="replace")
        command = [executable, "--listen", self.address, "--host-pool-bytes", str(host_pool_bytes), *flags]
        if calibration_dir:
            command += ["--calibration-dir", calibration_dir]
        try:
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=self._log,
                                             text=True, preexec_fn=_end_with_parent)
            assert self._process.stdout is not None
            for line in self._process.stdout:
                if line.startswith("kvmanagerd ready"):
                    return
            status = self._process.wait(timeout=_READY_S)
            self._log.seek(0)
            raise RuntimeError(f"kvmanagerd: ended with {status} before it was ready: {self._log.read()[-2000:].strip()}")
        except BaseException:
            self._clean()
            raise

    def close(self) -> None:
        if self._process.poll() is None:
            for sign in (signal.SIGINT, signal.SIGTERM):  # the second one ends it, whatever is held
                self._process.send_signal(sign)
            try:
                self._process.wait(timeout=_READY_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()
        self._clean()

    def _clean(self) -> None:
        self._log.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def __enter__(self) -> Daemon:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()
