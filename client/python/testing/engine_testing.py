"""What the engines' tests share: cases around one daemon, and methods held against those of the engine's own classes."""

from __future__ import annotations

import inspect
import re
import unittest
import urllib.request

import kvmanager
from kvmanager_testing import Daemon

_WAIT_MS = 60000  # not a test of how busy the machine is


def published(daemon: Daemon) -> int:
    """Blocks that can be found by name."""
    with kvmanager.connect(daemon.listen, connect_ms=_WAIT_MS) as client:
        return client.status().published_blocks


def metric(daemon: Daemon, name: str) -> float:
    """The sum of a metric's series."""
    with urllib.request.urlopen(f"http://{daemon.metrics}/metrics", timeout=10) as answer:
        series = re.findall(rf"^{re.escape(name)}(?:{{.*}})? (\S+)$", answer.read().decode(), re.MULTILINE)
    return sum(map(float, series))


class DaemonTestCase(unittest.TestCase):
    """Cases that share a daemon, which has no published blocks when each begins."""

    daemon: Daemon
    flags: tuple[str, ...] = ()

    @classmethod
    def setUpClass(cls) -> None:
        cls.daemon = Daemon(host_pool="256MiB", flags=cls.flags)
        cls.addClassCleanup(cls.daemon.__exit__)

    def setUp(self) -> None:
        with kvmanager.connect(self.daemon.listen) as client:
            client.purge()

    def published(self) -> int:
        return published(self.daemon)


def compare_signatures(case: unittest.TestCase, ours: type, *bases: type) -> int:
    """Fails the case where a method that `ours` defines has other parameters than in one of the bases that defines it, too;
    returns how many it compared."""

    def shape(function) -> list[tuple]:
        return [(each.name, each.kind, each.default) for each in inspect.signature(function).parameters.values()]

    compared = 0
    for base in bases:
        for name, theirs in inspect.getmembers(base, inspect.isroutine):
            if name in ours.__dict__ and name in base.__dict__:
                case.assertEqual(shape(theirs), shape(getattr(ours, name)), name)
                compared += 1
    return compared
