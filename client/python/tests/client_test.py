"""Steps, names, prefixes, forks and crops against a real daemon: outputs equal a reference."""

from __future__ import annotations

import hashlib
import unittest

import kvmanager as kv
import numpy
from kvmanager_testing import Daemon
from reference import MODEL, Prompt, attention

RAW_ATOL = 2e-3  # of float16 K and V in float32 arithmetic


class WithCache(unittest.TestCase):
    CODEC = "raw"

    def setUp(self) -> None:
        self.daemon = self.enterContext(Daemon())
        self.client = self.enterContext(kv.connect(self.daemon.listen, name="test"))
        self.cache = self.client.open_cache(**MODEL, codec=self.CODEC)

    def attend(self, sequence, layer: int, q, position: int):
        out = numpy.zeros_like(q)
        self.cache.step(layer, [(sequence, position, len(q))], q=q, out=out)
        return out


class Steps(WithCache):
    def test_prefill_equals_the_reference_with_its_lse(self) -> None:
        prompt = Prompt(1, 150)
        sequence = self.cache.create_sequence()
        out, lse = numpy.zeros_like(prompt.q), numpy.zeros((150, 8), numpy.float32)
        for layer in range(2):
            result = self.cache.step(layer, [(sequence, 0, 150)], prompt.k[layer], prompt.v[layer], prompt.q, out, lse)
            want, want_lse = attention(prompt.k[layer], prompt.v[layer], prompt.q, 0)
            numpy.testing.assert_allclose(out, want, atol=RAW_ATOL)
            numpy.testing.assert_allclose(lse, want_lse, atol=RAW_ATOL)
            self.assertEqual((result.encoded_pairs, result.raw_pairs), (0, 150 * 151 // 2))

    def test_a_batch_of_ragged_sequences_equals_the_reference(self) -> None:
        prompts = [Prompt(seed, tokens) for seed, tokens in ((1, 70), (2, 20), (3, 130))]
        sequences = self.cache.create_sequences([None] * 3)
        for prompt, sequence in zip(prompts, sequences):
            prompt.append(self.cache, sequence, 0, prompt.tokens - 1)
        entries = kv.Entries((s, p.tokens - 1, 1) for s, p in zip(sequences, prompts))
        for layer in range(2):
            k = numpy.stack([p.k[layer][-1] for p in prompts])
            v = numpy.stack([p.v[layer][-1] for p in prompts])
            q = numpy.stack([p.q[-1] for p in prompts])
            out = numpy.zeros_like(q)
            self.cache.step(layer, entries, k, v, q, out)
            for i, p in enumerate(prompts):
                want, _ = attention(p.k[layer], p.v[layer], p.q[-1:], p.tokens - 1)
                numpy.testing.assert_allclose(out[i], want[0], atol=RAW_ATOL)

    def test_queries_may_be_of_float16(self) -> None:
        prompt = Prompt(4, 40)
        sequence = self.cache.create_sequence()
        prompt.append(self.cache, sequence)
        out = self.attend(sequence, 1, prompt.q[-3:].astype(numpy.float16), 37)
        want, _ = attention(prompt.k[1], prompt.v[1], prompt.q[-3:].astype(numpy.float16), 37)
        numpy.testing.assert_allclose(out, want, atol=5e-3)

    def test_the_scale_is_the_callers(self) -> None:
        prompt = Prompt(5, 30)
        sequence = self.cache.create_sequence()
        prompt.append(self.cache, sequence)
        out = numpy.zeros_like(prompt.q[-1:])
        self.cache.step(0, [(sequence, 29, 1)], q=prompt.q[-1:], out=out, scale=0.25)
        want, _ = attention(prompt.k[0], prompt.v[0], prompt.q[-1:] * (0.25 * 8), 29)  # 1/sqrt(64) is the usual
        numpy.testing.assert_allclose(out, want, atol=RAW_ATOL)

    def test_steps_under_way_at_once_give_what_waiting_steps_give(self) -> None:
        prompts = [Prompt(seed, 50) for seed in range(8)]
        sequences = self.cache.create_sequences([None] * 8)
        for prompt, sequence in zip(prompts, sequences):
            prompt.append(self.cache, sequence)
        outs = [numpy.full_like(p.q[-1:], 7) for p in prompts]
        pending = [self.cache.step_async(0, [(s, 49, 1)], q=p.q[-1:], out=out)
                   for s, p, out in zip(sequences, prompts, outs)]
        self.assertTrue(all((out == 7).all() for out in outs))  # written by wait() alone
        for call, sequence, prompt, out in zip(pending, sequences, prompts, outs):
            self.assertEqual(call.wait().raw_pairs, 50)
            self.assertIs(call.wait(), call.wait())
            self.assertTrue(call.ready())
            numpy.testing.assert_array_equal(out, self.attend(sequence, 0, prompt.q[-1:], 49))

    def test_every_head_dim_up_to_256(self) -> None:
        """Gemma 3 270M has 256, with one KV head for four query heads."""
        for head_dim in (16, 80, 128, 256):
            model = MODEL | {"kv_heads": 1, "query_heads": 4, "head_dim": head_dim}
            prompt = Prompt(9, 300, model)
            want, _ = attention(prompt.k[0], prompt.v[0], prompt.q[-1:], 299)
            for codec, error_max in (("raw", 1e-3), ("hack:k_bits=8,v_bits=8", 0.05)):
                cache = self.client.open_cache(**model, codec=codec, lag_pages=0)
                sequence, out = cache.create_sequence(), numpy.zeros_like(prompt.q[-1:])
                prompt.append(cache, sequence)
                result = cache.step(0, [(sequence, 299, 1)], q=prompt.q[-1:], out=out)
                self.assertEqual(result.encoded_pairs > 0, codec != "raw")
                error = numpy.linalg.norm(out - want) / numpy.linalg.norm(want)
                self.assertLess(error, error_max, f"{codec}, head_dim {head_dim}")
        with self.assertRaisesRegex(kv.InvalidArgumentError, "head_dim"):
            self.client.open_cache(**MODEL | {"head_dim": 272})

    def test_bfloat16_goes_as_bits(self) -> None:
        cache = self.client.open_cache(**{**MODEL, "dtype": "bfloat16"})
        ones = numpy.full((5, 2, 64), 0x3F80, numpy.uint16)  # 1.0
        sequence = cache.create_sequence()
        q, out = numpy.ones((5, 8, 64), numpy.float32), numpy.zeros((5, 8, 64), numpy.float32)
        cache.step(0, [(sequence, 0, 5)], ones, ones, q, out)
        numpy.testing.assert_allclose(out, 1, atol=1e-6)

    def test_read_gives_what_was_appended(self) -> None:
        prompt = Prompt(6, 100)
        sequence = self.cache.create_sequence()
        prompt.append(self.cache, sequence)
        k, v = numpy.zeros((60, 2, 64), numpy.float16), numpy.zeros((60, 2, 64), numpy.float16)
        self.assertEqual(self.cache.read(1, [(sequence, 30, 60)], k, v), (0, 60))
        numpy.testing.assert_array_equal(k, prompt.k[1][30:90])
        numpy.testing.assert_array_equal(v, prompt.v[1][30:90])
        k[:] = 0
        call = self.cache.read_async(1, [(sequence, 30, 60)], k, v)
        self.assertFalse(k.any())
        call.wait()
        numpy.testing.assert_array_equal(k, prompt.k[1][30:90])


class Encoded(WithCache):
    CODEC = "hack"

    def test_attention_on_encoded_pages_is_near_the_reference(self) -> None:
        prompt = Prompt(7, 400)
        sequence = self.cache.create_sequence()
        prompt.append(self.cache, sequence)
        out = numpy.zeros_like(prompt.q[-1:])
        result = self.cache.step(0, [(sequence, 399, 1)], q=prompt.q[-1:], out=out)
        self.assertGreater(result.encoded_pairs, 0)
        self.assertEqual(result.encoded_pairs + result.raw_pairs, 400)
        want, _ = attention(prompt.k[0], prompt.v[0], prompt.q[-1:], 399)
        error = numpy.linalg.norm(out - want) / numpy.linalg.norm(want)
        print(f"relative error of {self.cache.options.codec}: {error:.4f}")
        self.assertLess(error, 0.5)  # of noise without structure; the codec's own tests say more
        self.assertGreater(error, 0)

    def test_read_decodes_what_has_aged(self) -> None:
        prompt = Prompt(8, 400)
        sequence = self.cache.create_sequence()
        prompt.append(self.cache, sequence, 0, 399)
        prompt.append(self.cache, sequence, 399)
        k, v = numpy.zeros((400, 2, 64), numpy.float16), numpy.zeros((400, 2, 64), numpy.float16)
        result = self.cache.read(0, [(sequence, 0, 400)], k, v)
        # The last append began in page 6: those before page 4 have aged. The first is a sink.
        self.assertEqual(result, (192, 208))
        numpy.testing.assert_array_equal(k[:64], prompt.k[0][:64])
        numpy.testing.assert_array_equal(k[256:], prompt.k[0][256:])
        for got, given in ((k, prompt.k[0]), (v, prompt.v[0])):
            aged = given[64:256].astype(float)
            error = numpy.linalg.norm(got[64:256].astype(float) - aged) / numpy.linalg.norm(aged)
            self.assertGreater(error, 0)
            self.assertLess(error, 0.5)

    def test_a_description_says_what_a_page_takes_and_how_many_tokens_are_sinks(self) -> None:
        self.assertEqual(self.cache.description.sink_tokens, 64)
        self.assertTrue(self.cache.options.codec.endswith(";sinks=64"), self.cache.options.codec)
        without = self.client.open_cache(**{**MODEL, "codec": "hack;sinks=0"})
        self.assertEqual(without.description.sink_tokens, 0)
        self.assertTrue(without.options.codec.endswith(";sinks=0"), without.options.codec)
        self.assertNotEqual(without.description.digest, self.cache.description.digest)
        raw = self.client.open_cache(**MODEL).description
        self.assertEqual((raw.sink_tokens, raw.options.codec), (0, "raw"))
        # Of a policy, the mean over its layers.
        mixed = self.client.open_cache(**{**MODEL, "codec": "hack;0=raw"}).description
        layers = MODEL["layers"]
        one = without.description.encoded_page_bytes
        self.assertEqual(mixed.encoded_page_bytes, -(-(raw.raw_page_bytes + (layers - 1) * one) // layers))
        self.assertLessEqual(mixed.payload_page_bytes, mixed.encoded_page_bytes)


class Names(WithCache):
    def test_they_depend_on_all_tokens_before_and_on_the_cache(self) -> None:
        ids = list(range(200))
        names = self.cache.block_names(ids)
        self.assertEqual(len(names), 3)
        self.assertEqual(self.cache.block_names(ids[:191])[:2], names[:2])
        changed = self.cache.block_names([7] + ids[1:])
        self.assertTrue(all(a != b for a, b in zip(names, changed)))
        self.assertEqual(names[1][32:], changed[1][32:])  # the digest of the second page's own tokens
        other = self.client.open_cache(**{**MODEL, "tenant": "another"})
        self.assertNotEqual(other.block_names(ids), names)

    def test_ids_of_any_kind_of_list_give_equal_names(self) -> None:
        ids = list(range(128))
        want = self.cache.block_names(ids)
        for given in (tuple(ids), range(128), numpy.array(ids), numpy.array(ids, numpy.int32), numpy.array(ids, numpy.uint32)):
            self.assertEqual(self.cache.block_names(given), want)

    def test_names_are_a_list(self) -> None:
        names = self.cache.external_names([b"a", b"bb", b"c" * 32])
        self.assertEqual((len(names), len(names[:2]), len(names[2:2]), len(names[-1])), (3, 2, 0, 64))
        self.assertEqual(names[:1] + names[1:], names)
        self.assertEqual(list(names), [names[0], names[1], names[2]])
        self.assertEqual(names[0], self.cache.external_names([b"a"])[0])
        digest = self.cache.description.digest
        for name, each in zip(names, (b"a", b"bb", b"c" * 32)):
            words = (b"kvmanager external block\0", b"kvmanager external tokens\0")
            self.assertEqual(b"".join(hashlib.sha256(word + digest + each).digest() for word in words), name)
        self.assertEqual(0, len(self.cache.external_names([])))
        self.assertRaises(IndexError, lambda: names[3])


class Prefixes(WithCache):
    def test_what_is_published_is_found(self) -> None:
        prompt = Prompt(9, 200)
        names = self.cache.block_names(prompt.ids)
        first = self.cache.create_sequence(names)
        self.assertEqual((first.hit_blocks, first.miss_reason), (0, "not_found"))
        prompt.append(self.cache, first)
        self.assertEqual(first.publish(names), (3, 0, 0))
        first.close()
        other = self.cache.block_names(prompt.ids[:64] + [1] * 64)
        self.assertEqual(self.cache.match([names, other, self.cache.block_names([])]),
                         [(3, "none", 3), (1, "not_found", 1), (0, "none", 0)])
        again = self.cache.create_sequence(names, prompt_tokens=200)
        self.assertEqual((again.hit_blocks, again.info().tokens), (3, 192))
        prompt.append(self.cache, again, 192)
        want, _ = attention(prompt.k[1], prompt.v[1], prompt.q[-1:], 199)
        numpy.testing.assert_allclose(self.attend(again, 1, prompt.q[-1:], 199), want, atol=RAW_ATOL)

    def test_tokens_that_do_not_fit_a_name_are_a_miss(self) -> None:
        prompt = Prompt(10, 64)
        names = self.cache.block_names(prompt.ids)
        sequence = self.cache.create_sequence()
        prompt.append(self.cache, sequence)
        sequence.publish(names)
        lie = kv.BlockNames(names[0][:32] + bytes(32))
        self.assertEqual(self.cache.match([lie]), [(0, "token_mismatch", 0)])

    def test_an_engines_own_hashes_are_names(self) -> None:
        prompt = Prompt(11, 128)
        names = self.cache.external_names([b"one", b"two"])
        sequence = self.cache.create_sequence()
        prompt.append(self.cache, sequence)
        self.assertEqual(sequence.publish(names).published, 2)
        self.assertEqual(self.cache.match([self.cache.external_names([b"one", b"three"]), names]),
                         [(1, "not_found", 1), (2, "none", 2)])

    def test_a_batch_of_sequences_begins_with_what_each_finds(self) -> None:
        prompt = Prompt(12, 128)
        names = self.cache.block_names(prompt.ids)
        with self.cache.create_sequence() as sequence:
            prompt.append(self.cache, sequence)
            sequence.publish(names)
        made = self.cache.create_sequences([names, None, names[:1]], prompt_tokens=[128, 0, 64])
        self.assertEqual([each.hit_blocks for each in made], [2, 0, 1])

    def test_an_error_of_one_gives_back_the_others_or_stands_in_its_place(self) -> None:
        self.client.drain()
        self.assertRaises(kv.UnavailableError, self.cache.create_sequences, [None, None])
        made = self.cache.create_sequences([None, None], partial=True)
        self.assertEqual([type(each) for each in made], [kv.UnavailableError] * 2)
        self.client.drain(False)
        self.assertEqual(self.client.status().leases, 0)

    def test_purging_forgets(self) -> None:
        prompt = Prompt(13, 64)
        names = self.cache.block_names(prompt.ids)
        with self.cache.create_sequence() as sequence:
            prompt.append(self.cache, sequence)
            sequence.publish(names)
        self.assertEqual(self.cache.refresh().published_blocks, 1)
        self.assertEqual(self.client.purge(self.cache.description.id), 1)
        self.assertEqual(self.cache.match([names])[0].hit_blocks, 0)
        self.assertEqual(self.client.purge(), 0)


class ForksAndCrops(WithCache):
    def test_forks_go_their_own_ways(self) -> None:
        prompt, left, right = Prompt(14, 100), Prompt(15, 100), Prompt(16, 100)
        one = self.cache.create_sequence()
        prompt.append(self.cache, one)
        two = one.fork()
        self.assertNotEqual(one.id, two.id)
        for sequence, tail in ((one, left), (two, right)):
            for layer in range(2):
                self.cache.step(layer, [(sequence, 100, 1)], tail.k[layer][:1], tail.v[layer][:1])
            k, v = (numpy.concatenate([getattr(prompt, side)[0], getattr(tail, side)[0][:1]]) for side in "kv")
            want, _ = attention(k, v, tail.q[:1], 100)
            numpy.testing.assert_allclose(self.attend(sequence, 0, tail.q[:1], 100), want, atol=RAW_ATOL)

    def test_a_cropped_sequence_reads_what_is_left_and_grows_again(self) -> None:
        prompt, tail = Prompt(17, 100), Prompt(18, 100)
        sequence = self.cache.create_sequence()
        prompt.append(self.cache, sequence)
        sequence.crop(70)
        self.assertEqual(sequence.info().tokens, 70)
        want, _ = attention(prompt.k[0], prompt.v[0], prompt.q[69:70], 69)
        numpy.testing.assert_allclose(self.attend(sequence, 0, prompt.q[69:70], 69), want, atol=RAW_ATOL)
        self.cache.step(0, [(sequence, 70, 5)], tail.k[0][:5], tail.v[0][:5])
        k, v = (numpy.concatenate([getattr(prompt, side)[0][:70], getattr(tail, side)[0][:5]]) for side in "kv")
        want, _ = attention(k, v, tail.q[:1], 74)
        numpy.testing.assert_allclose(self.attend(sequence, 0, tail.q[:1], 74), want, atol=RAW_ATOL)


class Retentions(WithCache):
    def priorities(self, names: kv.BlockNames) -> list[int]:
        explained = self.client.explain(names, self.cache.description.id)
        return [block["priority"] for block in explained["blocks"]]

    def test_blocks_are_retained_and_given_back(self) -> None:
        prompt = Prompt(30, 192)
        names = self.cache.block_names(prompt.ids)
        with self.cache.create_sequence() as sequence:
            prompt.append(self.cache, sequence)
            self.assertEqual(self.cache.retain(names, 80), (0, 0))  # not published so far
            sequence.publish(names)
        retained = self.cache.retain(names, 80, ttl_ms=3600000)
        self.assertEqual(retained.blocks, 3)
        self.assertGreater(retained.nbytes, 0)
        self.assertEqual(self.cache.retain(names[2:], 0).blocks, 1)
        self.assertEqual(self.priorities(names), [80, 80, 0])
        (first, *_) = self.client.explain(names, self.cache.description.id)["blocks"]
        self.assertTrue(3500000 < first["retained_ms"] <= 3600000, first)
        # What others name is not theirs.
        other = self.client.open_cache(**MODEL, codec=self.CODEC, tenant="another")
        self.assertEqual(other.retain(names, 0), (0, 0))
        self.assertEqual(self.client.retain(self.cache.description.id, names, 50).blocks, 3)
        self.assertEqual(self.priorities(names), [50, 50, 50])
        self.assertEqual(self.cache.retain(kv.BlockNames(), 100), (0, 0))

    def test_what_cannot_be_asked_for(self) -> None:
        names = self.cache.block_names(range(64))
        for field, call in (
            ("priority", lambda: self.cache.retain(names, 101)),
            ("priority", lambda: self.cache.retain(names, -1)),
            ("priority", lambda: self.cache.retain(names, 80.5)),
            ("ttl_ms", lambda: self.cache.retain(names, 80, -1)),
            ("ttlMs", lambda: self.cache.retain(names, 80, 2**63 - 1)),
            ("ttl_ms", lambda: self.cache.retain(names, 80, 2**64)),
            ("names", lambda: self.cache.retain([b"x"], 80)),
            ("cache_id", lambda: self.client.retain(-1, names, 80)),
        ):
            with self.subTest(field), self.assertRaises(kv.InvalidArgumentError) as raised:
                call()
            self.assertEqual(raised.exception.field, field)
        with self.assertRaises(kv.NotFoundError):
            self.client.retain(999, names, 80)


class Listings(WithCache):
    def test_the_daemon_says_what_it_holds(self) -> None:
        sequence = self.cache.create_sequence()
        Prompt(19, 10).append(self.cache, sequence)
        status = self.client.status()
        self.assertEqual((status.leases, status.caches, status.connections), (1, 1, 1))
        self.assertEqual(status.version, kv.__version__)
        self.assertEqual(status.boot_epoch, self.client.boot_epoch)
        self.assertEqual([(pool.tier, pool.capacity_bytes) for pool in status.pools], [("host", 64 << 20)])
        self.assertIsNone(status.disk)
        self.assertIsNone(status.kept_memory)
        (described,) = self.client.caches()
        self.assertEqual(described.digest, self.cache.description.digest)
        self.assertEqual(described.options, self.cache.options)
        (listed,) = self.client.sequences()
        self.assertEqual((listed.id, listed.tokens, listed.client), (sequence.id, 10, "test"))
        self.assertEqual(self.client.peers(), [])
        self.assertEqual(self.client.recompute()["sets"], [])
        limits = {limit.name: limit for limit in self.client.limits()}
        self.assertEqual(limits["arena_bytes"].flag, "--arena-bytes")
        self.assertEqual(limits["hello_ms"].used, None)
        self.assertGreaterEqual(limits["admin_connections"].used, 1)
        names = self.cache.block_names(range(128))
        explained = self.client.explain(names, self.cache.description.id)
        places = [(block["place"], block["loss"]) for block in explained["blocks"]]
        self.assertEqual(places, [("nowhere", "unknown")] * len(names))
        self.assertEqual(self.client.explain(names)["others"], [])
        self.assertEqual(self.client.peer_address, self.daemon.peer)
        self.client.ping()
        self.assertTrue(self.client.connected)

    def test_output_factors_are_none_where_outputs_are_as_usual(self) -> None:
        self.assertIsNone(self.cache.output_factors(0))


if __name__ == "__main__":
    unittest.main()
