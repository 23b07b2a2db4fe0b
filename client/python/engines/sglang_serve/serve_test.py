"""A real SGLang server, model and daemon, on a CPU (launch.py says what is not SGLang's own there).

The text is that of SGLang with its own storage in files: where prompts are computed, and where they come from the storage, with
kvmanager's behind a kill -9 of the server. Prints how long first tokens take: computed, from files, from the daemon, and from
SGLang's own cache, which is what the rest takes: on a CPU its attention computes all rows of a prompt, also of those it has.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
import unittest

from engine_testing import metric, published
from kvmanager_testing import Daemon, data_path
from tokenizers import Tokenizer

sys.path.append(data_path("client/python/engines/vllm_serve"))
import smollm2
from questions import questions
from sglang_server import PAGE_TOKENS, Answer, SglangServer, hit, leave_page_cache

ANSWER_TOKENS = 32
LONG = 3  # prompts in a row, where times are compared
ROUNDS = int(os.environ.get("KVMANAGER_SERVE_ROUNDS", "3"))
CHAT = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
_STORE_S = 300
_WAIT_MS = 60000  # for the daemon: not a test of how busy the machine is


def pages_of(prompts: list[list[int]], tokens: int) -> set[tuple[int, ...]]:
    """What is stored once so many tokens were generated behind each: a page is all tokens up to its end, generated ones -1.
    Of the last one SGLang has no K and V."""
    texts = [(*prompt, *[-1] * (tokens - 1)) for prompt in prompts]
    return {text[:end] for text in texts for end in range(PAGE_TOKENS, len(text) + 1, PAGE_TOKENS)}


class ServeTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls) -> None:
        folder = cls.enterClassContext(tempfile.TemporaryDirectory(prefix="smollm2"))
        cls.daemon = cls.enterClassContext(Daemon(host_pool="1GiB"))
        cls.files = os.path.join(folder, "files")
        cls.model = smollm2.convert(os.path.join(folder, "smollm2"))
        tokenizer = Tokenizer.from_file(os.path.join(cls.model, "tokenizer.json"))
        cls.prompts = [tokenizer.encode(CHAT.format(question)).ids for question in questions()]

    def server(self, storage: dict | str) -> SglangServer:
        server = SglangServer(self.model, storage)
        self.addCleanup(server.stop)
        return server

    def ours(self) -> SglangServer:
        return self.server({"address": self.daemon.listen, "deadline_ms": _WAIT_MS, "retention_priority": 80})

    def answers(self, server: SglangServer) -> list[Answer]:
        """One prompt at a time: then nothing that is computed depends on when another one came."""
        return [server.generate(prompt, ANSWER_TOKENS) for prompt in self.prompts]

    def texts(self, answers: list[Answer], hits: bool) -> list[str]:
        expected = [hit(prompt) if hits else 0 for prompt in self.prompts]
        self.assertEqual(expected, [each.found_tokens for each in answers])
        return [each.text for each in answers]

    def in_files(self) -> int:
        return len(os.listdir(self.files))

    def in_daemon(self) -> int:
        return published(self.daemon)

    def wait_for(self, pages: int, count, server: SglangServer) -> None:
        end = time.monotonic() + _STORE_S
        while (found := count()) != pages and time.monotonic() < end:
            time.sleep(0.1)
        self.assertEqual(pages, found, server.kvmanager_lines())

    def test_text_hits_and_times(self) -> None:
        own, first = self.server(self.files), self.ours()
        own.ready()
        first.ready()
        pages = pages_of(self.prompts, ANSWER_TOKENS)
        computed = self.texts(self.answers(own), hits=False)
        self.wait_for(len(pages), self.in_files, own)
        own.forget()
        found = self.texts(self.answers(own), hits=True)

        self.assertEqual(computed, self.texts(self.answers(first), hits=False))
        self.wait_for(len(pages), self.in_daemon, first)
        first.kill()
        second = self.ours().ready()
        self.assertEqual(found, self.texts(self.answers(second), hits=True))
        self.assertGreater(metric(self.daemon, "kvmanager_retained_blocks"), 0)
        print(f"The first answer begins {found[0][:100]!r}", flush=True)
        self.print_times(own, second, pages)

    def print_times(self, own: SglangServer, ours: SglangServer, pages: set[tuple[int, ...]]) -> None:
        """Of long prompts whose pages are all stored, in turns."""
        long = [sum((self.prompts[place:] + self.prompts[:place])[:LONG], []) for place in range(len(self.prompts))]
        pages = pages | pages_of(long, 1)
        times: dict[str, list[float]] = {}

        def ask(name: str, server: SglangServer, prompts: list[list[int]], hits: bool = True, forget: bool = True) -> None:
            if forget:
                server.forget()
            answers = [server.generate(prompt, 1) for prompt in prompts]
            times.setdefault(name, []).extend(each.first_s for each in answers)
            expected = [hit(prompt) if hits else 0 for prompt in prompts]
            self.assertEqual(expected, [each.found_tokens for each in answers], name)

        for server, count in ((own, self.in_files), (ours, self.in_daemon)):
            for prompt in long:
                server.generate(prompt, 1)
            self.wait_for(len(pages), count, server)
        for turn in range(ROUNDS):
            others = [[1000 + turn, *prompt] for prompt in long]
            ask("computed", ours, others, hits=False)
            pages |= pages_of(others, 1)
            self.wait_for(len(pages), self.in_daemon, ours)
            ask("SGLang's files, in the page cache", own, long)
            leave_page_cache(self.files)
            ask("SGLang's files, on the disk", own, long)
            ask("kvmanager", ours, long)
            ask("SGLang's own cache", ours, long, hits=False, forget=False)
        print(f"Seconds to the first token of {len(long[0])} (median, least, most of {len(long) * ROUNDS}):")
        for name, each in times.items():
            print(f"  {name}: {statistics.median(each):.3f}, {min(each):.3f}, {max(each):.3f}", flush=True)


if __name__ == "__main__":
    unittest.main()
