"""The benchmark of SGLang's servers: its arithmetic, faults and table, and the whole command with a simulated server and daemon
that answer over HTTP: no SGLang."""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import http.server
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time
import unittest

import sglang_bench
from configurations import Configuration, parse
from sglang_summary import Figures, faults, figures
from sglang_table import SGLANG, Table
from sglang_workload import COLD, DISK, PAGE_TOKENS, RESIDENT, RESTART, STORAGE, Answer, Record, Scale, Stored, Work, settle

TINY = Scale(lengths=(256, 512), prompts=(3, 2), passes=2, pool_bytes=1 << 30, engine_cache=4096, output=4)
VOCABULARY = 5000


class Simulated:
    """A server with a cache of its own and perhaps a storage, whose pages are files of a folder. A token computed takes 1 ms,
    one from the storage 0.1 ms; no time passes. changed: what comes from the storage leads to other token ids."""

    def __init__(self, folder: pathlib.Path | None, changed: bool = False, stores: bool = True) -> None:
        self._folder, self._changed, self._stores = folder, changed, stores
        self._own: set[str] = set()

    def generate(self, prompt: list[int], tokens: int) -> Answer:
        pages = [hashlib.sha256(json.dumps(prompt[:end]).encode()).hexdigest()
                 for end in range(PAGE_TOKENS, len(prompt) + 1, PAGE_TOKENS)]
        usable = pages[: (len(prompt) - 1) // PAGE_TOKENS]
        own = next((place for place, page in enumerate(usable) if page not in self._own), len(usable))
        there = next((place for place, page in enumerate(usable[own:], own) if not self._has(page)), len(usable))
        self._own.update(pages)
        if self._folder and self._stores:
            for page in pages:
                (self._folder / f"{page}.bin").write_bytes(b"page")
        first_s = 1e-3 * (len(prompt) - there * PAGE_TOKENS) + 1e-4 * (there - own) * PAGE_TOKENS
        wrong = self._changed and there > own
        ids = [(sum(prompt) + place + wrong) % VOCABULARY for place in range(tokens)]
        return Answer("", ids, first_s, first_s, there * PAGE_TOKENS, (there - own) * PAGE_TOKENS)

    def _has(self, page: str) -> bool:
        return self._folder is not None and (self._folder / f"{page}.bin").exists()

    def forget(self) -> None:
        self._own.clear()


def request(way: str, behind: str, pair: int, first_s: float, ids: list[int], found: int = 0, cycle: int = 0) -> dict:
    return {"way": way, "behind": behind, "length": 1024, "cycle": cycle, "pair": pair, "first_s": first_s, "total_s": first_s,
            "cached": found, "found": found, "ids": ids}


def run_of(cold_s: float, storage_s: float, changed: int = 0) -> dict:
    """Four prompts, each cold and from the storage; of the first `changed` the storage leads to other ids."""
    requests = []
    for pair in range(4):
        requests += [request(COLD, COLD, pair, cold_s, [pair]), request(RESIDENT, COLD, pair, 0.05, [pair, 1])]
    for pair in range(4):
        ids = [99] if pair < changed else [pair]
        requests += [request(STORAGE, STORAGE, pair, storage_s, ids, 960), request(RESIDENT, STORAGE, pair, 0.05, ids)]
    return {"requests": requests, "stored": [{"length": 1024, "pages": 64, "expected": 80, "seconds": 1.5}]}


class WorkTest(unittest.TestCase):
    def asked(self, stored: bool, files: bool = False) -> tuple[Record, Work, Simulated, list[str]]:
        folder = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))
        left: list[str] = []
        looked = Stored(sglang_bench.stored_in(folder).count, (lambda: left.append("left")) if files else None)
        looked = looked if stored else None
        record, server = Record(), Simulated(folder if stored else None)
        work = Work(TINY, VOCABULARY, record, looked, still_s=0.0, give_up_s=0.0)
        work.first(server)
        return record, work, server, left

    def ways(self, record: Record) -> dict[tuple[int, str, str], int]:
        counted: dict[tuple[int, str, str], int] = {}
        for each in record.requests:
            name = each["length"], each["behind"], each["way"]
            counted[name] = counted.get(name, 0) + 1
        return counted

    def test_each_prompt_is_computed_then_comes_from_the_storage_and_is_resident_behind_that(self) -> None:
        record, work, server, left = self.asked(stored=True, files=True)
        wanted = {(256, COLD, COLD): 3, (256, COLD, RESIDENT): 3, (256, STORAGE, STORAGE): 6, (256, STORAGE, RESIDENT): 6,
                  (256, DISK, DISK): 3, (256, DISK, RESIDENT): 3, (512, COLD, COLD): 2, (512, COLD, RESIDENT): 2,
                  (512, STORAGE, STORAGE): 4, (512, STORAGE, RESIDENT): 4, (512, DISK, DISK): 2, (512, DISK, RESIDENT): 2}
        self.assertEqual(wanted, self.ways(record))
        self.assertEqual(["left", "left"], left)
        for each in record.requests:
            full = each["length"] - PAGE_TOKENS
            self.assertEqual(full if each["way"] in (STORAGE, DISK) else 0, each["found"], each)
            self.assertEqual(0 if each["way"] == COLD else full, each["cached"], each)
        # Of three prompts and the one that warms up; of two and one more of twice the length.
        self.assertEqual([(256, 16, 16), (512, 40, 40)],
                         [(each["length"], each["pages"], each["expected"]) for each in record.stored])

    def test_a_server_that_was_started_anew_finds_all_prompts(self) -> None:
        record, work, server, _ = self.asked(stored=True)
        del record.requests[:]
        server.forget()
        work.restarted(server)
        self.assertEqual({(256, RESTART, RESTART): 3, (256, RESTART, RESIDENT): 3, (512, RESTART, RESTART): 2,
                          (512, RESTART, RESIDENT): 2}, self.ways(record))
        self.assertTrue(all(each["found"] for each in record.requests if each["way"] == RESTART))

    def test_without_a_storage_all_passes_compute(self) -> None:
        record, *_ = self.asked(stored=False)
        self.assertEqual({(256, COLD, COLD): 9, (256, COLD, RESIDENT): 9, (512, COLD, COLD): 6, (512, COLD, RESIDENT): 6},
                         self.ways(record))
        self.assertEqual([], record.stored)
        self.assertEqual((6, 6), figures({"requests": record.requests}).equal[f"256 {COLD}"], "the first pass is not compared")

    def test_what_is_not_stored_is_not_found(self) -> None:
        folder, record = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory())), Record()
        work = Work(TINY, VOCABULARY, record, sglang_bench.stored_in(folder), still_s=0.0, give_up_s=0.0)
        work.first(Simulated(folder, stores=False))
        self.assertEqual([(0, 16), (0, 40)], [(each["pages"], each["expected"]) for each in record.stored])
        found = faults(parse("files", SGLANG), {"requests": record.requests})
        self.assertIn("SGLang's files, 256 tokens, storage: 6 of 6 requests found nothing in the storage", found)

    def test_nothing_is_asked_when_the_time_is_over(self) -> None:
        record = Record(end=time.monotonic() - 1)
        with self.assertRaisesRegex(TimeoutError, "--seconds"):
            Work(TINY, VOCABULARY, record, None).first(Simulated(None))
        self.assertEqual([], record.requests)

    def test_prompts_of_lengths_that_are_named(self) -> None:
        options = {"quick": False, "lengths": None, "prompts": None, "passes": None, "output": None, "pool_gib": None}
        for changes, wanted in (({}, (12, 4)), ({"lengths": [8192]}, (12,)), ({"lengths": [64, 32768]}, (4, 4)),
                                ({"prompts": [5]}, (5, 5)), ({"lengths": [64], "prompts": [6, 7]}, (6, 7))):
            self.assertEqual(wanted, sglang_bench.scale_of(argparse.Namespace(**{**options, **changes}), gpu=True).prompts)

    def test_scale(self) -> None:
        for each in (sglang_bench.GPU, sglang_bench.GPU_QUICK):
            each.check(128 << 10)
        for each in (sglang_bench.CPU, sglang_bench.CPU_QUICK):
            each.check(30 * 2 * 3 * 64 * 2)
            self.assertLessEqual(each.context, 4096)
        for changes, wanted in (
            ({"prompts": (1,)}, "--prompts has 1 numbers"), ({"lengths": (256, 100)}, "--lengths has 100"),
            ({"lengths": (256, 256)}, "--lengths has 256"), ({"passes": 0}, "--passes 0"), ({"output": 65}, "--output is 65"),
            ({"engine_cache": 2048}, "must be at most 0 here"), ({"pool_bytes": 1 << 20}, "--pool-gib is 0.00, must be at "),
        ):
            with self.assertRaisesRegex(ValueError, wanted):
                dataclasses.replace(TINY, **changes).check(1024)


class SettleTest(unittest.TestCase):
    """Time goes on where settle pauses."""

    def settle(self, counts: list[int], pages: int, end: float = 1e9) -> dict:
        clock = [100.0]

        def pause(seconds: float) -> None:
            clock[0] += seconds

        def count() -> tuple[int, int]:
            return (counts.pop(0) if len(counts) > 1 else counts[0]), 0

        return settle(count, pages, 1.0, 10.0, end, lambda: clock[0], pause)

    def test_all_pages_come(self) -> None:
        found = self.settle([0, 0, 4, 8], 8)
        self.assertEqual((8, 8), (found["pages"], found["expected"]))
        self.assertAlmostEqual(0.3, found["seconds"])

    def test_pages_that_never_come_are_waited_for_longer(self) -> None:
        self.assertEqual(9, self.settle([0, 5] + [5] * 80 + [9], 9)["pages"])
        self.assertEqual(5, self.settle([0, 5] + [5] * 150 + [9], 9)["pages"])

    def test_the_end_comes_first(self) -> None:
        self.assertEqual(0, self.settle([0], 9, end=103.0)["pages"])


class SummaryTest(unittest.TestCase):
    def test_figures(self) -> None:
        found = figures(run_of(0.4, 0.15, changed=1))
        self.assertEqual([0.4] * 4, found.first_s["1024 cold"])
        self.assertEqual([0.05] * 4, found.resident_s["1024 storage"])
        for extra in found.extra_s["1024 storage"]:
            self.assertAlmostEqual(0.1, extra)
        self.assertEqual({"1024 cold": 0.0, "1024 storage": 960 / 1024}, found.hits)
        self.assertEqual({"1024 storage": (3, 4)}, found.equal)
        self.assertEqual(64, found.stored[1024]["pages"])

    def test_ids_of_the_resident_request_behind_the_cold_one_are_computed_too(self) -> None:
        run = run_of(0.4, 0.15)
        run["requests"].append(request(STORAGE, STORAGE, 2, 0.15, [2, 1], 960, cycle=1))
        self.assertEqual((5, 5), figures(run).equal["1024 storage"])

    def test_an_error_is_said_beside_what_was_measured(self) -> None:
        self.assertEqual(["no memory"], figures({"error": "no memory"}).errors)

    def test_faults(self) -> None:
        raw, coded, files = parse("raw", SGLANG), parse("k4v3", SGLANG), parse("files", SGLANG)
        for configuration in (raw, coded, files):
            self.assertEqual([], faults(configuration, run_of(0.4, 0.15)))
        changed = run_of(0.4, 0.15, changed=2)
        self.assertEqual([], faults(coded, changed))
        self.assertEqual([], faults(files, changed))
        (resident, storage) = faults(raw, changed)
        self.assertIn("kvmanager raw, 1024 tokens, resident: 2 of 8 requests", resident)
        self.assertEqual("kvmanager raw, 1024 tokens, storage: 2 of 4 requests have other token ids than were computed, "
                         "must be 0 with codec raw: prompts 0, 1", storage)

    def test_prompts_that_are_not_found_and_those_that_should_not_be_are_faults(self) -> None:
        run = run_of(0.4, 0.15)
        run["requests"][8]["found"] = 0
        run["requests"][0]["found"] = 64
        self.assertEqual(["kvmanager k4v3, 1024 tokens, cold: 1 of 4 requests found tokens in the storage, must be 0",
                          "kvmanager k4v3, 1024 tokens, storage: 1 of 4 requests found nothing in the storage"],
                         faults(parse("k4v3", SGLANG), run))


class TableTest(unittest.TestCase):
    def test_rows(self) -> None:
        alone = run_of(0.4, 0.0)
        del alone["requests"][8:], alone["stored"][:]
        columns: dict[Configuration, Figures] = {
            parse("alone", SGLANG): figures(alone), parse("files", SGLANG): figures(run_of(0.5, 0.25)),
            parse("raw", SGLANG): figures(run_of(0.5, 0.16, changed=1)), parse("k4v3", SGLANG): figures({"error": "no memory"}),
        }
        text = Table(columns, (1024,), 1000, 50.0).markdown()
        table = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("|")]
        rows = {row[0]: row[1:] for row in table if not row[0].startswith("...")}
        self.assertEqual(["SGLang alone", "SGLang's files", "kvmanager raw", "kvmanager k4v3"], rows[""])
        self.assertEqual(["400, 400 (4)", "500, 500 (4)", "500, 500 (4)", "-"], rows["1K cold: TTFT, ms"])
        self.assertEqual(["-", "250, 250 (4)", "160, 160 (4)", "-"], rows["1K from the storage: TTFT, ms"])
        self.assertEqual(["-", "200, 200 (4)", "110, 110 (4)", "-"], rows["1K from the storage, less resident: TTFT, ms"])
        self.assertEqual(["-", "93.8%", "93.8%", "-"], rows["1K from the storage: hits"])
        self.assertEqual(["-", "4 of 4", "3 of 4", "-"], rows["1K from the storage: ids as computed"])
        self.assertEqual(["-", "64 of 80, 1.5 s", "64 of 80, 1.5 s", "-"], rows["1K pages stored"])
        self.assertIn("1K from the storage, less resident: GB/s of raw K and V (one large copy: 50.0)", rows)
        at = next(place for place, row in enumerate(table) if row[0] == "1K from the storage: TTFT, ms")
        self.assertEqual([
            ["... over cold in the same column", "-", "0.50 [0.50, 0.50]", "0.32 [0.32, 0.32]", "-"],
            ["... over cold, SGLang alone", "-", "0.62 [0.62, 0.62]", "0.40 [0.40, 0.40]", "-"],
            ["... over SGLang's files", "-", "-", "0.64 [0.64, 0.64]", "-"],
        ], table[at + 1 : at + 4])
        self.assertIn("- kvmanager k4v3, no memory", text)
        self.assertNotIn("on the disk", text)


# A Python with everything: machine.py says so, and any other program is a server.
PYTHON = """#!{python}
import json, os, sys
sys.path[:0] = [{here!r}]
if sys.argv[1].endswith("machine.py"):
    print(json.dumps(dict(gpu={gpu!r}, cores=2, versions=dict(sglang="1"), sglang=True, kvmanager=True,
                          limits=dict(load_gb_s=1.0, store_gb_s=1.0))))
    raise SystemExit
import sglang_bench_test
sglang_bench_test.serve(sys.argv[1:])
"""
DAEMON = """#!{python}
import sys
sys.path[:0] = [{here!r}]
import sglang_bench_test
sglang_bench_test.publish(sys.argv[sys.argv.index("--listen") + 1])
"""


def pages_of(address: str) -> pathlib.Path:
    return pathlib.Path(address.removeprefix("unix:")).parent


def serve(arguments: list[str]) -> None:
    """Answers as SGLang does: flags say where the storage is; --broken and --changed what is wrong."""
    print(f"arguments {arguments} threads {os.environ.get('OMP_NUM_THREADS')}", flush=True)
    if "--broken" in arguments:
        raise SystemExit("no such attention")
    values = dict(zip(arguments, arguments[1:]))
    folder = None
    if values.get("--hicache-storage-backend") == "file":
        folder = pathlib.Path(os.environ["SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR"])
    elif "--hicache-storage-backend-extra-config" in values:
        folder = pages_of(json.loads(values["--hicache-storage-backend-extra-config"])["address"])
    server = Simulated(folder, "--changed" in arguments)

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.answer(b"")

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if self.path.startswith("/flush_cache"):
                server.forget()
                self.answer(b"")
                return
            told = server.generate(body["input_ids"], body["sampling_params"]["max_new_tokens"])
            details = {"device": told.cached_tokens - told.found_tokens, "host": 0, "storage": told.found_tokens}
            facts = {"cached_tokens": told.cached_tokens, "cached_tokens_details": details if told.cached_tokens else None}
            events = [{"output_ids": told.ids[:end], "meta_info": facts} for end in (1, len(told.ids))]
            self.answer(b"".join(b"data: " + json.dumps(event).encode() + b"\n\n" for event in events) + b"data: [DONE]\n\n")

        def answer(self, body: bytes) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(body)

    http.server.HTTPServer(("127.0.0.1", int(values["--port"])), Handler).serve_forever()


def publish(address: str) -> None:
    """Answers as kvmanagerd's metrics do."""
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(f"kvmanager_published_blocks_total {len(list(pages_of(address).glob('*.bin')))}\n".encode())

        def log_message(self, *_: object) -> None:
            pass

    server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
    print(f"kvmanagerd ready listen={address} metrics=127.0.0.1:{server.server_address[1]}", flush=True)
    server.serve_forever()


class WholeTest(unittest.TestCase):
    """The command from its arguments to its table; server and daemon are stand-ins."""

    def run_bench(self, *arguments: str, gpu: str = "") -> tuple[subprocess.CompletedProcess, str, pathlib.Path]:
        folder = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))
        model = {"hidden_size": 512, "num_attention_heads": 8, "num_hidden_layers": 1, "num_key_value_heads": 4,
                 "vocab_size": 9000}
        words = {"python": sys.executable, "here": str(pathlib.Path(__file__).resolve().parent), "gpu": gpu}
        for name, text in {"python": PYTHON.format(**words), "kvmanagerd": DAEMON.format(**words),
                           "config.json": json.dumps(model)}.items():
            (folder / name).write_text(text, encoding="utf-8")
            (folder / name).chmod(0o755)
        command = [sys.executable, sglang_bench.__file__, "--out", str(folder / "out"), "--python", str(folder / "python")]
        command += ["--daemon", str(folder / "kvmanagerd"), "--lengths", "512", "--prompts", "2", "--passes", "1", *arguments]
        command += [] if gpu else ["--model", str(folder)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        logs = "".join(log.read_text() for log in (folder / "out").glob("*.log"))
        self.assertTrue((folder / "out" / "table.md").exists(), done.stdout + done.stderr + logs)
        return done, (folder / "out" / "table.md").read_text(encoding="utf-8"), folder / "out"

    def test_three_ways_on_a_cpu(self) -> None:
        done, table, out = self.run_bench("--configs", "alone", "files", "raw", "--server-flag=--page-size=64")
        self.assertEqual(0, done.returncode, done.stdout + done.stderr)
        self.assertIn("|  | SGLang alone | SGLang's files | kvmanager raw |", table)
        self.assertIn("| 512 from the storage: hits | - | 87.5% | 87.5% |", table)
        self.assertIn("| 512 from the storage: ids as computed | - | 2 of 2 | 2 of 2 |", table)
        self.assertIn("| 512 files on the disk: hits | - | 87.5% | - |", table)
        self.assertIn("| 512 after a restart: hits | - | - | 87.5% |", table)
        self.assertIn("| 512 cold again: ids as computed | 2 of 2 | - | - |", table)
        self.assertRegex(table, r"\| 512 pages stored \| - \| 24 of 24, .* \| 24 of 24, .* \|")
        self.assertNotIn("Not measured", table)
        self.assertEqual([], list(out.glob("sglang-files*")), "files are gone")
        results = json.loads((out / "results.json").read_text())
        self.assertEqual(["alone", "files", "raw"], [run["config"]["name"] for run in results["runs"]])
        self.assertEqual({8}, {len(each["ids"]) for run in results["runs"] for each in run["requests"]})
        for log in ("raw.log", "raw-restarted.log"):
            said = (out / log).read_text()
            self.assertRegex(said, "launch.py.*--device.*cpu.*--context-length', '2560.*--page-size=64.*threads 1")

    def test_a_gpus_servers_have_nothing_of_a_cpus(self) -> None:
        done, table, out = self.run_bench("--configs", "alone", gpu="a GPU")
        self.assertEqual(0, done.returncode, done.stdout + done.stderr)
        said = (out / "alone.log").read_text()
        self.assertIn("['-m', 'sglang.launch_server'", said)
        self.assertIn("'--hicache-io-backend', 'kernel'", said)
        self.assertIn("'--load-format', 'dummy'", said)
        self.assertNotIn("cpu", said)
        self.assertNotIn("torch_native", said)
        self.assertIn("a GPU; sglang 1; Llama-3.1-8B's shape, dummy weights", table)

    def test_other_ids_with_raw_and_a_server_that_does_not_start_are_failures(self) -> None:
        done, table, _ = self.run_bench("--configs", "raw", "k4v3", "--server-flag=--changed")
        self.assertEqual(1, done.returncode)
        self.assertIn("kvmanager raw, 512 tokens, storage: 2 of 2 requests have other token ids", done.stdout)
        self.assertNotIn("kvmanager k4v3, 512", done.stdout)
        self.assertIn("| 512 from the storage: ids as computed | 0 of 2 | 0 of 2 |", table)
        done, table, _ = self.run_bench("--configs", "alone", "--server-flag=--broken")
        self.assertEqual(1, done.returncode)
        self.assertIn("- SGLang alone, AssertionError: sglang ended: see alone.log\n", table)

    def test_earlier_runs_are_in_the_table(self) -> None:
        _, _, earlier = self.run_bench("--configs", "alone", gpu="a GPU")
        done, table, _ = self.run_bench("--configs", "files", "--add", str(earlier / "results.json"), gpu="a GPU")
        self.assertEqual(0, done.returncode, done.stdout + done.stderr)
        self.assertIn("|  | SGLang alone | SGLang's files |", table)
        self.assertRegex(table, r"\| \.\.\. over cold, SGLang alone \| - \| \d")

    def test_time_that_is_over_is_said(self) -> None:
        done, table, _ = self.run_bench("--configs", "alone", "--seconds", "5")
        self.assertEqual(1, done.returncode)
        self.assertIn("- SGLang alone, TimeoutError: --seconds 5 are over", table)


if __name__ == "__main__":
    unittest.main()
