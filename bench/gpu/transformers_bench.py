#!/usr/bin/env python3
"""Decode steps of one transformers model on a GPU: torch's SDPA over transformers' own cache, beside attention on the
daemon's pages in this process (attn_implementation="kvmanager").

    bench/gpu/transformers_bench.py --daemon kvmanagerd --model DIR [--shapes 16x32768 1x512 8x512] [--codecs ...]

Two numbers a shape and codec. `attention`: GPU time of the attention function's kernels, of all layers of a step, by
events in a stream that the host keeps ahead of; for kvmanager it holds appending the token, for SDPA it does not hold
what its cache does to append one (torch.cat of everything), which is printed beside it. `step`: wall time of a whole
forward pass, which the host bounds where contexts are small. A host's time wanders by more than what is looked for, so
steps of the two alternate, and `more a layer` has the quartiles of the differences of neighbours, the median in the
middle. --model may be a directory of config.json alone: weights are random then, which costs the same time.
"""

import argparse
import copy
import json
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

import torch
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import kvmanager.transformers as kvt

WARM_UPS, OWN_STEPS = 2, 5
AHEAD_CYCLES = 40_000_000  # the stream sleeps about 20 ms first, so that the host is ahead of it


class Timer:
    """Wraps an attention function: events around each call while `on`."""

    def __init__(self, name: str):
        self.on, self._events, self._function = False, [], ALL_ATTENTION_FUNCTIONS[name]
        ALL_ATTENTION_FUNCTIONS.register(name, self)

    def __call__(self, *args, **kwargs):
        if not self.on:
            return self._function(*args, **kwargs)
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        result = self._function(*args, **kwargs)
        end.record()
        self._events.append((begin, end))
        return result

    def take_us(self) -> float:
        """Of all calls since the last time."""
        torch.cuda.synchronize()
        total = sum(begin.elapsed_time(end) for begin, end in self._events) * 1e3
        self._events.clear()
        return total


class Updates:
    """The same for DynamicCache.update."""

    def __init__(self):
        self.on, self._events = False, []
        update = DynamicCache.update

        def timed(cache, *args, **kwargs):
            if not self.on:
                return update(cache, *args, **kwargs)
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            result = update(cache, *args, **kwargs)
            end.record()
            self._events.append((begin, end))
            return result

        DynamicCache.update = timed

    take_us = Timer.take_us


def own_cache(model, batch: int, context: int) -> DynamicCache:
    """Of random keys and values: their bits do not change SDPA's time."""
    config = model.config
    cache = DynamicCache(config=config)
    shape = (batch, config.num_key_value_heads, context, config.head_dim)
    for layer in range(config.num_hidden_layers):
        cache.update(torch.randn(shape, dtype=model.dtype, device="cuda"),
                     torch.randn(shape, dtype=model.dtype, device="cuda"), layer)
    return cache


def filled_cache(model, kv: kvt.Attachment, batch: int, context: int) -> kvt.KvCache:
    """A prefill of random tokens, each row its own."""
    cache = kv.cache(rows=batch)
    generator = torch.Generator(device="cuda").manual_seed(1)
    columns = max(1, 16384 // batch)
    for first in range(0, context, columns):
        ids = torch.randint(0, model.config.vocab_size, (batch, min(columns, context - first)), device="cuda",
                            generator=generator)
        model.model(ids, past_key_values=cache)
    torch.cuda.synchronize()
    return cache


def attention_us(model, cache, timers: list, ids: torch.Tensor, steps: int) -> list[float]:
    """Medians over steps of what each timer saw in one."""
    seen: list[list[float]] = [[] for _ in timers]
    for _ in range(steps):
        torch.cuda._sleep(AHEAD_CYCLES)
        for timer in timers:
            timer.on = True
        model(ids, past_key_values=cache)
        for timer, values in zip(timers, seen):
            timer.on = False
            values.append(timer.take_us())
    return [statistics.median(values) for values in seen]


def step_us(model, cache, ids: torch.Tensor, steps: int) -> float:
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(steps):
        model(ids, past_key_values=cache)
    torch.cuda.synchronize()
    return (time.perf_counter() - begin) / steps * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--daemon", required=True, help="kvmanagerd")
    parser.add_argument("--model", required=True, type=pathlib.Path)
    parser.add_argument("--shapes", nargs="+", default=["16x32768", "1x512", "8x512"], help="BATCHxCONTEXT")
    parser.add_argument("--codecs", nargs="+", default=["hack:k_bits=3,v_bits=2", "raw"])
    parser.add_argument("--pool", default="24GiB", help="--device-pool-bytes")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=20, help="of a round")
    parser.add_argument("--json", type=pathlib.Path)
    options = parser.parse_args()

    config = AutoConfig.from_pretrained(options.model)
    models = {}
    for name in ("sdpa", "kvmanager"):
        torch.manual_seed(0)
        if list(options.model.glob("*.safetensors")):
            models[name] = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float16,
                                                                attn_implementation=name)
        else:
            with torch.device("cuda"):
                models[name] = AutoModelForCausalLM.from_config(copy.deepcopy(config), dtype=torch.float16, attn_implementation=name)
        models[name] = models[name].to("cuda").eval()
    layers = config.num_hidden_layers
    timers = {name: Timer(name) for name in models}
    updates = Updates()
    results = []
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}; {layers} layers, {config.num_attention_heads} "
          f"query heads, {config.num_key_value_heads} KV heads, head_dim {config.head_dim}; us of a decode step",
          flush=True)
    print("| batch x context | codec | SDPA attention | its cache's cat | kvmanager attention | ratio | SDPA step | "
          "kvmanager step | more a layer |\n|---|---|---|---|---|---|---|---|---|", flush=True)
    with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
        address = f"unix:{folder}/kv.sock"
        daemon = subprocess.Popen([options.daemon, "--listen", address, "--host-pool-bytes", "512MiB",
                                   "--device-pool-bytes", options.pool], stdout=subprocess.PIPE, text=True)
        try:
            if not daemon.stdout.readline().startswith("kvmanagerd ready"):
                sys.exit("the daemon did not start")
            for shape in options.shapes:
                batch, context = map(int, shape.split("x"))
                own = own_cache(models["sdpa"], batch, context)
                ids = torch.randint(0, config.vocab_size, (batch, 1), device="cuda")
                for _ in range(WARM_UPS):  # cuDNN's SDPA makes a plan for every length it meets, 20 ms each
                    step_us(models["sdpa"], own, ids, OWN_STEPS + options.steps)
                    own.crop(context - own.get_seq_length())
                for codec in options.codecs:
                    with kvt.attach(models["kvmanager"], address, codec=codec, chunk_tokens=16384) as kv, \
                            filled_cache(models["kvmanager"], kv, batch, context) as cache:
                        caches = {"sdpa": own, "kvmanager": cache}
                        step_us(models["kvmanager"], cache, ids, OWN_STEPS)
                        seen: dict[str, list] = {"sdpa": [], "cat": [], "kvmanager": [], "sdpa step": [],
                                                 "kvmanager step": [], "more": []}
                        for _ in range(options.rounds):
                            own.crop(context - own.get_seq_length())  # lengths that it has plans for
                            sdpa, cat = attention_us(models["sdpa"], own, [timers["sdpa"], updates], ids, OWN_STEPS)
                            here, = attention_us(models["kvmanager"], cache, [timers["kvmanager"]], ids, OWN_STEPS)
                            for name, value in (("sdpa", sdpa), ("cat", cat), ("kvmanager", here)):
                                seen[name].append(value)
                            for _ in range(options.steps):
                                times = {name: step_us(model, caches[name], ids, 1) for name, model in models.items()}
                                for name, value in times.items():
                                    seen[f"{name} step"].append(value)
                                seen["more"].append((times["kvmanager"] - times["sdpa"]) / layers)
                        medians = {name: statistics.median(values) for name, values in seen.items()}
                        row = {"batch": batch, "context": context, "codec": codec, **medians,
                               "ratio": medians["sdpa"] / medians["kvmanager"],
                               "more quartiles": statistics.quantiles(seen["more"], n=4),
                               "length at the end": [own.get_seq_length(), cache.get_seq_length()]}
                        low, _, high = row["more quartiles"]
                        results.append(row)
                        print(f"| {shape} | {codec} | {row['sdpa']:.0f} | {row['cat']:.0f} | {row['kvmanager']:.0f} | "
                              f"{row['ratio']:.2f} | {row['sdpa step']:.0f} | {row['kvmanager step']:.0f} | "
                              f"{low:+.1f}, {row['more']:+.1f}, {high:+.1f} |", flush=True)
                del own
                torch.cuda.empty_cache()
        finally:
            daemon.terminate()
            daemon.wait()
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
