"""A real vLLM under kills: prompts that return are asked while the daemon is killed and stopped, and the engine killed.

No request may hang, and no text may be wrong: an answer is one that vLLM itself gives, behind as many blocks of its own prefix
cache as it likes. (Which blocks come from the daemon differs from request to request, and the same sums in other pieces may
choose the other of two words that are as likely.) vLLM itself is asked at the end, until each answer was found.

$KVMANAGER_SOAK_REQUESTS: how many requests, 40 of them for each kill of the daemon and 400 for each of the engine.
$KVMANAGER_SOAK_LAYERS: of the model, the first so many, for a CPU on which all of them take hours. Its answers then make no sense,
and must be vLLM's own as well.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import http.client
import os
import random
import signal
import tempfile
import time
import unittest

import smollm2
from engine_testing import metric
from kvmanager_testing import Daemon
from questions import questions
from server import BLOCK_TOKENS, Server

REQUESTS = int(os.environ.get("KVMANAGER_SOAK_REQUESTS", "40"))
LAYERS = int(os.environ.get("KVMANAGER_SOAK_LAYERS", "0"))  # 0: all
DAEMON_KILLS, ENGINE_KILLS = max(2, REQUESTS // 40), max(1, REQUESTS // 400)  # at most REQUESTS
ANSWER_TOKENS = 16
_HUNG_S = 120  # of requests that take seconds: the engine never waits for the daemon longer than lookup_ms and deadline_ms
_FOUND_S = 120


def falls_on(request: int, events: int) -> bool:
    """Whether one of so many events, spread evenly over all requests, falls on this one."""

    def so_far(requests: int) -> int:
        return (2 * requests * events + REQUESTS) // (2 * REQUESTS)

    return so_far(request + 1) > so_far(request)


class Kills:
    """Kills the daemon at random moments, or stops it for a while, and leaves it dead for some requests."""

    def __init__(self, daemon: Daemon, choose: random.Random) -> None:
        self._daemon, self._choose = daemon, choose
        self._dead_for = -1  # requests; -1: it lives
        self.kills = self.stops = 0

    def during_request(self, due: bool) -> None:
        """In the thread that started the daemon, which dies with it. due: it is time for a kill."""
        choose = self._choose
        if self._dead_for > 0:
            self._dead_for -= 1
        elif self._dead_for == 0:
            time.sleep(choose.uniform(0, 1))
            self.start()
        if not due:
            return
        self.start()
        time.sleep(choose.uniform(0, 2))
        if choose.random() < 0.3:
            self._daemon.process.send_signal(signal.SIGSTOP)
            time.sleep(choose.uniform(0.2, 3))
            self._daemon.process.send_signal(signal.SIGCONT)
            self.stops += 1
            time.sleep(choose.uniform(0, 1))
        self._daemon.kill()
        self.kills += 1
        self._dead_for = choose.choice((0, 1, 3))
        if choose.random() < 0.5:
            self.start()

    def start(self) -> None:
        """If it is dead."""
        if self._dead_for >= 0:
            self._daemon.start()
            self._dead_for = -1


class Answers:
    """Which answers each prompt was given, and to which request first."""

    def __init__(self, prompts: list[list[int]]) -> None:
        self._prompts = prompts
        self._given: list[dict[str, str]] = [{} for _ in prompts]

    def note(self, prompt: int, answer: str, request: str) -> None:
        self._given[prompt].setdefault(answer, request)

    def wrong(self, plain: Server) -> list[str]:
        """Those that vLLM without the connector does not give, whatever it has in its prefix cache."""
        wrong = []
        for prompt, given in zip(self._prompts, self._given):
            left = dict(given)
            # Most are given behind nothing, or behind all that can be there.
            most = (len(prompt) - 1) // BLOCK_TOKENS
            for blocks in (0, most, *range(1, most)):
                if not left:
                    break
                plain.forget()
                if blocks:
                    plain.generate(prompt[: blocks * BLOCK_TOKENS], 1)
                left.pop(plain.generate(prompt, ANSWER_TOKENS)[0], None)
            wrong += [f"{request}: {answer!r}" for answer, request in left.items()]
        return wrong


class SoakTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls) -> None:
        cls.seed = int(os.environ.get("KVMANAGER_SOAK_SEED", random.randrange(1 << 32)))
        print(f"KVMANAGER_SOAK_REQUESTS={REQUESTS} KVMANAGER_SOAK_LAYERS={LAYERS} KVMANAGER_SOAK_SEED={cls.seed}", flush=True)
        folder = cls.enterClassContext(tempfile.TemporaryDirectory(prefix="smollm2"))
        flags = ("--disk-path", os.path.join(folder, "disk"), "--disk-bytes", "2GiB")
        flags += ("--state-dir", os.path.join(folder, "state"), "--state-keep-s", "30")
        cls.daemon = cls.enterClassContext(Daemon(host_pool="512MiB", flags=flags))
        cls.requests = cls.enterClassContext(concurrent.futures.ThreadPoolExecutor(1))
        cls.model = smollm2.convert(os.path.join(folder, "smollm2"), layers=LAYERS)

    def engine(self) -> Server:
        """As docs/engines.md says: nothing of the connector is set but the address and the codec."""
        server = Server(self.model, {"address": self.daemon.listen, "codec": "raw"})
        self.addCleanup(server.stop)
        return server.ready()

    def kill_under_a_request(self, server: Server, prompt: list[int], choose: random.Random) -> None:
        """The request fails, or was faster; it does not hang."""
        request = self.requests.submit(server.generate, prompt, ANSWER_TOKENS)
        time.sleep(choose.uniform(0, 2))
        server.kill()
        with contextlib.suppress(OSError, http.client.HTTPException, AssertionError):
            request.result(timeout=_HUNG_S)

    def wait_until_found(self, server: Server, which: int, prompt: list[int], answers: Answers) -> None:
        """All is well again: the whole prompt comes from the daemon."""
        end = time.monotonic() + _FOUND_S
        want = (len(prompt) - 1) // BLOCK_TOKENS * BLOCK_TOKENS
        found = 0.0
        while found < want:
            self.assertLess(time.monotonic(), end, f"{found} tokens are found, must be {want}: {server.kvmanager_lines()}")
            server.forget()
            before = server.metric("vllm:kvmanager_loaded_tokens_total")
            answers.note(which, server.generate(prompt, ANSWER_TOKENS)[0], "behind all requests")
            found = server.metric("vllm:kvmanager_loaded_tokens_total") - before

    def test_no_request_hangs_and_no_text_is_wrong(self) -> None:
        choose = random.Random(self.seed)
        kills = Kills(self.daemon, choose)
        server = self.engine()
        prompts = [server.chat_tokens(question) for question in questions()]
        answers = Answers(prompts)
        loaded = failed = 0.0
        for request in range(REQUESTS):
            if falls_on(request, ENGINE_KILLS):
                loaded += server.metric("vllm:kvmanager_loaded_tokens_total")
                failed += server.metric("vllm:kvmanager_loads_failed_total")
                self.kill_under_a_request(server, choose.choice(prompts), choose)
                server = self.engine()
            which = choose.randrange(len(prompts))
            answer = self.requests.submit(server.generate, prompts[which], ANSWER_TOKENS)
            kills.during_request(falls_on(request, DAEMON_KILLS))
            answers.note(which, answer.result(timeout=_HUNG_S)[0], f"request {request}")
            server.forget()
        kills.start()
        for which, prompt in enumerate(prompts):
            self.wait_until_found(server, which, prompt, answers)
        loaded += server.metric("vllm:kvmanager_loaded_tokens_total")
        failed += server.metric("vllm:kvmanager_loads_failed_total")
        server.stop()
        with Server(self.model) as plain:
            self.assertEqual([], answers.wrong(plain.ready()))
        print(
            f"{REQUESTS} requests, {kills.kills} kills of the daemon, {kills.stops} stops, {ENGINE_KILLS} kills of the "
            f"engine: {loaded:.0f} tokens came from the daemon, {failed:.0f} loads failed; no hung request, no wrong text; "
            f"{metric(self.daemon, 'kvmanager_checksum_failures_total'):.0f} checksums failed",
            flush=True,
        )
        self.assertEqual(kills.kills, DAEMON_KILLS)
        self.assertGreater(loaded, REQUESTS * BLOCK_TOKENS, "the daemon was hardly used")


if __name__ == "__main__":
    unittest.main()
