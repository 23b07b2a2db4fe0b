#!/usr/bin/env python3
"""Greedy continuations with a codec beside raw's, as a page to read: generate.py --model DIR --text NAME=FILE ... --daemon kvmanagerd

Prompts are pieces of the texts at equal distances, of lengths from --shortest to --longest tokens; both continuations run
in the daemon, the one with codec `raw`, the other with --codec. Says of each how many tokens are raw's before the first that
is not: greedy text may part at a near tie and be as good behind it, so read both.

Needs torch, transformers, safetensors and the built package on PYTHONPATH (bazel-bin/client/python/package).
"""

from __future__ import annotations

import argparse
import contextlib
import pathlib
import sys

import package

if not package.find():
    sys.exit("generate: the package's client library is not on PYTHONPATH: build //client/python:package")

import torch
from kvmanager.quality import protocol
from kvmanager.quality.protocol import Subject
from variants import daemon, daemon_flags

import kvmanager.transformers as kvt


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", required=True, type=pathlib.Path)
    add("--text", action="append", required=True, metavar="NAME=FILE")
    add("--codec", default="default")
    add("--calibration-digest", default="")
    add("--calibration-dir", default="", help="where artifacts lie that codecs name, of a daemon that is started")
    add("--lag", type=int, default=2)
    add("--prompts", type=int, default=20)
    add("--shortest", type=int, default=1000, help="tokens of a prompt")
    add("--longest", type=int, default=3000)
    add("--tokens", type=int, default=64, help="to generate")
    add("--device", default="cpu")
    add("--threads", type=int)
    add("--daemon", type=pathlib.Path)
    add("--daemon-flag", action="append", default=[])
    add("--connect")
    add("--markdown", type=pathlib.Path, help="default: standard output")
    options = parser.parse_args()
    if bool(options.daemon) == bool(options.connect):
        parser.error("--daemon, --connect: one of them")
    if not 1 <= options.shortest <= options.longest:
        parser.error(f"--shortest, --longest: {options.shortest}, {options.longest}; must be 1 <= shortest <= longest")
    return options


def prompts_of(options: argparse.Namespace, subject: Subject) -> list[tuple[str, torch.Tensor]]:
    """(name of the text, ids [1, tokens]), texts in turn."""
    texts = [(name, subject.tokenizer.encode(pathlib.Path(file).read_text(encoding="utf-8", errors="replace")))
             for name, _, file in (each.partition("=") for each in options.text)]
    made = []
    for at in range(options.prompts):
        name, ids = texts[at % len(texts)]
        span = options.longest - options.shortest
        length = options.shortest + span * at // max(1, options.prompts - 1) - len(subject.prefix)
        first = (len(ids) - options.longest) * at // options.prompts
        if first < 0:
            raise SystemExit(f"generate: text {name} has {len(ids)} tokens; --longest is {options.longest}")
        made.append((name, torch.tensor([subject.prefix + ids[first : first + length]], device=subject.device)))
    return made


@torch.no_grad()
def continuations(subject: Subject, kv: kvt.Attachment, prompts: list, tokens: int, label: str) -> list[list[int]]:
    made = []
    for at, (_, ids) in enumerate(prompts):
        mask = torch.ones_like(ids)
        with kv.cache(ids, mask) as cache:
            out = subject.model.generate(ids, attention_mask=mask, past_key_values=cache, max_new_tokens=tokens, do_sample=False,
                                         eos_token_id=None, pad_token_id=0)
        made.append(out[0, ids.shape[1] :].tolist())
        print(f"{label}: {at + 1} of {len(prompts)}", file=sys.stderr, flush=True)
    return made


def equal_tokens(raw: list[int], coded: list[int]) -> int:
    return next((at for at, (a, b) in enumerate(zip(raw, coded)) if a != b), len(raw))


def quoted(text: str) -> str:
    return "`" + text.replace("`", "'").replace("\n", "⏎").replace("|", "¦") + "`"


def page(subject: Subject, codec: str, size: float, prompts: list, raw: list, coded: list) -> str:
    equal = [equal_tokens(a, b) for a, b in zip(raw, coded)]
    tokens = len(raw[0])
    lines = [f"{subject.name}, `{codec}`, {size:.1f} bytes per token and KV head: {sum(each == tokens for each in equal)} of {len(equal)} "
             f"continuations of {tokens} greedy tokens are raw's; {sum(equal) / len(equal):.1f} tokens on average before the first "
             "that differs.\n"]
    for at, ((name, ids), a, b, n) in enumerate(zip(prompts, raw, coded, equal)):
        lines += [f"**{at + 1}.** {name}, {ids.shape[1]} tokens; equal: {n} of {tokens}  ",
                  f"prompt's end: {quoted(subject.tokenizer.decode(ids[0, -24:].tolist()))}  ",
                  f"raw: {quoted(subject.tokenizer.decode(a))}  ",
                  "codec: the same\n" if n == tokens else f"codec: {quoted(subject.tokenizer.decode(b))}\n"]
    return "\n".join(lines)


def main() -> None:
    options = arguments()
    if options.threads:
        torch.set_num_threads(options.threads)
    subject = protocol.load(options.model, "kvmanager", device=options.device)
    prompts, made, size = prompts_of(options, subject), {}, 0.0
    with contextlib.ExitStack() as stack:
        address = options.connect or stack.enter_context(daemon(options.daemon, daemon_flags(options)))
        for codec in ("raw", options.codec):
            digest = options.calibration_digest if codec != "raw" else ""
            with kvt.attach(subject.model, address, codec=codec, lag_pages=options.lag, publish_prompts=False,
                            calibration_digest=digest, calibration_dir=options.calibration_dir, deadline_ms=600_000) as kv:
                made[codec] = continuations(subject, kv, prompts, options.tokens, codec)
                described = kv.description
                size = described.encoded_page_bytes / described.options.page_tokens / described.options.kv_heads
                canonical = described.options.codec
    text = page(subject, canonical, size, prompts, made["raw"], made[options.codec])
    if options.markdown:
        options.markdown.write_text(text)
    else:
        print(text)


if __name__ == "__main__":
    main()
