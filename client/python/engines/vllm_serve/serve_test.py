"""`vllm serve` of SmolLM2 with kvmanager's connector, as docs/engines.md says: a real engine, model and daemon.

raw: the text that vLLM gives without the connector, also behind a prefix that comes from the daemon: from its memory, after a
restart of the engine and a kill -9 of the daemon, and from its disk, after a kill while the engine lives on. A lossy codec: text
that vLLM without the connector finds about as likely as its own. Likelihood is the mean natural logarithm of a token's
probability, over the answers to all prompts, behind the prompts as they are.
"""

from __future__ import annotations

import math
import os
import statistics
import tempfile
import time
import unittest

import smollm2
from engine_testing import metric, published
from kvmanager_testing import Daemon
from questions import questions
from server import BLOCK_TOKENS, Server

# What docs/engines.md recommends for vLLM beside raw. Each costs a start of vLLM.
RECOMMENDED_CODECS = ("hack:k_bits=4,v_bits=3",)
# This codec spoils SmolLM2's text: a check that it passes checks nothing.
GARBAGE_CODEC = "hack:k_bits=2,v_bits=2,rotation=none,v_norm=0;sinks=0"
# How much less likely than vLLM's own text a codec's may be, in nats per token: a token two thirds as likely, in the geometric
# mean. K4 V3 loses 0.13, the garbage codec 0.67.
LOSS_MAX = math.log(1.5)

ANSWER_TOKENS = 48
_STORE_S = 300
_WAIT_MS = 60000  # of the connector for the daemon: not a test of how busy the machine is


class ServeTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls) -> None:
        folder = cls.enterClassContext(tempfile.TemporaryDirectory(prefix="smollm2"))
        cls.disk = ("--disk-path", os.path.join(folder, "disk"), "--disk-bytes", "2GiB")
        state = ("--state-dir", os.path.join(folder, "state"), "--state-keep-s", "30")
        cls.daemon = cls.enterClassContext(Daemon(host_pool="512MiB", flags=cls.disk + state))
        cls.model = smollm2.convert(os.path.join(folder, "smollm2"))
        cls.plain = cls.enterClassContext(Server(cls.model)).ready()
        cls.prompts = [cls.plain.chat_tokens(question) for question in questions()]

    def server(self, codec: str, tenant: str = "") -> Server:
        """Not yet ready, so that two start at a time. Tenants share no blocks."""
        extra = {"address": self.daemon.listen, "codec": codec, "tenant": tenant, "lookup_ms": _WAIT_MS,
                 "plan": "load", "deadline_ms": _WAIT_MS}
        server = Server(self.model, extra)
        self.addCleanup(server.stop)
        return server

    def answers(self, server: Server, tokens: int = ANSWER_TOKENS) -> list[tuple[str, list[int]]]:
        """One prompt at a time: then nothing that is computed depends on when another one came."""
        return [server.generate(prompt, tokens) for prompt in self.prompts]

    def wait_for_published(self, blocks: int, server: Server) -> None:
        end = time.monotonic() + _STORE_S
        while (found := published(self.daemon)) < blocks and time.monotonic() < end:
            time.sleep(0.1)
        if found < blocks:
            self.fail(f"{found} blocks are stored, must be {blocks}: {server.kvmanager_lines()}")

    def kill_daemon(self) -> None:
        """kill -9 once all that was published is on its disk, and another daemon in its place."""
        end = time.monotonic() + _STORE_S
        while (left := metric(self.daemon, "kvmanager_disk_unwritten_blocks")) > 0 and time.monotonic() < end:
            time.sleep(0.1)
        self.assertEqual(0, left, "blocks are not on the disk")
        self.daemon.kill()
        self.daemon.start()
        self.assertEqual(0, published(self.daemon))

    def wait_for_engine(self, server: Server) -> None:
        """Until scheduler and worker are attached to a daemon that was started behind them: each tries again in its own
        time. Then a prompt is found that was stored before."""
        end = time.monotonic() + _STORE_S
        before = server.metric("vllm:kvmanager_loaded_tokens_total")
        while server.metric("vllm:kvmanager_loaded_tokens_total") == before:
            if time.monotonic() > end:
                self.fail(f"the engine finds nothing at the new daemon: {server.kvmanager_lines()}")
            server.generate(list(range(1000, 1001 + BLOCK_TOKENS)), 1)
            server.forget()
            time.sleep(0.1)

    def assert_retained(self, blocks: int) -> None:
        """The daemon looks at this once a second."""
        end = time.monotonic() + _STORE_S
        while (found := metric(self.daemon, "kvmanager_retained_blocks")) != blocks and time.monotonic() < end:
            time.sleep(0.1)
        self.assertEqual(blocks, found)

    def prompt_blocks(self) -> int:
        return sum(len(prompt) // BLOCK_TOKENS for prompt in self.prompts)

    def hit_tokens(self) -> int:
        """Of the prompts: vLLM computes the last token always."""
        return sum((len(prompt) - 1) // BLOCK_TOKENS * BLOCK_TOKENS for prompt in self.prompts)

    def assert_hits(self, server: Server, before: float = 0) -> None:
        """All blocks of all prompts came from the daemon, as the connector and vLLM itself count them."""
        self.assertEqual(self.hit_tokens(), server.metric("vllm:kvmanager_loaded_tokens_total") - before)
        self.assertEqual(self.hit_tokens(), server.metric("vllm:external_prefix_cache_hits_total") - before)
        self.assertEqual(0, server.metric("vllm:kvmanager_loads_failed_total"))

    def test_raw_gives_the_text_of_vllm_also_after_restarts(self) -> None:
        with self.server("raw") as first:
            self.plain.forget()
            computed, found = self.answers(self.plain), self.answers(self.plain)  # found: behind vLLM's own prefix cache
            first.ready()
            before = published(self.daemon)
            self.assertEqual(computed, self.answers(first))
            self.assertEqual(0, first.metric("vllm:kvmanager_loaded_tokens_total"))
            self.wait_for_published(before + self.prompt_blocks(), first)
        self.kill_daemon()
        self.assertGreaterEqual(metric(self.daemon, "kvmanager_recovered_blocks_total"), self.prompt_blocks())
        with self.server("raw").ready() as second:
            self.assertEqual(found, self.answers(second))
            self.assert_hits(second)
            self.assertEqual(0, metric(self.daemon, "kvmanager_disk_read_blocks_total"), "memory has them")
            self.assert_retained(0)
            keep = {"kvmanager_retention_priority": 80, "kvmanager_retention_ttl_s": 3600}
            second.generate(self.prompts[0], 1, keep)
            self.assert_retained(len(self.prompts[0]) // BLOCK_TOKENS)
            # The same engine, and a daemon that has its disk alone.
            self.daemon.flags = self.disk
            self.kill_daemon()
            self.wait_for_engine(second)
            second.forget()
            before = second.metric("vllm:kvmanager_loaded_tokens_total")
            self.assertEqual(found, self.answers(second))
            self.assert_hits(second, before)
        self.assertGreaterEqual(metric(self.daemon, "kvmanager_disk_read_blocks_total"), self.prompt_blocks())

    def likelihood(self, answers: list[tuple[str, list[int]]]) -> float:
        logs = [
            log
            for prompt, (_, tokens) in zip(self.prompts, answers)
            for log in self.plain.log_likelihoods(prompt, tokens)
        ]
        return statistics.fmean(logs)

    def behind_encoded_pages(self, server: Server) -> list[tuple[str, list[int]]]:
        """Answers where the prompts come from the daemon, as its codec gives them back."""
        before = published(self.daemon)
        self.answers(server, 1)
        self.wait_for_published(before + self.prompt_blocks(), server)
        server.forget()
        answers = self.answers(server)
        self.assert_hits(server)
        return answers

    def test_recommended_codecs_keep_the_text_likely(self) -> None:
        codecs = (*RECOMMENDED_CODECS, GARBAGE_CODEC)
        own = self.likelihood(self.answers(self.plain))
        print(f"vLLM's own text: log-likelihood {own:.3f} per token", flush=True)
        losses: dict[str, float] = {}
        following = self.server(codecs[0], "likely")
        for codec, after in zip(codecs, (*codecs[1:], None)):
            with following.ready() as server:
                following = self.server(after, "likely") if after else None
                answers = self.behind_encoded_pages(server)
            losses[codec] = own - self.likelihood(answers)
            print(f"{codec}: {losses[codec]:.3f} less; begins {answers[0][0][:160]!r}", flush=True)
        for codec in RECOMMENDED_CODECS:
            with self.subTest(codec=codec):
                self.assertLessEqual(losses[codec], LOSS_MAX)
        with self.subTest(codec=GARBAGE_CODEC):
            self.assertGreater(losses[GARBAGE_CODEC], LOSS_MAX, "the bound tells garbage from text no more")


if __name__ == "__main__":
    unittest.main()
