"""The benchmark's arithmetic and its workload, on engines that are simulated: no vLLM."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import pathlib
import subprocess
import sys
import tempfile
import types
import unittest
from collections import OrderedDict

import configurations
import counters
import processes
import scale as scales
import serving_bench
import workload
from scale import BLOCK_TOKENS
from summary import compared_faults, disk_faults, figures, hit_share
from table import Table

TINY = scales.Scale(
    short=256, short_prefixes=6, long=512, long_prefixes=4, engine_cache=1024, model_len=1024, batch=1024, cycles=3, suffix=64,
    unique=128, unique_prompts=6, unique_batches=2, unique_at_once=3, unique_output=4, pool_bytes=1 << 20,
    capacity_pool_bytes=1 << 18, compare_short=2, compare_long=1,
)
VOCABULARY = 5000


class Simulated:
    """An engine with a prefix cache as vLLM's (least recently used blocks go first, the end of a request before its beginning),
    and perhaps a pool behind it, and a disk that keeps everything. A token computed takes 1 ms, one loaded 0.1 ms, from the disk
    0.3; no time passes."""

    def __init__(self, own_tokens: int, pool_tokens: int = 0, has_disk: bool = False) -> None:
        self._own: OrderedDict[int, None] = OrderedDict()
        self._pool: OrderedDict[int, None] = OrderedDict()
        self._own_blocks, self._pool_blocks = own_tokens // BLOCK_TOKENS, pool_tokens // BLOCK_TOKENS
        self.own_hits: list[int] = []  # tokens, by request
        self.calls: list[tuple] = []
        self._loaded = self._from_disk = 0
        self._disk = set() if has_disk else None

    async def ask(self, prompt: list[int], output: int) -> workload.Answer:
        await asyncio.sleep(0)
        names = [hash(tuple(prompt[:end])) for end in range(BLOCK_TOKENS, len(prompt) + 1, BLOCK_TOKENS)]
        usable = names[: (len(prompt) - 1) // BLOCK_TOKENS]
        own = next((i for i, name in enumerate(usable) if name not in self._own), len(usable))
        pool = own
        if self._pool_blocks:
            pool = next((i for i, name in enumerate(usable[own:], own) if name not in self._pool), len(usable))
        disk = pool
        if self._disk is not None:
            disk = next((i for i, name in enumerate(usable[pool:], pool) if name not in self._disk), len(usable))
            self._disk.update(names)
        self._from_disk += disk - pool
        self.own_hits.append(own * BLOCK_TOKENS)
        self._loaded += (pool - own) * BLOCK_TOKENS
        for kept, most in ((self._own, self._own_blocks), (self._pool, self._pool_blocks)):
            for name in reversed(names):
                kept[name] = None
                kept.move_to_end(name)
            while len(kept) > most:
                kept.popitem(last=False)
        seconds = (1e-3 * (len(prompt) - disk * BLOCK_TOKENS) + 1e-4 * (pool - own) * BLOCK_TOKENS
                   + 3e-4 * (disk - pool) * BLOCK_TOKENS)
        return workload.Answer(seconds, seconds, disk * BLOCK_TOKENS, output)

    @contextlib.asynccontextmanager
    async def turn(self):
        yield

    async def forget(self) -> None:
        self._own.clear()

    async def settle(self) -> None:
        pass

    async def call(self, method: str, *arguments) -> object:
        self.calls.append((method, *arguments))
        if method == "compare_kept_blocks":
            return {"equal": 0, "compared": arguments[1], "k_error": 1.0, "v_error": 1.0}
        if method == "compare_blocks":
            return {"equal": arguments[1], "compared": arguments[1], "k_error": 0.0, "v_error": 0.0}
        return None

    async def disk_blocks(self) -> float:
        return self._from_disk

    def counted(self) -> dict[str, float]:
        return {"kvmanager_loaded_bytes": self._loaded * 100.0, "kvmanager_load_seconds": self._loaded * 1e-4}


def latency_run(pool_tokens: int, number: int = 1, name: str = "raw") -> tuple[dict, Simulated]:
    engine, record = Simulated(TINY.engine_cache, pool_tokens), workload.Record()
    asyncio.run(workload.latency(engine, record, TINY, VOCABULARY))
    return {"kind": "latency", "round": number, "config": name, "requests": record.requests, "batches": record.batches,
            "counted": record.counted}, engine


class ScaleTest(unittest.TestCase):
    def test_more_of_the_same_covers_a_scale(self) -> None:
        self.assertTrue(scales.GPU.covers(scales.GPU))
        self.assertTrue(dataclasses.replace(scales.GPU, cycles=9, unique_batches=8).covers(scales.GPU))
        for less in (dict(cycles=4), dict(unique_batches=1), dict(pool_bytes=1), dict(short_prefixes=8)):
            self.assertFalse(dataclasses.replace(scales.GPU, **less).covers(scales.GPU), less)


class CountersTest(unittest.TestCase):
    def test_read_sums_labels_and_leaves_other_metrics(self) -> None:
        def metric(name: str, kind: str, samples: list[tuple[str, float]]) -> types.SimpleNamespace:
            return types.SimpleNamespace(name=name, type=kind,
                                         samples=[types.SimpleNamespace(name=each, value=value) for each, value in samples])

        registry = types.SimpleNamespace(collect=lambda: [
            metric("vllm:kv_offload_load_time", "counter", [("vllm:kv_offload_load_time_total", 0.25),
                                                             ("vllm:kv_offload_load_time_created", 9.0)]),
            metric("vllm:prefix_cache_hits", "counter", [("vllm:prefix_cache_hits_total", 2),
                                                         ("vllm:prefix_cache_hits_total", 3)]),
            metric("vllm:kvmanager_load_seconds", "histogram", [("vllm:kvmanager_load_seconds_sum", 0.5),
                                                                ("vllm:kvmanager_load_seconds_count", 4)]),
            metric("vllm:num_requests_running", "gauge", [("vllm:num_requests_running", 1)]),
            metric("python_gc_objects_collected", "counter", [("python_gc_objects_collected_total", 1)]),
        ])
        self.assertEqual({"kv_offload_load_time": 0.25, "prefix_cache_hits": 5, "kvmanager_load_seconds": 0.5},
                         counters.read(registry))

    def test_change_total_and_rate(self) -> None:
        moved = counters.change({"a": 1.0, "b": 2.0}, {"a": 1.0, "b": 5.0, "c": 1.0})
        self.assertEqual({"b": 3.0, "c": 1.0}, moved)
        self.assertEqual({"b": 6.0, "c": 2.0}, counters.total([moved, moved]))
        self.assertEqual(2.0, counters.rate({"kv_offload_load_bytes": 4e9, "kv_offload_load_time": 2.0}, counters.LOADS))
        self.assertIsNone(counters.rate({"kv_offload_load_bytes": 4e9}, counters.LOADS))


class WorkloadTest(unittest.TestCase):
    def test_known_prefixes_are_gone_from_the_engines_own_cache_but_where_they_are_resident(self) -> None:
        run, engine = latency_run(pool_tokens=0)
        warmed = engine.own_hits[len(workload.LENGTHS):]  # behind those that warm the engine up
        for each, own in zip(run["requests"], warmed, strict=True):
            length = each["way"].partition(" ")[0]
            wanted = getattr(TINY, length) if each["way"].endswith("resident") else 0
            self.assertEqual(wanted, own, each)

    def test_each_scale_has_prefixes_that_do_not_fit_and_enough_requests(self) -> None:
        for each in (scales.GPU, scales.GPU_QUICK, scales.CPU, scales.CPU_QUICK):
            each.check()
        for each in (scales.GPU, scales.CPU):
            for count in (each.short_prefixes, each.long_prefixes):
                self.assertGreaterEqual(2 * each.cycles * count, 40, "warm requests in two rounds")
        with self.assertRaisesRegex(ValueError, "3 prefixes of 256 tokens"):
            dataclasses.replace(TINY, short_prefixes=3).check()
        with self.assertRaisesRegex(ValueError, "does not fit"):
            dataclasses.replace(TINY, model_len=512).check()

    def test_full_scale_fits_its_pool(self) -> None:
        for each, token in ((scales.GPU, scales.token_bytes(scales.LLAMA_8B)), (scales.CPU, 30 * 2 * 3 * 64 * 2)):
            warm_up = each.short + each.long
            known = each.short * each.short_prefixes + each.long * each.long_prefixes
            suffixes = BLOCK_TOKENS * each.cycles * (3 * each.short_prefixes + 2 * each.long_prefixes)
            self.assertLess((warm_up + known + suffixes) * token, each.pool_bytes)

    def test_capacity_counts_what_is_found(self) -> None:
        for pool in (1024, 4096):
            engine, record = Simulated(TINY.engine_cache, pool), workload.Record()
            asyncio.run(workload.capacity(engine, record, TINY, VOCABULARY, 1.0, pool))
            found = figures([{"kind": "capacity", "round": 1, "requests": record.requests}]).fit_tokens
            # vLLM computes the last token of a prompt always, and with it its block.
            prompt = TINY.short - BLOCK_TOKENS
            self.assertLessEqual(found, pool)
            self.assertGreaterEqual(found, pool // TINY.short * prompt)

    def test_a_prefix_comes_from_the_disk_then_from_the_pool_then_from_the_engine(self) -> None:
        engine, record = Simulated(TINY.engine_cache, 2048, has_disk=True), workload.Record()
        asyncio.run(workload.disk(engine, record, TINY, VOCABULARY, 1.0, 2048))
        run = {"kind": "disk", "round": 1, "config": "raw", "requests": record.requests}
        found = figures([run])
        self.assertEqual([], disk_faults("raw", record.requests))
        self.assertEqual([0.32] * 6, found.first_s["short computed"])
        for way, seconds in (("from disk", 0.064 + 0.0768), ("from pool", 0.064 + 0.0256), ("from own", 0.064)):
            self.assertEqual([round(seconds, 6)] * 6, [round(each, 6) for each in found.first_s[f"short {way}"]], way)
        self.assertEqual(0.8, found.hits["short from disk"])
        text = Table({configurations.parse("raw"): found}, TINY, 100, {"load_gb_s": 1.0, "store_gb_s": 1.0}).markdown()
        self.assertIn("| 256, the disk alone has it: TTFT, ms | 141, 141 (6) |\n| ... over computing it | 0.44 [0.44, 0.44] |", text)
        record.requests[-1]["disk_blocks"] = 3
        self.assertEqual(["raw, long prefix 3 from own: 512 tokens hit and 3 blocks were read from the disk, must be 0"],
                         disk_faults("raw", record.requests))

    def test_compare_asks_between_forgetting_and_comparing(self) -> None:
        engine, record = Simulated(TINY.engine_cache, 1 << 14), workload.Record()
        results = asyncio.run(workload.compare(engine, record, TINY, VOCABULARY))
        self.assertEqual([4, 4, 8], [each["loaded"] for each in results])
        self.assertEqual([4, 4, 8], [each["equal"] for each in results])
        names = [call[0] for call in engine.calls]
        comparing = ["compare_kept_blocks", "compare_blocks"] * 3
        self.assertEqual(["watch_blocks", *["keep_blocks"] * 3, "overwrite_blocks", *comparing], names)


class SummaryTest(unittest.TestCase):
    def test_hits_times_and_rates(self) -> None:
        found = figures([latency_run(1 << 16, number)[0] for number in (1, 2)])
        prompt = TINY.short + TINY.suffix
        self.assertEqual(2, found.rounds)
        self.assertEqual(0, found.hits["short cold"])
        self.assertAlmostEqual(TINY.short / prompt, found.hits["short warm"])
        self.assertAlmostEqual(TINY.short / prompt, found.first_hits["short"])
        self.assertEqual(2 * TINY.cycles * TINY.long_prefixes, len(found.extra_s["long"]))
        for each in found.extra_s["long"]:
            self.assertAlmostEqual(1e-4 * TINY.long, each)
        self.assertEqual(2 * TINY.cycles, len(found.rates["short at once"]))
        self.assertEqual(2 * TINY.unique_batches, len(found.rates["unique"]))
        self.assertAlmostEqual(100 / 1e-4 / 1e9, found.load_gb_s)
        self.assertIsNone(found.store_gb_s)

    def test_unique_prompts_alone_are_the_same_batches_and_nothing_else_counts(self) -> None:
        engine, record = Simulated(TINY.engine_cache, 1 << 16), workload.Record()
        asyncio.run(workload.unique(engine, record, TINY, VOCABULARY))
        whole, _ = latency_run(1 << 16)
        self.assertEqual({"unique"}, {each["way"] for each in record.requests})
        self.assertEqual(sum(each["way"] == "unique" for each in whole["requests"]), len(record.requests))
        found = figures([{"kind": "unique", "round": 1, "requests": record.requests, "batches": record.batches,
                          "counted": record.counted}])
        self.assertEqual(TINY.unique_batches, len(found.rates["unique"]))
        self.assertEqual(1, found.rounds)

    def test_rates_are_of_prompt_or_output_tokens(self) -> None:
        run = {"kind": "latency", "round": 1, "requests": [{"way": "unique", "cycle": 0, "pair": 0, "prompt": 8, "cached": 2,
                                                            "first_s": 1, "total_s": 1}],
               "batches": [{"way": "unique", "wall_s": 2.0, "prompt": 100, "output": 10},
                           {"way": "short at once", "wall_s": 4.0, "prompt": 100, "output": 10}]}
        found = figures([run])
        self.assertEqual({"unique": [5.0], "short at once": [25.0]}, found.rates)
        self.assertEqual(0.25, hit_share(run["requests"]))

    def test_an_engine_that_failed_is_said_and_not_counted(self) -> None:
        found = figures([{"kind": "capacity", "round": 1, "requests": [], "error": "no room"}])
        self.assertIsNone(found.fit_tokens)
        self.assertEqual(["capacity, round 1: no room"], found.errors)


    def test_faults_of_what_was_compared(self) -> None:
        whole = {"prompt": 320, "blocks": 4, "loaded": 4, "equal": 4, "overwritten_equal": 0}
        self.assertEqual([], compared_faults("raw", True, [whole]))
        self.assertEqual([], compared_faults("k4v3", False, [{**whole, "equal": 1}]))
        self.assertIn("3 blocks are equal bit for bit, must be 4", compared_faults("raw", True, [{**whole, "equal": 3}])[0])
        self.assertIn("0 blocks were loaded, must be 4", compared_faults("k4v3", False, [{**whole, "loaded": 0, "equal": 0}])[0])
        self.assertIn("1 blocks were equal before", compared_faults("k4v3", False, [{**whole, "overwritten_equal": 1}])[0])


class TableTest(unittest.TestCase):
    def columns(self) -> dict:
        made = {}
        for name, pool in (("vllm", 0), ("offload", 1 << 16), ("raw", 1 << 16)):
            made[configurations.parse(name)] = figures([latency_run(pool)[0]])
        made[configurations.parse("offload")].fit_tokens = 1000
        made[configurations.parse("raw")].fit_tokens = 1500
        return made

    def row(self, text: str, name: str) -> list[str]:
        (line,) = [line for line in text.splitlines() if line.startswith(f"| {name} |")]
        return [cell.strip() for cell in line.strip("|").split("|")][1:]

    def test_rows(self) -> None:
        scale = dataclasses.replace(TINY, short=1024)
        text = Table(self.columns(), scale, 100, {"load_gb_s": 50.0, "store_gb_s": 40.0}).markdown()
        self.assertEqual(["320, 320 (18)", "90, 90 (18)", "90, 90 (18)"], self.row(text, "1K warm: TTFT, ms"))
        self.assertEqual(["0.0%", "80.0%", "80.0%"], self.row(text, "1K warm: hits"))
        self.assertEqual(["-", "0.0", "0.0"], self.row(text, "1K warm: GB/s of raw K and V to the first token"))
        self.assertEqual(["-", "1,000", "1,500"], self.row(text, "tokens found again in 0.000244141 GiB"))
        lines = text.splitlines()
        at = lines.index(next(line for line in lines if line.startswith("| 1K warm: TTFT")))
        self.assertEqual("| ... over vLLM alone | - | 0.28 [0.28, 0.28] | 0.28 [0.28, 0.28] |", lines[at + 1])
        self.assertEqual("| ... over vLLM's own offload | 3.57 [3.57, 3.57] | - | 1.00 [1.00, 1.00] |", lines[at + 2])
        self.assertTrue(any(line.endswith("| - | - | 1.50 |") for line in lines))
        widths = {line.count("|") for line in lines if line.startswith("|")}
        self.assertEqual({5}, widths)

    def test_what_was_compared_and_what_failed(self) -> None:
        raw = configurations.parse("raw")
        runs = [{"kind": "compare", "round": 1, "compared": [{"prompt": 320, "blocks": 4, "loaded": 3, "equal": 2, "k_error": 0.5,
                                                               "v_error": 0.25, "overwritten_equal": 0}]},
                {"kind": "latency", "round": 1, "error": "no memory"}]
        text = Table({raw: figures(runs)}, TINY, 100, {"load_gb_s": 1.0, "store_gb_s": 1.0}).markdown()
        self.assertIn("| kvmanager raw | 320 | 4 | 3 | 2 | 0.5000 | 0.2500 | 0 |", text)
        self.assertIn("- kvmanager raw, latency, round 1: no memory", text)


class ResultsTest(unittest.TestCase):
    def results(self, folder: pathlib.Path, name: str, pool_tokens: int) -> pathlib.Path:
        run, _ = latency_run(pool_tokens, 1, name)
        limits = {"load_gb_s": 1.0, "store_gb_s": 1.0}
        made = {"scale": dataclasses.asdict(TINY), "weights": "none", "model": scales.LLAMA_8B,
                "machine": {"gpu": "a GPU", "cores": 1, "versions": {"vllm": "1"}, "limits": limits},
                "configurations": {name: dataclasses.asdict(configurations.parse(name))}, "runs": [run]}
        file = folder / f"{name}.json"
        file.write_text(json.dumps(made), encoding="utf-8")
        return file

    def run_bench(self, folder: pathlib.Path, *files: pathlib.Path) -> subprocess.CompletedProcess:
        command = [sys.executable, serving_bench.__file__, "--out", str(folder / "out"), "--configs", "none", "--add"]
        return subprocess.run(command + list(map(str, files)), capture_output=True, text=True, check=False)

    def test_earlier_runs_make_one_table(self) -> None:
        with tempfile.TemporaryDirectory() as text:
            folder = pathlib.Path(text)
            alone = self.results(folder, "vllm", 0)
            done = self.run_bench(folder, self.results(folder, "raw", 1 << 16), alone, alone)
            self.assertEqual(0, done.returncode, done.stderr)
            table = (folder / "out" / "table.md").read_text(encoding="utf-8")
            self.assertIn("a GPU; vllm 1; none; the engine's own cache has 1024 tokens; not the full scale", table)
            # Two rounds of vLLM alone, which comes first.
            self.assertIn("| 256 warm: TTFT, ms | 320, 320 (36) | 90, 90 (18) |", table)
            rounds = [run["round"] for run in json.loads((folder / "out" / "results.json").read_text())["runs"]]
            self.assertEqual([1, 2, 3], rounds)

    def test_runs_of_another_scale_are_refused(self) -> None:
        with tempfile.TemporaryDirectory() as text:
            folder = pathlib.Path(text)
            file, other = self.results(folder, "vllm", 0), self.results(folder, "raw", 0)
            changed = json.loads(other.read_text())
            changed["scale"]["cycles"] += 1
            other.write_text(json.dumps(changed))
            done = self.run_bench(folder, file, other)
            self.assertEqual(1, done.returncode)
            self.assertIn("raw.json has another scale than this table", done.stderr)


# A Python with everything: machine.py says so, and engine.py runs with a simulated engine.
PYTHON = """#!{python}
import contextlib, json, sys
sys.path[:0] = [{here!r}]
if sys.argv[1].endswith("machine.py"):
    print(json.dumps(dict(gpu="", cores=2, versions=dict(vllm="1"), vllm=True, kvmanager=True,
                          limits=dict(load_gb_s=1.0, store_gb_s=1.0))))
    raise SystemExit
import engine, serving_test
from turns import Turn
class Engine(serving_test.Simulated):
    def __init__(self, plan):
        pool = plan["scale"]["capacity_pool_bytes" if plan["kind"] == "capacity" else "pool_bytes"] // 1024
        super().__init__(plan["scale"]["engine_cache"], pool if plan["transfer"] else 0)
        self._turn, self._plan = Turn(plan["turns"]), plan
        self.codec = (plan["transfer"] or dict()).get("kv_connector_extra_config", dict()).get("codec")
    async def ask(self, prompt, output):
        if self.codec == "broken":
            raise ValueError("no such codec")
        return await super().ask(prompt, output)
    @contextlib.asynccontextmanager
    async def turn(self):
        async with self._turn.taken():
            if self._plan["turns"]:
                with open({log!r}, "a") as log:
                    print("begins", self.codec, file=log, flush=True)
                    yield
                    print("ends", self.codec, file=log, flush=True)
            else:
                yield
    def close(self):
        self._turn.close()
engine.Engine, engine.daemon_metrics = Engine, lambda address: dict(kvmanager_published_blocks=3.0)
sys.argv = sys.argv[1:]
sys.exit(engine.main())
"""


class WholeTest(unittest.TestCase):
    """The command from its arguments to its table; engine and daemon are stand-ins."""

    def run_bench(self, *arguments: str) -> tuple[subprocess.CompletedProcess, str]:
        folder = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))
        here = str(pathlib.Path(__file__).resolve().parent)
        model = {"hidden_size": 512, "num_attention_heads": 8, "num_hidden_layers": 1, "num_key_value_heads": 4, "vocab_size": 9000}
        self.turns = folder / "turns"
        files = {"python": PYTHON.format(python=sys.executable, here=here, log=str(self.turns)), "config.json": json.dumps(model),
                 "kvmanagerd": "#!/bin/sh\necho kvmanagerd ready listen=x metrics=127.0.0.1:7\nexec sleep 1000\n"}
        for name, text in files.items():
            (folder / name).write_text(text, encoding="utf-8")
            (folder / name).chmod(0o755)
        command = [sys.executable, serving_bench.__file__, "--out", str(folder / "out"), "--python", str(folder / "python")]
        command += ["--daemon", str(folder / "kvmanagerd"), "--model", str(folder), "--quick", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        logs = "".join(log.read_text() for log in (folder / "out").glob("*.log"))
        self.assertTrue((folder / "out" / "table.md").exists(), done.stdout + done.stderr + logs)
        return done, (folder / "out" / "table.md").read_text(encoding="utf-8")

    def test_times_and_capacity(self) -> None:
        done, table = self.run_bench("--configs", "vllm", "raw", "--capacity-pool-gib", "0.004")
        self.assertEqual(0, done.returncode, done.stdout + done.stderr)
        self.assertIn("| 2K warm: hits | 0.0% | 97.0% |", table)
        self.assertIn("| 1K warm: TTFT, ms | 1088, 1088 (8) | 166, 166 (8) |", table)
        self.assertRegex(table, r"\| tokens found again in 0.004 GiB \| - \| [34],\d{3} \|")
        self.assertNotIn("Not measured", table)

    def test_side_by_side_one_works_while_the_others_wait(self) -> None:
        done, table = self.run_bench("--configs", "vllm", "raw", "bad=broken", "--parts", "latency", "--side-by-side", "--cycles", "2")
        self.assertEqual(1, done.returncode)
        self.assertIn("- kvmanager bad, latency, round 1: ValueError: no such codec", table)
        self.assertIn("| 1K warm: TTFT, ms | 1088, 1088 (16) | 166, 166 (16) | - |", table)
        self.assertIn("engines side by side", table)
        lines = self.turns.read_text().splitlines()
        lines.remove("begins broken")  # in its first turn
        self.assertEqual([line.replace("begins", "ends") for line in lines[::2]], lines[1::2])
        # The two that are left have a turn each in every round: no one has three running.
        own = [line == "begins None" for line in lines[::2]]
        self.assertEqual(len(own), 2 * sum(own))
        self.assertFalse(any(own[i] == own[i + 1] == own[i + 2] for i in range(len(own) - 2)))

    def test_a_pool_of_a_configuration_that_is_none(self) -> None:
        command = [sys.executable, serving_bench.__file__, "--out", "/tmp", "--configs", "vllm", "--pool-gib", "8", "raw=1"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        self.assertEqual(2, done.returncode)
        self.assertIn("--pool-gib raw=1: 'raw' is not of --configs, vllm", done.stderr)
        self.assertEqual(({"raw": 1.5}, 8.0), serving_bench.pools_of(["8", "raw=1.5"], ["raw"]))

    def test_what_fails_is_in_the_table_and_in_the_status(self) -> None:
        done, table = self.run_bench("--configs", "offload", "bad=broken", "raw", "--parts", "latency")
        self.assertEqual(1, done.returncode)
        self.assertIn("- vLLM's own offload, latency, round 1: vLLM's own offload needs a GPU", table)
        self.assertIn("- kvmanager bad, latency, round 1: ValueError: no such codec", table)
        self.assertIn("| 1K warm: hits |", table)

    def test_compare(self) -> None:
        done, table = self.run_bench("--configs", "vllm", "raw", "--compare")
        self.assertEqual(0, done.returncode, done.stdout + done.stderr)
        self.assertIn("| kvmanager raw | 2112 | 32 | 32 | 32 | 0.0000 | 0.0000 | 0 |", table)


class ProcessesTest(unittest.TestCase):
    def setUp(self) -> None:
        self.folder = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))
        self.log = self.folder / "log"

    def test_what_an_engine_says_and_how_it_ends(self) -> None:
        self.assertEqual("", processes.run(["sh", "-c", "echo $WORD; echo two >&2"], {"WORD": "one"}, self.log, 60))
        self.assertEqual("one\ntwo\n", self.log.read_text())
        self.assertEqual("ended with 3", processes.run(["sh", "-c", "exit 3"], {}, self.log, 60))

    def test_an_engine_that_takes_too_long_is_ended_with_all_it_started(self) -> None:
        mark = self.folder / "started"
        command = ["sh", "-c", f"(setsid sh -c 'echo $$ > {mark}; exec sleep 1000' &); exec sleep 1000"]
        self.assertEqual("took more than 2 s", processes.run(command, {}, self.log, 2))
        self.assertFalse(pathlib.Path(f"/proc/{mark.read_text().strip()}").exists())

    def program(self, text: str) -> str:
        path = self.folder / "kvmanagerd"
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)
        return str(path)

    def test_a_daemon_is_there_until_it_is_left(self) -> None:
        said = f"echo $* > {self.folder}/flags; echo 'kvmanagerd ready listen=x metrics=127.0.0.1:7'; exec sleep 1000"
        with processes.Daemon(self.program(said), self.folder, 5, ["--threads", "2"], self.log) as daemon:
            self.assertEqual(("127.0.0.1:7", f"unix:{self.folder}/kv.sock"), (daemon.metrics, daemon.address))
        wanted = f"--listen unix:{self.folder}/kv.sock --host-pool-bytes 5 --metrics-listen 127.0.0.1:0 --threads 2"
        self.assertEqual(wanted, (self.folder / "flags").read_text().strip())

    def test_a_daemon_that_does_not_start_says_why(self) -> None:
        with self.assertRaisesRegex(RuntimeError, "ended with 2 before it was ready: no such pool"):
            processes.Daemon(self.program("echo no such pool >&2; exit 2"), self.folder, 5, [], self.log)


class ConfigurationsTest(unittest.TestCase):
    def test_transfer(self) -> None:
        self.assertIsNone(configurations.parse("vllm").transfer("unix:x", 1, {}))
        offload = configurations.parse("offload").transfer("", 5, {"a": 1})
        self.assertEqual({"cpu_bytes_to_use": 5}, offload["kv_connector_extra_config"])
        own = configurations.parse("mine=zack+hack:bytes=48,calibration=llama").transfer("unix:x", 5, {"staging_mib": 7})
        self.assertEqual({"address": "unix:x", "codec": "zack+hack:bytes=48,calibration=llama", "staging_mib": 7},
                         own["kv_connector_extra_config"])
        for wrong in ("nothing", "vllm=raw", "=raw", "mine="):
            with self.assertRaisesRegex(ValueError, "must be one of"):
                configurations.parse(wrong)

    def test_plans_turn_and_leave_out_what_says_nothing(self) -> None:
        options = types.SimpleNamespace(configs=[configurations.parse(each) for each in ("vllm", "offload", "raw")], rounds=2,
                                        quick=False, compare=False, parts=["latency", "capacity"])
        names = [(kind, number, each.name) for kind, number, each in serving_bench.plans(options)]
        self.assertEqual([("latency", 1, "vllm"), ("latency", 1, "offload"), ("latency", 1, "raw"),
                          ("latency", 2, "offload"), ("latency", 2, "raw"), ("latency", 2, "vllm"),
                          ("capacity", 1, "offload"), ("capacity", 1, "raw")], names)
        options.parts = ["unique"]
        alone = serving_bench.plans(options)
        self.assertEqual(["unique"] * 6, [kind for kind, *_ in alone])
        self.assertEqual([3, 3], [len(group) for group in serving_bench.groups(alone, side_by_side=True)])
        options.compare = True
        self.assertEqual(["offload", "raw"], [each.name for _, _, each in serving_bench.plans(options)])

    def test_shape(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            model = scales.write_shape(pathlib.Path(folder) / "shape")
            self.assertEqual(128 << 10, scales.token_bytes(json.loads((model / "config.json").read_text())))


if __name__ == "__main__":
    unittest.main()
