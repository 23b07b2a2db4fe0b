"""How fast blocks of a paged cache on a GPU reach the daemon and come back: paged_bench.py [--tokens N] [--block N]

One line of numbers per codec, the limit (one copy of the same bytes between pinned memory and the GPU) beside them."""

from __future__ import annotations

import argparse
import statistics
import time

import kvmanager
import torch
from kvmanager.paged import PagedCopy, Staging
from kvmanager_testing import Daemon

LAYERS, HEADS, HEAD_DIM = 32, 8, 128
REPEATS = 5


def median_seconds(function) -> float:
    function()
    seconds = []
    for _ in range(REPEATS):
        torch.cuda.synchronize()
        began = time.perf_counter()
        function()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--block", type=int, default=16)
    arguments = parser.parse_args()
    tokens, block = arguments.tokens, arguments.block
    count, blocks = tokens // block, 2 * tokens // block
    nbytes = tokens * LAYERS * 2 * HEADS * HEAD_DIM * 2
    generator = torch.Generator(device="cuda").manual_seed(1)
    shape = (blocks, HEADS, block, 2 * HEAD_DIM)
    caches = [torch.randn(shape, generator=generator, device="cuda", dtype=torch.float16) for _ in range(LAYERS)]
    copy = PagedCopy(caches, blocks, block, HEADS, HEAD_DIM)
    indices = copy.indices(torch.randperm(blocks)[:count].tolist())
    print(f"{torch.cuda.get_device_name()}; {tokens} tokens, blocks of {block}, {LAYERS} layers, {nbytes >> 20} MiB")
    for codec in ("raw", *(("hack:k_bits=3,v_bits=2",) if block % 64 == 0 else ())):  # hack's pages are of 64 tokens
        with Daemon(host_pool="6GiB") as daemon, kvmanager.connect(daemon.listen) as client:
            arena = client.create_arena(nbytes)
            memory = torch.from_dlpack(arena.tensor((nbytes,), "uint8"))
            staging = Staging(memory, LAYERS, block, HEADS, HEAD_DIM, torch.float16, copy.device)
            extent = staging.take(count)
            on_device = torch.empty(nbytes, dtype=torch.uint8, device="cuda")
            out = median_seconds(lambda: memory.copy_(on_device, non_blocking=True))
            back = median_seconds(lambda: on_device.copy_(memory, non_blocking=True))

            def save() -> None:
                after = copy.here()
                for layer in range(LAYERS):
                    copy.save(layer, indices, *extent.rows(layer), after)

            def load() -> None:
                after = copy.here()
                for layer in range(LAYERS):
                    copy.load(layer, indices, *extent.rows(layer), after)

            saved, loaded = median_seconds(save), median_seconds(load)
            began = time.perf_counter()
            save()
            enqueue = time.perf_counter() - began
            torch.cuda.synchronize()
            cache = client.open_cache(
                model="m",
                layers=LAYERS,
                kv_heads=HEADS,
                query_heads=HEADS,
                head_dim=HEAD_DIM,
                page_tokens=block,
                codec=codec,
                lag_pages=0,
            )
            names = cache.external_names(number.to_bytes(4, "big") for number in range(count))
            began = time.perf_counter()
            with cache.create_sequence() as sequence:
                for layer in range(LAYERS):
                    cache.step(layer, [(sequence, 0, tokens)], *extent.rows(layer))
                sequence.publish(names)
            stored = time.perf_counter() - began
            began = time.perf_counter()
            with cache.create_sequence(names) as sequence:
                found = sequence.hit_blocks
                matched = time.perf_counter() - began
                for layer in range(LAYERS):
                    cache.read(layer, [(sequence, 0, tokens)], *extent.rows(layer))
            read = time.perf_counter() - began
            gb = nbytes / 1e9
            print(
                f"codec={codec} pinned={staging.pinned} limit_to_host={gb / out:.1f} GB/s save={gb / saved:.1f} GB/s "
                f"limit_to_gpu={gb / back:.1f} GB/s load={gb / loaded:.1f} GB/s save_begun_in={1e3 * enqueue:.2f} ms "
                f"daemon_append={gb / stored:.2f} GB/s daemon_match_and_read={gb / read:.2f} GB/s "
                f"match={1e3 * matched:.1f} ms hit_blocks={found}/{count}"
            )
            extent.close()


if __name__ == "__main__":
    main()
