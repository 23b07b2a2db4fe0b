#!/usr/bin/env python3
"""Codecs of the daemon beside published methods: one run, one protocol, one table.

    compare.py --model DIR --text dev=FILE --text book=FILE --daemon kvmanagerd --codec hack --json OUT.json

Each variant reads the same windows of text and answers the same retrieval cases; differences from raw are paired. Bytes
are per token and KV head of what is stored encoded, K and V together, metadata included. Peers run in torch, with our sinks and
window (`--sinks`, `--lag`) and with their own. A daemon's codec runs in the daemon; `--emulate` runs hack's arithmetic in
torch, where there is none. With --json a run goes on where it was stopped.

Needs torch, transformers and safetensors; for --codec also the built package on PYTHONPATH
(bazel-bin/client/python/package).
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import pathlib
import re
import sys
import time
from typing import Any, Iterator

import package

HAVE_CLIENT = package.find()

import torch
from kvmanager.quality import protocol, tasks
from paged_attention import NAME, PagedAttention
from quantisers import parse_hack, peer
from report import Measured, beside_peers, table
from drawing import write_svg
from variants import Bench, Variant, daemon, daemon_flags

PEERS = ("fp8", "kivi4", "kivi2", "int4", "tq4", "tq3", "tq2")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", required=True, type=pathlib.Path, help="a Hugging Face folder")
    add("--text", action="append", default=[], metavar="NAME=FILE", help="held-out text; may be given again")
    add("--codec", action="append", default=[], help="a codec of the daemon; may be given again")
    add("--emulate", action="append", default=[], help="hack in torch, for example hack:k_bits=4,v_bits=3")
    add("--peers", nargs="*", default=list(PEERS))
    add("--peer-windows", nargs="*", choices=("ours", "own"), default=["ours", "own"])
    add("--sinks", type=int, default=64, help="tokens at the beginning that stay raw, of peers with our window")
    add("--lag", type=int, default=2, help="full pages before a query's own that it reads raw")
    add("--windows", type=int, default=8)
    add("--window", type=int, default=2048, help="tokens")
    add("--tasks", nargs="*", choices=tasks.TASKS, default=list(tasks.TASKS))
    add("--prompts", type=int, default=20)
    add("--cases", type=int, default=20, help="of a prompt")
    add("--context", type=int, default=1000, help="tokens of a prompt before its first question")
    add("--shape", action="append", default=[], metavar="TASK=LENGTH[,DISTRACTORS[,REPEATS]]", help="see kvmanager.quality.tasks.Shape")
    add("--seed", type=int, default=1)
    add("--device", default="cpu")
    add("--threads", type=int, help="of torch")
    add("--daemon", type=pathlib.Path, help="kvmanagerd, which is started for the run")
    add("--daemon-flag", action="append", default=[], help="for example --daemon-flag=--calibration-dir=DIR")
    add("--connect", help="unix:PATH of a daemon that runs already")
    add("--calibration-digest", default="")
    add("--calibration-dir", default="", help="where artifacts lie that codecs name, of a daemon that is started")
    add("--json", type=pathlib.Path)
    add("--svg", type=pathlib.Path)
    add("--markdown", type=pathlib.Path, help="the tables go there, too")
    options = parser.parse_args()
    if options.codec and not (options.daemon or options.connect):
        parser.error("--codec: needs --daemon or --connect")
    if options.codec and not HAVE_CLIENT:
        parser.error("--codec: the package's client library is not on PYTHONPATH: build //client/python:package")
    if not options.text and not options.tasks:
        parser.error("--text, --tasks: nothing to measure")
    try:
        options.text = {name: pathlib.Path(file) for name, _, file in (each.partition("=") for each in options.text)}
        options.shape = {name: tasks.Shape(*map(int, text.split(",")))
                         for name, _, text in (each.partition("=") for each in options.shape)}
        for each in options.emulate:
            parse_hack(each)
        for each in options.peers:
            peer(each)
    except (ValueError, TypeError) as error:
        parser.error(str(error))
    return options


def variants_of(options: argparse.Namespace) -> list[Variant]:
    chosen = [Variant("raw", "raw")]
    chosen += [Variant("daemon", each) for each in options.codec] + [Variant("emulated", each) for each in options.emulate]
    for each in options.peers:
        chosen += [Variant("peer", each)] * ("ours" in options.peer_windows) + [Variant("own", each)] * ("own" in options.peer_windows)
    return list(dict.fromkeys(chosen))


class Progress:
    """Lines with the time that is left, from how long pieces took per token so far, raw and coded apart."""

    def __init__(self, pieces: int):
        self._pieces, self._done, self._measured, self._began = pieces, 0, 0, time.monotonic()

    def piece(self, text: str, measured: bool) -> None:
        self._done += 1
        self._measured += measured
        if not measured:
            return
        left = (time.monotonic() - self._began) / self._measured * (self._pieces - self._done)
        print(f"[{self._done}/{self._pieces}] {text}, about {left / 60:.0f} min left", file=sys.stderr, flush=True)


def fingerprint(folder: pathlib.Path) -> str:
    """Of a model's folder: its configuration, and names and sizes of its weights."""
    digest = hashlib.sha256((folder / "config.json").read_bytes())
    for file in sorted(folder.glob("*.safetensors")):
        digest.update(f"{file.name} {file.stat().st_size}".encode())
    return digest.hexdigest()[:12]


def artifact_of(codec: str, options: argparse.Namespace) -> str:
    """What says which artifacts a codec has: the digest that was given, or those of the files it names in --calibration-dir."""
    names = re.findall("calibration=([^,;]+)", codec)
    if options.calibration_digest or not options.calibration_dir:
        return options.calibration_digest
    digests = []
    for name in names:
        files = [pathlib.Path(options.calibration_dir, name + end) for end in ("", ".safetensors")]
        file = next((each for each in files if each.is_file()), None)
        # Where there is no such file the daemon knows the name as a digest, or says that it does not.
        digests.append(hashlib.sha256(file.read_bytes()).hexdigest()[:12] if file else name)
    return " ".join(digests)


class Run:
    """All pieces (a text or a task) of all variants; results by key in a file."""

    def __init__(self, options: argparse.Namespace, bench: Bench, model: str):
        self._options, self._bench, self._results = options, bench, protocol.Results(options.json)
        subject = bench.subject
        self._pieces: dict[str, tuple[str, Any]] = {}  # name -> settings that its results depend on, windows or prompts
        for name, file in options.text.items():
            text = file.read_text(encoding="utf-8", errors="replace")
            parts = protocol.windows(subject, text, count=options.windows, tokens=options.window)
            digest = hashlib.sha256(text.encode()).hexdigest()[:12]
            self._pieces[name] = f"text {digest} {options.windows}x{options.window}", parts
        for task in options.tasks:
            prompts = tasks.make_prompts(subject.tokenizer, task, prompts=options.prompts, cases_per_prompt=options.cases,
                                         context_tokens=options.context, seed=options.seed, prefix=subject.prefix,
                                         shape=options.shape.get(task))
            digest = hashlib.sha256(repr(prompts).encode()).hexdigest()[:12]
            self._pieces[task] = f"task {digest}", prompts
        self._model = model

    def measure(self, chosen: list[Variant]) -> list[Measured]:
        progress = Progress(len(chosen) * len(self._pieces))
        return [self._one(variant, progress) for variant in chosen]

    def _one(self, variant: Variant, progress: Progress) -> Measured:
        window = "" if variant.kind in ("raw", "own") else f" lag={self._options.lag}"
        window += f" sinks={self._options.sinks}" if variant.kind == "peer" else ""
        artifact = f" {artifact_of(variant.name, self._options)}" if variant.kind == "daemon" else ""
        stem = f"{self._model} | {variant.key}{window}{artifact}"
        keys = {name: f"{stem} | {settings}" for name, (settings, _) in self._pieces.items()}
        found = {name: self._results.get(key) for name, key in keys.items()}
        size = self._results.get(f"{stem} | bytes")
        with contextlib.ExitStack() as stack:
            forward = None
            for name, (_, parts) in self._pieces.items():
                began, missing = time.monotonic(), found[name] is None
                if missing:
                    if forward is None:
                        forward, size = stack.enter_context(self._bench.running(variant))
                        self._results.put(f"{stem} | bytes", size)
                    found[name] = self._piece(name, forward, parts)
                    self._results.put(keys[name], found[name])
                progress.piece(f"{variant.label}: {name} took {time.monotonic() - began:.0f} s", missing)
        return Measured(variant, size, {name: found[name] for name in self._options.text},
                        {name: found[name] for name in self._options.tasks})

    def _piece(self, name: str, forward: protocol.Forward, parts: Any) -> list:
        if name in self._options.text:
            return protocol.text_losses(self._bench.subject, forward, parts)
        return [protocol.prompt_scores(self._bench.subject, forward, prompt) for prompt in parts]


@contextlib.contextmanager
def address_of(options: argparse.Namespace) -> Iterator[str]:
    if options.connect or not options.codec:
        yield options.connect or ""
    else:
        with daemon(options.daemon, daemon_flags(options)) as address:
            yield address


@torch.no_grad()
def main() -> None:
    options = arguments()
    if options.threads:
        torch.set_num_threads(options.threads)
    paged = PagedAttention.register()
    subject = protocol.load(options.model, NAME, device=options.device)
    with address_of(options) as address:
        attach = {"calibration_digest": options.calibration_digest, "calibration_dir": options.calibration_dir}
        bench = Bench(subject, paged, sinks=options.sinks, lag=options.lag, address=address, attach=attach)
        measured = Run(options, bench, f"{subject.name} {fingerprint(options.model)}").measure(variants_of(options))
    head = (f"{subject.name}, head_dim {bench.head_dim}: {options.windows} windows of {options.window} tokens a text, "
            f"{options.prompts} prompts of {options.cases} cases a task, lag {options.lag}, sinks {options.sinks}")
    page = f"{head}\n\n{table(measured)}\n{beside_peers(measured)}"
    print(page)
    if options.markdown:
        options.markdown.write_text(page)
    if options.svg:
        write_svg(options.svg, measured, head)


if __name__ == "__main__":
    main()
