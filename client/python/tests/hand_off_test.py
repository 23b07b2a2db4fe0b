"""Hand-offs between two daemons."""

from __future__ import annotations

import unittest

import kvmanager as kv
import numpy
from kvmanager_testing import Daemon
from reference import MODEL, Prompt, attention


class HandOffs(unittest.TestCase):
    def setUp(self) -> None:
        self.here = self.enterContext(Daemon())
        self.there = self.enterContext(Daemon())
        self.sender = self.enterContext(kv.connect(self.here.listen, name="prefill"))
        self.receiver = self.enterContext(kv.connect(self.there.listen, name="decode"))
        self.cache = self.sender.open_cache(**MODEL)
        self.far_cache = self.receiver.open_cache(**MODEL)

    def check(self, cache, sequence, prompt) -> None:
        out = numpy.zeros_like(prompt.q[-1:])
        for layer in range(2):
            cache.step(layer, [(sequence, prompt.tokens - 1, 1)], q=prompt.q[-1:], out=out)
            want, _ = attention(prompt.k[layer], prompt.v[layer], prompt.q[-1:], prompt.tokens - 1)
            numpy.testing.assert_allclose(out, want, atol=2e-3)

    def test_a_sequence_that_is_complete(self) -> None:
        prompt = Prompt(1, 150)
        sequence = self.cache.create_sequence()
        prompt.append(self.cache, sequence)
        sent = sequence.hand_off(self.there.peer, b"next token: 7", will_append=True)
        self.assertEqual((sent.peer, sent.resumes, len(sent.layers)), (self.there.peer, 0, 2))
        self.assertGreater(sent.bytes_sent, 0)
        claimed = self.far_cache.claim(sent.ticket)
        self.assertEqual((claimed.tokens, claimed.blob), (150, b"next token: 7"))
        self.check(self.far_cache, claimed.sequence, prompt)
        self.check(self.cache, sequence, prompt)  # it stays here, too
        self.assertRaises(kv.NotFoundError, self.far_cache.claim, sent.ticket)
        (peer,) = self.sender.peers()
        self.assertEqual((peer.peer, peer.incoming, peer.transfers, peer.load_error), (self.there.peer, False, 1, ""))
        self.assertEqual(peer.load.capacity_bytes, 64 << 20)

    def test_one_that_still_grows_and_is_claimed_early(self) -> None:
        prompt = Prompt(2, 150)
        sequence = self.cache.create_sequence()
        hand_off = sequence.begin_hand_off(self.there.peer, 150)
        self.assertEqual(hand_off.peer, self.there.peer)
        claim = self.far_cache.claim_async(hand_off.ticket, deadline_ms=30000)
        self.assertFalse(claim.ready())
        prompt.append(self.cache, sequence, 0, 100)
        self.assertRaises(kv.FailedPreconditionError, hand_off.finish)  # names the shortest layer; may be called again
        prompt.append(self.cache, sequence, 100)
        finish = hand_off.finish_async(b"\0\xff")
        claimed = claim.wait()
        self.assertEqual((claimed.tokens, claimed.blob), (150, b"\0\xff"))
        self.check(self.far_cache, claimed.sequence, prompt)
        self.assertGreater(finish.wait().pages_sent, 0)

    def test_one_that_is_closed_early_is_cancelled(self) -> None:
        sequence = self.cache.create_sequence()
        with sequence.begin_hand_off(self.there.peer, 100) as hand_off:
            claim = self.far_cache.claim_async(hand_off.ticket)
        self.assertRaises(kv.UnavailableError, claim.wait)
        sequence.crop(0)

    def test_nobody_there(self) -> None:
        sequence = self.cache.create_sequence()
        Prompt(3, 70).append(self.cache, sequence)
        peer = self.there.peer
        self.there.kill()
        self.assertRaises(kv.UnavailableError, sequence.hand_off, peer, timeout_ms=5000)
        self.assertEqual(sequence.info().tokens, 70)
        self.there.start()

    def test_another_model_cannot_claim(self) -> None:
        sequence = self.cache.create_sequence()
        Prompt(4, 70).append(self.cache, sequence)
        ticket = sequence.hand_off(self.there.peer).ticket
        other = self.receiver.open_cache(**{**MODEL, "revision": "another"})
        self.assertRaises(kv.Error, other.claim, ticket)


if __name__ == "__main__":
    unittest.main()
