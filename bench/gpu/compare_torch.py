#!/usr/bin/env python3
"""Decode attention of this project beside torch's, on the same shapes, in one run on one GPU.

    bench/gpu/compare_torch.py --bench bazel-bin/attention/attention_gpu_bench [--grid bars|small|full] [--codec NAME ...] [--json FILE]
        [--also bazel-bin/attention/pq_gpu_bench]

Torch's flash and cuDNN back ends read contiguous fp16 K and V; ours reads shuffled pages, the newest of which are raw. Both get
random data, inputs that rotate so that they do not fit the second-level cache, and replays of a CUDA graph; medians are printed.
A ratio is torch's better time over ours; a shape whose contiguous K and V do not fit the card has none. If torch's time is more
than 5% above what it was when these shapes were chosen, something else used the GPU, and the run says that it does not count.
Needs torch and a Hopper GPU.
"""
import argparse
import json
import statistics
import subprocess
import sys
import tempfile

# Milliseconds of torch 2.11 on an H200 (flash, cuDNN) by (batch, query heads, KV heads, context).
EXPECTED_MS = {
    (1, 32, 8, 32768): (0.051, 0.042),
    (1, 32, 8, 131072): (0.149, 0.129),
    (16, 32, 8, 4096): (0.074, 0.065),
    (16, 32, 8, 32768): (0.477, 0.468),
    (64, 32, 8, 8192): (0.786, 0.471),
    (8, 64, 8, 32768): (0.247, 0.244),
    (1, 32, 32, 32768): (0.142, 0.126),
}
TOLERANCE = 1.05
HEAD_DIM = 128
ROTATE_BYTES = 320 << 20
CALLS, WARM_UPS, REPETITIONS_MIN, REPETITIONS_MAX = 8, 3, 7, 15
MEASURED_US = 60e3  # what the replays of one way to call a back end take together, where fewer are enough
BYTES_PER_US = 4e6  # a guess, for the number of replays


def random_halves(torch, *shape):
    return torch.empty(*shape, device="cuda", dtype=torch.float16).normal_()


def graph_us(torch, call, calls, repetitions):
    """Microseconds of one call(i), of which a graph holds `calls`; RuntimeError where the back end refuses."""
    for i in range(2):
        call(i)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(calls):
            call(i)
    times = []
    for repetition in range(WARM_UPS + repetitions):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        if repetition >= WARM_UPS:
            times.append(begin.elapsed_time(end) * 1e3 / calls)
    return statistics.median(times)


def torch_us(torch, backends, batch, query_heads, kv_heads, context):
    """Microseconds of one call of each back end; None where it refuses, or K and V do not fit the card."""
    from torch.nn.attention import sdpa_kernel
    group = query_heads // kv_heads
    size = 2 * batch * kv_heads * context * HEAD_DIM * 2
    sets = max(1, min(CALLS, -(-ROTATE_BYTES // size)))
    best = [None] * len(backends)
    if size * sets > torch.cuda.mem_get_info()[0] * 0.9:
        return best
    likely_us = size / BYTES_PER_US
    calls = CALLS if sets > 1 else int(max(1, min(CALLS, MEASURED_US / 10 / likely_us)))
    repetitions = int(max(REPETITIONS_MIN, min(REPETITIONS_MAX, MEASURED_US / (likely_us * calls))))
    k, v = ([random_halves(torch, batch, kv_heads, context, HEAD_DIM) for _ in range(sets)] for _ in range(2))
    # The group's heads as heads, or as query tokens of their KV head: the same numbers, and back ends differ in what they like. So
    # they do in which of head and token comes first in memory.
    as_heads = (random_halves(torch, batch, query_heads, 1, HEAD_DIM), {"enable_gqa": group > 1})
    as_tokens = (random_halves(torch, batch, kv_heads, group, HEAD_DIM), {})
    for tokens_first in (False, True):
        if tokens_first:
            k, v = ([x.view(batch, context, kv_heads, HEAD_DIM).transpose(1, 2) for x in side] for side in (k, v))
        for q, options in (as_heads, as_tokens) if group > 1 else (as_heads,):
            for i, backend in enumerate(backends):
                try:
                    with sdpa_kernel(backend):
                        us = graph_us(torch, lambda call: torch.nn.functional.scaled_dot_product_attention(
                            q, k[call % sets], v[call % sets], **options), calls, repetitions)
                except RuntimeError:
                    continue
                best[i] = us if best[i] is None else min(best[i], us)
    return best


def summarise(runs):
    """Per codec: how many shapes have a ratio, the least of it, the median, the most, and where it is below 1."""
    print(f"{'codec':24}{'shapes':>7}{'least':>7}{'median':>8}{'most':>7}  below 1")
    for codec in dict.fromkeys(run["codec"] for run in runs):
        of = [run for run in runs if run["codec"] == codec and run.get("ratio")]
        ratios = [run["ratio"] for run in of]
        if not ratios:
            continue
        below = ", ".join(f"{run['batch']} x {run['context']} {run['query_heads']}/{run['kv_heads']} ({run['ratio']:.2f})"
                          for run in of if run["ratio"] < 1)
        print(f"{codec:24}{len(ratios):7}{min(ratios):7.2f}{statistics.median(ratios):8.2f}{max(ratios):7.2f}  {below or '-'}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bench", required=True, help="the program attention_gpu_bench")
    parser.add_argument("--grid", choices=("bars", "small", "full"), default="bars")
    parser.add_argument("--codec", nargs="+", default=[], help="these alone, by the names that attention_gpu_bench prints")
    parser.add_argument("--also", action="append", default=[], metavar="PROGRAM",
                        help="a benchmark with the same --grid and --json, whose rows are added: pq_gpu_bench")
    parser.add_argument("--json", help="write everything to this file")
    options = parser.parse_args()
    try:
        import torch
        from torch.nn.attention import SDPBackend
    except ImportError as error:
        sys.exit(f"compare_torch.py: {error}: install torch with CUDA to compare with it")
    if not torch.cuda.is_available():
        sys.exit("compare_torch.py: torch sees no GPU here")

    chosen = [word for name in options.codec for word in ("--codec", name)]
    ours, ceiling = {"runs": []}, None
    for program in [[options.bench, *chosen]] + [[also] for also in options.also]:
        with tempfile.NamedTemporaryFile(suffix=".json") as out:
            said = subprocess.run([*program, "--grid", options.grid, "--json", out.name], stdout=subprocess.PIPE, text=True)
            if said.returncode != 0:
                sys.exit(f"compare_torch.py: {program[0]} failed:\n{said.stdout}")
            theirs = json.load(open(out.name))
        ours = {**theirs, **ours, "runs": ours["runs"] + theirs["runs"]}
        ceiling = ceiling or said.stdout.splitlines()[0]
    print(ceiling)
    print(f"torch {torch.__version__}, {torch.cuda.get_device_name()}")
    print(f"{'codec':24}{'batch':>6}{'context':>9}{'heads':>8}{'ours us':>10}{'TB/s':>7}{'flash us':>10}{'cuDNN us':>10}{'ratio':>7}")
    slow, torchs = [], {}
    for run in ours["runs"]:
        shape = (run["batch"], run["query_heads"], run["kv_heads"], run["context"])
        if run["batch"] == 0:
            continue  # ragged: torch has no such call
        if shape not in torchs:
            torchs[shape] = torch_us(torch, (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION), *shape)
            torch.cuda.empty_cache()
            measured = [us for us in torchs[shape] if us is not None]
            expected = min(EXPECTED_MS.get(shape, (float("inf"),))) * 1e3
            if measured and min(measured) > expected * TOLERANCE:
                slow.append(f"batch {shape[0]}, context {shape[3]}: {min(measured):.0f} us, expected {expected:.0f}")
        times = [us for us in torchs[shape] if us is not None]
        run["flash_us"], run["cudnn_us"] = torchs[shape]
        run["ratio"] = min(times) / run["us"] if times else None
        cells = [f"{us:10.1f}" if us is not None else f"{'-':>10}" for us in torchs[shape]]
        ratio = f"{run['ratio']:7.2f}" if times else f"{'-':>7}"
        print(f"{run['codec']:24}{run['batch']:6}{run['context']:9}{run['query_heads']:5}/{run['kv_heads']:<2}{run['us']:10.1f}"
              f"{run['tb_per_s']:7.2f}{cells[0]}{cells[1]}{ratio}", flush=True)
    summarise(ours["runs"])
    if slow:
        print("This run does not count: torch was more than 5% slower than expected (" + "; ".join(slow) + ").")
    if options.json:
        ours["torch"], ours["device"], ours["counts"] = torch.__version__, torch.cuda.get_device_name(), not slow
        with open(options.json, "w") as out:
            json.dump(ours, out, indent=1)
            out.write("\n")


if __name__ == "__main__":
    main()
