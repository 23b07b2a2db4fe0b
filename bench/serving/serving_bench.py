#!/usr/bin/env python3
"""Measures real vLLM engines side by side: alone, with vLLM's own offload to host memory, with kvmanager under several codecs.

    serving_bench.py --out DIR                                     # a GPU: Llama-3.1-8B's shape, dummy weights
    serving_bench.py --out DIR --quick --configs vllm raw          # a few requests of each way: does it work?
    serving_bench.py --out DIR --side-by-side --parts latency      # all engines at once, in turns
    serving_bench.py --out DIR --side-by-side --parts unique --rounds 6    # prompts that never return, in many engines
    serving_bench.py --out DIR --compare --configs raw k4v3        # are loaded blocks what was stored?
    serving_bench.py --out DIR --quick --python ENV/bin/python --model SMOLLM2 --configs vllm raw    # a CPU

Each engine is an AsyncLLM with an EngineCore of its own; one runs at a time, and a round runs all configurations, so that what
changes on the machine meets all of them. --side-by-side starts all of a round's timed engines at once and lets them take
turns, request by request: ratios between them are then as narrow as a machine allows, but all models and pools must fit it.
Prompts are token ids: prefixes of two lengths that do not fit the engine's own cache of --engine-cache tokens together, cold,
then warm one at a time and four at once; each warm request is followed by one of the same prefix, then resident in the
engine's own cache; unique prompts at the end. --parts unique asks for unique prompts alone: batches of one engine scatter by a
tenth of their rate, so a few percent take fifty of them, in several engines. A second engine of each configuration
(--parts capacity) fills a small pool of host memory and counts the tokens that are found again. --parts disk takes the time of
prompts that kvmanager's disk alone has, beside computing them and finding them in host memory.

DIR gets results.json (every request, every counter), table.md and the engines' logs. --add takes in results of earlier runs on
the same machine, and with --configs none the table is made of those alone. The engine's Python needs vllm and the kvmanager
package (--client); kvmanagerd is started and stopped for each engine.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import pathlib
import sys
import tempfile
import threading
import time
from typing import Any

import machine
import processes
import scale as scales
from configurations import ALONE, CODECS, OFFLOAD, Configuration, parse
from rows import head
from summary import TIMED, compared_faults, disk_faults, figures
from table import NOTE, Table
from turns import Turns

_FOLDER = pathlib.Path(__file__).resolve().parent
_KINDS = (*TIMED, "capacity", "disk", "compare")
_ENGINE_MIN_S = 60.0  # less time left than this starts no engine
_DISK_POOLS = 32  # a disk has so many times the pool's bytes
_NO_GPU = "vLLM's own offload needs a GPU"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    default = [ALONE, OFFLOAD, *CODECS]
    add("--out", required=True, type=pathlib.Path, metavar="DIR", help="results go there")
    add("--configs", nargs="+", default=default, metavar="NAME",
        help=f"of {', '.join(default)}, or NAME=CODEC for another codec of kvmanager; none: measure nothing; default: all five")
    add("--rounds", type=int, default=2, help="engines of each configuration whose times are taken (default 2)")
    add("--side-by-side", action="store_true", help="timed engines of a round run at once and take turns")
    add("--cycles", type=int, help="passes over all prefixes in each timed engine (default 5; with --quick 1)")
    add("--batches", type=int, help="of unique prompts in each timed engine (default 4; with --quick 1)")
    add("--parts", nargs="+", choices=[each for each in _KINDS if each != "compare"], default=["latency", "capacity"],
        help="latency, capacity (default both), unique: prompts that never return, alone; disk: prompts that kvmanager's disk alone has")
    add("--compare", action="store_true",
        help="compare loaded K and V with those that were stored, bit for bit, instead of taking times")
    add("--quick", action="store_true", help="one round, one pass over fewer prefixes: says whether it works, not how fast")
    add("--add", nargs="+", default=[], type=pathlib.Path, metavar="RESULTS",
        help="results.json of earlier runs of the same scale")
    add("--seconds", type=float, default=float("inf"), help="for the whole run: engines that do not fit are not started")
    add("--engine-seconds", type=float, default=900, help="for one engine, its start included (default 900)")
    add("--model", type=pathlib.Path, metavar="DIR",
        help="a Hugging Face folder; default, on a GPU: Llama-3.1-8B's shape with dummy weights. A CPU needs a small one: "
        "client/python/engines/vllm_serve/smollm2.py makes it")
    add("--python", default=sys.executable, help="with vllm; on a CPU that of tools/engines vllm_serve (default: this one)")
    add("--daemon", type=pathlib.Path, default=processes.ROOT / "bazel-bin/kvmanager/daemon/kvmanagerd", help="kvmanagerd")
    add("--client", type=pathlib.Path, default=processes.ROOT / "bazel-bin/client/python/package",
        help="folder of the kvmanager package, put before others if it is there (default bazel-bin/client/python/package)")
    add("--calibration-dir", help="artifacts that codecs name, for kvmanagerd")
    add("--daemon-flag", action="append", default=[], help="for kvmanagerd, for example --daemon-flag=--threads=8")
    add("--connector", default="{}", metavar="JSON", help="further kv_connector_extra_config of kvmanager's connector")
    add("--disk-dir", type=pathlib.Path, metavar="DIR", help="--parts disk: the daemon's disk is a new folder there (default --out)")
    add("--gpu-memory", type=float, default=0.5, help="vLLM's gpu_memory_utilization (default 0.5)")
    add("--pool-gib", nargs="+", default=[], metavar="GIB",
        help="host memory of the timed engines' pools (default 40; on a CPU 1); CONFIG=GIB: of that configuration's alone")
    add("--capacity-pool-gib", type=float, help="of the pools that are filled (default 8; on a CPU 0.125)")
    add("--engine-cache", type=int, help="tokens of the engine's own cache (default 49152; on a CPU 6144)")
    options = parser.parse_args()
    try:
        options.configs = [] if options.configs == ["none"] else [parse(each) for each in options.configs]
        options.pools, options.pool_gib = pools_of(options.pool_gib, [each.name for each in options.configs])
        options.connector = json.loads(options.connector)
        if not isinstance(options.connector, dict):
            raise ValueError(f"--connector is {options.connector!r}, must be a JSON object")
    except ValueError as error:
        parser.error(str(error))
    for name in ("rounds", "cycles", "batches"):
        if (number := getattr(options, name)) is not None and number < 1:
            parser.error(f"--{name} is {number}, must be at least 1")
    if any(each.codec for each in options.configs) and not os.access(options.daemon, os.X_OK):
        parser.error(f"--daemon: {options.daemon} is not a program: bazel build --config=opt //kvmanager/daemon:kvmanagerd")
    if not options.configs and not options.add:
        parser.error("--configs none: needs --add")
    return options


def pools_of(given: list[str], names: list[str]) -> tuple[dict[str, float], float | None]:
    """--pool-gib: GiB by configuration, and of the others; None: the default."""
    pools, others = {}, None
    for each in given:
        name, _, gib = each.rpartition("=")
        if name and name not in names:
            raise ValueError(f"--pool-gib {each}: {name!r} is not of --configs, {', '.join(names)}")
        if not 0 < float(gib) < 1 << 20:
            raise ValueError(f"--pool-gib {each}: must be above 0")
        if name:
            pools[name] = float(gib)
        else:
            others = float(gib)
    return pools, others


def environment(options: argparse.Namespace, gpu: bool) -> dict[str, str]:
    """Of engines. What the caller set stays."""
    folders = [str(_FOLDER)] + ([str(options.client)] if options.client.exists() else []) + [os.environ.get("PYTHONPATH", "")]
    defaults = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_COLOR": "0", "PYTHONHASHSEED": "0"}
    if not gpu:
        threads = str(max(1, (os.cpu_count() or 1) - 1))
        defaults |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": threads,
                     "VLLM_HOST_IP": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo"}
    return {**{name: os.environ.get(name, value) for name, value in defaults.items()},
            "PYTHONPATH": os.pathsep.join(filter(None, folders))}


def look(options: argparse.Namespace) -> dict[str, Any]:
    """machine.py's facts, by the engines' Python."""
    facts = machine.look(options.python, environment(options, gpu=True))
    if not facts["vllm"]:
        raise SystemExit(f"--python: {options.python} has no vllm. For a CPU, `tools/engines vllm_serve` installs it")
    if not facts["kvmanager"] and any(each.codec for each in options.configs):
        raise SystemExit(f"--client: {options.client} does not exist, and {options.python} has no kvmanager: "
                         "bazel build --config=opt //client/python:package")
    return facts


def scale_of(options: argparse.Namespace, gpu: bool) -> scales.Scale:
    chosen = {(True, False): scales.GPU, (True, True): scales.GPU_QUICK, (False, False): scales.CPU,
              (False, True): scales.CPU_QUICK}[gpu, options.quick]
    changes = {}
    if options.pool_gib:
        changes["pool_bytes"] = int(options.pool_gib * scales.GIB)
    if options.capacity_pool_gib:
        changes["capacity_pool_bytes"] = int(options.capacity_pool_gib * scales.GIB)
    if options.engine_cache:
        changes["engine_cache"] = options.engine_cache
    if options.cycles:
        changes["cycles"] = options.cycles
    if options.batches:
        changes["unique_batches"] = options.batches
    chosen = dataclasses.replace(chosen, **changes)
    try:
        chosen.check()
    except ValueError as error:
        raise SystemExit(f"--engine-cache: {error}") from error
    return chosen


def groups(planned: list, side_by_side: bool) -> list[list]:
    """Of plans(): those that run at once."""
    found: dict[object, list] = {}
    for place, (kind, number, configuration) in enumerate(planned):
        found.setdefault((kind, number) if side_by_side and kind in TIMED else place, []).append((kind, number, configuration))
    return list(found.values())


def plans(options: argparse.Namespace) -> list[tuple[str, int, Configuration]]:
    """(kind, round, configuration) of each engine. The order of configurations turns from round to round."""
    rounds = 1 if options.quick or options.compare else options.rounds
    kinds = ["compare"] if options.compare else [kind for kind in _KINDS if kind in options.parts]
    found = []
    for kind in kinds:
        for number in range(rounds if kind in TIMED else 1):
            first = number % max(1, len(options.configs))
            turned = options.configs[first:] + options.configs[:first]
            # Nothing is loaded without a connector: nothing fits, and there is nothing to compare. kvmanager alone has a disk.
            found += [(kind, number + 1, each) for each in turned
                      if kind in TIMED or (each.codec if kind == "disk" else each.name != ALONE)]
    return found


class Bench:
    """Runs engines one after the other and writes results.json after each."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options, self._end = options, time.monotonic() + options.seconds
        earlier = [(file, json.loads(file.read_text(encoding="utf-8"))) for file in options.add]
        self._results = self._new() if options.configs else {**earlier[0][1], "configurations": {}, "runs": []}
        self._gpu = bool(self._results["machine"]["gpu"])
        self._scale = scales.Scale(**self._results["scale"])
        for file, each in earlier:
            self._take(file, each)
        for each in options.configs:
            self._results["configurations"][each.name] = dataclasses.asdict(each)

    def _new(self) -> dict[str, Any]:
        options, facts = self._options, look(self._options)
        if not facts["gpu"]:
            print("no GPU: a CPU engine at a small scale. Not measured: vLLM's own offload, copies between host and GPU")
            if options.model is None:
                raise SystemExit("--model: a CPU needs the folder of a small model: "
                                 "client/python/engines/vllm_serve/smollm2.py makes one")
        self._model = options.model or scales.write_shape(options.out / "llama-3.1-8b-shape")
        weights = f"model {options.model.name}" if options.model else "Llama-3.1-8B's shape, dummy weights"
        return {"scale": dataclasses.asdict(scale_of(options, bool(facts["gpu"]))), "machine": facts, "weights": weights,
                "side_by_side": options.side_by_side,
                "model": json.loads((self._model / "config.json").read_text(encoding="utf-8")), "configurations": {}, "runs": []}

    def _take(self, file: pathlib.Path, earlier: dict[str, Any]) -> None:
        differing = [key for key in ("scale", "model", "weights") if earlier[key] != self._results[key]]
        if earlier["machine"]["gpu"] != self._results["machine"]["gpu"]:
            differing.append("GPU")
        if differing:
            raise SystemExit(f"--add: {file} has another {', '.join(differing)} than this table")
        first = max((run["round"] for run in self._results["runs"]), default=0)
        for run in earlier["runs"]:
            self._results["runs"].append({**run, "round": run["round"] + first})
        self._results["configurations"].update(earlier["configurations"])

    def run(self) -> bool:
        """Whether all that was asked for was measured."""
        whole = True
        for group in groups(plans(self._options), self._options.side_by_side):
            for run in self._run_group(group):
                whole = whole and "error" not in run
                said = run.get("error") or f"{run['seconds']:.0f} s"
                print(f"{run['kind']}, round {run['round']}, {run['config']}: {said}", flush=True)
                self._results["runs"].append(run)
            self.write()
        return whole

    def _run_group(self, group: list[tuple[str, int, Configuration]]) -> list[dict[str, Any]]:
        """Engines that run at once."""
        left = self._end - time.monotonic()
        runs = [{"kind": kind, "round": number, "config": configuration.name} for kind, number, configuration in group]
        started = []
        for run in runs:
            if run["config"] == OFFLOAD and not self._gpu:
                run["error"] = _NO_GPU
            elif left < _ENGINE_MIN_S:
                run["error"] = f"--seconds {self._options.seconds:.0f} are over"
            else:
                started.append(run)
        with tempfile.TemporaryDirectory(prefix="kvturns") as folder, contextlib.ExitStack() as stack:
            turns = None
            if len(started) > 1:
                turns = stack.enter_context(contextlib.closing(Turns(pathlib.Path(folder) / "turns.sock", len(started))))
            configurations = {configuration.name: configuration for _, _, configuration in group}
            threads = [threading.Thread(target=self._run_one, args=(run, configurations[run["config"]], left, turns)) for run in started]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        return runs

    def _run_one(self, run: dict[str, Any], configuration: Configuration, left: float, turns: Turns | None) -> None:
        began = time.monotonic()
        limit_s = min(left, self._options.engine_seconds)
        try:
            run.update(self._engine(run["kind"], run["round"], configuration, limit_s, turns))
        except Exception as error:  # a thread's: it is one configuration that was not measured
            run["error"] = f"{type(error).__name__}: {error}"
        finally:
            if turns is not None:
                turns.leave()
        run["seconds"] = time.monotonic() - began

    def _engine(self, kind: str, number: int, configuration: Configuration, limit_s: float,
                turns: Turns | None) -> dict[str, Any]:
        options, name = self._options, f"{kind}-{number}-{configuration.name}"
        pool_bytes = self._scale.capacity_pool_bytes
        if kind not in ("capacity", "disk"):
            pool_bytes = int(options.pools.get(configuration.name, self._scale.pool_bytes / scales.GIB) * scales.GIB)
        with (tempfile.TemporaryDirectory(prefix="kvserve") as text,
              tempfile.TemporaryDirectory(prefix="kvserve-disk", dir=options.disk_dir or options.out) as disk):
            folder = pathlib.Path(text)
            plan = {"kind": kind, "scale": dataclasses.asdict(self._scale), "model": str(self._model),
                    "dummy": options.model is None, "gpu": self._gpu,
                    "gpu_memory": options.gpu_memory / (len(options.configs) if turns else 1),
                    "turns": str(turns.path) if turns else "", "token_bytes": scales.token_bytes(self._results["model"]),
                    "compression_max": configuration.compression_max, "metrics": ""}
            if configuration.codec is None:
                return self._measure(name, folder, {**plan, "transfer": configuration.transfer("", pool_bytes, {})}, limit_s)
            flags = options.daemon_flag + (["--calibration-dir", options.calibration_dir] if options.calibration_dir else [])
            if kind == "disk":
                flags = [f"--disk-path={disk}", f"--disk-bytes={_DISK_POOLS * pool_bytes}", *flags]
            try:
                log = options.out / f"{name}-daemon.log"
                with processes.Daemon(str(options.daemon), folder, pool_bytes, flags, log) as daemon:
                    # What is not a matter of time is loaded, whatever is faster.
                    settings = options.connector if kind in TIMED else {"plan": "load", **options.connector}
                    transfer = configuration.transfer(daemon.address, pool_bytes, settings)
                    plan |= {"transfer": transfer, "metrics": daemon.metrics}
                    return self._measure(name, folder, plan, limit_s)
            except RuntimeError as error:
                return {"error": str(error)}

    def _measure(self, name: str, folder: pathlib.Path, plan: dict, limit_s: float) -> dict[str, Any]:
        files = folder / "plan.json", folder / "result.json"
        files[0].write_text(json.dumps(plan), encoding="utf-8")
        command = [self._options.python, str(_FOLDER / "engine.py"), *map(str, files)]
        log = self._options.out / f"{name}.log"
        wrong = processes.run(command, {**environment(self._options, self._gpu), "TMPDIR": str(folder)}, log, limit_s)
        result = json.loads(files[1].read_text(encoding="utf-8")) if files[1].exists() else {}
        if wrong:
            result.setdefault("error", f"the engine {wrong}: see {log.name}")
        return result

    def faults(self) -> list[str]:
        """What was compared and is not as it must be."""
        configured = [Configuration(**each) for each in self._results["configurations"].values()]
        return [fault for each in configured for run in self._results["runs"] if run["config"] == each.name
                for fault in (*compared_faults(each.label, each.lossless, run.get("compared", [])),
                              *disk_faults(each.label, run.get("requests", [])))]

    def write(self) -> str:
        """results.json and table.md. Returns the table."""
        known = [ALONE, OFFLOAD, *CODECS]
        names = sorted(self._results["configurations"], key=lambda name: known.index(name) if name in known else len(known))
        columns = {Configuration(**self._results["configurations"][name]):
                   figures([run for run in self._results["runs"] if run["config"] == name]) for name in names}
        facts = self._results["machine"]
        token_bytes = scales.token_bytes(self._results["model"])
        paired = bool(self._results.get("side_by_side"))
        made = Table(columns, self._scale, token_bytes, facts["limits"], paired).markdown() + NOTE
        text = head(self._results, whole=any(self._scale.covers(each) for each in (scales.GPU, scales.CPU))) + made
        (self._options.out / "results.json").write_text(json.dumps(self._results), encoding="utf-8")
        (self._options.out / "table.md").write_text(text, encoding="utf-8")
        return text


def main() -> int:
    options = arguments()
    options.out = options.out.resolve()
    options.out.mkdir(parents=True, exist_ok=True)
    bench = Bench(options)
    whole = bench.run()
    print(bench.write())
    for fault in (faults := bench.faults()):
        print(fault)
    return 0 if whole and not faults else 1


if __name__ == "__main__":
    sys.exit(main())
