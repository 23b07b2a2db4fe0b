"""KvmanagerQualityLow on a real model: Q, K and V of SmolLM2 over a text go through a daemon that samples every page, and
promtool decides by the rules of monitoring/prometheus whether what the daemon measured is an alert."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
import time
import unittest
import urllib.request

import kvmanager as kv
import smollm2
import torch
from kvmanager.calibrate.attention import NAME, visiting
from kvmanager.calibrate.models import load
from kvmanager_testing import Daemon, data_path

METRIC = "kvmanager_codec_relative_error"
# docs/operating.md, "How good encoded pages are", says what text these give.
FIRING = (
    "hack:k_bits=2,v_bits=2;sinks=0",
    "hack:k_bits=2,v_bits=2,rotation=none,v_norm=0;sinks=0",
    "hack:k_bits=3,v_bits=2,rotation=none,v_norm=0;sinks=0",
)
SILENT = ("default", "hack", "hack:k_bits=4,v_bits=3", "hack:k_bits=4,v_bits=3;sinks=0")
PAGE_TOKENS = 64
DEADLINE_S = 120  # of what should take milliseconds
AHEAD = 8  # pages that may wait to be compared: a daemon compares 16 at once, and does not sample what comes meanwhile
_SAMPLE = re.compile(rf"(?m)^({METRIC}_(bucket|sum|count))\{{(.*)\}} (\S+)$")
# Each minute brings what the whole text brought, for longer than the alert's windows and waiting.
_RULES_TEST = """\
rule_files: ["{rules}", "{alerts}"]
evaluation_interval: 1m
tests:
  - interval: 1m
    input_series:
{series}
    promql_expr_test:
      - expr: count by (alertname) (ALERTS{{alertstate="firing"}})
        eval_time: 70m
        exp_samples: [{firing}]
"""


def captured(folder: str) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Of each layer (q, k, v), [tokens][heads][head_dim] in fp16, whole pages of the passages."""
    model, tokenizer = load(smollm2.convert(folder), attention=NAME)
    with open(data_path("client/python/engines/vllm_serve/passages.txt"), encoding="utf-8") as file:
        ids = tokenizer(file.read()).input_ids
    layers: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []

    def keep(layer: int, *tensors: torch.Tensor) -> None:
        assert layer == len(layers), (layer, len(layers))
        layers.append(tuple(each.transpose(0, 1).half().contiguous() for each in tensors))

    with torch.no_grad(), visiting(keep):
        model(torch.tensor([ids[: len(ids) // PAGE_TOKENS * PAGE_TOKENS]]), logits_to_keep=1)
    return layers


@unittest.skipUnless(shutil.which("promtool"), "promtool is not installed: apt-get install prometheus")
class AlertTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls) -> None:
        cls.folder = cls.enterClassContext(tempfile.TemporaryDirectory(prefix="alert"))
        cls.layers = captured(os.path.join(cls.folder, "smollm2"))

    def compared(self, daemon: Daemon, codec: str, pages: int) -> list[tuple[str, str, str, float]]:
        """(name, kind, labels, value) of the histogram once so many pages were compared."""
        end = time.monotonic() + DEADLINE_S
        while True:
            with urllib.request.urlopen(f"http://{daemon.metrics}/metrics", timeout=DEADLINE_S) as answer:
                found = [(*each[:3], float(each[3])) for each in _SAMPLE.findall(answer.read().decode())]
            counted = sum(value for _, kind, _, value in found if kind == "count")
            if counted >= pages:
                return found
            if time.monotonic() > end:
                self.fail(f"{codec}: {counted:.0f} pages were compared, must be {pages}")
            time.sleep(0.01)

    def samples(self, codec: str) -> list[tuple[str, str, str, float]]:
        """As compared(), of every page that is encoded."""
        (tokens, query_heads, head_dim), kv_heads = self.layers[0][0].shape, self.layers[0][1].shape[1]
        out = torch.empty(PAGE_TOKENS, query_heads, head_dim, dtype=torch.float16)
        flags = ("--quality-sample", "1", "--log-level", "error")
        with Daemon("256MiB", flags) as daemon, kv.connect(daemon.listen, deadline_ms=DEADLINE_S * 1000) as client:
            cache = client.open_cache(model="smollm2", layers=len(self.layers), kv_heads=kv_heads, query_heads=query_heads,
                                      head_dim=head_dim, codec=codec, page_tokens=PAGE_TOKENS)
            sequence = cache.create_sequence()
            pages = 0
            # Page by page, so that queries come from all of the text.
            for first in range(0, tokens, PAGE_TOKENS):
                for layer, tensors in enumerate(self.layers):
                    q, k, v = (each[first : first + PAGE_TOKENS] for each in tensors)
                    cache.step(layer, [(sequence, first, PAGE_TOKENS)], k, v, q, out)
                    pages += first >= cache.description.sink_tokens
                    self.compared(daemon, codec, pages - AHEAD)
            found = self.compared(daemon, codec, pages)
            self.assertEqual(pages, sum(value for _, kind, _, value in found if kind == "count"), codec)
        mean = sum(value for _, kind, _, value in found if kind == "sum") / pages
        print(f"{codec}: {pages} pages, mean error {mean:.3f}", flush=True)
        return found

    def decide(self, codec: str, firing: str) -> None:
        """`firing`: what promtool expects of this codec's samples."""
        series = "\n".join(
            f"      - {{series: '{name}{{job=\"kvmanager\", instance=\"a\", {labels}}}', values: '0+{value!r}x75'}}"
            for name, _, labels, value in self.samples(codec))
        rules, alerts = (os.path.abspath(data_path(f"monitoring/prometheus/{name}"))
                         for name in ("recording_rules.yml", "alerts.yml"))
        path = os.path.join(self.folder, "rules_test.yml")
        with open(path, "w", encoding="utf-8") as file:
            file.write(_RULES_TEST.format(rules=rules, alerts=alerts, series=series, firing=firing))
        done = subprocess.run(["promtool", "test", "rules", path], capture_output=True, text=True, check=False)
        self.assertEqual(0, done.returncode, f"{codec}: {done.stdout[-3000:]}{done.stderr[-3000:]}")

    def test_fires_for_codecs_that_spoil_the_text(self) -> None:
        for codec in FIRING:
            with self.subTest(codec=codec):
                self.decide(codec, "{labels: '{alertname=\"KvmanagerQualityLow\"}', value: 1}")

    def test_is_silent_for_codecs_that_keep_the_text(self) -> None:
        for codec in SILENT:
            with self.subTest(codec=codec):
                self.decide(codec, "")


if __name__ == "__main__":
    unittest.main()
