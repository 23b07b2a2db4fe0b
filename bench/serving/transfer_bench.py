#!/usr/bin/env python3
"""Measures how fast the vLLM connector's half in a worker stores blocks and loads them, without an engine: paged caches of
Llama-3.1-8B's shape with random K and V, a daemon, and beside them one large pinned copy.

    transfer_bench.py                                       # a GPU: raw and K4V3, prompts of 8K and 32K tokens
    transfer_bench.py --churn 2 --pool-gib 8                # in a pool that was written twice before, by prompts of all lengths
    transfer_bench.py --layers 4 --tokens 512 --repeats 3   # a CPU: does it work?
    transfer_bench.py --capacity --codecs k4v3 k3v2         # instead: how many tokens of the newest prompts a pool keeps

A store ends when the daemon has all blocks, a load when the engine may use them: checksums are compared, and the lease is
released. Loaded blocks are compared with the stored ones, raw ones bit for bit. Needs torch, and vLLM or not.
"""

from __future__ import annotations

import argparse
import json
import logging
import pathlib
import random
import statistics
import sys
import tempfile
import time

import processes
from configurations import CODECS, parse
from intervals import quantile, ratio_of_medians
from workload import filling

sys.path += [str(processes.ROOT / "client/python/engines/vllm"), str(processes.ROOT / "bazel-bin/client/python/package")]

import stand_in  # noqa: E402,F401: before what needs vLLM

try:
    import torch
except ImportError:
    raise SystemExit("transfer_bench.py: this Python has no torch. On a GPU take vLLM's; on a CPU `tools/engines paged` makes one, "
                     "~/.cache/kvmanager/engines/paged/bin/python") from None

from kvmanager.vllm.facts import Facts, Settings  # noqa: E402
from kvmanager.vllm.messages import Finish, Load, StepPlan, Store  # noqa: E402
from kvmanager.vllm.scheduler import Lookup  # noqa: E402
from kvmanager.vllm.worker import WorkerHalf  # noqa: E402

HEADS, HEAD_DIM, BLOCK_TOKENS = 8, 128, 64
GIB = 1 << 30
DEADLINE_S = 120
_LOSS_MAX = 0.2  # of a codec's values, root mean square over that of random ones


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--codecs", nargs="+", default=["raw", "k4v3"], metavar="NAME", help=f"of {', '.join(CODECS)}, or NAME=CODEC")
    add("--tokens", nargs="+", type=int, default=[8192, 32768], help="of a prompt (default 8192 32768)")
    add("--layers", type=int, default=32, help="of the model (default 32)")
    add("--repeats", type=int, default=10, help="prompts of each length (default 10)")
    add("--pool-gib", type=float, default=20, help="the daemon's host memory (default 20)")
    add("--churn", type=float, default=0, metavar="TIMES", help="the pool is written so often before, by prompts of all lengths (default 0)")
    add("--capacity", action="store_true",
        help="fill the pool with prompts of the first of --tokens that nobody asks for again, and count what is found from the newest on")
    add("--daemon", default=str(processes.ROOT / "bazel-bin/kvmanager/daemon/kvmanagerd"), help="kvmanagerd")
    add("--daemon-flag", action="append", default=[], help="for kvmanagerd")
    add("--connector", default="{}", metavar="JSON", help="further kv_connector_extra_config")
    add("--out", type=pathlib.Path, metavar="FILE", help="all figures as JSON")
    options = parser.parse_args()
    if min(options.tokens) < BLOCK_TOKENS or options.layers < 1 or options.repeats < 1:
        parser.error(f"--tokens must be at least {BLOCK_TOKENS}, --layers and --repeats at least 1")
    return options


class Worker:
    """The connector's half in a worker, and caches with room for two prompts."""

    def __init__(self, address: str, codec: str, layers: int, blocks: int, extra: dict) -> None:
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        names = tuple(f"model.layers.{layer}.self_attn.attn" for layer in range(layers))
        self.blocks = blocks
        shape = (2 * blocks + 1, BLOCK_TOKENS, HEADS, 2 * HEAD_DIM)
        self.memory = [torch.randn(shape, dtype=torch.bfloat16, device=self.device) for _ in names]
        options = {"model": "shape", "layers": layers, "kv_heads": HEADS, "query_heads": 4 * HEADS, "head_dim": HEAD_DIM,
                   "page_tokens": BLOCK_TOKENS, "dtype": "bfloat16", "codec": codec}
        facts = Facts(layers=names, groups=(0,) * layers, blocks=2 * blocks + 1, block_tokens=BLOCK_TOKENS, heads=HEADS,
                      head_dim=HEAD_DIM, dtype=torch.bfloat16, options=options)
        self.half = WorkerHalf(facts, Settings.of({"address": address, "codec": codec, **extra}), logging.getLogger("transfer_bench"))
        self.half.register({name: each.permute(0, 2, 1, 3) for name, each in zip(names, self.memory)}, {})
        if not self.half.link.wait(True, DEADLINE_S):
            raise RuntimeError("the connector does not attach: see its log above")
        self._requests = 0

    def store(self, hashes: list[bytes]) -> float:
        """Seconds until the daemon has the first blocks of the caches under these names."""
        self._requests += 1
        name, ids = f"store {self._requests}", list(range(1, 1 + len(hashes)))
        self._synchronize()
        began = time.perf_counter()
        plan = StepPlan(stores=[Store(name, "", 0, hashes, 0, (ids,))])
        self.half.prepare_stores(plan)
        self.half.finish_saves()
        self.half.finishes(StepPlan(finishes=[Finish(name, False)]))
        if not self.half.link.settle(DEADLINE_S):
            raise RuntimeError("a store does not end")
        return time.perf_counter() - began

    def load(self, hashes: list[bytes]) -> float:
        """Seconds until they are in the second half of the caches."""
        self._requests += 1
        name, ids = f"load {self._requests}", list(range(1 + self.blocks, 1 + self.blocks + len(hashes)))
        self._synchronize()
        began, end = time.perf_counter(), time.perf_counter() + DEADLINE_S
        self.half.start_loads(StepPlan(loads=[Load(name, "", hashes, 0, (ids,))]))
        while True:
            self.half.wait_for_loads(computes=False)  # as a step that has nothing else to do
            _, received, failed = self.half.results()
            if name in received:
                break
            if time.perf_counter() > end:
                raise RuntimeError("a load does not end")
        seconds = time.perf_counter() - began
        if name in failed:
            raise RuntimeError(f"{len(failed[name])} of {len(hashes)} blocks were not found: raise --pool-gib")
        return seconds

    def forget_loaded(self) -> None:
        for each in self.memory:
            each[1 + self.blocks :].fill_(float("nan"))

    def check(self, count: int, lossless: bool) -> None:
        """Compares loaded blocks with the stored ones."""
        for layer, each in enumerate(self.memory):
            stored, loaded = each[1 : 1 + count], each[1 + self.blocks : 1 + self.blocks + count]
            if lossless:
                right = torch.equal(stored.view(torch.int16), loaded.view(torch.int16))
            else:
                right = bool((stored - loaded).float().square().mean().sqrt() <= _LOSS_MAX)
            if not right:
                raise RuntimeError(f"layer {layer}: what was loaded is not what was stored")

    def taken(self, name: str) -> float:
        """A counter since the last call, which takes all."""
        stats = self.half.take_stats()
        return stats.data.get(name, 0) if stats is not None else 0

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def one_copy(device: torch.device, nbytes: int, to_device: bool) -> float:
    """Seconds of one copy of so many bytes between pinned host memory and the GPU; without one within memory: the fastest of five."""
    cuda = device.type == "cuda"
    host = torch.empty(nbytes, dtype=torch.uint8, pin_memory=cuda)
    there = torch.empty(nbytes, dtype=torch.uint8, device=device)
    seconds = []
    for _ in range(6):
        began = time.perf_counter()
        (there.copy_(host) if to_device else host.copy_(there))
        if cuda:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    return min(seconds)


def names_of(source: random.Random, count: int) -> list[bytes]:
    return [source.randbytes(32) for _ in range(count)]


def churn(worker: Worker, options: argparse.Namespace, source: random.Random) -> None:
    left, worker_bytes = options.churn * options.pool_gib * GIB, 0
    while worker_bytes < left:
        worker.store(names_of(source, source.randint(1, worker.blocks)))
        worker_bytes += worker.taken("stored_encoded_bytes")


def capacity(options: argparse.Namespace, name: str, codec: str, compression_max: float) -> dict:
    """More unique prompts than fit; found: of the newest ones, until one is not found at all."""
    source, blocks = random.Random(5), options.tokens[0] // BLOCK_TOKENS
    with tempfile.TemporaryDirectory(prefix="kvmanager-transfer-") as folder:
        pool_bytes = int(options.pool_gib * GIB)
        log = pathlib.Path(folder, "kvmanagerd.log")
        with processes.Daemon(options.daemon, pathlib.Path(folder), pool_bytes, options.daemon_flag, log) as daemon:
            worker = Worker(daemon.address, codec, options.layers, blocks, json.loads(options.connector))
            raw_tokens = pool_bytes // worker.half.block_bytes * BLOCK_TOKENS
            prompts = [names_of(source, blocks) for _ in range(filling(options.tokens[0], compression_max, raw_tokens))]
            for hashes in prompts:
                worker.store(hashes)
            found = []
            for hashes in reversed(prompts):
                lookup = Lookup("", hashes, 1)
                if not worker.half.link.submit(lookup) or not worker.half.link.settle(DEADLINE_S):
                    raise RuntimeError("a lookup does not end")
                if not lookup.blocks:
                    break
                found.append(lookup.blocks)
            worker.half.close()
    tokens = sum(found) * BLOCK_TOKENS
    print(f"{name:>8}: of {len(prompts)} prompts of {options.tokens[0]} tokens the newest {len(found)} are found, "
          f"{sum(each == blocks for each in found)} of them whole: {tokens:,} tokens, {tokens / raw_tokens:.2f} times what fits raw")
    return {"codec": name, "prompts": len(prompts), "found": [each * BLOCK_TOKENS for each in found], "raw_tokens": raw_tokens}


def measure(options: argparse.Namespace, name: str, codec: str) -> list[dict]:
    source, rows = random.Random(1), []
    most = max(options.tokens) // BLOCK_TOKENS
    with tempfile.TemporaryDirectory(prefix="kvmanager-transfer-") as folder:
        log = pathlib.Path(folder, "kvmanagerd.log")
        with processes.Daemon(options.daemon, pathlib.Path(folder), int(options.pool_gib * GIB), options.daemon_flag, log) as daemon:
            worker = Worker(daemon.address, codec, options.layers, most, json.loads(options.connector))
            churn(worker, options, source)
            worker.store(names_of(source, 2))  # kernels are compiled
            for tokens in options.tokens:
                rows.append({"codec": name, "tokens": tokens, **prompts(worker, options, tokens // BLOCK_TOKENS, codec == "raw", source)})
                print(line_of(rows[-1]), flush=True)
            worker.half.close()
    return rows


def prompts(worker: Worker, options: argparse.Namespace, blocks: int, lossless: bool, source: random.Random) -> dict:
    stores, loads, load_bytes, store_bytes = [], [], 0, 0
    worker.taken("")
    for number in range(options.repeats + 1):
        hashes = names_of(source, blocks)
        stored = worker.store(hashes)
        store_bytes = worker.taken("stored_encoded_bytes")
        worker.forget_loaded()
        loaded = worker.load(hashes)
        load_bytes = worker.taken("loaded_encoded_bytes")
        worker.check(blocks, lossless)
        if number:  # the first maps memory, and makes room for what is begun
            stores.append(stored)
            loads.append(loaded)
    raw_bytes = blocks * worker.half.block_bytes
    return {"blocks": blocks, "raw_bytes": raw_bytes, "load_bytes": load_bytes, "store_bytes": store_bytes, "stores": stores, "loads": loads,
            "load_limit": one_copy(worker.device, int(load_bytes), True), "store_limit": one_copy(worker.device, int(store_bytes), False)}


def line_of(row: dict) -> str:
    def side(kind: str) -> str:
        seconds, nbytes, limit = row[f"{kind}s"], row[f"{kind}_bytes"], row[f"{kind}_limit"]
        middle = statistics.median(seconds)
        share = ratio_of_medians([limit], seconds)
        return (f"{kind} {1e3 * middle:7.1f} ms (p99 {1e3 * quantile(seconds, 0.99):.1f}), {nbytes / middle / 1e9:5.1f} GB/s"
                f" of {nbytes / limit / 1e9:.1f}: {share}, raw {row['raw_bytes'] / middle / 1e9:5.1f} GB/s")

    return f"{row['codec']:>8} {row['tokens']:6} tokens: {side('load')}; {side('store')}"


def main() -> None:
    options = arguments()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    where = torch.cuda.get_device_name(0) if torch.cuda.is_available() else "CPU"
    how = "filled" if options.capacity else (
        f"written {options.churn} times before; medians of {options.repeats}, beside one copy of the same bytes")
    print(f"{where}, torch {torch.__version__}, {options.layers} layers, {HEADS} x {HEAD_DIM}, blocks of {BLOCK_TOKENS} tokens, pool "
          f"{options.pool_gib} GiB, {how}")
    rows = []
    for text in options.codecs:
        configuration = parse(text)
        if configuration.codec is None:
            raise SystemExit(f"--codecs: {text} is none of kvmanager's")
        if options.capacity:
            rows.append(capacity(options, configuration.name, configuration.codec, configuration.compression_max))
        else:
            rows += measure(options, configuration.name, configuration.codec)
    if options.out:
        options.out.write_text(json.dumps({"device": where, "layers": options.layers, "churn": options.churn, "pool_gib": options.pool_gib,
                                           "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
