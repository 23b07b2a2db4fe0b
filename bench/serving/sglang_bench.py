#!/usr/bin/env python3
"""Measures real SGLang servers side by side: alone, with SGLang's own storage in files, with kvmanager under several codecs.

    sglang_bench.py --out DIR                                      # a GPU: Llama-3.1-8B's shape, dummy weights
    sglang_bench.py --out DIR --quick --configs alone raw          # a few requests of each way: does it work?
    sglang_bench.py --out DIR --lengths 8192 --prompts 12 --configs alone files raw k4v3
    sglang_bench.py --out DIR --quick --python ENV/bin/python --model SMOLLM2 --configs alone files raw    # a CPU

One server runs at a time, with HiCache's host pool in every configuration. Prompts are token ids, asked for over HTTP one by
one: cold; then, once all pages are stored, in passes, each behind a flush of the engine's own caches, so that they come from
the storage. Each request is followed by one of the same prompt, then resident in the engine's cache. SGLang's files are also
read after they left the page cache. kvmanager's server is ended by kill -9, and another finds the prompts in the same daemon.

SGLang alone computes in every pass, which is what the others are compared with, beside their own cold prompts.

DIR gets results.json (every request), table.md and the logs. The exit status is 1 if something was not measured, if a prompt
that is stored finds nothing, or if codec raw leads to other token ids than computing. The servers' Python needs sglang and the
kvmanager package (--client). On a CPU launch.py of client/python/engines/sglang_serve stands in for SGLang's kernels.
"""

from __future__ import annotations

import argparse
import dataclasses
import http.client
import json
import os
import pathlib
import sys
import tempfile
import time
from typing import Any, Callable

import machine
import processes
from configurations import CODECS, Configuration, parse
from counters import daemon_metrics
from rows import head
from scale import GIB, token_bytes, write_shape
from sglang_summary import faults, figures
from sglang_table import ALONE, FILES, NOTE, SGLANG, Table
from sglang_workload import Record, Scale, Stored, Work

from sglang_server import SglangServer, leave_page_cache  # in a folder that sglang_workload adds

GPU = Scale(lengths=(8192, 32768), prompts=(12, 4), passes=3, pool_bytes=40 * GIB, engine_cache=48 * 1024, host_ratio=4)
GPU_QUICK = dataclasses.replace(GPU, prompts=(4, 2), passes=1)
CPU = Scale(lengths=(2048,), prompts=(8,), passes=3, pool_bytes=GIB, engine_cache=16 * 1024)
CPU_QUICK = dataclasses.replace(CPU, prompts=(3,), passes=1)
_FAILURES = (AssertionError, OSError, RuntimeError, ValueError, KeyError, http.client.HTTPException)  # of a server or a daemon
_SERVER_MIN_S = 60.0  # less time left than this starts no server
_START_S = 900.0  # kernels may have to be compiled


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    default = [*SGLANG, "raw", "k4v3"]
    add("--out", required=True, type=pathlib.Path, metavar="DIR", help="results go there")
    add("--configs", nargs="+", default=default, metavar="NAME",
        help=f"of {', '.join((*SGLANG, *CODECS))}, or NAME=CODEC for another codec of kvmanager; default: {' '.join(default)}")
    add("--lengths", nargs="+", type=int, metavar="TOKENS", help="of prompts (default 8192 32768; on a CPU 2048)")
    add("--prompts", nargs="+", type=int, metavar="COUNT", help="of each length, or of all (default 12 4; on a CPU 8)")
    add("--passes", type=int, help="over the stored prompts, each behind a flush (default 3)")
    add("--output", type=int, help="tokens that follow a prompt (default 8)")
    add("--quick", action="store_true", help="one pass over fewer prompts: says whether it works, not how fast")
    add("--add", nargs="+", default=[], type=pathlib.Path, metavar="RESULTS",
        help="results.json of earlier runs of the same scale on the same machine, for what is not among --configs")
    add("--seconds", type=float, default=float("inf"), help="for the whole run: what does not fit is not measured")
    add("--model", type=pathlib.Path, metavar="DIR",
        help="a Hugging Face folder; default, on a GPU: Llama-3.1-8B's shape with dummy weights. A CPU needs a small one: "
        "client/python/engines/vllm_serve/smollm2.py makes it")
    add("--python", default=sys.executable, help="with sglang; on a CPU that of tools/engines sglang_serve (default: this one)")
    add("--daemon", type=pathlib.Path, default=processes.ROOT / "bazel-bin/kvmanager/daemon/kvmanagerd", help="kvmanagerd")
    add("--client", type=pathlib.Path, default=processes.ROOT / "bazel-bin/client/python/package",
        help="folder of the kvmanager package, put before others if it is there (default bazel-bin/client/python/package)")
    add("--daemon-flag", action="append", default=[], help="for kvmanagerd, for example --daemon-flag=--threads=8")
    add("--server-flag", action="append", default=[],
        help="for SGLang, behind the flags that are set here, for example --server-flag=--hicache-mem-layout=page_first")
    add("--backend", default="{}", metavar="JSON",
        help="further extra_config of kvmanager's backend, for example '{\"staging_mib\": 1024}'")
    add("--pool-gib", type=float, help="the daemon's host memory (default 40; on a CPU 1)")
    add("--files-dir", type=pathlib.Path, metavar="DIR", help="SGLang's files are in a new folder there (default --out)")
    options = parser.parse_args()
    try:
        options.configs = [parse(each, SGLANG) for each in options.configs]
        options.backend = json.loads(options.backend)
        if not isinstance(options.backend, dict):
            raise ValueError(f"--backend is {options.backend!r}, must be a JSON object")
    except ValueError as error:
        parser.error(str(error))
    if len({each.name for each in options.configs}) < len(options.configs):
        parser.error("--configs has a name twice")
    if any(each.codec for each in options.configs) and not os.access(options.daemon, os.X_OK):
        parser.error(f"--daemon: {options.daemon} is not a program: bazel build --config=opt //kvmanager/daemon:kvmanagerd")
    return options


def environment(options: argparse.Namespace) -> dict[str, str]:
    """Of servers, beside what SglangServer sets."""
    folders = ([str(options.client)] if options.client.exists() else []) + [os.environ.get("PYTHONPATH", "")]
    return {"PYTHONPATH": os.pathsep.join(filter(None, folders))}


def look(options: argparse.Namespace) -> dict[str, Any]:
    """machine.py's facts, by the servers' Python."""
    facts = machine.look(options.python, environment(options))
    if not facts["sglang"]:
        raise SystemExit(f"--python: {options.python} has no sglang. For a CPU, `tools/engines sglang_serve` installs it")
    if not facts["kvmanager"] and any(each.codec for each in options.configs):
        raise SystemExit(f"--client: {options.client} does not exist, and {options.python} has no kvmanager: "
                         "bazel build --config=opt //client/python:package")
    if not facts["gpu"] and options.model is None:
        raise SystemExit("--model: a CPU needs the folder of a small model: "
                         "client/python/engines/vllm_serve/smollm2.py makes one")
    return facts


def scale_of(options: argparse.Namespace, gpu: bool) -> Scale:
    chosen = {(True, False): GPU, (True, True): GPU_QUICK, (False, False): CPU, (False, True): CPU_QUICK}[gpu, options.quick]
    lengths = tuple(options.lengths or chosen.lengths)
    known = dict(zip(chosen.lengths, chosen.prompts))
    prompts = tuple(options.prompts or (known.get(length, min(chosen.prompts)) for length in lengths))
    return dataclasses.replace(
        chosen, lengths=lengths, prompts=prompts * len(lengths) if len(prompts) == 1 else prompts,
        passes=chosen.passes if options.passes is None else options.passes,
        output=chosen.output if options.output is None else options.output,
        pool_bytes=chosen.pool_bytes if options.pool_gib is None else int(options.pool_gib * GIB),
    )


def stored_in(folder: pathlib.Path) -> Stored:
    """SGLang's own storage: a file is a page."""
    def count() -> tuple[int, int]:
        sizes = [file.stat().st_size for file in folder.glob("*.bin")]
        return len(sizes), sum(sizes)

    return Stored(count, lambda: leave_page_cache(str(folder)))


def published_by(metrics: str) -> Stored:
    """kvmanager's storage: a published block is a page."""
    return Stored(lambda: (int(daemon_metrics(metrics).get("kvmanager_published_blocks_total", 0)), 0))


class Bench:
    """Runs the configurations one after the other. Writes results.json after each pass: it is there if this is ended, too."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options, self._end = options, time.monotonic() + options.seconds
        facts = look(options)
        self._gpu = bool(facts["gpu"])
        self._model = (options.model or write_shape(options.out / "llama-3.1-8b-shape")).resolve()
        config = json.loads((self._model / "config.json").read_text(encoding="utf-8"))
        self._scale, self._token = scale_of(options, self._gpu), token_bytes(config)
        try:
            self._scale.check(self._token)
        except ValueError as error:
            raise SystemExit(str(error)) from error
        if not self._gpu:
            print("no GPU: servers on a CPU at a small scale. Not measured: copies between host and GPU")
        self._vocabulary = config["vocab_size"]
        weights = f"model {options.model.name}" if options.model else "Llama-3.1-8B's shape, dummy weights"
        self._results: dict[str, Any] = {
            "scale": dataclasses.asdict(self._scale), "machine": facts, "weights": weights, "model": config,
            "server_flags": options.server_flag, "daemon_flags": options.daemon_flag, "backend": options.backend, "runs": [],
        }
        for file in options.add:
            self._take(file, json.loads(file.read_text(encoding="utf-8")))

    def _take(self, file: pathlib.Path, earlier: dict[str, Any]) -> None:
        ours = json.loads(json.dumps(self._results))
        differing = [key for key in ("scale", "model", "weights") if earlier[key] != ours[key]]
        if earlier["machine"]["gpu"] != ours["machine"]["gpu"]:
            differing.append("GPU")
        if differing:
            raise SystemExit(f"--add: {file} has another {', '.join(differing)} than this table")
        known = {each.name for each in self._options.configs} | {run["config"]["name"] for run in self._results["runs"]}
        self._results["runs"] += [run for run in earlier["runs"] if run["config"]["name"] not in known]

    def run(self) -> bool:
        """Whether all that was asked for was measured."""
        for configuration in self._options.configs:
            run: dict[str, Any] = {"config": dataclasses.asdict(configuration), "requests": [], "stored": []}
            run["error"] = "was ended before it was measured"
            self._results["runs"].append(run)
            began = time.monotonic()
            try:
                if self._end - began < _SERVER_MIN_S:
                    raise TimeoutError(f"--seconds {self._options.seconds:.0f} are over")
                self._measure(configuration, run)
                del run["error"]
            except _FAILURES as error:
                (said, *more) = str(error).splitlines() or [""]
                see = f" see {configuration.name}.log" if more else ""  # a server's last lines
                run["error"] = f"{type(error).__name__}: {said}{see}"
            run["seconds"] = time.monotonic() - began
            print(f"{configuration.name}: {run.get('error') or format(run['seconds'], '.0f') + ' s'}", flush=True)
            self.write()
        return not any("error" in run for run in self._results["runs"])

    def _measure(self, configuration: Configuration, run: dict[str, Any]) -> None:
        options, name = self._options, configuration.name
        with tempfile.TemporaryDirectory(prefix="kvserve") as text:
            if name == ALONE:
                self._serve(name, run, None, None)
            elif name == FILES:
                with tempfile.TemporaryDirectory(prefix="sglang-files", dir=options.files_dir or options.out) as files:
                    self._serve(name, run, files, stored_in(pathlib.Path(files)))
            else:
                log = options.out / f"{name}-daemon.log"
                with processes.Daemon(str(options.daemon), pathlib.Path(text), self._scale.pool_bytes, options.daemon_flag,
                                      log) as daemon:
                    backend = {"address": daemon.address, "codec": configuration.codec, **options.backend}
                    self._serve(name, run, backend, published_by(daemon.metrics))

    def _serve(self, name: str, run: dict[str, Any], storage: dict | str | None, stored: Stored | None) -> None:
        """storage: as SglangServer takes it; a dictionary, which is kvmanager's, outlives a server."""
        def say(line: str) -> None:
            print(f"  {name}: {line}", flush=True)
            self._write_results()

        record = Record(say, self._end, run["requests"], run["stored"])
        work = Work(self._scale, self._vocabulary, record, stored)
        restarts = isinstance(storage, dict)
        self._with_server(name, storage, work.first, record, killed=restarts)
        if restarts:
            self._with_server(f"{name}-restarted", storage, work.restarted, record)

    def _with_server(self, name: str, storage: dict | str | None, work: Callable[[SglangServer], None], record: Record,
                     killed: bool = False) -> None:
        """killed: the server ends by kill -9."""
        scale, flags = self._scale, ["--skip-tokenizer-init", "--random-seed", "1"]
        flags += ["--context-length", str(scale.context), "--max-total-tokens", str(scale.engine_cache)]
        flags += ["--hicache-ratio", str(scale.host_ratio)]  # pages wait in the host pool while they are stored
        if self._gpu:
            flags += ["--disable-cuda-graph"]  # what counts is prefill
        if self._options.model is None:
            flags += ["--load-format", "dummy"]
        began = time.monotonic()
        server = SglangServer(str(self._model), storage, gpu=self._gpu, python=self._options.python,
                              flags=flags + self._options.server_flag, environment=environment(self._options))
        with server:
            try:
                server.ready(min(_START_S, max(0.0, self._end - began)))
                record.say(f"started in {time.monotonic() - began:.0f} s")
                work(server)
            finally:
                (self._options.out / f"{name}.log").write_text(server.log(), encoding="utf-8")
            if killed:
                server.kill()

    def faults(self) -> list[str]:
        return [fault for run in self._results["runs"] for fault in faults(Configuration(**run["config"]), run)]

    def write(self) -> str:
        """results.json and table.md. Returns the table."""
        facts = self._results["machine"]
        known = [*SGLANG, *CODECS]
        runs = sorted(self._results["runs"], key=lambda run: (known.index(run["config"]["name"])
                                                              if run["config"]["name"] in known else len(known)))
        columns = {Configuration(**run["config"]): figures(run) for run in runs}
        made = Table(columns, self._scale.lengths, self._token, facts["limits"]["load_gb_s"]).markdown() + NOTE
        text = head(self._results, whole=self._scale in (GPU, CPU)) + made
        self._write_results()
        (self._options.out / "table.md").write_text(text, encoding="utf-8")
        return text

    def _write_results(self) -> None:
        whole = self._options.out / "results.new"
        whole.write_text(json.dumps(self._results), encoding="utf-8")
        whole.replace(self._options.out / "results.json")


def main() -> int:
    options = arguments()
    options.out = options.out.resolve()
    options.out.mkdir(parents=True, exist_ok=True)
    bench = Bench(options)
    whole = bench.run()
    print(bench.write())
    for fault in (found := bench.faults()):
        print(fault)
    return 0 if whole and not found else 1


if __name__ == "__main__":
    sys.exit(main())
