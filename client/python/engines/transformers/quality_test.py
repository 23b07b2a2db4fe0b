"""kvmanager.quality and bench/quality: tasks, statistics, peers' arithmetic, and that one run compares them."""

import json
import math
import pathlib
import subprocess
import sys
import tempfile
import unittest

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from kvmanager.quality import protocol, tasks
from kvmanager_testing import Daemon, daemon_program, data_path

sys.path.insert(0, data_path("bench/quality"))
import page
import paged_attention
import quantisers
import returning
import texts
from paged_attention import Decoded, Homomorphic, PagedAttention
from quantisers import PAGE, Hack, Peer, half, pages_near, parse_hack, peer
from variants import Bench, Variant

torch.set_num_threads(1)  # the daemon's workers want cores, too
HEAD_DIM, KV_HEADS = 64, 2


def write_model(folder: pathlib.Path) -> None:
    """A byte-level Llama of random weights, sharp enough that tokens attend to few others."""
    torch.manual_seed(3)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=256, hidden_size=128, intermediate_size=192, num_hidden_layers=3,
                                         num_attention_heads=4, num_key_value_heads=KV_HEADS, head_dim=HEAD_DIM,
                                         initializer_range=0.15))
    model.save_pretrained(folder)


def normal(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


class ReturningTest(unittest.TestCase):
    def trace(self, **options) -> list[returning.Request]:
        return returning.make_trace(**({"documents": 12, "tokens": 1088, "requests": 300, "answer": 64, "exponent": 0.8,
                                        "seed": 3} | options))

    def test_documents_return_with_longer_prompts_and_begin_anew(self):
        trace = self.trace()
        self.assertEqual(trace, self.trace())
        first = [request.prompt for request in trace if request.document == 0]
        self.assertEqual(first[:6], [528, 656, 784, 912, 528, 656])
        self.assertEqual([request.blocks for request in trace if request.document == 0][:2], [8, 10])
        asked = [sum(request.document == document for request in trace) for document in range(12)]
        self.assertGreater(asked[0], 2 * asked[-1])
        self.assertLessEqual(max(request.prompt + request.answer for request in trace), 1088)

    def test_points_line_and_errors(self):
        trace = self.trace()
        base = [2.0 + 0.1 * request.document for request in trace]
        ways = {"high": (2, 0.0), "ladder": (4, math.log(1.01)), "low": (5, math.log(1.02))}
        outcomes = {way: [returning.Outcome(hits, loss + more) for loss in base] for way, (hits, more) in ways.items()}
        found = returning.compare(trace, base, outcomes, resamples=50)
        asked = sum(request.blocks for request in trace)
        self.assertAlmostEqual(found.hits["high"].value, 2 * len(trace) / asked)
        self.assertAlmostEqual(found.change["low"].value, 0.02)
        self.assertAlmostEqual(found.above.value, (4 - 3.5) * len(trace) / asked)
        self.assertEqual(found.above_share, 1)
        self.assertLess(found.change["low"].error, 1e-9)  # the same of each document
        self.assertGreater(found.hits["low"].error, 0)
        self.assertIsNone(returning.compare(trace, base, {"high": outcomes["high"]}, resamples=10).above)
        self.assertAlmostEqual(returning.above_line((0.2, 0.01), (0.3, 0.0), (0.4, 0.02)), 0.1)


class TasksTest(unittest.TestCase):
    def make(self, task: str, **options) -> list[tasks.Prompt]:
        return tasks.make_prompts(protocol.ByteTokenizer(), task, **({"prompts": 3, "cases_per_prompt": 8,
                                                                      "context_tokens": 3500, "seed": 7} | options))

    def test_equal_seeds_make_equal_prompts(self):
        for task in tasks.TASKS:
            self.assertEqual(self.make(task), self.make(task))
            self.assertNotEqual(self.make(task), self.make(task, seed=8))
            self.assertEqual(self.make(task)[:2], self.make(task, prompts=2), "a prompt depends on its number alone")

    def test_each_answer_is_in_the_material_once_and_out_of_reach(self):
        for task in tasks.TASKS:
            for prompt in self.make(task):
                self.assertEqual(len(prompt.answers), 8)
                text = bytes(prompt.ids)
                context = text[slice(*prompt.material)]
                self.assertGreaterEqual(prompt.material[0], tasks.LEAD_TOKENS)
                self.assertGreaterEqual(prompt.answers[0][0] - prompt.material[1], tasks.TAIL_TOKENS)
                self.assertAlmostEqual(prompt.answers[0][0], 3500, delta=200)
                for first, last in prompt.answers:
                    self.assertEqual(context.count(text[first:last].strip()), 1, (task, text[first:last]))
                    if task != "copy":  # the words before an answer name it in the material, too
                        name = text[:first].rsplit(b"\n", 1)[1]
                        self.assertIn(name + text[first:last], context)

    def test_material_is_said_as_often_as_asked(self):
        for task in tasks.TASKS:
            prompt = self.make(task, shape=tasks.Shape(6, 0, 3))[0]
            context = bytes(prompt.ids)[slice(*prompt.material)]
            for first, last in prompt.answers:
                self.assertEqual(context.count(bytes(prompt.ids[first:last]).strip()), 3, task)

    def test_the_repeated_list_is_the_list(self):
        for prompt in self.make("copy"):
            text = bytes(prompt.ids)
            said = text[prompt.answers[0][0] : prompt.answers[-1][1]]
            self.assertEqual(text.count(said), 2)

    def test_a_case_is_right_if_all_of_its_tokens_are(self):
        prompt = tasks.Prompt("copy", [5, 6, 7, 8, 9], [(1, 3), (3, 5)], (0, 1))
        self.assertEqual(tasks.score(prompt, [[6, 7], [8, 9]]), [True, True])
        self.assertEqual(tasks.score(prompt, [[6, 8], [8, 9]]), [False, True])
        with self.assertRaisesRegex(ValueError, "1 cases; the prompt has 2"):
            tasks.score(prompt, [[6, 7]])

    def test_what_is_refused(self):
        with self.assertRaisesRegex(ValueError, "task: 'sort'"):
            self.make("sort")
        with self.assertRaisesRegex(ValueError, "cases_per_prompt: 0"):
            self.make("copy", cases_per_prompt=0)

    def test_the_prefix_comes_first(self):
        for task in tasks.TASKS:
            for prompt, plain in zip(self.make(task, prefix=[1, 2]), self.make(task)):
                self.assertEqual(prompt.ids[:2], [1, 2])
                self.assertNotEqual(plain.ids[:2], [1, 2])


class StatisticsTest(unittest.TestCase):
    def test_paired(self):
        mean, error = protocol.paired([1.0, 2.0, 3.0], [1.5, 2.0, 4.0])
        self.assertAlmostEqual(mean, 0.5)
        self.assertAlmostEqual(error, 0.5 / math.sqrt(3))
        self.assertTrue(math.isnan(protocol.paired([1.0], [2.0])[1]))

    def test_changes(self):
        change, error = protocol.perplexity_change([2.0, 2.0], [2.1, 2.1])
        self.assertAlmostEqual(change, math.exp(0.1) - 1)
        self.assertAlmostEqual(error, 0)
        raw, coded = [[True, True], [True, False]], [[True, False], [True, False]]
        self.assertEqual(protocol.accuracy(raw), 0.75)
        change, error = protocol.accuracy_change(raw, coded)
        self.assertAlmostEqual(change, -0.25)
        self.assertAlmostEqual(error, 0.25)

    def test_results_survive(self):
        with tempfile.TemporaryDirectory() as folder:
            file = pathlib.Path(folder) / "results.json"
            protocol.Results(file).put("a", [1.5, True])
            self.assertEqual(protocol.Results(file).get("a"), [1.5, True])
            self.assertIsNone(protocol.Results(file).get("b"))


class PeersTest(unittest.TestCase):
    def test_bytes(self):
        sizes = {"fp8": 128, "kivi4": 80, "kivi2": 48, "int4": 72, "tq4": 68, "tq3": 52, "tq2": 36}
        self.assertEqual({name: peer(name).bytes(64) for name in sizes}, sizes)
        self.assertEqual(peer("kivi2").bytes(128), 96)
        self.assertEqual([Hack(*bits).bytes(64) for bits in ((4, 3), (4, 2), (3, 2))], [62, 54, 46])
        self.assertEqual(Hack(3, 2).bytes(128) * 64, 5760)  # the worked example of docs/codecs.md, padded
        with self.assertRaisesRegex(ValueError, "peer: 'fp4'"):
            peer("fp4")

    def test_more_bits_lose_less_down_to_nothing(self):
        x = normal(2, 128, 64)
        error = lambda name, side: float((getattr(peer(name), side)(x) - x).square().mean())
        for name in ("kivi", "tq", "int"):
            for side in ("k", "v"):
                errors = [error(f"{name}{bits}", side) for bits in (2, 3, 4, 8)]
                self.assertEqual(errors, sorted(errors, reverse=True), (name, side))
                self.assertLess(errors[-1], 2e-4, (name, side))
        self.assertLess(error("fp8", "k"), 1e-3)

    def test_scale_and_zero_are_halves(self):
        x = normal(2, 64, 64) * 3 + 1
        got = peer("int4").k(x)
        for row in got.reshape(-1, 64):
            levels = row.unique()
            self.assertLessEqual(len(levels), 16)
            zero, steps = levels[0], levels.diff()
            self.assertEqual(zero, half(zero))
            scale = half((x.reshape(-1, 64)[(got.reshape(-1, 64) == row).all(-1)][0].max() - zero) / 15)
            multiples = (levels - zero) / scale
            self.assertLess(float((multiples - multiples.round()).abs().max()), 1e-3)
            self.assertTrue(bool((steps > 0).all()))

    def test_groups_of_kivi(self):
        """At 2 bits a group has at most 4 values: of K 32 tokens of a channel, of V 32 channels of a token."""
        x = normal(1, 128, 64)
        k, v = peer("kivi2").k(x)[0], peer("kivi2").v(x)[0]
        for first in range(0, 128, 32):
            self.assertLessEqual(max(len(k[first : first + 32, channel].unique()) for channel in range(64)), 4)
        for first in (0, 32):
            self.assertLessEqual(max(len(v[token, first : first + 32].unique()) for token in range(128)), 4)
        outlier = x.clone()
        outlier[0, 40, 3] = 1000.0
        touched = (peer("kivi2").k(outlier)[0] != k).nonzero()
        self.assertEqual((set(touched[:, 0].tolist()) <= set(range(32, 64)), set(touched[:, 1].tolist())), (True, {3}))
        touched = (peer("kivi2").v(outlier)[0] != v).nonzero()
        self.assertEqual((set(touched[:, 0].tolist()), set(touched[:, 1].tolist()) <= set(range(32))), ({40}, True))

    def test_turboquant(self):
        levels = quantisers.lloyd_max(2, 64)
        self.assertTrue(torch.allclose(levels, -levels.flip(0), atol=1e-5))
        self.assertAlmostEqual(float(levels[3] * 8), 1.51, delta=0.05)  # Lloyd-Max of a normal distribution of variance 1 / 64
        rotation = quantisers.random_rotation(64)
        self.assertTrue(torch.allclose(rotation @ rotation.T, torch.eye(64), atol=1e-5))
        x = normal(1, 512, 64)
        relative = float((peer("tq2").k(x) - x).square().sum() / x.square().sum())
        self.assertAlmostEqual(relative, 0.117, delta=0.01)  # the paper's distortion at 2 bits
        self.assertTrue(torch.equal(peer("tq2").k(x * 4), peer("tq2").k(x) * 4))

    def test_own_windows(self):
        query, key = torch.tensor([[300]]), torch.arange(301)[None]
        raw = lambda near: near(query, key)[0].nonzero().flatten().tolist()
        k, v = peer("kivi2").own_near
        self.assertEqual((raw(k), raw(v)), (list(range(256, 301)), list(range(173, 301))))
        self.assertEqual(raw(peer("tq3").own_near[0]), [300])
        self.assertEqual(raw(pages_near(2)[0]), list(range(128, 301)))


class AttentionTest(unittest.TestCase):
    def setUp(self):
        self.k, self.v = normal(2, 400, 64, seed=2), normal(2, 400, 64, seed=3)
        self.q = normal(2, 3, 400, 64, seed=4)

    def attend(self, arithmetic, window=None, step=100):
        prepared = arithmetic.prepare(self.k, self.v)
        return torch.cat([arithmetic.attend(prepared, self.q[:, :, at : at + step], at, 0.125, window)
                          for at in range(0, 400, step)], 2)

    def naive(self, k, v, near, coded_k, coded_v, window=None):
        """Query by query in double precision."""
        out = torch.empty(2, 3, 400, 64, dtype=torch.float64)
        for i in range(400):
            first = 0 if window is None else max(0, i + 1 - window)
            key = torch.arange(first, i + 1)
            raw = near(torch.tensor(i), key)[:, None]
            ki, vi = (torch.where(raw, x[:, first : i + 1], y[:, first : i + 1]).double() for x, y in ((k, coded_k), (v, coded_v)))
            p = (torch.einsum("hgd,htd->hgt", self.q[:, :, i].double(), ki) * 0.125).softmax(-1)
            out[:, :, i] = torch.einsum("hgt,htd->hgd", p, vi)
        return out.float()

    def test_near_tokens_and_sinks_are_raw(self):
        spoil = Peer("spoil", lambda x: -2 * x, lambda x: x + 3, lambda d: 1, pages_near(0), 32)
        for window in (None, 150):
            got = self.attend(Decoded(spoil, sinks=64, near=pages_near(1)), window)
            coded_k, coded_v = -2 * self.k, self.v + 3
            coded_k[:, :64], coded_v[:, :64] = self.k[:, :64], self.v[:, :64]
            expected = self.naive(self.k, self.v, pages_near(1)[0], coded_k, coded_v, window)
            self.assertLess(float((got - expected).abs().max()), 1e-4)

    def test_chunks_do_not_matter(self):
        for arithmetic in (Decoded(peer("kivi2"), sinks=64, near=pages_near(2)),
                           Homomorphic(Hack(3, 2), sinks=64, lag=1)):
            self.assertLess(float((self.attend(arithmetic) - self.attend(arithmetic, step=64)).abs().max()), 2e-2)
            self.assertLess(float((self.attend(Decoded(peer("tq3"), sinks=0, near=peer("tq3").own_near))
                                   - self.attend(Decoded(peer("tq3"), sinks=0, near=peer("tq3").own_near), step=37)).abs().max()),
                            1e-4)

    def test_integers_give_what_their_values_give(self):
        """hack with q and P in 8 bits, beside attention in double precision on what the codes stand for."""
        for codec in (Hack(3, 2, False, False), Hack(4, 3), Hack(8, 8, True, False)):
            coded_k, coded_v = self.k.clone(), self.v.clone()
            back = quantisers.hadamard(64) if codec.rotation else torch.eye(64)
            coded_k[:, 64:384] = codec.encode(self.k[:, 64:384], False).values() @ back
            coded_v[:, 64:384] = codec.encode(self.v[:, 64:384], True).values() @ back
            expected = self.naive(self.k, self.v, pages_near(1)[0], coded_k, coded_v)
            got = self.attend(Homomorphic(codec, sinks=64, lag=1))
            self.assertLess(float((got - expected).square().mean() / expected.square().mean()), 2e-3, codec)
            if codec.k_bits == 8:
                raw = self.naive(self.k, self.v, pages_near(1)[0], self.k, self.v)
                self.assertLess(float((got - raw).square().mean() / raw.square().mean()), 2e-3)

    def test_codes_and_metadata_of_hack(self):
        x = normal(2, 128, 64) * torch.linspace(0.01, 5, 64)
        side = Hack(2, 2, False, True).encode(x, True)
        self.assertLessEqual(float(side.codes.max()), 3)
        self.assertEqual(float((side.codes - side.codes.round()).abs().max()), 0)
        largest = x.reshape(2, 2, PAGE, 64).abs().amax(-1)
        self.assertTrue(bool((side.norms >= largest * (1 - 1e-6)).all()), "rounded up, so that nothing exceeds its norm")
        shares = side.norms / side.norms.amax(-1, keepdim=True) * 255
        self.assertLess(float((shares - shares.round()).abs().max()), 1e-3)
        fractions = side.steps / side.steps.amax(-1, keepdim=True) * 255
        self.assertLess(float((fractions - fractions.round()).abs().max()), 1e-3)
        constant = Hack(rotation=False).encode(torch.full((1, 64, 64), 0.5), False)
        self.assertTrue(torch.allclose(constant.values(), torch.tensor(0.5)))

    def test_specs(self):
        self.assertEqual(parse_hack("hack:k_bits=4,v_bits=3,rotation=none,v_norm=0;sinks=65"), (Hack(4, 3, False, False), 128))
        self.assertEqual(parse_hack("hack"), (Hack(), 64))
        with self.assertRaisesRegex(ValueError, "emulate: 'hack:v_bits=1'"):
            parse_hack("hack:v_bits=1")
        with self.assertRaisesRegex(ValueError, "emulate: 'million'"):
            parse_hack("million")


class TextsTest(unittest.TestCase):
    def test_prose_of_a_book(self):
        with tempfile.TemporaryDirectory() as folder:
            said = "This sentence has more than sixty characters, so it is kept as prose of the book."
            page = (f'<html><head><title>{said}</title></head><body><div class="docnav"><p>{said} Not navigation.</p></div>'
                    f'<div class="para">{said}<pre>{said} A program.</pre></div><p>Short.</p><p>%s &amp;\n more: {said}</p></body></html>')
            for name in ("b", "a"):
                (pathlib.Path(folder) / f"{name}.html").write_text(page % name)
            (pathlib.Path(folder) / "index.html").write_text('<a href="b.html#x">b</a><a href="a.html">a</a>')
            self.assertEqual(texts.handbook(pathlib.Path(folder)), f"{said}\n\nb & more: {said}\n\na & more: {said}\n")


class PageTest(unittest.TestCase):
    def test_only_the_named_place_changes(self):
        text = "a\n<!-- x -->\nold\n<!-- end x -->\nb\n<!-- y -->\n<!-- end y -->\n"
        once = page.replaced(text, "x", "new | \\1\n")
        self.assertEqual(once, text.replace("old", "\nnew | \\1\n"))
        self.assertEqual(page.replaced(once, "x", "new | \\1"), once)
        with self.assertRaisesRegex(ValueError, "z: the page must have"):
            page.replaced(text, "z", "")


class CompareTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(folder.cleanup)
        cls.folder = pathlib.Path(folder.name)
        write_model(cls.folder / "tiny")
        cls.text = cls.folder / "text.txt"
        cls.text.write_text("".join(f"{i * i % 997} and {i} " for i in range(900)))

    def test_hack_in_the_daemon_is_hack_in_torch(self):
        paged = PagedAttention.register()
        subject = protocol.load(self.folder / "tiny", paged_attention.NAME)
        with Daemon(host_pool="128MiB") as daemon:
            bench = Bench(subject, paged, sinks=64, lag=1, address=daemon.listen)
            ids = protocol.windows(subject, self.text.read_text(), count=1, tokens=500)[0]
            codecs = ("hack:k_bits=2,v_bits=2", "hack:k_bits=2,v_bits=2,rotation=none,v_norm=0")
            hidden, sizes = {}, {}
            for kind, name in [("raw", "raw"), ("daemon", "raw"), *((kind, name) for name in codecs for kind in ("daemon", "emulated"))]:
                with torch.no_grad(), bench.running(Variant(kind, name)) as (forward, size):
                    hidden[kind, name], sizes[kind, name] = forward(ids), size
        base = hidden["raw", "raw"]
        away = lambda kind, name: float((hidden[kind, name] - base).square().mean() / base.square().mean())
        self.assertLess(away("daemon", "raw"), 1e-4)
        for name in codecs:
            with self.subTest(name):
                self.assertEqual(sizes["daemon", name], sizes["emulated", name])
                self.assertGreater(away("daemon", name), 1e-3, "the codec is not raw")
                apart = (hidden["daemon", name] - hidden["emulated", name]).square().mean() / base.square().mean()
                self.assertLess(float(apart), 1e-3 * away("daemon", name), "the same codes; sums differ in order")

    def test_continuations(self):
        out = self.folder / "continuations.md"
        command = [sys.executable, data_path("bench/quality/generate.py"), "--model", self.folder / "tiny", "--text",
                   f"numbers={self.text}", "--daemon", daemon_program(), "--daemon-flag=--host-pool-bytes=128MiB", "--codec",
                   "hack:k_bits=8,v_bits=8", "--prompts", "3", "--shortest", "200", "--longest", "400", "--tokens", "5", "--markdown", out,
                   "--threads", "1"]
        got = subprocess.run(command, capture_output=True, text=True)
        self.assertEqual(got.returncode, 0, got.stderr)
        text = out.read_text()
        self.assertIn("3 of 3 continuations", text, "8 bits lose next to nothing")
        self.assertEqual([f"numbers, {n} tokens" in text for n in (200, 300, 400)], [True] * 3)

    def test_a_ladder_beside_its_rungs(self):
        svg = self.folder / "ladder.svg"
        command = [sys.executable, data_path("bench/quality/ladder.py"), "--model", self.folder / "tiny", "--text", self.text,
                   "--daemon", daemon_program(), "--high", "hack:k_bits=8,v_bits=8", "--low", "hack:k_bits=2,v_bits=2", "--documents",
                   "3", "--requests", "8", "--tokens", "320", "--answer", "16", "--pool-share", "8", "--threads", "1",
                   "--json", self.folder / "ladder.json", "--svg", svg]
        first = subprocess.run(command, capture_output=True, text=True)
        self.assertEqual(first.returncode, 0, first.stderr)
        rows = {line.split(" | ")[0].strip("| "): line.split(" | ") for line in first.stdout.splitlines() if line.startswith("| ")}
        self.assertEqual({"way", "---", "high", "ladder", "low"}, set(rows))
        self.assertEqual(rows["high"][2], rows["ladder"][2], "all fits: nothing is lowered")
        self.assertEqual(rows["high"][3], rows["ladder"][3])
        self.assertGreater(abs(float(rows["low"][3].split()[0])), 5 * abs(float(rows["high"][3].split()[0])))
        self.assertIn("above the line", first.stdout)
        self.assertIn("<svg", svg.read_text())
        again = subprocess.run(command, capture_output=True, text=True)
        self.assertEqual(again.stdout, first.stdout)
        self.assertNotIn("requests,", again.stderr, "nothing was measured again")

    def test_one_run_and_what_it_goes_on_from(self):
        out = self.folder / "out.json"
        command = [sys.executable, data_path("bench/quality/compare.py"), "--model", self.folder / "tiny", "--text",
                   f"numbers={self.text}", "--daemon", daemon_program(), "--codec", "hack:k_bits=4,v_bits=3;sinks=64", "--emulate",
                   "hack:k_bits=4,v_bits=3;sinks=64", "--peers", "kivi4", "tq3", "--windows", "2", "--window", "400", "--tasks",
                   "copy", "--prompts", "2", "--cases", "5", "--context", "600", "--json", out, "--svg", self.folder / "out.svg",
                   "--daemon-flag=--host-pool-bytes=128MiB", "--threads", "1"]
        first = subprocess.run(command, capture_output=True, text=True)
        self.assertEqual(first.returncode, 0, first.stderr)
        self.assertIn("min left", first.stderr)
        results = json.loads(out.read_text())["results"]
        self.assertEqual(len(results), 7 * 3)  # raw, two of ours, two windows of two peers: bytes, a text, a task
        for label in ("raw fp16", "hack:k_bits=4,v_bits=3;sinks=64 |", "kivi4, its own window", "tq3 |"):
            self.assertIn(f"| {label}", first.stdout)
        self.assertIn("<svg", (self.folder / "out.svg").read_text())
        again = subprocess.run(command, capture_output=True, text=True)
        self.assertEqual(again.stdout, first.stdout)
        self.assertNotIn("min left", again.stderr, "nothing was measured again")


if __name__ == "__main__":
    unittest.main()
