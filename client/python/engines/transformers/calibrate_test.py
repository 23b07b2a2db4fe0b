"""Calibration and evaluation of a Hugging Face model: examples/model with a tokenizer whose tokens are bytes."""

import importlib.util
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import unittest

import numpy as np
import torch
from safetensors import safe_open
from safetensors.numpy import load_file
from tokenizers import Tokenizer, decoders, models as tokenizer_models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import kvmanager
from fixture import MODEL, TEXT
from kvmanager.calibrate import attention, capture, coding, models, probe, texts
from kvmanager.evaluate import report
from kvmanager.evaluate.grid import fewest_bytes
from kvmanager.evaluate.measure import Measured
from kvmanager_testing import Daemon, daemon_program, data_path


def byte_characters() -> dict[str, int]:
    """The characters that ByteLevel stands bytes for."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + at): byte for at, byte in enumerate(rest)}


def byte_tokenizer() -> PreTrainedTokenizerFast:
    inner = Tokenizer(tokenizer_models.BPE(vocab=byte_characters(), merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=inner)


def tiny_model(layers: int = 3) -> LlamaForCausalLM:
    torch.manual_seed(1)
    config = LlamaConfig(vocab_size=256, hidden_size=64, intermediate_size=96, num_hidden_layers=layers,
                         num_attention_heads=4, num_key_value_heads=2, head_dim=32, initializer_range=0.2)
    model = LlamaForCausalLM(config).eval()
    model.set_attn_implementation(attention.NAME)
    return model


def random_windows(count: int, tokens: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(2)
    return torch.randint(0, 256, (count, tokens), generator=generator).tolist()


class Texts(unittest.TestCase):
    def test_trained_and_held_out_windows_share_nothing(self):
        ids = [list(range(1000)), list(range(5000, 5300))]
        trained, held_out = texts.split(ids, 64, 16, 3, [])
        self.assertEqual((len(trained), len(held_out)), (16, 3))
        every = [token for window in trained + held_out for token in window]
        self.assertEqual(len(every), len(set(every)))
        self.assertTrue(any(window[0] >= 5000 for window in trained + held_out))
        trained, held_out = texts.split([list(range(130))], 64, 16, 3, [])
        self.assertEqual((len(trained), len(held_out)), (1, 1))
        with self.assertRaisesRegex(ValueError, "must have at least 63"):
            texts.split([list(range(62))], 64, 1, 0, [7])

    def test_what_is_to_be_copied_was_there_before(self):
        tokenizer = byte_tokenizer()
        prose = [ord("p")] * 2048
        window = texts.copy_window(tokenizer, prose, 2048, 3, [])
        self.assertEqual(len(window.ids), 2048)
        self.assertEqual(window, texts.copy_window(tokenizer, prose, 2048, 3, []))
        self.assertNotEqual(window.ids, texts.copy_window(tokenizer, prose, 2048, 4, []).ids)
        repeated = window.ids[window.counted :]
        first = next(at for at in range(window.counted) if window.ids[at : at + 40] == repeated[:40])
        self.assertEqual(window.ids[first : first + len(repeated)], repeated)
        self.assertGreater(window.counted - first - len(repeated), 3 * 64, "beyond the raw pages")


class Capture(unittest.TestCase):
    def test_it_holds_what_the_layers_attend_with(self):
        model, windows = tiny_model(), random_windows(3, 128)
        geometry = models.geometry_of(model)
        with tempfile.TemporaryDirectory() as folder:
            capture.write_capture(model, geometry, "tiny", windows, 64, folder, True)
            files = sorted(pathlib.Path(folder).iterdir())
            self.assertEqual(len(files), 3)
            tensors = {name: array for file in files for name, array in load_file(file).items()}
            with safe_open(files[-1], "np") as file:
                self.assertEqual(file.metadata(), {"model": "tiny", "windows": "128", "sinks": "64"})
        self.assertEqual(tensors["layers.0.q"].shape, (4, 384, 32))
        self.assertEqual(tensors["layers.2.v"].shape, (2, 384, 32))
        wanted = model.model.layers[1].self_attn.o_proj.weight.detach().numpy()
        np.testing.assert_allclose(tensors["layers.1.w_o"], wanted, atol=1e-3)
        seen = []
        with torch.no_grad(), attention.visiting(lambda layer, q, k, v: seen.append((layer, q, k, v))):
            model.model(input_ids=torch.tensor([windows[1]]), use_cache=False)
        for layer, *rows in seen:
            for side, values in zip("qkv", rows):
                np.testing.assert_allclose(tensors[f"layers.{layer}.{side}"][:, 128:256], values, atol=1e-2, rtol=1e-3)

    def test_values_beyond_fp16_are_named(self):
        model = tiny_model()
        with torch.no_grad():
            model.model.layers[1].self_attn.v_proj.weight *= 1e6
        with tempfile.TemporaryDirectory() as folder, self.assertRaisesRegex(ValueError, "V of layer 1 .* 65504"):
            capture.write_capture(model, models.geometry_of(model), "tiny", random_windows(1, 64), 0, folder, True)


class Probing(unittest.TestCase):
    def setUp(self):
        self.model = tiny_model()
        self.geometry = models.geometry_of(self.model)
        self.window = texts.Window(random_windows(1, 512)[0], 0)

    def factors(self) -> probe.Factors:
        """Of no rotation, channels alike."""
        shape = (3, 2, 32, 32)
        eye = np.broadcast_to(np.eye(32, dtype=np.float32), shape).copy()
        tensors = {f"zack.balanced.{pair}.{end}": eye for pair in ("qk", "vw") for end in ("left", "right")}
        tensors["zack_hack.balanced.order"] = np.broadcast_to(np.arange(32, dtype=np.int32), (3, 2, 2, 32)).copy()
        tensors["zack_hack.balanced.energy"] = np.ones((3, 2, 2, 32), np.float32)
        return probe.Factors(tensors, "balanced")

    def measure(self, **options) -> np.ndarray:
        return probe.measure_sensitivity(self.model, self.geometry, self.factors(), [self.window],
                                         **(dict(sinks=64, lag_pages=2, per_head=False, quiet=True) | options))

    def test_a_layer_whose_output_is_dropped_costs_nothing(self):
        with torch.no_grad():
            self.model.model.layers[1].self_attn.o_proj.weight.zero_()
        costs = self.measure()
        self.assertEqual(costs.shape, (3, 2, 2))
        self.assertLess(costs[1].max(), 1e-3 * costs[[0, 2]].min(), "rounding alone")
        np.testing.assert_array_equal(costs[:, 0], costs[:, 1])

    def test_heads_are_told_apart_on_request(self):
        with torch.no_grad():  # the second KV head's queries add nothing
            self.model.model.layers[0].self_attn.o_proj.weight[:, 64:] = 0
        costs = self.measure(per_head=True)
        self.assertLess(costs[0, 1].max(), 1e-3 * costs[0, 0].min(), "rounding alone")

    def test_running_from_a_layer_on_gives_what_the_whole_model_gives(self):
        positions = probe.counted_positions(self.window, 64, 2)
        self.assertEqual(int(positions[0]), 256)
        with torch.no_grad():
            replay = probe._Replay(self.model, self.window, positions)
            whole = self.model(input_ids=torch.tensor([self.window.ids])).logits[0, positions]
            for layer in range(3):
                torch.testing.assert_close(replay.logits_from(layer), whole)
        self.assertLess(float(probe.divergence(replay.raw, whole).max()), 1e-5)

    def test_exact_codes_attend_as_torch_does(self):
        generator = torch.Generator().manual_seed(3)
        q, k, v = (torch.randn(heads, 512, 32, generator=generator) for heads in (4, 2, 2))
        wanted = torch.nn.functional.scaled_dot_product_attention(
            q[None], k.repeat_interleave(2, 0)[None], v.repeat_interleave(2, 0)[None], is_causal=True)[0]
        torch.testing.assert_close(coding.attend(q, k, v, k.clone(), v.clone(), 2), wanted, atol=1e-5, rtol=1e-4)
        changed = v.clone()
        changed[:, :64] += 1
        moved = (coding.attend(q, k, v, k, changed, 2) - wanted).abs().amax((0, 2))
        self.assertLess(float(moved[:192].max()), 1e-5, "pages inside the lag are read raw")
        self.assertGreater(float(moved[192:].min()), 1e-4)

    def test_a_tokens_size_costs_nothing_where_its_norm_is_stored(self):
        generator = torch.Generator().manual_seed(5)
        x = torch.randn(2, 128, 32, generator=generator)
        sizes = 10 ** torch.linspace(-1, 1, 128)[torch.randperm(128, generator=generator)][None, :, None]
        norms = coding.norms_of(x * sizes)
        self.assertEqual(norms.shape, (2, 128, 1))
        largest = (x * sizes).abs().amax(-1, keepdim=True)
        self.assertTrue(bool((norms >= largest * (1 - 1e-6)).all()))
        self.assertLess(float((norms - largest).max()), float(largest.max()) / 255 * 1.001)
        eye, order = torch.eye(32).expand(2, 32, 32), torch.arange(32).expand(2, 32)
        widths = torch.full((2, 32), 4)

        def error(normed: bool) -> float:
            coded = coding.Rotation(eye, eye, order, normed).code(x * sizes, widths, 0)
            return float(((coded - x * sizes) / sizes).square().mean())

        self.assertLess(error(True), 0.1 * error(False))

    def test_widths_are_those_of_the_codec(self):
        self.assertEqual(coding.allocate([100.0, 10.0, 1.0, 0.1], 4), [3, 1, 0, 0])
        self.assertEqual(coding.allocate([1.0, 1.0], 3), [2, 1])
        widths, lost = coding.head_widths(torch.tensor([[100.0] * 16 + [1.0] * 16]), 1)
        self.assertEqual(widths.tolist(), [[2] * 16 + [0] * 16])
        self.assertAlmostEqual(float(lost[0]), 1600 * 0.21 + 16)
        x = torch.randn(1, 128, 32, generator=torch.Generator().manual_seed(4))
        coded = coding.code_pages(x, widths)
        torch.testing.assert_close(coded[0, :64, 16:], x[0, :64, 16:].mean(0).expand(64, 16))
        self.assertEqual([len(coded[0, :64, c].unique()) for c in range(4)], [4] * 4)


class Reports(unittest.TestCase):
    def test_change_is_paired_by_windows(self):
        raw = Measured("raw", [1.0, 2.0], raw_page_bytes=64 * 512, encoded_page_bytes=64 * 512)
        coded = Measured("x", [1.1, 2.1], raw_page_bytes=64 * 512, encoded_page_bytes=64 * 56, sink_tokens=64)
        self.assertAlmostEqual(coded.change(raw), np.exp(0.1) - 1)
        self.assertAlmostEqual(coded.change_error(raw), 0)
        self.assertIsNone(Measured("x", [1.0]).change_error(raw))
        self.assertAlmostEqual(coded.context_bytes(2048), 56 + 456 * 64 / 2048)
        self.assertIn("+10.52%", report.table([raw, coded], raw))
        drawn = report.svg([raw, coded], raw, "a < b")
        self.assertIn("a &lt; b", drawn)
        self.assertEqual(report.as_json([raw, coded], raw, {"model": "m"})["codecs"][1]["token_bytes"], 56)


class Commands(unittest.TestCase):
    """The whole way, as commands."""

    @classmethod
    def setUpClass(cls):
        cls.kvctl = data_path("client/cli/kvctl")
        folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(folder.cleanup)
        cls.folder = pathlib.Path(folder.name)
        cls.model = cls.folder / "bytes-model"
        cls.model.mkdir()
        byte_tokenizer().save_pretrained(cls.model)
        for name in ("config.json", "model.safetensors"):
            os.symlink(os.path.realpath(MODEL / name), cls.model / name)
        (cls.folder / "other.txt").write_bytes(TEXT.read_bytes()[:16384])
        cls.artifact = cls.folder / "made.safetensors"
        cls.said = cls.calibrate("zack+hack", cls.artifact)

    @classmethod
    def calibrate(cls, codec: str, out: pathlib.Path, *options: str) -> dict:
        report_file = out.with_suffix(".json")
        cls.command("calibrate", "--text", MODEL / "calibration.txt", "--codec", codec, "--out", out, "--windows", "4",
                    "--window", "1024", "--kvctl", cls.kvctl, "--json", report_file, *options)
        return json.loads(report_file.read_text())

    @classmethod
    def command(cls, module: str, *options, fails: bool = False) -> subprocess.CompletedProcess:
        done = subprocess.run([sys.executable, "-m", f"kvmanager.{module}", "--model", cls.model, "--kvmanagerd",
                               daemon_program(), *options], capture_output=True, text=True, check=False)
        if (done.returncode != 0) != fails:
            raise AssertionError(f"{module} ended with {done.returncode}: {done.stdout}\n{done.stderr}")
        return done

    def test_the_artifact_is_measured(self):
        with safe_open(self.artifact, "np") as file:
            about = file.metadata()
            sensitivity = file.get_tensor("zack_hack.balanced.sensitivity")
        self.assertEqual(about["model"], "bytes-model")
        self.assertEqual((about["revision"], about["sinks"]), ("", "64"))
        self.assertEqual(about["zack_hack.sensitivity"], "measured")
        self.assertGreater(sensitivity.min(), 0)
        self.assertGreater(sensitivity.max() / sensitivity.min(), 3)
        for what, key in (("V's basis", "zack_hack.v_basis"), ("zack+hack's allocation", "zack_hack.allocation")):
            options = [choice for choice in self.said["choices"] if choice["what"] == what]
            self.assertEqual(len(options), 2)
            best = min(options, key=lambda choice: choice["divergence"])
            self.assertEqual([about[key]], [choice["option"] for choice in options if choice["chosen"]])
            self.assertEqual(about[key], best["option"])
        (held_out,) = self.said["held_out"]["codecs"]
        self.assertEqual(self.said["held_out"]["windows"], 2)
        self.assertLess(abs(held_out["change"]), 0.02)
        self.assertEqual(self.said["warnings"], [])

    def test_caches_of_every_engine_accept_it(self):
        """As kvmanager.transformers, kvmanager.vllm and kvmanager.sglang describe a model of that folder."""
        shape = dict(layers=self.said["layers"], kv_heads=2, head_dim=128, page_tokens=64, dtype="bfloat16",
                     codec="zack+hack:calibration=made")
        heads = json.loads((self.model / "config.json").read_text())["num_attention_heads"]
        with Daemon(flags=("--calibration-dir", str(self.folder)), host_pool="256MiB") as daemon, \
                kvmanager.connect(daemon.listen) as client:
            for model, revision, query_heads in (("bytes-model", "0123456789abcdef", heads), (str(self.model), "", heads),
                                                 (f"{self.model}/", "main", heads),
                                                 (str(self.model), "sglang:pp=0/1,pool=kv", 2)):
                with self.subTest(model=model, revision=revision):
                    client.open_cache(model=model, revision=revision, query_heads=query_heads, **shape)
            with self.assertRaisesRegex(kvmanager.FailedPreconditionError, "another-model"):
                client.open_cache(model="/x/another-model", query_heads=heads, **shape)

    def test_a_bad_artifact_is_warned_of(self):
        out = self.folder / "bad.safetensors"
        done = self.command("calibrate", "--text", MODEL / "calibration.txt", "--codec", "million:m=1,bits=4",
                            "--out", out, "--windows", "2", "--window", "2048", "--check-windows", "1",
                            "--kvctl", self.kvctl, "--json", self.folder / "bad.json", "--quiet")
        said = json.loads((self.folder / "bad.json").read_text())
        self.assertGreater(said["held_out"]["codecs"][0]["change"], 0.1)
        self.assertRegex(done.stderr, r"warning: this artifact measures \+\d+% on held-out windows: million:m=1,bits=4")
        self.assertEqual(len(said["warnings"]), 1)

    def test_evaluation_of_it(self):
        table, drawn = self.folder / "table.json", self.folder / "drawn.svg"
        done = self.command("evaluate", "--text", self.folder / "other.txt", "--codec", f"default:calibration={self.artifact}",
                            "--codec", "hack:k_bits=2,v_bits=2", "--windows", "3", "--window", "1024", "--json", table,
                            "--svg", drawn, "--quiet")
        said = json.loads(table.read_text())
        raw, stacked, plain = said["codecs"]
        self.assertEqual([raw["change"], raw["token_bytes"]], [0, 512])
        self.assertEqual([len(each["window_nats"]) for each in said["codecs"]], [3, 3, 3])
        self.assertLess(stacked["change"], plain["change"])
        self.assertLess(stacked["token_bytes"], 0.25 * raw["token_bytes"])
        self.assertIn("hack:k_bits=2,v_bits=2", done.stdout)
        self.assertIn("</svg>", drawn.read_text())

    @unittest.skipUnless(importlib.util.find_spec("kvmanager.quality"), "kvmanager.quality is not there")
    def test_tasks_are_scored_beside_raw(self):
        table = self.folder / "tasks.json"
        done = self.command("evaluate", "--text", self.folder / "other.txt", "--codec", "hack:k_bits=1,v_bits=1", "--windows",
                            "1", "--window", "1024", "--tasks", "--prompts", "1", "--cases", "4", "--context", "900",
                            "--json", table, "--quiet")
        raw, coarse = json.loads(table.read_text())["codecs"]
        for each in (raw, coarse):
            self.assertEqual({task: said["cases"] for task, said in each["tasks"].items()},
                             {"passkey": 4, "lookup": 4, "copy": 4})
        right = [sum(said["right"] for said in each["tasks"].values()) for each in (raw, coarse)]
        self.assertLessEqual(right[1], right[0])
        self.assertRegex(done.stdout, r"raw .* of 4")

    def test_the_codec_of_fewest_bytes_within_a_loss_is_said(self):
        table = self.folder / "grid.json"
        done = self.command("evaluate", "--text", self.folder / "other.txt", "--max-loss", "0.2", "--calibration", self.artifact,
                            "--windows", "1", "--window", "1024", "--json", table, "--quiet")
        said = json.loads(table.read_text())
        within = [each for each in said["codecs"] if each["change"] <= 0.002]
        self.assertLess(len(within), len(said["codecs"]))
        least = min(within, key=lambda each: each["token_bytes"])
        self.assertEqual(least["codec"], said["chosen"])
        self.assertIn(f"fewest bytes within 0.2%: {least['codec']}, ", done.stdout)

    def test_codecs_that_lose_too_much_are_not_chosen(self):
        def measured(codec, nats, size, right):
            return Measured(codec, [nats], raw_page_bytes=64 * 256, encoded_page_bytes=64 * size,
                            tasks={"copy": [True] * right + [False] * (10 - right)})

        raw, fine, coarse = results = [measured("raw", 1, 256, 9), measured("a", 1.005, 62, 9), measured("b", 1.01, 38, 7)]
        self.assertIs(fewest_bytes(results, raw, 0.02, None), coarse)
        self.assertIs(fewest_bytes(results, raw, 0.02, 0.2), coarse)
        self.assertIs(fewest_bytes(results, raw, 0.02, 0.19), fine)
        self.assertIs(fewest_bytes(results, raw, 0.008, 1), fine)
        self.assertIs(fewest_bytes(results, raw, 0.001, None), raw)

    def test_mistakes_are_named(self):
        text = MODEL / "calibration.txt"
        broken = self.folder / "broken.safetensors"
        broken.write_text("broken")
        for options, wanted in (
                (("calibrate", "--text", text, "--codec", "zack+hack", "--out", "/tmp/x"), "must end in .safetensors"),
                (("calibrate", "--text", text, "--codec", "zack+hack", "--out", "/nowhere/x.safetensors"), "/nowhere"),
                (("calibrate", "--text", text, "--codec", "zack+hack", "--out", "/tmp/x.safetensors", "--window", "100"),
                 "multiple of 64"),
                (("calibrate", "--text", "/nowhere.txt", "--codec", "zack+hack", "--out", "/tmp/x.safetensors", "--kvctl",
                  self.kvctl), "/nowhere.txt"),
                (("calibrate", "--text", text, "--codec", "zack+hack", "--out", "/tmp/x.safetensors", "--kvctl", "/no"),
                 "--kvctl: '/no'"),
                (("calibrate", "--text", text, "--codec", "zip", "--out", "/tmp/x.safetensors", "--kvctl", self.kvctl,
                  "--windows", "1"), "zip"),
                (("evaluate", "--text", text, "--codec", "zack+hack:calibration=none"), "calibration=none"),
                (("evaluate", "--text", text), "--max-loss"),
                (("evaluate", "--text", text, "--max-loss", "1", "--calibration", broken), f"{broken}: file bytes"),
                (("evaluate", "--text", text, "--max-loss", "101"), "--max-loss: 101.0; must be in 0..100"),
                (("evaluate", "--text", text, "--max-loss", "1", "--max-points", "1"), "must stand beside --tasks"),
                (("evaluate", "--text", text, "--codec", "hack", "--calibration", "x"), "must stand beside --max-loss")):
            with self.subTest(wanted):
                self.assertIn(wanted, self.command(*options, fails=True).stderr)


if __name__ == "__main__":
    unittest.main()
