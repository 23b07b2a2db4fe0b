#!/usr/bin/env python3
"""Attention by many query tokens of this project beside torch's, on the same shapes, in one run on one GPU.

    bench/gpu/compare_prefill.py --bench bazel-bin/attention/prefill_gpu_bench [--json FILE]

Query tokens are the newest of their context, causal among themselves. Torch's flash back end gets contiguous fp16 K and V and a
causal mask aligned to the last token, as ours has. Torch's cuDNN back end aligns its mask to the first token, so that it cannot do
the same behind a history: there it is timed without a mask, which is up to 3% more work in the shape of the bar, and its time is
scaled by the work. Random data, replays of a CUDA graph, medians. A ratio is torch's time over ours. Needs torch and a Hopper GPU.
"""
import argparse
import json
import statistics
import subprocess
import sys
import tempfile

WARM_UPS, REPETITIONS = 2, 9
MEASURED_US = 20e3
CHECKED_ROWS = (0, 1, -1)


def graph_us(torch, call, calls):
    """Microseconds of one call, of which a graph holds `calls`; RuntimeError where the back end refuses."""
    for _ in range(2):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            call()
    times = []
    for repetition in range(WARM_UPS + REPETITIONS):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        if repetition >= WARM_UPS:
            times.append(begin.elapsed_time(end) * 1e3 / calls)
    return statistics.median(times)


def check(torch, q, k, v, got):
    """`got` is attention under a mask aligned to the last token, in some rows of the first sequence."""
    group, behind = q.shape[1] // k.shape[1], k.shape[2] - q.shape[2]
    for row in CHECKED_ROWS:
        seen = behind + row % q.shape[2] + 1
        keys = k[0, :, :seen].float().repeat_interleave(group, 0)
        values = v[0, :, :seen].float().repeat_interleave(group, 0)
        scores = torch.einsum("hd,htd->ht", q[0, :, row].float(), keys) / q.shape[3] ** 0.5
        wanted = torch.einsum("ht,htd->hd", scores.softmax(-1), values)
        error = ((got[0, :, row].float() - wanted).norm() / wanted.norm()).item()
        if not error < 5e-3:
            sys.exit(f"compare_prefill.py: torch's flash attention is not what it is compared as: error {error} in row {row}")


def torch_us(torch, run):
    """Flash, cuDNN: microseconds, or None."""
    batch, tokens, context = run["batch"], run["tokens"], run["history"] + run["tokens"]
    random = lambda heads, length: torch.empty(batch, heads, length, run["head_dim"], device="cuda", dtype=torch.float16).normal_()
    q, k, v = random(run["query_heads"], tokens), random(run["kv_heads"], context), random(run["kv_heads"], context)
    pairs = tokens * run["history"] + tokens * (tokens + 1) / 2
    calls = int(min(max(MEASURED_US / (4 * pairs * batch * run["query_heads"] * run["head_dim"] / 5e8), 1), 64))
    flash = torch.ops.aten._scaled_dot_product_flash_attention
    try:
        got = flash(q, k, v, 0.0, True)[0]
        keys, values = k, v
    except RuntimeError:
        group = run["query_heads"] // run["kv_heads"]
        keys, values = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        got = flash(q, keys, values, 0.0, True)[0]
    check(torch, q, k, v, got)
    times = [graph_us(torch, lambda: flash(q, keys, values, 0.0, True), calls)]
    causal = run["history"] == 0
    try:
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.CUDNN_ATTENTION):
            us = graph_us(
                torch, lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True), calls)
        times.append(us if causal else us * pairs / (tokens * context))
    except RuntimeError as error:
        print(f"cuDNN: {str(error).splitlines()[0]}")
        times.append(None)
    return times


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bench", required=True, help="the program attention/prefill_gpu_bench")
    parser.add_argument("--json", help="write the results to this file")
    options = parser.parse_args()
    try:
        import torch
    except ImportError as error:
        sys.exit(f"compare_prefill.py: {error}: install torch with CUDA to compare with it")
    if not torch.cuda.is_available():
        sys.exit("compare_prefill.py: torch sees no GPU here")
    with tempfile.NamedTemporaryFile(suffix=".json") as out:
        said = subprocess.run([options.bench, "--json", out.name], stdout=subprocess.PIPE, text=True)
        if said.returncode != 0:
            sys.exit(f"compare_prefill.py: {options.bench} failed:\n{said.stdout}")
        ours = json.load(open(out.name))
    print(f"torch {torch.__version__}, {torch.cuda.get_device_name()}")
    print(f"{'codec':24}{'batch':>6}{'tokens':>7}{'history':>8}{'heads':>8}{'dim':>4}{'ours us':>10}{'TFLOP/s':>9}"
          f"{'flash us':>10}{'cuDNN us':>10}{'of flash':>9}{'of cuDNN':>9}")
    torchs = {}
    for run in ours["runs"]:
        shape = tuple(run[name] for name in ("batch", "tokens", "history", "query_heads", "kv_heads", "head_dim"))
        if shape not in torchs:
            torchs[shape] = torch_us(torch, run)
            torch.cuda.empty_cache()
        run["flash_us"], run["cudnn_us"] = torchs[shape]
        cells = [f"{us:10.1f}" if us else f"{'-':>10}" for us in torchs[shape]]
        ratios = [f"{us / run['us']:9.2f}" if us else f"{'-':>9}" for us in torchs[shape]]
        heads = f"{run['query_heads']}/{run['kv_heads']}"
        print(f"{run['codec']:24}{run['batch']:6}{run['tokens']:7}{run['history']:8}{heads:>8}{run['head_dim']:4}{run['us']:10.1f}"
              f"{run['tflops']:9.1f}{cells[0]}{cells[1]}{ratios[0]}{ratios[1]}", flush=True)
    if options.json:
        ours["torch"], ours["device"] = torch.__version__, torch.cuda.get_device_name()
        with open(options.json, "w") as out:
            json.dump(ours, out, indent=1)
            out.write("\n")


if __name__ == "__main__":
    main()
