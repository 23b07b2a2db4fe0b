"""python -m kvmanager.evaluate: perplexity and retrieval of a Hugging Face model, codec by codec, beside raw."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from typing import Any

import torch

import kvmanager
from kvmanager.calibrate import models, texts
from kvmanager.calibrate.progress import Progress
from kvmanager.evaluate import report
from kvmanager.evaluate.grid import fewest_bytes, grid
from kvmanager.evaluate.measure import Artifacts, Measured, attach, logits_of, measure, pool_bytes
from kvmanager.programs import Daemon, program

_TASKS = ("passkey", "lookup", "copy")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m kvmanager.evaluate", description="Measures codecs on a Hugging Face "
                                     "model through kvmanagerd: perplexity on text, and retrieval tasks.")
    add = parser.add_argument
    add("--model", required=True, help="folder, repository or .gguf file that transformers loads")
    add("--text", required=True, metavar="FILE", help="text to measure on, UTF-8; not one that was calibrated on")
    add("--codec", action="append", default=[],
        help="such as hack:k_bits=4,v_bits=3 or zack+hack:bytes=28,calibration=FILE; may be repeated")
    add("--max-loss", type=float, default=None, metavar="PERCENT",
        help="measure a grid of codecs, too, and say which has the fewest bytes with no more loss of perplexity than this")
    add("--max-points", type=float, default=None, metavar="POINTS",
        help="with --max-loss and --tasks: and loses no more of any task's percentage than this")
    add("--calibration", default=None, metavar="FILE", help="with --max-loss: an artifact, for zack+hack in the grid")
    add("--calibration-dir", default="", metavar="DIR", help="where calibration=NAME is; a path needs none")
    add("--windows", type=int, default=4, help="at equal distances in the text (4)")
    add("--window", type=int, default=2048, help="tokens of a window (2048)")
    add("--lag-pages", type=int, default=2, help="newest full pages that are read raw (2)")
    add("--tasks", action="store_true", help="passkey, lookup and copy, too")
    add("--prompts", type=int, default=5, help="of each task (5)")
    add("--cases", type=int, default=20, help="of each prompt (20)")
    add("--context", type=int, default=1200, help="tokens before a prompt's first question (1200)")
    add("--seed", type=int, default=1, help="of the tasks")
    add("--connect", default="", metavar="unix:PATH",
        help="a daemon that runs, whose --calibration-dir has the artifacts; default: one for this measurement")
    add("--kvmanagerd", default="", metavar="PROGRAM", help="(the wheel's, or PATH's)")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--device-pool-bytes", default="4GiB", help="of the daemon that is started, for a model on a GPU (4GiB)")
    add("--dtype", choices=("float32", "bfloat16", "float16"), default=None, help="(float32 on a CPU, else bfloat16)")
    add("--json", default="", metavar="FILE")
    add("--svg", default="", metavar="FILE")
    add("--quiet", action="store_true", help="no progress")
    args = parser.parse_args()
    for option, value in (("--windows", args.windows), ("--prompts", args.prompts), ("--cases", args.cases)):
        if value < 1:
            parser.error(f"{option}: {value}; must be at least 1")
    if not args.codec and args.max_loss is None:
        parser.error("--codec: absent; must be given, or --max-loss, which measures a grid of codecs")
    for option, value in (("--max-points", args.max_points), ("--calibration", args.calibration)):
        if value is not None and args.max_loss is None:
            parser.error(f"{option}: {value}; must stand beside --max-loss")
    if args.max_points is not None and not args.tasks:
        parser.error(f"--max-points: {args.max_points}; must stand beside --tasks")
    for option, value in (("--max-loss", args.max_loss), ("--max-points", args.max_points)):
        if value is not None and not 0 <= value <= 100:
            parser.error(f"{option}: {value}; must be in 0..100")
    if args.window < 2:
        parser.error(f"--window: {args.window}; must be at least 2")
    args.dtype = args.dtype or ("float32" if args.device == "cpu" else "bfloat16")
    return args


def _make_prompts(tokenizer: Any, args: argparse.Namespace, before: list[int]) -> dict[str, list[Any]]:
    from kvmanager.quality import tasks

    class Plain:
        def encode(self, text: str) -> list[int]:
            return tokenizer(text, add_special_tokens=False, verbose=False).input_ids

    return {task: tasks.make_prompts(Plain(), task, prompts=args.prompts, cases_per_prompt=args.cases,
                                     context_tokens=args.context, seed=args.seed, prefix=before) for task in _TASKS}


def _answer(model: Any, attachment: Any, prompt: Any) -> list[bool]:
    from kvmanager.quality import tasks

    best = torch.cat([logits.argmax(-1).cpu() for _, logits in logits_of(model, attachment, prompt.ids)]).tolist()
    return tasks.score(prompt, [best[first - 1 : last - 1] for first, last in prompt.answers])


def run(args: argparse.Namespace) -> tuple[list[Measured], dict[str, Any]]:
    executable = "" if args.connect else program("kvmanagerd", args.kvmanagerd)
    model, tokenizer = models.load(args.model, args.device, args.dtype, "kvmanager")
    before = texts.begins_with(tokenizer)
    windows = texts.spaced_windows(texts.tokenize(tokenizer, args.text), args.window, args.windows, before)
    if len(windows) < args.windows:
        print(f"evaluate: --windows: {args.windows}; the text has {len(windows)} of {args.window} tokens", file=sys.stderr)
    prompts = _make_prompts(tokenizer, args, before) if args.tasks else {}
    geometry = models.geometry_of(model)
    longest = max([args.window, *(len(prompt.ids) for each in prompts.values() for prompt in each)])
    searched = grid(args.calibration or "", geometry.head_dim) if args.max_loss is not None else []
    codecs = list(dict.fromkeys(["raw", *args.codec, *searched]))
    with contextlib.ExitStack() as stack:
        specs = {codec: codec for codec in codecs}
        artifacts = None
        calibration_dir = args.calibration_dir
        if not args.connect:
            artifacts = stack.enter_context(Artifacts())
            calibration_dir = artifacts.path
            specs = {codec: artifacts.spec(codec, args.calibration_dir) for codec in codecs}
            flags = () if args.device == "cpu" else ("--device-pool-bytes", args.device_pool_bytes)
            daemon = stack.enter_context(Daemon(executable, calibration_dir=calibration_dir, flags=flags,
                                                host_pool_bytes=pool_bytes(geometry.raw_token_bytes, longest)))
        address = args.connect or daemon.address
        shared = calibration_dir if args.device != "cpu" else ""
        for codec in codecs[1:]:  # before anything is measured
            try:
                attach(model, address, specs[codec], lag_pages=args.lag_pages, calibration_dir=shared).close()
            except kvmanager.Error as error:
                said = artifacts.named(str(error)) if artifacts else str(error)
                if codec in args.codec or not isinstance(error, kvmanager.FailedPreconditionError):
                    raise ValueError(f"codec {codec}: {said}") from None
                print(f"evaluate: {codec} is left out: {said}", file=sys.stderr)
                specs.pop(codec)
        codecs = [codec for codec in codecs if codec in specs]
        per_codec = len(windows) + sum(map(len, prompts.values()))
        progress = stack.enter_context(Progress("measuring", per_codec * len(codecs), args.quiet))
        done = 0

        def step() -> None:
            nonlocal done
            done += 1
            progress.update(done)

        def solve(attachment: Any, measured: Measured) -> None:
            for task, of_task in prompts.items():
                measured.tasks[task] = []
                for prompt in of_task:
                    measured.tasks[task] += _answer(model, attachment, prompt)
                    step()

        results = [measure(model, address, specs[codec], windows, lag_pages=args.lag_pages, label=codec, progress=step,
                           calibration_dir=shared, also=solve)
                   for codec in codecs]
    settings = {"model": args.model, "name": models.name_of(model), "text": args.text, "windows": len(windows), "window": args.window,
                "lag_pages": args.lag_pages, "dtype": args.dtype, "seed": args.seed if args.tasks else None,
                "version": kvmanager.__version__}
    return results, settings


def main() -> int:
    args = arguments()
    try:
        results, settings = run(args)
    except (ValueError, OSError, RuntimeError, kvmanager.Error) as error:
        print(f"evaluate: {error}", file=sys.stderr)
        return 1
    raw = results[0]
    print(report.table(results, raw))
    print(f"{settings['windows']} windows of {args.window} tokens, lag {args.lag_pages}; bytes per token and KV head, K and "
          "V, of encoded pages, and of a context whose sinks are raw")
    if args.max_loss is not None:
        points = None if args.max_points is None else args.max_points / 100
        chosen = fewest_bytes(results, raw, args.max_loss / 100, points)
        within = f"within {args.max_loss:g}%" + ("" if points is None else f" and {args.max_points:g} points")
        settings["chosen"] = chosen.codec
        print(f"fewest bytes {within}: {chosen.codec}, {chosen.token_bytes:.1f} bytes, {100 * chosen.change(raw):+.2f}%"
              if chosen is not raw else f"fewest bytes {within}: raw; no codec of the grid keeps so much")
    if args.json:
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump(report.as_json(results, raw, settings), file, indent=2)
            file.write("\n")
    if args.svg:
        with open(args.svg, "w", encoding="utf-8") as file:
            file.write(report.svg(results, raw, f"{settings['name']}: change of perplexity"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
