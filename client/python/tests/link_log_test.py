"""What links say to an operator: each thing once, whichever of a process's links notices it first. Time is a number here."""

from __future__ import annotations

import itertools
import logging
import unittest
from unittest import mock

from kvmanager._link_log import LinkLog
from kvmanager.errors import (
    DeadlineExceededError,
    InvalidArgumentError,
    ResourceExhaustedError,
    UnavailableError,
    UnimplementedError,
)

DEADLINE_MS = 10000
GONE = UnavailableError("the daemon closed the connection; Reconnect()")
_numbers = itertools.count()


class LinkLogTest(unittest.TestCase):
    def setUp(self) -> None:
        self.address = f"unix:/run/daemon{next(_numbers)}.sock"  # what was said of others is known still
        self.lines: list[tuple[int, str]] = []
        self.now = 100.0
        clock = self.enterContext(mock.patch("kvmanager._link_log.time"))
        clock.monotonic = lambda: self.now

    def link(self, **set_by: str) -> LinkLog:
        log = mock.Mock(spec=logging.Logger)
        log.warning = lambda form, text: self.lines.append((logging.WARNING, form % text))
        log.log = lambda level, form, text: self.lines.append((level, form % text))
        made = LinkLog(self.address, log, DEADLINE_MS, set_by)
        made.attached()
        return made

    def said(self) -> list[str]:
        """Since the last call."""
        lines, self.lines = self.lines, []
        return [text for _, text in lines]

    def test_links_that_lose_one_daemon_say_it_once(self) -> None:
        first, second = self.link(), self.link()
        self.now += 5
        first.lost(GONE)
        (line,) = self.said()
        self.assertTrue(line.startswith(f"kvmanager: lost kvmanagerd at {self.address}. Requests go on without it"), line)
        self.now += DEADLINE_MS / 1000 + 1  # within a call that waited for it
        second.lost(GONE)
        self.assertEqual([], self.said())

    def test_one_that_notices_when_the_first_is_attached_again(self) -> None:
        first, second = self.link(), self.link()
        self.now += 5
        first.lost(GONE)
        self.now += 1
        first.attached()
        self.said()
        self.now += 1
        second.lost(GONE)
        self.assertEqual([], self.said())
        self.now += 1
        second.attached()
        self.now += 1
        first.lost(GONE)  # the next daemon
        self.assertEqual(1, len(self.said()))
        second.lost(GONE)
        self.assertEqual([], self.said())

    def test_a_loss_long_behind_another_is_said(self) -> None:
        first, second = self.link(), self.link()
        self.now += 5
        first.lost(GONE)
        self.now += DEADLINE_MS / 1000 + 60
        second.lost(GONE)
        self.assertEqual(2, len(self.said()))

    def test_other_daemons_are_others(self) -> None:
        first = self.link()
        self.address += ".2"
        second = self.link()
        self.now += 5
        first.lost(GONE)
        second.lost(GONE)
        self.assertEqual(2, len(self.said()))

    def test_a_daemon_that_is_not_there_is_said_once_until_it_was(self) -> None:
        link, other = self.link(), self.link()
        for each in (link, other, link):
            each.not_attached(UnavailableError("connection refused"))
        (line,) = self.said()
        self.assertTrue(line.startswith(f"kvmanager: no kvmanagerd at {self.address}: connection refused. Requests go on"), line)
        link.attached()
        link.not_attached(DeadlineExceededError("no answer for 500 ms"))
        self.assertEqual(1, len(self.said()))

    def test_who_said_that_it_is_lost_does_not_say_that_it_is_not_there(self) -> None:
        link = self.link()
        self.now += 5
        link.lost(GONE)
        self.said()
        link.not_attached(UnavailableError("connection refused"))
        self.assertEqual([], self.said())

    def test_what_is_declined_is_off_in_the_engines_terms(self) -> None:
        link = self.link(page_tokens="vLLM's --block-size")
        declined = InvalidArgumentError("page_tokens is 32, must be 64", "page_tokens", "32", "64")
        link.not_attached(declined)
        link.not_attached(declined)
        self.assertEqual(
            [(logging.ERROR, "kvmanager: OFF, because page_tokens is 32, must be 64 (page_tokens is vLLM's --block-size). "
              f"Requests are served without it (kvmanagerd at {self.address})")], self.lines)
        self.said()
        link.not_attached(UnimplementedError("match"))  # of another version, started meanwhile
        self.assertIn("match; install client and daemon of one version", *self.said())

    def test_what_else_is_wrong_is_named(self) -> None:
        link = self.link()
        link.not_attached(ResourceExhaustedError("connections is 64, must be below 64"))
        link.not_attached(FileNotFoundError(2, "No such file", "token"))
        first, second = self.said()
        self.assertIn("cannot attach to kvmanagerd", first)
        self.assertIn("connections is 64", first)
        self.assertIn("FileNotFoundError", second)

    def test_a_loss_that_is_no_closed_connection_says_what_it_is(self) -> None:
        link = self.link()
        self.now += 5
        link.lost(DeadlineExceededError("no answer for 10000 ms"))
        self.assertIn(": no answer for 10000 ms. Requests go on", *self.said())


if __name__ == "__main__":
    unittest.main()
