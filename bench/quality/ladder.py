#!/usr/bin/env python3
"""A ladder of codecs beside each of its rungs alone, at equal bytes: hits, and what the answers lose.

    ladder.py --model DIR --text FILE --daemon kvmanagerd --high zack+hack:bytes=54,calibration=a --low zack+hack:bytes=30,calibration=a

Prompts of documents return (returning.py), through a kvmanagerd whose host pool holds a part of them: once with the
higher rung alone, once with the lower one, once with ladder=HIGH>LOW. The model attends to what hit as it is stored;
the loss of the text behind each prompt is measured. The base is exact attention, without a daemon.

Needs torch, transformers and the built package on PYTHONPATH (bazel-bin/client/python/package).
"""

from __future__ import annotations

import argparse
import pathlib
import sys
import time
from typing import Any

import package

HAVE_CLIENT = package.find()

import torch
import torch.nn.functional as F
from kvmanager.quality import protocol
from kvmanager.quality.protocol import Subject, markdown
from returning import PAGE, Comparison, Outcome, Request, compare, make_trace
from variants import daemon

_WAYS = ("high", "ladder", "low")
_CHUNK_TOKENS = 4 * PAGE  # of a step: its pages are raw until they are encoded
_RAW_BLOCKS = 8           # that a running request has at most: a step's, those of the lag, the open one
_SLAB_BYTES = 2 << 20  # the least


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", required=True, type=pathlib.Path, help="a Hugging Face folder")
    add("--text", required=True, type=pathlib.Path, help="held-out text that documents are cut from")
    add("--daemon", required=True, type=pathlib.Path, help="kvmanagerd, which is started once for each way")
    add("--daemon-flag", action="append", default=[], help="for example --daemon-flag=--eviction=lru")
    add("--calibration-dir", default="", help="where artifacts lie that codecs name")
    add("--revision", default="", help="of the model, that an artifact of `kvctl calibrate --model` wants")
    add("--high", required=True, help="the codec of rung 0")
    add("--low", required=True, help="the codec of rung 1, of fewer bytes")
    add("--ladder", default="", help="the ladder's text (default: ladder=HIGH>LOW)")
    add("--ways", nargs="*", choices=_WAYS, default=list(_WAYS))
    add("--documents", type=int, default=48)
    add("--tokens", type=int, default=1024 + PAGE, help="of a document")
    add("--requests", type=int, default=400)
    add("--answer", type=int, default=64, help="tokens behind a prompt that are measured")
    add("--exponent", type=float, default=0.8, help="of Zipf's law, by which documents return")
    add("--pool-share", type=float, default=0.35, help="of what all documents take on the higher rung, that the pool holds")
    add("--lag", type=int, default=2, help="full pages before a query's own that it reads raw")
    add("--seed", type=int, default=1)
    add("--threads", type=int, help="of torch")
    add("--quick", action="store_true", help="24 documents and 120 requests: some minutes on two cores")
    add("--json", type=pathlib.Path, help="goes on where it was stopped")
    add("--svg", type=pathlib.Path)
    add("--markdown", type=pathlib.Path)
    options = parser.parse_args()
    if options.quick:
        options.documents, options.requests = 24, 120
    if not HAVE_CLIENT:
        parser.error("kvmanager: the package's client library is not on PYTHONPATH: build //client/python:package")
    options.codecs = {"high": options.high, "low": options.low,
                      "ladder": options.ladder or f"ladder={options.high}>{options.low}"}
    return options


def documents_of(subject: Subject, text: str, *, count: int, tokens: int) -> list[torch.Tensor]:
    return [part[0] for part in protocol.windows(subject, text, count=count, tokens=tokens)]


def token_losses(subject: Subject, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Nats of each target, which the hidden state of its row predicts."""
    return torch.cat([F.cross_entropy(subject.logits(hidden[at : at + PAGE]), targets[at : at + PAGE], reduction="none")
                      for at in range(0, len(targets), PAGE)])


def base_losses(subject: Subject, documents: list[torch.Tensor], trace: list[Request]) -> list[float]:
    """Of each request with exact attention: one pass over each document has them all."""
    subject.model.set_attn_implementation("sdpa")
    of_document = {}
    for number in sorted({request.document for request in trace}):
        ids = documents[number]
        hidden = subject.decoder(ids[None], use_cache=False).last_hidden_state[0]
        of_document[number] = token_losses(subject, hidden[:-1], ids[1:])
    return [of_document[request.document][request.prompt - 1 : request.prompt - 1 + request.answer].mean().item()
            for request in trace]


def attach(subject: Subject, address: str, codec: str, options: argparse.Namespace) -> Any:
    import kvmanager.transformers as kvt

    subject.model.set_attn_implementation("kvmanager")
    return kvt.attach(subject.model, address, codec=codec, lag_pages=options.lag, chunk_tokens=_CHUNK_TOKENS,
                      deadline_ms=600_000, calibration_dir=options.calibration_dir, revision=options.revision)


def one(subject: Subject, attachment: Any, ids: torch.Tensor, request: Request) -> Outcome:
    """The prompt's blocks that the daemon has, the rest computed in steps, and the answer's loss. What was computed is
    found by later requests."""
    end = request.prompt + request.answer
    with attachment.cache(ids[None, : request.prompt]) as cache:
        hit = cache.row_tokens[0]
        parts = []
        for begin in range(hit, end, _CHUNK_TOKENS):
            some = ids[None, begin : min(begin + _CHUNK_TOKENS, end)]
            parts.append(subject.decoder(some, past_key_values=cache, use_cache=True).last_hidden_state[0])
        hidden = torch.cat(parts)[request.prompt - 1 - hit : end - 1 - hit]
        return Outcome(hit // PAGE, token_losses(subject, hidden, ids[request.prompt : end]).mean().item())


def flags_of(options: argparse.Namespace, pool_bytes: int) -> list[str]:
    flags = [f"--host-pool-bytes={pool_bytes}", f"--slab-bytes={_SLAB_BYTES}", "--quality-sample=0", *options.daemon_flag]
    return flags + ([f"--calibration-dir={options.calibration_dir}"] if options.calibration_dir else [])


def pool_of(subject: Subject, options: argparse.Namespace) -> tuple[int, dict[str, Any]]:
    """Bytes of the pool, the same for each way, and what it is computed from."""
    with daemon(options.daemon, flags_of(options, 1 << 30)) as address, \
            attach(subject, address, options.high, options) as attachment:
        about = attachment.description
        raw, encoded, sinks = (about.raw_page_bytes * attachment.layers, about.encoded_page_bytes * attachment.layers,
                               getattr(about, "sink_tokens", 0) // PAGE)
    blocks = options.tokens // PAGE
    held = options.documents * (sinks * raw + (blocks - sinks) * encoded)
    size = int(options.pool_share * held) + _RAW_BLOCKS * raw
    return -(-size // _SLAB_BYTES) * _SLAB_BYTES, {"raw_block_bytes": raw, "block_bytes": encoded, "sink_blocks": sinks,
                                                   "all_documents_bytes": held}


def run_way(subject: Subject, way: str, documents: list[torch.Tensor], trace: list[Request], pool_bytes: int,
            options: argparse.Namespace) -> list[Outcome]:
    began, outcomes = time.monotonic(), []
    with daemon(options.daemon, flags_of(options, pool_bytes)) as address, \
            attach(subject, address, options.codecs[way], options) as attachment:
        for number, request in enumerate(trace):
            outcomes.append(one(subject, attachment, documents[request.document], request))
            if (number + 1) % max(1, len(trace) // 10) == 0:
                spent = time.monotonic() - began
                print(f"{way}: {number + 1} of {len(trace)} requests, {spent:.0f} s, about "
                      f"{spent / (number + 1) * (len(trace) - number - 1):.0f} s left", file=sys.stderr, flush=True)
    return outcomes


def table(subject: Subject, result: Comparison, codecs: dict[str, str], head: str) -> str:
    rows = [["way", "codec", "blocks that hit", "change of perplexity, %"]]
    for way in (way for way in _WAYS if way in result.hits):
        rows.append([way, f"`{codecs[way]}`", result.hits[way].text(4), result.change[way].text(2, 100, "+")])
    text = f"{head}\n\n{markdown(rows)}"
    if result.above is not None:
        text += (f"\nThe ladder's hit ratio is {result.above.text(4, 1, '+')} above the line between its rungs; above 0 in "
                 f"{100 * result.above_share:.1f}% of the resamples of documents.\n")
    return text


def write_svg(path: pathlib.Path, result: Comparison, title: str) -> None:
    """Hit ratio by change of perplexity: a point with its errors for each way, and the line between the rungs."""
    width, height, left, bottom, top = 520, 340, 60, 50, 34
    points = {way: (100 * result.change[way].value, result.hits[way].value) for way in result.hits}
    errors = {way: (100 * result.change[way].error, result.hits[way].error) for way in result.hits}
    least, most = ([pick(points[way][axis] + sign * errors[way][axis] for way in points) for axis in (0, 1)]
                   for pick, sign in ((min, -1), (max, 1)))
    spread = [max(b - a, 1e-6) for a, b in zip(least, most)]
    least, most = [a - s / 8 for a, s in zip(least, spread)], [b + s / 8 for b, s in zip(most, spread)]
    x = lambda value: left + (value - least[0]) / (most[0] - least[0]) * (width - left - 20)
    y = lambda value: height - bottom - (value - least[1]) / (most[1] - least[1]) * (height - bottom - top)
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="sans-serif" font-size="11">',
             f'<rect width="{width}" height="{height}" fill="white"/>', f'<text x="8" y="16" font-size="12">{title}</text>']
    for step in range(6):
        at = [low + (high - low) * step / 5 for low, high in zip(least, most)]
        parts.append(f'<line x1="{left}" x2="{width - 20}" y1="{y(at[1]):.1f}" y2="{y(at[1]):.1f}" stroke="#ddd"/>'
                     f'<text x="{left - 6}" y="{y(at[1]) + 4:.1f}" text-anchor="end">{at[1]:.3f}</text>'
                     f'<text x="{x(at[0]):.1f}" y="{height - bottom + 16}" text-anchor="middle">{at[0]:+.2f}%</text>')
    if {"high", "low"} <= set(points):
        (x1, y1), (x2, y2) = points["high"], points["low"]
        parts.append(f'<line x1="{x(x1):.1f}" y1="{y(y1):.1f}" x2="{x(x2):.1f}" y2="{y(y2):.1f}" stroke="#999" stroke-dasharray="4"/>')
    for way, (cx, cy) in points.items():
        dx, dy = errors[way]
        parts.append(f'<path d="M{x(cx - dx):.1f} {y(cy):.1f}H{x(cx + dx):.1f}M{x(cx):.1f} {y(cy - dy):.1f}V{y(cy + dy):.1f}" stroke="#36c"/>'
                     f'<circle cx="{x(cx):.1f}" cy="{y(cy):.1f}" r="4" fill="#36c"/>'
                     f'<text x="{x(cx) + 7:.1f}" y="{y(cy) - 5:.1f}">{way}</text>')
    parts.append(f'<text x="{(left + width) / 2}" y="{height - 12}" text-anchor="middle">change of perplexity; up: blocks that hit</text>')
    path.write_text("\n".join([*parts, "</svg>"]) + "\n")


@torch.no_grad()
def main() -> None:
    options = arguments()
    if options.threads:
        torch.set_num_threads(options.threads)
    import kvmanager.transformers  # noqa: F401  registers the attention that set_attn_implementation names

    subject = protocol.load(options.model, "sdpa")
    documents = documents_of(subject, options.text.read_text(encoding="utf-8", errors="replace"), count=options.documents,
                             tokens=options.tokens)
    trace = make_trace(documents=options.documents, tokens=options.tokens, requests=options.requests, answer=options.answer,
                       exponent=options.exponent, seed=options.seed)
    results = protocol.Results(options.json)
    pool_bytes, sizes = pool_of(subject, options)
    stem = (f"{subject.name} | {options.text.name} {options.documents}x{options.tokens} {options.requests} {options.answer} "
            f"{options.exponent} {options.seed} lag={options.lag}")

    def measured(key: str, make: Any) -> Any:
        if (found := results.get(key)) is None:
            results.put(key, found := make())
        return found

    base = measured(f"{stem} | base", lambda: base_losses(subject, documents, trace))
    ways = {}
    for way in options.ways:
        rows = measured(f"{stem} | {pool_bytes} {' '.join(options.daemon_flag)} | {options.codecs[way]}",
                        lambda: [[each.hit_blocks, each.loss] for each in
                                 run_way(subject, way, documents, trace, pool_bytes, options)])
        ways[way] = [Outcome(hits, loss) for hits, loss in rows]
    result = compare(trace, base, ways)
    head = (f"{subject.name}: {options.requests} requests of {options.documents} documents of {options.tokens} tokens, answers "
            f"of {options.answer}; pool of {pool_bytes / 2**20:.2f} MiB, where all documents on the higher rung take "
            f"{sizes['all_documents_bytes'] / 2**20:.1f}; a block takes {sizes['block_bytes']} bytes there, raw "
            f"{sizes['raw_block_bytes']}, {sizes['sink_blocks']} of each document stay raw")
    page = table(subject, result, options.codecs, head)
    print(page)
    if options.markdown:
        options.markdown.write_text(page)
    if options.svg:
        write_svg(options.svg, result, f"{subject.name}, pool of {pool_bytes / 2**20:.1f} MiB")


if __name__ == "__main__":
    main()
