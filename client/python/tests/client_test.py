"""The package against a real daemon: attention, prefixes, forks, crops, arenas, hand-offs."""

from __future__ import annotations

import unittest

import kvmanager as kv
import numpy
from kvmanager_testing import Daemon
from reference import MODEL, Prompt, attention


class WithDaemon(unittest.TestCase):
    def setUp(self) -> None:
        self.daemon = self.enterContext(Daemon())
        self.client = self.enterContext(kv.connect(self.daemon.listen, name="test"))


class Steps(WithDaemon):
    def test_attention_of_raw_pages_equals_the_reference(self) -> None:
        cache = self.client.open_cache(**MODEL)
        prompt = Prompt(1, 150)
        sequence = cache.create_sequence()
        out, lse = numpy.zeros_like(prompt.q), numpy.zeros((150, 8), numpy.float32)
        for layer in range(2):
            result = cache.step(layer, [(sequence, 0, 150)], prompt.k[layer], prompt.v[layer], prompt.q, out, lse)
            want, want_lse = attention(prompt.k[layer], prompt.v[layer], prompt.q, 0)
            numpy.testing.assert_allclose(out, want, atol=2e-3)
            numpy.testing.assert_allclose(lse, want_lse, atol=2e-3)
            self.assertEqual((result.encoded_pairs, result.raw_pairs), (0, 150 * 151 // 2))

    def test_a_batch_of_ragged_sequences_in_steps_equals_the_reference(self) -> None:
        cache = self.client.open_cache(**MODEL)
        prompts = [Prompt(seed, tokens) for seed, tokens in ((1, 70), (2, 20), (3, 130))]
        sequences = cache.create_sequences([None] * 3)
        for prompt, sequence in zip(prompts, sequences):
            prompt.append(cache, sequence, 0, prompt.tokens - 1)
        entries = kv.Entries((s, p.tokens - 1, 1) for s, p in zip(sequences, prompts))
        for layer in range(2):
            k, v = (numpy.stack([each[layer][-1] for each in rows])
                    for rows in ([p.k for p in prompts], [p.v for p in prompts]))
            q = numpy.stack([p.q[-1] for p in prompts])
            out = numpy.zeros_like(q)
            cache.step(layer, entries, k, v, q, out)
            for i, p in enumerate(prompts):
                want, _ = attention(p.k[layer], p.v[layer], p.q[-1:], p.tokens - 1)
                numpy.testing.assert_allclose(out[i], want[0], atol=2e-3)


if __name__ == "__main__":
    unittest.main()
