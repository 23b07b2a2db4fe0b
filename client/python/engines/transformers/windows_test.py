"""Models some of whose layers attend to a window of tokens, beside the same models with transformers' attention.

KVMANAGER_TEST_FOLDERS: Hugging Face folders, separated by colons, whose logits are compared, too.
"""

import functools
import os
import unittest

import torch
from transformers import (AttentionInterface, AttentionMaskInterface, AutoModelForCausalLM, AutoTokenizer,
                          Gemma2Config, Gemma2ForCausalLM, Gemma3ForCausalLM, Gemma3TextConfig, GptOssConfig,
                          GptOssForCausalLM, LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM)
from transformers.masking_utils import eager_mask

import kvmanager
import kvmanager.transformers as kvt
from fixture import DEVICE, K3V2, batch, daemon, generate, generate_here, prompt, tokens_fed

WINDOW, PAGE = 50, 16
SIZES = dict(vocab_size=256, hidden_size=128, intermediate_size=192, num_attention_heads=4, num_key_value_heads=2,
             head_dim=64, max_position_embeddings=4096, pad_token_id=0, initializer_range=0.15)
WINDOWED, FULL = "sliding_attention", "full_attention"
NEAR = 1e-2  # logits of these models are of the order of 10; a rounding that goes the other way makes 3e-3


def reference(module, query, key, value, attention_mask, scaling, dropout=0.0, s_aux=None, page_dtype=torch.float16,
              **_):
    """Attention as transformers' eager functions have it, on keys and values as pages have them."""
    groups = query.shape[1] // key.shape[1]
    key, value = (x.to(page_dtype).to(x.dtype).repeat_interleave(groups, 1) for x in (key, value))
    logits = query @ key.transpose(2, 3) * scaling + attention_mask
    if s_aux is not None:
        logits = torch.cat([logits, s_aux[None, :, None, None].expand(*logits.shape[:3], 1)], -1)
    return (logits.softmax(-1)[..., : key.shape[2]] @ value).transpose(1, 2).contiguous(), None


AttentionInterface.register("reference", reference)
AttentionMaskInterface.register("reference", eager_mask)
AttentionInterface.register("unrounded", functools.partial(reference, page_dtype=torch.float32))
AttentionMaskInterface.register("unrounded", eager_mask)


def gemma3(**other) -> Gemma3ForCausalLM:
    config = dict(SIZES, num_hidden_layers=5, layer_types=[WINDOWED, WINDOWED, FULL, WINDOWED, FULL],
                  sliding_window=WINDOW, query_pre_attn_scalar=64, eos_token_id=None, bos_token_id=None)
    return Gemma3ForCausalLM(Gemma3TextConfig(**(config | other)))


def gpt_oss() -> GptOssForCausalLM:
    """With sinks that take a good part of the softmax, and all experts at work: rounding changes no choice of them."""
    model = GptOssForCausalLM(GptOssConfig(**SIZES, num_hidden_layers=4, sliding_window=WINDOW, num_local_experts=2,
                                           num_experts_per_tok=2, eos_token_id=None))
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.sinks.copy_(torch.linspace(-1, 4, 4))
    return model


def qwen2() -> Qwen2ForCausalLM:
    """With windows in its upper layers."""
    return Qwen2ForCausalLM(Qwen2Config(**SIZES, num_hidden_layers=4, use_sliding_window=True, sliding_window=WINDOW,
                                        max_window_layers=2))


def made(kind, attentions: tuple[str, ...] = ("reference", "kvmanager"), **other) -> list:
    """Models of the same weights."""
    models = []
    for attention in attentions:
        torch.manual_seed(0)
        model = kind(**other).to(DEVICE).eval()
        model.set_attn_implementation(attention)
        models.append(model)
    return models


@torch.no_grad()
def own_logits(own, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return own(ids, attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp(0)).logits


@torch.no_grad()
def logits_here(model, cache, ids: torch.Tensor, mask: torch.Tensor, parts: list[int]) -> torch.Tensor:
    """Of the columns that the cache has not, in passes that end at these columns."""
    got, begin = [], cache.get_seq_length()
    for end in [end for end in parts if end > begin]:
        got.append(model(ids[:, begin:end], attention_mask=mask[:, :end], past_key_values=cache).logits)
        begin = end
    return torch.cat(got, 1)


class WithDaemon(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.daemon = cls.enterClassContext(daemon())

    def attach(self, model, where=None, **options) -> kvt.Attachment:
        kv = kvt.attach(model, (where or self.daemon).listen, **(dict(page_tokens=PAGE) | options))
        self.addCleanup(kv.close)
        return kv

    def assert_logits(self, expected: torch.Tensor, got: torch.Tensor, mask: torch.Tensor, what: str = "",
                      near: float = NEAR) -> None:
        self.assertEqual(expected.shape, got.shape)
        worst = float(((expected - got).float().abs() * mask[..., None]).max())
        print(f"[{DEVICE}] {what or self.id().rpartition('.')[2]}: largest difference of logits {worst:.2g}, largest "
              f"logit {float(expected.abs().max()):.3g}", flush=True)
        self.assertLess(worst, near)


class Logits(WithDaemon):
    def test_contexts_longer_than_the_window(self):
        ids, mask = batch([prompt(0, 230), prompt(400, 133), prompt(900, 20)])
        for kind in (gemma3, gpt_oss, qwen2):
            with self.subTest(kind.__name__):
                own, model = made(kind)
                expected = own_logits(own, ids, mask)
                kv = self.attach(model, publish_prompts=False)
                with kv.cache(rows=3) as cache:
                    got = logits_here(model, cache, ids, mask, [97, 180, *range(181, 231)])
                    self.assertEqual(cache.row_tokens, [230, 133, 20])
                self.assert_logits(expected, got, mask, kind.__name__)

    def test_the_reference_is_what_transformers_has(self):
        ids, mask = batch([prompt(0, 230), prompt(400, 133)])
        for kind in (gemma3, gpt_oss, qwen2):
            eager, ours = made(kind, ("eager", "unrounded"))
            self.assert_logits(own_logits(eager, ids, mask), own_logits(ours, ids, mask), mask, kind.__name__, 1e-3)

    def test_the_window_matters(self):
        """Or the tests here would pass without."""
        own, _ = made(gemma3)
        wide, _ = made(gemma3, sliding_window=4000)
        ids = prompt(0, 230)
        mask = torch.ones_like(ids)
        apart = (own_logits(own, ids, mask) - own_logits(wide, ids, mask)).abs().amax((0, 2))
        self.assertEqual(float(apart[:WINDOW].max()), 0)
        self.assertGreater(float(apart[WINDOW + 5 :].min()), 10 * NEAR)

    def test_sinks_matter(self):
        own, model = made(gpt_oss)
        ids = prompt(0, 100)
        mask = torch.ones_like(ids)
        expected = own_logits(own, ids, mask)
        with torch.no_grad():
            for layer in own.model.layers:
                layer.self_attn.sinks.fill_(-1e4)
        apart = (own_logits(own, ids, mask) - expected).abs().amax((0, 2))
        self.assertGreater(float(apart.min()), 10 * NEAR)

    def test_a_prefill_in_one_pass_of_many_windows(self):
        own, model = made(gemma3)
        ids = prompt(0, 1300)  # of more queries than are attended at once
        mask = torch.ones_like(ids)
        kv = self.attach(model)
        with kv.cache() as cache:
            got = logits_here(model, cache, ids, mask, [1300])
            # What is kept: the window and two pages of 3 layers, K and V of 2 heads of 64 float16.
            self.assertEqual(cache.window_bytes, (WINDOW - 1 + 2 * PAGE) * 3 * 2 * 2 * 64 * 2)
        self.assert_logits(own_logits(own, ids, mask), got, mask)

    def test_head_dim_256(self):
        """As Gemma 3 270M has it, with one KV head."""
        ids = prompt(0, 400)
        mask = torch.ones_like(ids)
        own, model = made(gemma3, head_dim=256, num_key_value_heads=1, query_pre_attn_scalar=256)
        expected = own_logits(own, ids, mask)
        for codec, near in (("raw", NEAR), ("hack:k_bits=4,v_bits=4", 0.5)):
            kv = self.attach(model, codec=codec, page_tokens=64)
            with kv.cache() as cache:
                got = logits_here(model, cache, ids, mask, [300, *range(301, 401)])
            self.assertTrue(bool(got.isfinite().all()))
            self.assert_logits(expected, got, mask, f"head_dim 256, {codec}", near)
            if codec != "raw":
                self.assertGreater(kv.description.raw_page_bytes, 2 * kv.description.payload_page_bytes)

    def test_the_daemon_has_the_other_layers_alone(self):
        _, model = made(gemma3)
        kv = self.attach(model)
        self.assertEqual((kv.description.options.layers, kv.window_description.options.layers), (2, 3))
        self.assertEqual(kv.windows, (WINDOW, WINDOW, None, WINDOW, None))
        self.assertEqual(kv.window_description.options.codec, "raw")
        with self.attach(made(lambda: LlamaForCausalLM(LlamaConfig(**SIZES, num_hidden_layers=2)))[1]) as other:
            self.assertIsNone(other.window_description)


class Prefixes(WithDaemon):
    def test_a_prefix_begins_with_its_last_window(self):
        own, model = made(gemma3)
        ids, mask = batch([prompt(0, 230), prompt(400, 133), prompt(900, 20)])
        expected = own_logits(own, ids, mask)
        kv = self.attach(model)
        with kv.cache(ids, mask) as cache:
            self.assertEqual(cache.row_tokens, [0, 0, 0])
            logits_here(model, cache, ids, mask, [230])
        with kv.cache(ids, mask) as cache:
            self.assertEqual(cache.row_tokens, [224, 128, 16])
            begin = cache.get_seq_length()
            got = logits_here(model, cache, ids, mask, [begin + 3, *range(begin + 4, 231)])
        # A row that has more than the least computes none of these columns again.
        has = torch.arange(begin, 230)[None] >= torch.tensor([[224], [97 + 128], [210 + 16]])
        self.assert_logits(expected[:, begin:], got, mask[:, begin:] * has.to(DEVICE))

    def test_prompts_that_begin_alike(self):
        own, model = made(gemma3)
        kv = self.attach(model)
        first = prompt(3000, 300)
        with kv.cache() as cache:
            logits_here(model, cache, first, torch.ones_like(first), [300])
        for common in (150, 40):
            ids = torch.cat([first[:, :common], prompt(4000, 60)], 1)
            mask = torch.ones_like(ids)
            with kv.cache(ids) as cache:
                self.assertEqual(cache.row_tokens, [common // PAGE * PAGE])
                begin = cache.get_seq_length()
                got = logits_here(model, cache, ids, mask, [common + 60])
            self.assert_logits(own_logits(own, ids, mask)[:, begin:], got, mask[:, begin:], f"{common} tokens alike")

    def test_a_prefix_whose_window_is_gone_is_computed_again(self):
        own, model = made(gemma3)
        kv = self.attach(model)
        ids = prompt(6000, 200)
        expected = generate(own, ids, max_new_tokens=20)
        for purged, found in ((False, 192), (True, 0)):
            with kv.cache() as cache:
                logits_here(model, cache, ids, torch.ones_like(ids), [200])
            if purged:
                kv.client.purge(kv.window_description.id)
            with kv.cache(ids) as cache:
                self.assertEqual(cache.row_tokens, [found])
                got = generate(model, ids, past_key_values=cache, max_new_tokens=20)
            self.assertTrue(torch.equal(expected, got))

    def test_the_next_turn_finds_what_was_generated(self):
        own, model = made(gemma3)
        kv = self.attach(model)
        ids = prompt(5000, 100)
        with kv.cache(ids) as cache:
            out = generate(model, ids, past_key_values=cache, max_new_tokens=150)
            self.assertEqual(cache.publish(), 249 // PAGE - 100 // PAGE)
        turn = torch.cat([out, prompt(0, 30)], 1)
        with kv.cache(turn) as cache:
            self.assertEqual(cache.row_tokens, [249 // PAGE * PAGE])
            begin = cache.get_seq_length()
            got = logits_here(model, cache, turn, torch.ones_like(turn), [280])
        mask = torch.ones_like(turn)
        self.assert_logits(own_logits(own, turn, mask)[:, begin:], got, mask[:, begin:])

    def test_another_window_finds_nothing(self):
        ids = prompt(2000, 100)
        for window in (WINDOW, WINDOW + 1):
            _, model = made(gemma3, sliding_window=window)
            kv = self.attach(model)
            for found in (0, 96):
                with kv.cache(ids) as cache:
                    self.assertEqual(cache.row_tokens, [found])
                    logits_here(model, cache, ids, torch.ones_like(ids), [100])


class Rows(WithDaemon):
    def test_beams_are_forks(self):
        own, model = made(gemma3)
        ids, mask = batch([prompt(400, 200), prompt(1400, 90)])
        options = dict(max_new_tokens=40, num_beams=4, num_return_sequences=2)
        kv = self.attach(model)
        with kv.cache(ids, mask, expand=4) as cache:
            got = generate(model, ids, mask, past_key_values=cache, **options)
        self.assertTrue(torch.equal(generate(own, ids, mask, **options), got))
        self.assertEqual(len(kv.client.sequences()), 0)

    def test_assisted_decoding_crops(self):
        own, model = made(gemma3)
        assistant = made(lambda: LlamaForCausalLM(LlamaConfig(**SIZES, num_hidden_layers=1)), ("sdpa",))[0]
        ids = prompt(600, 200)
        expected = generate(own, ids, max_new_tokens=64)
        for codec in ("raw", K3V2):
            kv = self.attach(model, codec=codec, page_tokens=64, publish_prompts=False)
            plain = expected if codec == "raw" else generate_here(model, kv, ids, max_new_tokens=64)
            for options in (dict(prompt_lookup_num_tokens=8), dict(assistant_model=assistant)):
                with kv.cache() as cache:
                    got = generate(model, ids, past_key_values=cache, max_new_tokens=64, **options)
                    self.assertEqual(cache.row_tokens, [263])
                self.assertTrue(torch.equal(plain, got), (codec, options))

    @torch.no_grad()
    def test_crop_reorder_and_fork_of_a_cache(self):
        own, model = made(gemma3)
        kv = self.attach(model)
        ids, more = prompt(0, 150), prompt(900, 20)
        with kv.cache() as cache:
            model(ids, past_key_values=cache)
            model(more, past_key_values=cache)
            cache.crop(-20)
            cache.batch_repeat_interleave(3)
            tails = torch.cat([more[:, :7], more[:, 7:14], more[:, :7]])
            with cache.fork() as fork:
                logits = model(tails, past_key_values=fork).logits
            expected = own(torch.cat([ids.repeat(3, 1), tails], 1)).logits[:, 150:]
            mask = torch.ones_like(tails)
            self.assert_logits(expected, logits, mask, "a fork")
            model(tails, past_key_values=cache)
            cache.reorder_cache(torch.tensor([1, 1, 0]))
            again = torch.cat([tails[1:2], tails[1:2], tails[:1]])
            logits = model(more[:, :7].repeat(3, 1), past_key_values=cache).logits
            expected = own(torch.cat([ids.repeat(3, 1), again, more[:, :7].repeat(3, 1)], 1)).logits[:, 157:]
            self.assert_logits(expected, logits, mask, "reordered")

    @torch.no_grad()
    def test_a_crop_beyond_what_is_here(self):
        own, model = made(gemma3)
        ids, more = prompt(0, 300), prompt(900, 10)
        mask = torch.ones_like(more)
        kv = self.attach(model)
        with kv.cache() as cache:  # its blocks are in the daemon
            model(ids, past_key_values=cache)
            cache.crop(131)
            self.assertEqual(cache.row_tokens, [131])
            got = model(more, past_key_values=cache).logits
        self.assert_logits(own(torch.cat([ids[:, :131], more], 1)).logits[:, 131:], got, mask)
        kv = self.attach(model, publish_prompts=False, tenant="another")
        with kv.cache() as cache:
            model(ids, past_key_values=cache)
            with self.assertRaisesRegex(kvmanager.FailedPreconditionError, f"remove {2 * PAGE} at most"):
                cache.crop(131)
            cache.crop(-2 * PAGE)
            got = model(more, past_key_values=cache).logits
            self.assert_logits(own(torch.cat([ids[:, :268], more], 1)).logits[:, 268:], got, mask)
            cache.reset()
            got = model(more, past_key_values=cache).logits
        self.assert_logits(own(more).logits, got, mask)

    def test_prefill_here_and_decode_there(self):
        own, model = made(gemma3)
        ids, mask = batch([prompt(100, 500), prompt(2000, 33), prompt(3000, 128)])
        expected = generate(own, ids, mask, max_new_tokens=40)
        kv = self.attach(model)
        with daemon() as there, kv.cache(ids, mask) as cache:
            first = generate(model, ids, mask, past_key_values=cache, max_new_tokens=1)
            tickets = cache.hand_off(there.peer, first[:, -1:], b"sampling state")
            decoder = self.attach(model, there)
            got = decoder.claim(tickets)
            with got.cache as claimed, tokens_fed(model) as fed:
                self.assertEqual(claimed.row_tokens, [500, 33, 128])
                out = generate(model, got.input_ids, got.attention_mask, past_key_values=claimed, max_new_tokens=39)
                self.assertEqual(fed, [3] * 39, "no token of the prompt")
            self.assertEqual(got.blobs, [b"sampling state"] * 3)
            decoder.close()
        self.assertTrue(torch.equal(expected, out))


class Refused(WithDaemon):
    def test_attention_that_is_not_known(self):
        model = made(gemma3)[1]
        model.config.layer_types[1] = "chunked_attention"
        with self.assertRaisesRegex(ValueError, "layer 1 is 'chunked_attention'"):
            self.attach(model)
        model = made(gemma3)[1]
        kv = self.attach(model)
        model.model.layers[0].self_attn.sliding_window = 7
        with self.assertRaisesRegex(ValueError, f"sliding_window: 7 in layer 0; must be {WINDOW}"), torch.no_grad():
            model(prompt(0, 9), past_key_values=kv.cache())
        model = Gemma2ForCausalLM(Gemma2Config(**SIZES, num_hidden_layers=2)).to(DEVICE).eval()
        model.set_attn_implementation("kvmanager")
        with self.assertRaisesRegex(ValueError, "softcap: given"), torch.no_grad():
            model(prompt(0, 9), past_key_values=self.attach(model).cache())
        model = made(gemma3, use_bidirectional_attention=True, sliding_window=2 * WINDOW)[1]
        with self.assertRaisesRegex(ValueError, "is_causal|mask"), torch.no_grad():
            model(prompt(0, 9), past_key_values=self.attach(model).cache())

    @torch.no_grad()
    def test_values_that_float16_cannot_have(self):
        model = made(gemma3)[1]
        model.model.layers[0].self_attn.v_proj.weight *= 1e6
        with self.assertRaisesRegex(ValueError, "dtype='bfloat16'"):
            model(prompt(0, 60), past_key_values=self.attach(model).cache())
        self.assertTrue(bool(model(prompt(0, 60), past_key_values=self.attach(model, dtype="bfloat16").cache())
                             .logits.isfinite().all()))


class Rope(WithDaemon):
    LLAMA3 = dict(rope_type="llama3", rope_theta=500000.0, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
                  original_max_position_embeddings=8192)
    YARN = dict(rope_type="yarn", rope_theta=150000.0, factor=32.0, beta_fast=32.0, beta_slow=1.0, truncate=False,
                original_max_position_embeddings=4096)
    LONG = dict(rope_type="longrope", rope_theta=1e4, short_factor=[1.0 + i / 64 for i in range(32)],
                long_factor=[1.0 + i for i in range(32)], original_max_position_embeddings=4096)

    def test_every_kind_of_settings_is_attached(self):
        ids = prompt(0, 80)
        mask = torch.ones_like(ids)
        digests = set()
        for rope in (self.LLAMA3, self.LLAMA3 | dict(factor=32.0), self.YARN, self.YARN | dict(beta_fast=31.0),
                     self.LONG, dict(rope_type="default", rope_theta=1e4),
                     dict(rope_type="linear", rope_theta=1e4, factor=8.0)):
            config = dict(SIZES, num_hidden_layers=2, rope_parameters=rope)
            own, model = made(lambda: LlamaForCausalLM(LlamaConfig(**config)))
            kv = self.attach(model, model_name="a model", revision="1")
            with kv.cache() as cache:
                got = logits_here(model, cache, ids, mask, [50, 80])
            self.assert_logits(own_logits(own, ids, mask), got, mask, rope["rope_type"])
            digests.add(kv.description.digest)
        self.assertEqual(len(digests), 7)


@unittest.skipUnless(os.environ.get("KVMANAGER_TEST_FOLDERS"), "KVMANAGER_TEST_FOLDERS names no models")
class Folders(WithDaemon):
    TEXT = ("The history of the observatory begins with a clock. In the year {year} the keeper wrote down when the bell "
            "of the harbour rang, and when the sun stood over the mill, and found that they differed by {minutes} "
            "minutes. ")

    def test_logits(self):
        """Beside the reference, whose keys and values are rounded as in pages; beside transformers' own attention they
        are not farther off than the reference is."""
        text = "".join(self.TEXT.format(year=1700 + i, minutes=i * 7 % 60) for i in range(24))
        for folder in os.environ["KVMANAGER_TEST_FOLDERS"].split(":"):
            ids = AutoTokenizer.from_pretrained(folder)(text, return_tensors="pt").input_ids[:, :900].to(DEVICE)
            mask = torch.ones_like(ids)
            model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa")
            model = model.to(DEVICE).eval()
            own = own_logits(model, ids, mask)
            model.set_attn_implementation("reference")
            expected = own_logits(model, ids, mask)
            model.set_attn_implementation("kvmanager")
            kv = self.attach(model, page_tokens=64)
            self.assertGreater(ids.shape[1], max([each for each in kv.windows if each], default=0) + 64)
            for turn, begin in (("prefill", 0), ("prefix", 832)):
                with kv.cache(ids[:, :870]) as cache:
                    self.assertEqual(cache.get_seq_length(), begin)
                    got = logits_here(model, cache, ids, mask, [870, *range(871, 901)])
                name = f"{os.path.basename(folder)}, {turn}"
                off, rounding = ((own[:, begin:] - each).abs().amax(-1)[0] for each in (got, expected[:, begin:]))
                same = float((expected[:, begin:].argmax(-1) == got.argmax(-1)).float().mean())
                print(f"{name}: beside transformers' attention {float(off.median()):.2g} in the median and "
                      f"{float(off.max()):.2g} at most, the reference {float(rounding.median()):.2g} and "
                      f"{float(rounding.max()):.2g}; beside the reference {same:.4f} of the likeliest tokens equal; "
                      f"{kv.description.options.layers} of {kv.layers} layers in the daemon")
                self.assert_logits(expected[:, begin:], got, mask[:, begin:], name, 0.5)
                self.assertLess(float(off.median()), 1.5 * float(rounding.median()))
                self.assertGreater(same, 0.99)


if __name__ == "__main__":
    unittest.main()
