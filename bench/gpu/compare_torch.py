#!/usr/bin/env python3
"""Decode attention of this project beside torch's, on the same shapes, in one run on one GPU.

    bench/gpu/compare_torch.py --bench bazel-bin/attention/attention_gpu_bench [--grid bars|full] [--json FILE]

Torch's flash and cuDNN back ends read contiguous fp16 K and V; ours reads shuffled pages, the newest of which are raw. Both get
random data, inputs that rotate so that they do not fit the second-level cache, and replays of a CUDA graph; medians are printed.
A ratio is torch's better time over ours. If that time is more than 5% above what it was when these shapes were chosen, something
else used the GPU, and the run says that it does not count. Needs torch and a Hopper GPU.
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
CALLS, REPETITIONS = 8, 15


def torch_us(torch, backend, batch, query_heads, kv_heads, context):
    """Microseconds of one call; None where the back end refuses."""
    from torch.nn.attention import sdpa_kernel
    group = query_heads // kv_heads
    size = 2 * batch * kv_heads * context * HEAD_DIM * 2
    sets = max(1, min(CALLS, -(-ROTATE_BYTES // size)))
    if size * sets > torch.cuda.mem_get_info()[0] * 0.9:
        return None

    def random(*shape):
        return torch.randn(*shape, device="cuda", dtype=torch.float16)

    k = [random(batch, kv_heads, context, HEAD_DIM) for _ in range(sets)]
    v = [random(batch, kv_heads, context, HEAD_DIM) for _ in range(sets)]
    best = None
    # The group's heads as heads, or as query tokens of their KV head: the same numbers, and back ends differ in what they like. So
    # they do in which of head and token comes first in memory.
    variants = [(random(batch, query_heads, 1, HEAD_DIM), {"enable_gqa": group > 1}, False), (random(batch, kv_heads, group, HEAD_DIM), {}, False),
                (random(batch, query_heads, 1, HEAD_DIM), {"enable_gqa": group > 1}, True), (random(batch, kv_heads, group, HEAD_DIM), {}, True)]
    for q, options, tokens_first in variants:
        if tokens_first and k[0].shape[1] == kv_heads and k[0].is_contiguous():
            k, v = ([x.view(batch, context, kv_heads, HEAD_DIM).transpose(1, 2) for x in side] for side in (k, v))
        try:
            with sdpa_kernel(backend):
                def call(i):
                    return torch.nn.functional.scaled_dot_product_attention(q, k[i % sets], v[i % sets], **options)

                for i in range(3):
                    call(i)
                torch.cuda.synchronize()
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    for i in range(CALLS):
                        call(i)
        except RuntimeError:
            continue
        times = []
        for repetition in range(REPETITIONS + 3):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            graph.replay()
            end.record()
            torch.cuda.synchronize()
            if repetition >= 3:
                times.append(begin.elapsed_time(end) * 1e3 / CALLS)
        us = statistics.median(times)
        best = us if best is None else min(best, us)
    return best


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bench", required=True, help="the program attention_gpu_bench")
    parser.add_argument("--grid", choices=("bars", "full"), default="bars")
    parser.add_argument("--json", help="write everything to this file")
    options = parser.parse_args()
    try:
        import torch
        from torch.nn.attention import SDPBackend
    except ImportError as error:
        sys.exit(f"compare_torch.py: {error}: install torch with CUDA to compare with it")
    if not torch.cuda.is_available():
        sys.exit("compare_torch.py: torch sees no GPU here")

    with tempfile.NamedTemporaryFile(suffix=".json") as out:
        said = subprocess.run([options.bench, "--grid", options.grid, "--json", out.name], stdout=subprocess.PIPE, text=True)
        if said.returncode != 0:
            sys.exit(f"compare_torch.py: {options.bench} failed:\n{said.stdout}")
        ours = json.load(open(out.name))
    print(said.stdout.splitlines()[0])
    print(f"torch {torch.__version__}, {torch.cuda.get_device_name()}")
    print(f"{'codec':24}{'batch':>6}{'context':>9}{'heads':>8}{'ours us':>10}{'TB/s':>7}{'flash us':>10}{'cuDNN us':>10}{'ratio':>7}")
    slow, torchs = [], {}
    for run in ours["runs"]:
        shape = (run["batch"], run["query_heads"], run["kv_heads"], run["context"])
        if run["batch"] == 0:
            continue  # ragged: torch has no such call
        if shape not in torchs:
            torchs[shape] = [torch_us(torch, backend, *shape) for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION)]
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
    if slow:
        print("This run does not count: torch was more than 5% slower than expected (" + "; ".join(slow) + ").")
    if options.json:
        ours["torch"], ours["device"], ours["counts"] = torch.__version__, torch.cuda.get_device_name(), not slow
        with open(options.json, "w") as out:
            json.dump(ours, out, indent=1)
            out.write("\n")


if __name__ == "__main__":
    main()
