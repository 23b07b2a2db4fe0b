"""python -m kvmanager.calibrate: from a Hugging Face model and text to a calibration artifact."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from typing import Any

import numpy as np
import torch

import kvmanager
from kvmanager.calibrate import attention, models, texts
from kvmanager.calibrate.capture import write_capture
from kvmanager.calibrate.probe import (Factors, counted_positions, divergence, divergences_of_values,
                                       measure_sensitivity)
from kvmanager.calibrate.progress import Progress
from kvmanager.evaluate.measure import Artifacts, attach, logits_of, measure, pool_bytes
from kvmanager.programs import Daemon, program

_LAG_PAGES = 2  # the daemon's default: what is near is raw
_ALLOCATIONS = ("model", "head")
_MODE = "balanced"
_BASES = ("trained", "hadamard")
_BASIS_BITS = 2.0  # of V, where they are compared
_COMPARED = "zack+hack:k_bits=1.5,v_bits=1"  # as coarse as what a user would want, so that allocations differ


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m kvmanager.calibrate", description="Trains a calibration artifact on "
                                     "a Hugging Face model and text like what it will read.",
                                     epilog="docs/calibration.md says what each step does.")
    add = parser.add_argument
    add("--model", required=True, help="folder, repository or .gguf file that transformers loads")
    add("--text", required=True, action="append", metavar="FILE", help="text to train on, UTF-8; may be repeated")
    add("--codec", required=True, action="append",
        help="what to train: zack+hack, million:m=32,bits=8, ...; may be repeated")
    add("--out", required=True, metavar="FILE.safetensors")
    add("--windows", type=int, default=20, help="windows to train on, evenly from all texts (20, or as many as there are)")
    add("--window", type=int, default=2048, help="tokens of a window (2048)")
    add("--sinks", type=int, default=64,
        help="first tokens of each window that are left out, since caches keep them raw (64)")
    add("--copy-windows", type=int, default=None,
        help="of those, how many are random strings that come again (a fifth)")
    add("--probe", choices=("layer", "head", "off"), default=None,
        help="measure what an error costs per layer and side, or per KV head, too (head on a GPU, else layer)")
    add("--probe-windows", type=int, default=1, help="windows of prose, and as many to copy, that probes run over (1)")
    add("--check-windows", type=int, default=2, help="windows held out to measure the defaults on; 0: do not (2)")
    add("--warn-percent", type=float, default=10, help="warn where a default loses more on held-out windows (10)")
    add("--seed", type=int, default=0, help="of k-means and of the strings to copy")
    add("--name", default="", help="the model's name in the artifact (the last part of --model)")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--dtype", choices=("float32", "bfloat16", "float16"), default=None, help="(float32 on a CPU, else bfloat16)")
    add("--device-pool-bytes", default="4GiB", help="of the daemon that measures, for a model on a GPU (4GiB)")
    add("--threads", type=int, default=0, help="of training and of torch on a CPU; 0: one per usable CPU")
    add("--work-dir", default=None, metavar="DIR", help="for the capture while it is needed (the folder of --out)")
    add("--kvctl", default="", metavar="PROGRAM", help="(the wheel's, or PATH's)")
    add("--kvmanagerd", default="", metavar="PROGRAM", help="(the wheel's, or PATH's)")
    add("--json", default="", metavar="FILE", help="write the report as JSON")
    add("--quiet", action="store_true", help="no progress")
    args = parser.parse_args()
    for option, value, low in (("--windows", args.windows, 1), ("--window", args.window, 64), ("--sinks", args.sinks, 0),
                               ("--probe-windows", args.probe_windows, 1), ("--check-windows", args.check_windows, 0),
                               ("--threads", args.threads, 0), ("--seed", args.seed, 0)):
        if value < low:
            parser.error(f"{option}: {value}; must be at least {low}")
    if args.window % texts.PAGE_TOKENS:
        parser.error(f"--window: {args.window}; must be a multiple of {texts.PAGE_TOKENS}, a page")
    if args.sinks % texts.PAGE_TOKENS or args.sinks >= args.window:
        parser.error(f"--sinks: {args.sinks}; must be a multiple of {texts.PAGE_TOKENS} below --window {args.window}")
    if not args.out.endswith(".safetensors"):
        parser.error(f"--out: {args.out!r}; must end in .safetensors")
    folder = os.path.dirname(os.path.abspath(args.out))
    if not os.access(folder, os.W_OK):
        parser.error(f"--out: {folder} is not a folder that can be written to")
    args.work_dir = args.work_dir or folder
    args.probe = args.probe or ("layer" if args.device == "cpu" else "head")
    if args.copy_windows is None:
        args.copy_windows = args.windows // 5
    if not 0 <= args.copy_windows < args.windows:
        parser.error(f"--copy-windows: {args.copy_windows}; must be 0..{args.windows - 1}, below --windows")
    args.dtype = args.dtype or ("float32" if args.device == "cpu" else "bfloat16")
    return args


class Calibration:
    """One run, step by step; `report` is what --json writes."""

    def __init__(self, args: argparse.Namespace):
        self._args = args
        self._kvctl = program("kvctl", args.kvctl)
        self._stacked = any(codec.partition(":")[0] in ("zack+hack", "default") for codec in args.codec)
        measured = args.check_windows > 0 or (self._stacked and args.probe != "off")
        self._kvmanagerd = program("kvmanagerd", args.kvmanagerd) if measured else ""
        if args.threads:
            torch.set_num_threads(args.threads)
        self.report: dict[str, Any] = {"out": args.out, "codecs": args.codec, "seconds": {}}
        self._model, tokenizer = models.load(args.model, args.device, args.dtype, attention.NAME)
        self._geometry = models.geometry_of(self._model)
        self._name = args.name or models.name_of(self._model)
        before = texts.begins_with(tokenizer)
        ids = [texts.tokenize(tokenizer, path) for path in args.text]
        prose, self._held_out = texts.split(ids, args.window, args.windows - args.copy_windows, args.check_windows, before)
        if args.check_windows and not self._held_out:
            self._say("warning: --text has one window alone: the defaults are not measured on held-out text")

        def copied(at: int) -> texts.Window:
            return texts.copy_window(tokenizer, prose[at % len(prose)][len(before):], args.window, args.seed + at, before)

        self._trained = prose + [copied(args.probe_windows + at).ids for at in range(args.copy_windows)]
        self._probed: list[texts.Window] = []
        if self._stacked and args.probe != "off":
            for at in range(args.probe_windows):
                self._probed += [texts.Window(prose[at * len(prose) // args.probe_windows], 0), copied(at)]
            for window in self._probed:
                counted_positions(window, args.sinks, _LAG_PAGES)
        self.report.update(model=self._name, layers=len(self._geometry.layers), kv_heads=self._geometry.kv_heads,
                           head_dim=self._geometry.head_dim, tokens=args.window * len(self._trained), sinks=args.sinks)

    def run(self) -> None:
        args = self._args
        with tempfile.TemporaryDirectory(prefix=".kvmanager-calibrate-", dir=args.work_dir) as folder:
            trained = os.path.join(folder, "trained.safetensors")
            self._train(folder, trained)
            if self._probed:
                self._measure(folder, trained)
            else:
                os.replace(trained, args.out)
        if self._held_out:
            self._step("check", self._check)

    def _measure(self, folder: str, trained: str) -> None:
        measured, candidate = (os.path.join(folder, name) for name in ("measured.safetensors", "candidate.safetensors"))
        found = {"measured.parts": self._args.probe, "measured.mode": _MODE,
                 "measured.windows": f"{len(self._probed) // 2} of prose, {len(self._probed) // 2} to copy"}
        found["zack_hack.v_basis"] = self._step("basis", lambda: self._choose_basis(trained, measured, candidate))
        self._add(trained, measured, candidate, {}, found)
        costs = self._step("probe", lambda: self._probe(candidate))
        # The cost of a unit of energy hardly depends on the basis: both modes get what was measured with one.
        tensors = {f"zack_hack.{mode}.sensitivity": costs for mode in ("joint", "balanced")}
        self._add(trained, measured, candidate, tensors, found)
        found["zack_hack.allocation"] = self._step("allocation", lambda: self._choose_allocation(candidate))
        self._add(trained, measured, self._args.out, tensors, found)

    def _add(self, artifact: str, measured: str, out: str, tensors: dict[str, np.ndarray], about: dict[str, str]) -> None:
        """Writes `out`: the artifact with what was measured. kvctl alone writes artifacts."""
        from safetensors.numpy import save_file

        save_file(tensors, measured, about)
        self._kvctl_calibrate("--artifact", artifact, "--measured", measured, "--out", out)

    def _choose_basis(self, trained: str, measured: str, candidate: str) -> str:
        """In which basis codes of V change predictions less, over the windows that are probed with."""
        from safetensors.numpy import load_file

        if self._geometry.head_dim & (self._geometry.head_dim - 1):
            return "trained"  # there is no Hadamard matrix
        bases = {}
        for basis in _BASES:
            self._add(trained, measured, candidate, {}, {"zack_hack.v_basis": basis})
            bases[basis] = Factors(load_file(candidate), _MODE)
        found = divergences_of_values(self._model, self._geometry, bases, self._probed, average_bits=_BASIS_BITS,
                                      sinks=self._args.sinks, lag_pages=_LAG_PAGES, quiet=self._args.quiet)
        return self._chosen("V's basis", found)

    def _chosen(self, what: str, divergences: dict[str, float]) -> str:
        chosen = min(divergences, key=lambda each: divergences[each])
        self.report.setdefault("choices", []).extend(
            {"what": what, "option": each, "divergence": value, "chosen": each == chosen}
            for each, value in divergences.items())
        return chosen

    def _say(self, line: str) -> None:
        print(f"calibrate: {line}", file=sys.stderr, flush=True)

    def _step(self, name: str, work: Any) -> Any:
        begun = time.monotonic()
        done = work()
        self.report["seconds"][name] = round(time.monotonic() - begun, 1)
        return done

    def _kvctl_calibrate(self, *options: str) -> dict[str, Any]:
        with tempfile.NamedTemporaryFile("r", suffix=".json", encoding="utf-8") as said:
            command = [self._kvctl, "calibrate", *options, "--json", said.name]
            done = subprocess.run(command, stdout=subprocess.DEVNULL, check=False)
            if done.returncode:
                raise RuntimeError(f"{self._kvctl} calibrate ended with {done.returncode}; what it said is above")
            with open(said.name, encoding="utf-8") as file:
                return json.load(file)

    def _train(self, folder: str, out: str) -> None:
        args = self._args
        with tempfile.TemporaryDirectory(dir=folder) as capture:
            self._step("capture", lambda: write_capture(self._model, self._geometry, self._name, self._trained, args.sinks,
                                                        capture, args.quiet))
            options = ["--capture", capture, "--out", out, "--seed", str(args.seed), "--threads", str(args.threads)]
            for codec in args.codec:
                options += ["--codec", codec]
            said = self._step("train", lambda: self._kvctl_calibrate(*options, *["--quiet"] * args.quiet))
        self.report["parts"] = said["parts"]

    def _probe(self, artifact: str) -> np.ndarray:
        from safetensors.numpy import load_file

        args = self._args
        return measure_sensitivity(self._model, self._geometry, Factors(load_file(artifact), _MODE), self._probed,
                                   sinks=args.sinks, lag_pages=_LAG_PAGES, per_head=args.probe == "head",
                                   quiet=args.quiet)

    def _daemon(self, artifacts: Artifacts) -> Daemon:
        flags = () if self._args.device == "cpu" else ("--device-pool-bytes", self._args.device_pool_bytes)
        return Daemon(self._kvmanagerd, calibration_dir=artifacts.path, flags=flags,
                      host_pool_bytes=pool_bytes(self._geometry.raw_token_bytes, self._args.window))

    def _through_daemon(self) -> None:
        self._model.set_attn_implementation("kvmanager")

    @torch.no_grad()
    def _choose_allocation(self, artifact: str) -> str:
        """Which allocation's predictions are nearer to raw's, over the windows that were probed with."""
        self._through_daemon()
        divergences = {}
        with Artifacts() as artifacts, self._daemon(artifacts) as daemon, \
                Progress("choosing the allocation", 3 * len(self._probed), self._args.quiet) as progress:
            base = artifacts.spec(f"{_COMPARED},calibration={artifact}")
            codecs = {"raw": "raw"} | {each: f"{base},allocation={each}" for each in _ALLOCATIONS}
            done = 0
            for window in self._probed:
                positions = counted_positions(window, self._args.sinks, _LAG_PAGES)
                raw = None
                for each, codec in codecs.items():
                    with attach(self._model, daemon.address, codec, lag_pages=_LAG_PAGES, name=self._name,
                                calibration_dir=artifacts.path) as attachment:
                        logits = torch.cat([rows[positions[(positions >= first) & (positions < first + len(rows))] - first]
                                            for first, rows in logits_of(self._model, attachment, window.ids)]).float()
                    if raw is None:
                        raw = logits.log_softmax(-1)
                    else:
                        share = float(divergence(raw, logits).mean()) / len(self._probed)
                        divergences[each] = divergences.get(each, 0.0) + share
                    done += 1
                    progress.update(done)
        return self._chosen("zack+hack's allocation", divergences)

    def _check(self) -> None:
        """The defaults, on windows that nothing was trained or chosen on."""
        self._through_daemon()
        wanted = []
        for codec in self._args.codec:
            spec = "default" if codec.partition(":")[0] in ("zack+hack", "default") else codec
            wanted.append(f"{spec}{',' if ':' in spec else ':'}calibration={self._args.out}")
        wanted = list(dict.fromkeys(wanted))
        with Artifacts() as artifacts, self._daemon(artifacts) as daemon, \
                Progress("measuring on held-out windows", (1 + len(wanted)) * len(self._held_out),
                         self._args.quiet) as progress:
            done = 0

            def step() -> None:
                nonlocal done
                done += 1
                progress.update(done)

            results = [measure(self._model, daemon.address, artifacts.spec(codec), self._held_out, lag_pages=_LAG_PAGES,
                               label=codec, calibration_dir=artifacts.path, name=self._name, progress=step)
                       for codec in ["raw", *wanted]]
        raw = results[0]
        self.report["held_out"] = {"windows": len(self._held_out), "raw_perplexity": raw.perplexity(), "codecs": []}
        self.report["warnings"] = []
        for each in results[1:]:
            change = each.change(raw)
            self.report["held_out"]["codecs"].append(
                {"codec": each.codec, "canonical": each.canonical, "token_bytes": each.token_bytes,
                 "perplexity": each.perplexity(), "change": change, "change_error": each.change_error(raw)})
            if not 100 * change <= self._args.warn_percent:
                self.report["warnings"].append(
                    f"this artifact measures {100 * change:+.0f}% on held-out windows: {each.codec} has perplexity "
                    f"{each.perplexity():.3f}, raw {raw.perplexity():.3f}. Train on more text, or on text more like what "
                    "the model reads, or take a codec of more bytes (python -m kvmanager.evaluate compares them)")

    def summary(self) -> str:
        report = self.report
        seconds = ", ".join(f"{value:.0f} {name}" for name, value in report["seconds"].items())
        lines = [f"{report['out']}: {os.path.getsize(report['out']) / 2**20:.1f} MiB, for model {report['model']}",
                 f"  {report['layers']} layers, {report['kv_heads']} KV heads of {report['head_dim']}; "
                 f"{report['tokens']} tokens, of which each window's first {report['sinks']} were left out",
                 f"  seconds: {seconds}"]
        for choice in report.get("choices", []):
            lines.append(f"  {choice['what']} {choice['option']}: divergence {choice['divergence']:.4f}"
                         + ("  <- chosen" if choice["chosen"] else ""))
        held_out = report.get("held_out")
        if held_out:
            lines.append(f"  on {held_out['windows']} held-out windows, raw perplexity {held_out['raw_perplexity']:.3f}:")
            for each in held_out["codecs"]:
                lines.append(f"    {each['codec']}: {100 * each['change']:+.2f}% at {each['token_bytes']:.1f} bytes per "
                             "token and KV head")
        folder = os.path.dirname(os.path.abspath(report["out"]))
        name = os.path.splitext(os.path.basename(report["out"]))[0]
        codec = "default" if self._stacked else report["codecs"][0]
        spec = f"{codec}{',' if ':' in codec else ':'}calibration={name}"
        lines += ["Next:", f"  python -m kvmanager.evaluate --model {self._args.model} --text OTHER --calibration-dir {folder} "
                  f"--codec {spec}",
                  f"  kvmanagerd --calibration-dir {folder} ...   and a cache with codec {spec}"]
        return "\n".join(lines)


def main() -> int:
    args = arguments()
    try:
        run = Calibration(args)
        run.run()
    except (ValueError, OSError, RuntimeError, kvmanager.Error) as error:
        print(f"calibrate: {error}", file=sys.stderr)
        return 1
    print(run.summary())
    for warning in run.report.get("warnings", []):
        print(f"calibrate: warning: {warning}", file=sys.stderr)
    if args.json:
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump(run.report, file, indent=2)
            file.write("\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
