"""Progress of long work on stderr: a bar with the time left on a terminal, elsewhere a line at every tenth."""

from __future__ import annotations

import sys
import time


def _duration(seconds: float) -> str:
    whole = int(seconds + 0.5)
    if whole < 60:
        return f"{whole} s"
    return f"{whole // 60} min {whole % 60} s" if whole < 3600 else f"{whole // 3600} h {whole % 3600 // 60} min"


class Progress:
    """One stage of work. update() from one thread; a context manager, which ends its line."""

    def __init__(self, what: str, total: float, quiet: bool = False):
        self._what, self._total, self._quiet = what, max(total, 1e-9), quiet
        self._terminal = sys.stderr.isatty()
        self._begun = time.monotonic()
        self._shown = -1
        self.update(0)

    def update(self, done: float) -> None:
        if self._quiet:
            return
        share = min(1.0, done / self._total)
        passed = time.monotonic() - self._begun
        left = f", {_duration(passed / share * (1 - share))} left" if 0 < share < 1 else ""
        if self._terminal:
            bar = "=" * int(30 * share)
            print(f"\r{self._what} [{bar:30}] {100 * share:3.0f}%{left}\033[K", end="", file=sys.stderr, flush=True)
        elif int(10 * share) > self._shown:
            self._shown = int(10 * share)
            took = f", {_duration(passed)}" if share == 1 else left
            print(f"{self._what}: {100 * share:.0f}%{took}", file=sys.stderr, flush=True)

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, kind: type | None, *_: object) -> None:
        if kind is None:
            self.update(self._total)
        if self._terminal and not self._quiet:
            print(file=sys.stderr, flush=True)
