"""Models of transformers whose keys and values are in a daemon, beside the same models with transformers' attention."""

import copy
import gc
import json
import os
import pathlib
import pickle
import signal
import subprocess
import sys
import tempfile
import time
import unittest
import unittest.mock

import torch
from transformers import (LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM, Qwen2Config,
                          Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM)

import kvmanager
import kvmanager.transformers as kvt
from fixture import (DEVICE, DTYPE, K3V2, MODEL, NEAR, TEXT, batch, daemon, first_differences, generate, generate_here,
                     load, prompt, tokens_fed)
from kvmanager_testing import daemon_program, data_path


def report(what: str) -> None:
    print(f"[{DEVICE} {str(DTYPE).rpartition('.')[2]} {MODEL.name}] {what}", flush=True)


def work(action: str, **arguments) -> dict:
    """Of a second process."""
    done = subprocess.run([sys.executable, pathlib.Path(__file__).parent / "worker.py", action, json.dumps(arguments)],
                          stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def settle(model, kv: kvt.Attachment, ids: torch.Tensor, mask: torch.Tensor, cache: kvt.KvCache, **options):
    with cache:
        return generate(model, ids, mask, past_key_values=cache, **options)


class WithDaemon(unittest.TestCase):
    daemon_flags: tuple[str, ...] = ()

    @classmethod
    def setUpClass(cls):
        cls.daemon = cls.enterClassContext(daemon(*cls.daemon_flags))
        cls.own, cls.model = load("sdpa"), load("kvmanager")

    def attach(self, **options) -> kvt.Attachment:
        kv = kvt.attach(self.model, self.daemon.listen, **options)
        self.addCleanup(kv.close)
        return kv

    def assert_near(self, expected: torch.Tensor, got: torch.Tensor, mask: torch.Tensor, what: str) -> None:
        """Equal but where two logits are near: from there on two texts are two texts."""
        self.assertEqual(expected.shape, got.shape)
        differences = first_differences(self.own, expected, got, mask)
        report(f"{what}: {len(expected) - len(differences)} of {len(expected)} rows equal; "
               f"first differences (row, column, gap of logits): {differences}")
        for row, column, gap in differences:
            self.assertLessEqual(gap, NEAR, f"row {row}, column {column}")


class Generation(WithDaemon):
    def test_ten_prompts_of_512_greedy_tokens(self):
        step = (len(TEXT.read_bytes()) - 256) // 10
        ids, mask = batch([prompt(step * i, 256) for i in range(10)])
        expected = generate(self.own, ids, mask, max_new_tokens=512)
        got = generate_here(self.model, self.attach(), ids, mask, max_new_tokens=512)
        self.assert_near(expected, got, mask, "512 greedy tokens of ten prompts")

    def test_ragged_rows_are_what_they_are_alone(self):
        prompts = [prompt(0, 300), prompt(1000, 64), prompt(2000, 1), prompt(3000, 131)]
        ids, mask = batch(prompts)
        for codec in ("raw", K3V2):
            kv = self.attach(codec=codec, publish_prompts=False)
            with kv.cache(ids, mask) as cache:
                together = generate(self.model, ids, mask, past_key_values=cache, max_new_tokens=48)
                self.assertEqual(cache.row_tokens, [300 + 47, 64 + 47, 1 + 47, 131 + 47], "padding is no token")
            alone = [generate_here(self.model, kv, one, max_new_tokens=48) for one in prompts]
            padded, _ = batch(alone)
            self.assert_near(padded, together, mask, f"ragged rows and each alone, {codec}")
        self.assert_near(generate(self.own, ids, mask, max_new_tokens=48),
                         generate_here(self.model, self.attach(), ids, mask, max_new_tokens=48), mask, "ragged rows")

    def test_a_long_prompt_in_chunks_of_every_kind(self):
        ids = prompt(100, 700)
        expected = generate(self.own, ids, max_new_tokens=8)
        kv = self.attach(chunk_tokens=64, publish_prompts=False)
        mask = torch.ones_like(ids)
        self.assert_near(expected, generate_here(self.model, kv, ids, max_new_tokens=8), mask, "calls of 64 tokens")
        got = settle(self.model, kv, ids, mask, kv.cache(), max_new_tokens=8, prefill_chunk_size=100)
        self.assert_near(expected, got, mask, "forward passes of 100 tokens")

    def test_beams_are_forks(self):
        ids, mask = batch([prompt(400, 200), prompt(1400, 90)])
        options = dict(max_new_tokens=40, num_beams=4, num_return_sequences=2)
        expected = generate(self.own, ids, mask, **options)
        kv = self.attach()
        with tokens_fed(self.model) as fed, kv.cache(ids, mask, expand=4) as cache:
            got = generate(self.model, ids, mask, past_key_values=cache, **options)
        self.assertEqual(kv.tokens_computed, 290 + 39 * 8, "a prompt's beams are one sequence until it is prefilled")
        self.assertEqual(fed, [8 * 200] + [8] * 39)
        self.assertTrue(torch.equal(expected, got), "beams")
        self.assertEqual(len(kv.client.sequences()), 0)

    def test_assisted_decoding_crops(self):
        ids = prompt(600, 400)
        expected = generate(self.own, ids, max_new_tokens=64)
        mask = torch.ones_like(ids)
        for codec in ("raw", K3V2):
            kv = self.attach(codec=codec, publish_prompts=False)
            plain = expected if codec == "raw" else generate_here(self.model, kv, ids, max_new_tokens=64)
            for options in (dict(prompt_lookup_num_tokens=8), dict(assistant_model=self.own)):
                with kv.cache() as cache:
                    got = generate(self.model, ids, past_key_values=cache, max_new_tokens=64, **options)
                    self.assertEqual(cache.row_tokens, [463])
                self.assert_near(plain, got, mask, f"assisted by {list(options)[0]}, {codec}")

    @torch.no_grad()
    def test_crop_reorder_and_fork_of_a_cache(self):
        kv = self.attach()
        ids, more = prompt(0, 150), prompt(900, 20)
        with kv.cache() as cache:
            self.model(ids, past_key_values=cache)
            self.model(more, past_key_values=cache)
            cache.crop(-20)
            self.assertEqual((cache.get_seq_length(), cache.row_tokens), (150, [150]))
            cache.batch_repeat_interleave(3)
            with cache.fork() as fork:
                self.assertEqual(fork.row_tokens, [150] * 3)
                logits = self.model(torch.cat([more[:, :7], more[:, 7:14], more[:, :7]]), past_key_values=fork).logits
            self.assertTrue(torch.equal(logits[0], logits[2]))
            expected = self.own(torch.cat([torch.cat([ids, ids]), torch.cat([more[:, :7], more[:, 7:14]])], 1)).logits
            self.assertLess(float((logits[:2] - expected[:, 150:]).abs().max()), 5e-2)
            cache.reorder_cache(torch.tensor([2, 2, 0]))
            cache.batch_select_indices(torch.tensor([1]))
            again = self.model(more[:, :7], past_key_values=cache).logits
            self.assertLess(float((again[0] - expected[0, 150:]).abs().max()), 5e-2)
            self.assertEqual(len(kv.client.sequences()), 1)

    def test_what_cannot_be_right_is_refused(self):
        kv = self.attach()
        ids, mask = batch([prompt(0, 100), prompt(500, 40)])
        behind = mask.clone()
        behind[0, -3:] = 0
        with self.assertRaisesRegex(ValueError, "pad on the left"):
            settle(self.model, kv, ids, behind, kv.cache(rows=2), max_new_tokens=2)
        with self.assertRaisesRegex(ValueError, "expand=num_beams"):
            settle(self.model, kv, ids, mask, kv.cache(ids, mask), max_new_tokens=2, num_beams=2)
        with self.assertRaisesRegex(ValueError, "past_key_values: not a cache of kvmanager"):
            generate(self.model, ids, mask, max_new_tokens=2)
        with self.assertRaisesRegex(ValueError, "position_ids"), torch.no_grad():
            self.model(prompt(0, 9), position_ids=torch.arange(1, 10, device=DEVICE)[None], past_key_values=kv.cache())
        with self.assertRaisesRegex(RuntimeError, "no_grad"):
            self.model(prompt(0, 9), past_key_values=kv.cache())
        with self.assertRaisesRegex(ValueError, "attn_implementation"):
            kvt.attach(self.own, self.daemon.listen)
        closed = kv.cache()
        closed.close()
        with self.assertRaisesRegex(RuntimeError, "it was closed"), torch.no_grad():
            self.model(prompt(0, 9), past_key_values=closed)


class TwoProcesses(WithDaemon):
    def test_a_second_process_does_not_compute_a_prefix_again(self):
        length = 4096 + 50
        kv = self.attach()
        ids = prompt(0, length)
        with tokens_fed(self.model) as fed:
            first = generate_here(self.model, kv, ids, max_new_tokens=32)
        self.assertEqual(fed[0], length)
        second = work("reuse", address=self.daemon.listen, offset=0, length=length, new_tokens=32)
        self.assertEqual(second["fed"], [50] + [1] * 31)
        self.assertEqual(second["computed"], 50 + 31)
        got = torch.cat([ids, torch.tensor([second["tokens"]], device=DEVICE)], 1)
        self.assert_near(first, got, torch.ones_like(ids), "with the prefix of 4,096 tokens of another process")

    def test_what_was_generated_is_found_in_the_next_turn(self):
        kv = self.attach()
        ids = prompt(5000, 100)
        with kv.cache(ids) as cache:
            out = generate(self.model, ids, past_key_values=cache, max_new_tokens=200)
            self.assertEqual(cache.publish(), 299 // 64 - 100 // 64)
        with kv.cache(torch.cat([out, prompt(0, 10)], 1)) as cache:
            self.assertEqual(cache.row_tokens, [299 // 64 * 64])

    def test_prefill_here_and_decode_there(self):
        prompts = [prompt(100, 500), prompt(2000, 77), prompt(3000, 128)]
        ids, mask = batch(prompts)
        with daemon() as there:
            for codec in ("raw", K3V2):
                kv = self.attach(codec=codec)
                with kv.cache(ids, mask) as cache:
                    whole = generate(self.model, ids, mask, past_key_values=cache, max_new_tokens=64)
                kv.client.purge()
                with kv.cache(ids, mask) as cache:
                    first = generate(self.model, ids, mask, past_key_values=cache, max_new_tokens=1)
                    tickets = cache.hand_off(there.peer, first[:, -1:], b"sampling state")
                done = work("decode", address=there.listen, codec=codec, tickets=[t.hex() for t in tickets],
                            new_tokens=63)
                self.assertEqual(done["fed"], [3] * 63, "no token of the prompt")
                self.assertEqual(done["blobs"], ["sampling state"] * 3)
                self.assert_near(whole, torch.tensor(done["tokens"], device=DEVICE), mask,
                                 f"prefill and decode in two processes, {codec}")


class Quality(WithDaemon):
    WINDOW, WINDOWS = 4096, 2

    @classmethod
    def setUpClass(cls):
        cls.folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(cls.folder.cleanup)
        cls.daemon_flags = ("--calibration-dir", cls.folder.name)
        super().setUpClass()

    def bits_per_byte(self, model, kv: kvt.Attachment) -> float:
        total = 0.0
        with torch.no_grad():
            for window in range(self.WINDOWS):
                ids = prompt(window * self.WINDOW, self.WINDOW + 1)
                with kv.cache() as cache:
                    logits = model(ids[:, :-1], past_key_values=cache).logits.float()
                total += float(torch.nn.functional.cross_entropy(logits[0], ids[0, 1:])) / 0.6931471805599453
        return total / self.WINDOWS

    def evaluated(self, codec: str) -> float:
        """What examples/engine measures by the same windows; KVMANAGER_TEST_BPB has it where that cannot run."""
        given = json.loads(os.environ.get("KVMANAGER_TEST_BPB", "{}"))
        if codec in given:
            return given[codec]
        out = pathlib.Path(self.folder.name, "evaluation.json")
        subprocess.run([data_path("examples/engine/evaluate"), "--model", MODEL, "--text", TEXT, "--codec", codec,
                        "--lag", "2", "--window", str(self.WINDOW), "--stride", str(self.WINDOW),
                        "--windows", str(self.WINDOWS), "--daemon", daemon_program(), "--json", out],
                       check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        return json.loads(out.read_text())["bpb"]

    def check(self, codec: str, model=None, kv: kvt.Attachment | None = None, evaluated: str = "") -> None:
        kv = kv or self.attach(codec=codec, lag_pages=2, publish_prompts=False)
        got, expected = self.bits_per_byte(model or self.model, kv), self.evaluated(evaluated or codec)
        report(f"{codec}, lag 2: {got:.4f} bits per byte, evaluate {expected:.4f}")
        self.assertAlmostEqual(got, expected, delta=0.003)

    def test_k3v2_costs_what_evaluate_says(self):
        self.check(K3V2)

    def test_zack_with_folded_weights_costs_what_evaluate_says(self):
        kvctl = data_path("client/cli/kvctl")
        if not os.path.exists(kvctl):
            self.skipTest("no kvctl to calibrate with")
        artifact = pathlib.Path(self.folder.name, "m.safetensors")
        said = pathlib.Path(self.folder.name, "calibration.json")
        subprocess.run([kvctl, "calibrate", "--model", MODEL, "--text", MODEL / "calibration.txt",
                        "--windows", "2", "--codec", "zack:rate=0.5", "--out", artifact, "--json", said],
                       check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        codec = f"zack:rate=0.5,calibration={artifact.name},fold=1"
        model = load("kvmanager")
        options = dict(codec=codec, revision=json.loads(said.read_text())["revision"], publish_prompts=False)
        with kvt.attach(model, self.daemon.listen, **options) as kv:
            with self.assertRaisesRegex(ValueError, "fold_output_weights"):
                kv.cache()
            kvt.fold_output_weights(model, kv)
            kvt.fold_output_weights(model, kv)  # once is enough
            self.check(codec, model, kv, evaluated=f"zack:rate=0.5,calibration={artifact},fold=1")
        with kvt.attach(model, self.daemon.listen) as kv, self.assertRaisesRegex(ValueError, "folded for another"):
            kv.cache()


class Killed(WithDaemon):
    def test_a_killed_daemon_ends_generation_and_a_new_one_serves_the_next(self):
        kv = self.attach()
        ids = prompt(0, 200)
        expected = generate(self.own, ids, max_new_tokens=16)
        killed = []

        def stop_at_5(input_ids, scores):
            if input_ids.shape[1] == 205:
                self.daemon.kill()
                killed.append(time.monotonic())
            return scores

        with self.assertRaises(kvmanager.UnavailableError) as raised:
            generate_here(self.model, kv, ids, max_new_tokens=64, logits_processor=[stop_at_5])
        seconds = time.monotonic() - killed[0]
        report(f"the daemon was killed: raised {seconds:.3f} s later: {raised.exception}")
        with self.assertRaises(kvmanager.UnavailableError):
            kv.cache()  # still gone
        self.daemon.start()
        got = generate_here(self.model, kv, ids, max_new_tokens=16)
        self.assert_near(expected, got, torch.ones_like(ids), "with the daemon that came after")

    def test_a_process_that_only_claims_is_served_by_the_daemon_that_came_after(self):
        ids = prompt(0, 200)
        with daemon() as there:
            kv = kvt.attach(self.model, there.listen)
            self.addCleanup(kv.close)
            there.kill()
            with self.assertRaises(kvmanager.UnavailableError):
                kv.claim([b"of the daemon that is gone"])
            there.start()
            other = self.attach()
            with other.cache(ids) as cache:
                first = generate(self.model, ids, past_key_values=cache, max_new_tokens=1)
                tickets = cache.hand_off(there.peer, first[:, -1:])
            got = kv.claim(tickets)
            with got.cache as cache:
                self.assertEqual(cache.row_tokens, [200])
                options = dict(past_key_values=cache, max_new_tokens=15)
                found = generate(self.model, got.input_ids, got.attention_mask, **options)
        self.assert_near(generate(self.own, ids, max_new_tokens=16), found, torch.ones_like(ids), "claimed there")

    def test_a_daemon_that_hangs_ends_generation_and_is_served_by_a_new_connection(self):
        kv = self.attach(deadline_ms=500)
        first, ids = kv.client, prompt(0, 200)
        expected = generate(self.own, ids, max_new_tokens=16)

        def stop_at_5(input_ids, scores):
            if input_ids.shape[1] == 205:
                self.daemon.process.send_signal(signal.SIGSTOP)
            return scores

        try:
            with self.assertRaises(kvmanager.DeadlineExceededError):
                generate_here(self.model, kv, ids, max_new_tokens=64, logits_processor=[stop_at_5])
            with self.assertRaises(kvmanager.UnavailableError):
                kv.cache()  # still hangs
        finally:
            self.daemon.process.send_signal(signal.SIGCONT)
        got = generate_here(self.model, kv, ids, max_new_tokens=16)
        self.assert_near(expected, got, torch.ones_like(ids), "with the daemon that goes on")
        # The step that was given up may be answered late, into the first connection's memory.
        self.assertIsNot(kv.client, first)
        with self.assertRaisesRegex(kvmanager.FailedPreconditionError, "closed"):
            first.ping()

    def test_what_could_not_be_opened_again_is_tried_again(self):
        kv = self.attach()
        ids = prompt(0, 100)
        expected = generate_here(self.model, kv, ids, max_new_tokens=4)
        self.daemon.kill()
        self.daemon.start()
        with unittest.mock.patch.object(type(kv.client), "open_cache", side_effect=kvmanager.ResourceExhaustedError("")):
            with self.assertRaises(kvmanager.ResourceExhaustedError):
                kv.cache()
        self.assertTrue(torch.equal(expected, generate_here(self.model, kv, ids, max_new_tokens=4)))


class Copies(WithDaemon):
    def test_a_copied_model_shares_nothing(self):
        kv = self.attach()
        ids = prompt(0, 100)
        expected = generate_here(self.model, kv, ids, max_new_tokens=8)
        copied = copy.deepcopy(self.model)
        with self.assertRaisesRegex(ValueError, "attach it, too"):
            generate_here(copied, kv, ids, max_new_tokens=8)
        with kvt.attach(copied, self.daemon.listen) as other:
            self.assertTrue(torch.equal(expected, generate_here(copied, other, ids, max_new_tokens=8)))
        del copied
        gc.collect()
        self.assertTrue(torch.equal(expected, generate_here(self.model, kv, ids, max_new_tokens=8)))
        with self.assertRaisesRegex(TypeError, "cannot be copied or pickled"):
            pickle.dumps(kv.client)


class Weights(WithDaemon):
    def test_weights_that_change_find_nothing_of_what_they_were(self):
        model, own, ids = load("kvmanager"), load("sdpa"), prompt(0, 200)
        with kvt.attach(model, self.daemon.listen) as kv:
            before = generate_here(model, kv, ids, max_new_tokens=16)
            first, chat = kv.client, kv.cache(ids)
            self.assertEqual(chat.row_tokens, [192])
            self.assertIs(kv.client, first)
            with torch.no_grad():
                for each in (model, own):
                    for layer in each.model.layers:
                        layer.self_attn.v_proj.weight.data.neg_()  # so much that the text is another on any device
            with kv.cache(ids) as cache:
                self.assertEqual(cache.row_tokens, [0])
                got = generate(model, ids, past_key_values=cache, max_new_tokens=16)
            self.assertFalse(torch.equal(before, got))
            self.assert_near(generate(own, ids, max_new_tokens=16), got, torch.ones_like(ids), "with changed weights")
            with self.assertRaises(kvmanager.FailedPreconditionError):
                generate(model, ids, past_key_values=chat, max_new_tokens=1)
            with kv.cache(ids) as cache:
                self.assertEqual(cache.row_tokens, [192])


class Architectures(unittest.TestCase):
    COMMON = dict(vocab_size=256, hidden_size=256, intermediate_size=320, num_hidden_layers=3, num_attention_heads=4,
                  num_key_value_heads=2, head_dim=64, max_position_embeddings=1024, pad_token_id=0)

    def test_models_that_are_no_llama(self):
        torch.manual_seed(0)
        kinds = [(MistralForCausalLM, MistralConfig(**self.COMMON, sliding_window=200)),
                 (Qwen2ForCausalLM, Qwen2Config(**self.COMMON)), (Qwen3ForCausalLM, Qwen3Config(**self.COMMON)),
                 (LlamaForCausalLM, LlamaConfig(**self.COMMON, attention_bias=True))]
        ids, mask = batch([prompt(0, 100), prompt(200, 33)])
        with daemon() as one:
            for kind, config in kinds:
                for dtype in (torch.float32, torch.bfloat16):
                    with self.subTest(kind.__name__, dtype=dtype):
                        model = kind(config).to(DEVICE, dtype).eval()
                        model.set_attn_implementation("sdpa")
                        places = (mask.cumsum(1) - 1).clamp(0)
                        with torch.no_grad():
                            expected = model(ids, attention_mask=mask, position_ids=places).logits
                        model.set_attn_implementation("kvmanager")
                        with kvt.attach(model, one.listen) as kv, kv.cache(ids, mask) as cache, torch.no_grad():
                            got = [model(ids[:, :60], attention_mask=mask[:, :60], past_key_values=cache).logits]
                            for column in range(60, 100):
                                got.append(model(ids[:, column : column + 1], attention_mask=mask[:, : column + 1],
                                                 past_key_values=cache).logits)
                        wrong = ((torch.cat(got, 1) - expected).float() * mask[..., None]).abs().max()
                        self.assertLess(float(wrong), 3e-3 if dtype == torch.float32 else 6e-2)

    def test_a_context_longer_than_the_sliding_window_is_refused(self):
        model = MistralForCausalLM(MistralConfig(**self.COMMON, sliding_window=64)).to(DEVICE).eval()
        model.set_attn_implementation("kvmanager")
        with daemon() as one, kvt.attach(model, one.listen) as kv, kv.cache() as cache, torch.no_grad():
            model(prompt(0, 64), past_key_values=cache)
            with self.assertRaisesRegex(ValueError, "sliding_window: 64"):
                model(prompt(64, 1), past_key_values=cache)


if __name__ == "__main__":
    unittest.main()
