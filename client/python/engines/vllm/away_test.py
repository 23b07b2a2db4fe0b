"""The connector inside vLLM's own scheduler and model runner's hooks, while the daemon is away, hangs, or declines what the
engine asks for: requests go on, each is counted once, and the log says once what to do."""

from __future__ import annotations

import contextlib
import logging
import signal
import unittest

from engine import Engine, prompt
from engine_testing import DaemonTestCase
from kvmanager_testing import Daemon


def total(engine: Engine, name: str) -> float:
    return sum(each.get(name, 0) for each in engine.stats)


@contextlib.contextmanager
def lines_of(level: int = logging.WARNING):
    """The connector's lines of the log, at and above a level."""
    lines: list[str] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    logger, handler = logging.getLogger("vllm.kvmanager"), Handler(level)
    before = logger.level
    logger.setLevel(min(level, before or level))
    logger.addHandler(handler)
    try:
        yield lines
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)


class AwayTest(unittest.TestCase):
    def test_the_engine_goes_on_and_attaches_again(self) -> None:
        tokens = prompt(60, 320)
        with Daemon(host_pool="128MiB") as daemon, Engine(daemon.listen) as engine:
            (expected,) = engine.run(engine.add("a", tokens))
            # In the middle of a request that was looked up and of one that stores.
            engine.scheduler.reset_prefix_cache()
            loading = engine.add("b", tokens)
            storing = engine.add("c", prompt(61, 400), output=40)
            engine.settle()
            daemon.kill()
            engine.run(loading, storing)
            self.assertEqual(expected, list(loading.output_token_ids))
            self.assertTrue(engine.wait(False))
            # While it is away: misses.
            engine.scheduler.reset_prefix_cache()
            before = engine.loaded_tokens
            engine.run(engine.add("d", tokens))
            self.assertEqual(before, engine.loaded_tokens)
            daemon.start()
            self.assertTrue(engine.wait(True))
            engine.scheduler.reset_prefix_cache()
            engine.run(engine.add("e", tokens))  # the new daemon has nothing
            self.assertEqual(before, engine.loaded_tokens)
            engine.scheduler.reset_prefix_cache()
            engine.run(engine.add("f", tokens))
            self.assertEqual(before + 304, engine.loaded_tokens)

    def test_a_daemon_that_comes_later(self) -> None:
        with Daemon(host_pool="128MiB") as daemon:
            daemon.kill()
            engine = Engine(daemon.listen)
            self.assertFalse(engine.connector.attached)
            engine.run(engine.add("a", prompt(62, 100)))
            daemon.start()
            with engine:
                engine.scheduler.reset_prefix_cache()
                engine.run(engine.add("b", prompt(62, 100)))
                engine.scheduler.reset_prefix_cache()
                engine.run(engine.add("c", prompt(62, 100)))
                self.assertEqual(96, engine.loaded_tokens)

    def test_a_request_counts_one_lookup_however_often_vllm_asks(self) -> None:
        with Daemon(host_pool="128MiB") as daemon, Engine(daemon.listen, blocks=16) as engine:
            daemon.kill()
            self.assertTrue(engine.wait(False))
            # Room for two of them at a time: vLLM asks for the others at each step.
            engine.run(*(engine.add(f"r{i}", prompt(70 + i, 100), output=30) for i in range(6)))
            self.assertEqual((6, 6), (total(engine, "lookups"), total(engine, "lookups_unanswered")))
            self.assertEqual(6 * 128, total(engine, "unstored_away_tokens"))

    def test_a_daemon_that_ends_is_said_once_and_so_is_its_return(self) -> None:
        with Daemon(host_pool="128MiB") as daemon, lines_of(logging.INFO) as lines, Engine(daemon.listen) as engine:
            self.assertEqual(1, sum("attached to" in line for line in lines), lines)
            for turn in range(2):
                del lines[:]
                requests = [engine.add(f"{turn}.{i}", prompt(80 + i, 200), output=20) for i in range(4)]
                engine.step()
                daemon.kill()
                engine.run(*requests)
                self.assertTrue(engine.wait(False))
                for i in range(4):
                    engine.run(engine.add(f"{turn}.{i} behind it", prompt(90 + i, 200)))
                self.assertEqual(1, len(lines), lines)
                self.assertIn(f"kvmanager: lost kvmanagerd at {daemon.listen}", lines[0])
                self.assertIn("Requests go on without it. Start kvmanagerd", lines[0])
                self.assertNotIn("reconnect()", lines[0])
                daemon.start()
                self.assertTrue(engine.wait(True))
                self.assertEqual(2, len(lines), lines)
                self.assertIn("attached to", lines[1])

    def test_a_daemon_that_hangs_is_said_once_without_advice_for_other_programs(self) -> None:
        with Daemon(host_pool="128MiB") as daemon, Engine(daemon.listen, deadline_ms=500) as engine, lines_of() as lines:
            daemon.process.send_signal(signal.SIGSTOP)
            try:
                engine.run(*(engine.add(f"r{i}", prompt(100 + i, 200), output=20) for i in range(3)))
                self.assertTrue(engine.wait(False))
            finally:
                daemon.process.send_signal(signal.SIGCONT)
            self.assertEqual(1, len(lines), lines)
            self.assertIn("kvmanager: lost kvmanagerd at", lines[0])
            self.assertNotIn("info().tokens", lines[0])


class DeclinedTest(DaemonTestCase):
    def test_what_the_daemon_declines_is_said_once_with_vllm_s_own_option(self) -> None:
        with lines_of() as lines:
            engine = Engine(self.daemon.listen, codec="hack:k_bits=4,v_bits=3", block_size=32)
            try:
                worker = engine.workers[0].connector._worker
                worker.link.wait_tried(60)
                for i in range(3):
                    engine.run(engine.add(f"r{i}", prompt(110 + i, 200)))
                self.assertFalse(worker.link.attached)
            finally:
                engine.__exit__()
        self.assertEqual(1, len(lines), lines)
        self.assertIn("kvmanager: OFF, because page_tokens is 32, must be a multiple of 64", lines[0])
        self.assertIn("(page_tokens is vLLM's --block-size)", lines[0])
        self.assertEqual(3 * 192, total(engine, "unstored_failed_tokens"))
        self.assertEqual(0, total(engine, "unstored_away_tokens"))

    def test_caches_of_an_unknown_layout_are_served_without(self) -> None:
        engine = Engine(self.daemon.listen)
        try:
            worker = engine.workers[0].connector._worker
            worker.link.close()
            worker.link = worker.copies = None  # as register() leaves it behind a ValueError
            with lines_of() as lines:
                engine.run(engine.add("a", prompt(120, 200)))
        finally:
            engine.__exit__()
        self.assertEqual([], lines)
        self.assertEqual(192, total(engine, "unstored_failed_tokens"))


if __name__ == "__main__":
    unittest.main()
