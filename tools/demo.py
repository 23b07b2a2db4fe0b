#!/usr/bin/env python3
"""The demo's run, after tools/demo has built it: two kvmanagerd, three engine processes per codec, one table.

First `kvctl calibrate` trains an artifact for the codecs that need one, on examples/model/calibration.txt; later runs find it
in ~/.cache/kvmanager. For each codec: an engine process prefills the first 6,000 bytes of docs/design.md against the prefill
daemon and hands the sequence over; a second engine process claims it at the decode daemon and continues the text, attention
running in that daemon. Then `evaluate` measures bits per byte of a held-out text through the prefill daemon. In the end one hand-off goes
out while its prefill still runs, and is drawn layer by layer. Everything started is stopped.
"""
import argparse
import hashlib
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
BIN = pathlib.Path(os.environ.get("KVMANAGER_BIN", ROOT / "bazel-bin"))  # where bazel put the programs
MODEL = ROOT / "examples/model"
CODECS = (  # name in the table, codec, lag in pages; CALIBRATION stands for the artifact, PLUGIN for the plug-in's codec
    ("raw fp16", "raw", 2),
    ("hack K4V3 (default)", "default", 2),
    ("hack K3V2", "hack", 2),
    ("hack K2V1", "hack:k_bits=2,v_bits=1", 2),
    ("policy: layer 4 finer", "hack:k_bits=2,v_bits=1;4..4=hack:k_bits=4,v_bits=3", 2),
    ("hack, the paper's axis", "hack:k_axis=token,k_bits=2,v_bits=2,meta=16", 2),
    ("zack+hack 76 (trained)", "default:CALIBRATION", 2),
    ("zack+hack 56", "zack+hack:bytes=56,CALIBRATION", 2),
    ("zack+hack 40", "zack+hack:bytes=40,CALIBRATION", 2),
    ("million (64,8)", "million:m=64,bits=8,CALIBRATION", 2),
    ("zack+million (32,8)", "zack+million:m=32,bits=8,CALIBRATION", 2),
    ("zack 1/4 removed", "zack:rate=0.25,CALIBRATION", 2),
    ("pq, attends to a tenth", "pq:m=4,bits=8,ratio=0.1", 2),
    ("plug-in (out of tree)", "PLUGIN", 2),
)
CALIBRATED = ("zack", "zack+hack", "million:m=64,bits=8", "zack+million:m=32,bits=8")  # what the artifact is trained for
CALIBRATION_WINDOWS = 8  # of 4,096 bytes
TIMELINE_CODEC = ("hack K3V2", "hack", 0)
TIMELINE_RATE = 8 << 20  # bytes per second: so much slower than loopback that there is something to see
TIMELINE_COLUMNS = 100
PAGE_TOKENS = 64
RAW_BYTES = 512  # per token and KV head: fp16, head_dim 128, K and V


class Progress:
    """One line on a terminal, a line per step elsewhere."""

    def __init__(self, steps):
        self.steps, self.done, self.tty = steps, 0, sys.stderr.isatty()

    def step(self, text):
        width = 24
        filled = width * self.done // self.steps
        line = f"[{'#' * filled}{'.' * (width - filled)}] {self.done}/{self.steps} {text}"
        print(f"\r\033[K{line}" if self.tty else line, end="" if self.tty else "\n", file=sys.stderr, flush=True)
        self.done += 1

    def finish(self):
        if self.tty:
            print("\r\033[K", end="", file=sys.stderr, flush=True)


class Daemon:
    """A kvmanagerd of this demo: Unix socket, free ports; stopped by SIGTERM, which must end it with status 0."""

    def __init__(self, name, folder, pool, flags):
        self.name, self.address = name, f"unix:{folder}/{name}.sock"
        self.log = open(folder / f"{name}.log", "w")
        self.process = subprocess.Popen(
            [BIN / "kvmanager/daemon/kvmanagerd", "--listen", self.address, "--host-pool-bytes", pool, "--metrics-listen", "127.0.0.1:0",
             "--peer-listen", "127.0.0.1:0", "--hand-off-peers", "any", *map(str, flags)],
            stdout=subprocess.PIPE, stderr=self.log, text=True)
        ready = self.process.stdout.readline().split()
        if ready[:2] != ["kvmanagerd", "ready"]:
            raise RuntimeError(f"{name} daemon did not start; see below\n" + (folder / f"{name}.log").read_text())
        where = dict(word.split("=", 1) for word in ready[2:])
        self.peer, self.metrics = where["peer"], where["metrics"]

    def stop(self):
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            status = self.process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            status = self.process.wait()
        self.log.close()
        return status


class Stopped(Exception):
    """A signal asked the demo to end."""


def stop_on_signals():
    def stop(number, _):
        raise Stopped(signal.Signals(number).name)

    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(number, stop)


def run(folder, program, *arguments):
    """Runs one of our programs with --json; returns what it wrote. Ends it if the demo is ended."""
    out = folder / "out.json"
    out.unlink(missing_ok=True)
    process = subprocess.Popen([BIN / program, *map(str, arguments), "--json", out], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        said, _ = process.communicate()
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait()
    if process.returncode != 0:
        raise RuntimeError(f"{program} failed with status {process.returncode}:\n{said[-4000:]}")
    return json.loads(out.read_text())


def calibrate(folder, progress):
    """The artifact for the demo's model: trained once, then kept."""
    text = (MODEL / "calibration.txt").read_bytes()
    said = hashlib.sha256(repr((CALIBRATED, text)).encode() + (MODEL / "model.safetensors").read_bytes()).hexdigest()
    kept = pathlib.Path(os.environ.get("XDG_CACHE_HOME", pathlib.Path.home() / ".cache")) / "kvmanager"
    kept.mkdir(parents=True, exist_ok=True)
    artifact = kept / f"demo-{said[:16]}.safetensors"
    progress.step(f"calibration artifact: {'training, one to four minutes' if not artifact.exists() else 'kept from an earlier run'}")
    if not artifact.exists():
        codecs = [word for codec in CALIBRATED for word in ("--codec", codec)]
        run(folder, "client/cli/kvctl", "calibrate", "--model", MODEL, "--text", MODEL / "calibration.txt", "--windows",
            CALIBRATION_WINDOWS, *codecs, "--out", artifact)
    return artifact


def one_codec(folder, prefill, decode, codec, lag, options, progress, name):
    common = ["--model", MODEL, "--codec", codec, "--lag", lag]
    ticket = folder / "ticket"
    progress.step(f"{name}: prefill of {options.prompt_bytes} bytes, hand-off")
    first = run(folder, "examples/engine/generate", "--connect", prefill.address, *common, "--prompt-file", ROOT / "docs/design.md",
                "--prompt-bytes", options.prompt_bytes, "--temperature", options.temperature, "--seed", 7, "--hand-off", decode.peer,
                "--ticket-file", ticket, "--quiet")
    progress.step(f"{name}: decoding {options.tokens} tokens on the decode host")
    second = run(folder, "examples/engine/generate", "--connect", decode.address, *common, "--claim-ticket-file", ticket, "--tokens",
                 options.tokens, "--quiet")
    progress.step(f"{name}: bits per byte of the held-out text")
    quality = run(folder, "examples/engine/evaluate", "--connect", prefill.address, *common, "--text", MODEL / "held_out.txt",
                  "--window", 4096, "--stride", 4096, "--windows", 2)
    return {
        "name": name, "codec": quality["codec"], "lag_pages": lag, "bytes_per_token_head": quality["bytes_per_token_head"],
        "ratio": RAW_BYTES / quality["bytes_per_token_head"], "bpb": quality["bpb"], "transferred_bytes": first["transferred_bytes"],
        "transferred_seconds": first["transferred_seconds"], "prefill_seconds": first["prefill_seconds"],
        "tokens_per_second": second["tokens_per_second"], "prompt_tokens": second["prompt_tokens"],
        "prompt_tokens_computed_by_decode_process": second["prompt_computed_tokens"], "text": second["text"],
    }


def timeline(folder, decode, flags, options, progress):
    """One hand-off that begins before its prefill does, by way of a link that --peer-rate-bytes holds to TIMELINE_RATE. The
    times are those that the engines' steps and the sending daemon measured, by one clock."""
    name, codec, lag = TIMELINE_CODEC
    progress.step(f"{name}: pages sent while prefill runs")
    sender = Daemon("streaming", folder, options.pool, [*flags, "--peer-local-copy", "off", "--peer-rate-bytes", TIMELINE_RATE])
    common = ["--model", MODEL, "--codec", codec, "--lag", lag, "--quiet"]
    ticket, out = folder / "early-ticket", [folder / "sent.json", folder / "read.json"]
    generate = [BIN / "examples/engine/generate", *map(str, common)]
    prompt_bytes = str(max(options.prompt_bytes // PAGE_TOKENS, 1) * PAGE_TOKENS)  # whole pages: an open one goes at the very end
    engines = []
    try:
        engines.append(subprocess.Popen([*generate, "--connect", sender.address, "--prompt-file", ROOT / "docs/design.md", "--prompt-bytes",
                                         prompt_bytes, "--chunk", prompt_bytes, "--stream", "--hand-off", decode.peer,
                                         "--ticket-file", ticket, "--json", out[0]]))
        while not ticket.exists():  # it is there before prefill begins
            if engines[0].poll() is not None:
                raise RuntimeError(f"generate --stream ended with status {engines[0].returncode}")
            time.sleep(0.01)
        engines.append(subprocess.Popen([*generate, "--connect", decode.address, "--claim-ticket-file", ticket, "--tokens", "8", "--json", out[1]]))
        for engine in engines:
            if engine.wait():
                raise RuntimeError(f"generate failed with status {engine.returncode} while the timeline was measured")
    finally:
        for engine in engines:
            if engine.poll() is None:
                engine.terminate()
                engine.wait()
        status = sender.stop()
    if status:
        raise RuntimeError(f"the streaming daemon ended with status {status}")
    sent, read = (json.loads(path.read_text()) for path in out)
    seconds = lambda unix_ns: (unix_ns - sent["begun_unix_ns"]) * 1e-9
    return {
        "codec": name, "tokens": sent["prompt_tokens"], "bytes": sent["transferred_bytes"], "rate_bytes": TIMELINE_RATE,
        "layers": [{"prefill": [seconds(a["prefill_begun_unix_ns"]), seconds(a["prefill_ended_unix_ns"])],
                    "ready": [a["ready_first"], a["ready_last"]], "sent": [a["sent_first"], a["arrived_last"]],
                    "read": [seconds(b["read_begun_unix_ns"]), seconds(b["read_ended_unix_ns"])]}
                   for a, b in zip(sent["layers"], read["layers"])],
    }


def draw(measured):
    """The timeline as lines of at most TIMELINE_COLUMNS characters: two per layer."""
    label = 9
    begin = min(layer["prefill"][0] for layer in measured["layers"])
    end = max(layer["read"][1] for layer in measured["layers"])
    scale = (TIMELINE_COLUMNS - label) / (end - begin)

    def bar(line, span, mark):
        first = int((span[0] - begin) * scale)
        last = max(first + 1, int((span[1] - begin) * scale))
        for column in range(max(first, 0), min(last, len(line))):
            line[column] = mark

    lines = [f"A hand-off's timeline: {measured['codec']}, {measured['tokens']} tokens, {measured['bytes'] / 1e6:.2f} MB "
             f"over a link held to {measured['rate_bytes'] / 1e6:.1f} MB/s.",
             "= prefill's attention   . encoded, waits for the link   > first byte sent to last page there",
             "# the decode engine's first step reads it",
             " " * label + f"0 s{f'{end - begin:.2f} s':>{TIMELINE_COLUMNS - label - 3}}"]
    for number, layer in enumerate(measured["layers"]):
        above, below = ([" "] * (TIMELINE_COLUMNS - label) for _ in range(2))
        bar(above, layer["prefill"], "=")
        bar(above, layer["read"], "#")
        if layer["sent"][0] > layer["ready"][0]:
            bar(below, [layer["ready"][0], layer["sent"][0]], ".")
        bar(below, layer["sent"], ">")
        lines += [f"layer {number:<3}".ljust(label) + "".join(above).rstrip(), " " * label + "".join(below).rstrip()]
    prefilled = max(layer["prefill"][1] for layer in measured["layers"])
    late = max(layer["sent"][1] for layer in measured["layers"]) - prefilled
    lines.append(f"The last page arrived {max(late, 0):.3f} s after prefill's last attention.")
    lines.append(f"Behind it in one piece, the link alone would take {measured['bytes'] / measured['rate_bytes']:.2f} s.")
    return lines


def show(rows):
    raw = rows[0]
    print("\nThe text each codec continued with (prompt: the first bytes of docs/design.md; model: examples/model, 7.6 M parameters):")
    for row in rows:
        print(f"\n--- {row['name']}\n{row['text'].strip()}")
    header = f"\n{'codec':24}{'B/token/head':>13}{'ratio':>7}{'bits/byte':>11}{'change':>9}{'MB moved':>10}{'of raw':>8}{'s moved':>9}{'tokens/s':>10}"
    print(header + "\n" + "-" * (len(header) - 1))
    for row in rows:
        row["bpb_change"] = row["bpb"] - raw["bpb"]
        row["transferred_of_raw"] = row["transferred_bytes"] / raw["transferred_bytes"]
        print(f"{row['name']:24}{row['bytes_per_token_head']:13.1f}{row['ratio']:6.1f}x{row['bpb']:11.4f}{row['bpb_change']:+9.4f}"
              f"{row['transferred_bytes'] / 1e6:10.2f}{row['transferred_of_raw']:8.3f}{row['transferred_seconds']:9.3f}"
              f"{row['tokens_per_second']:10.1f}")
    computed = sum(row["prompt_tokens_computed_by_decode_process"] for row in rows)
    print(f"\nPrompt tokens whose K and V the decode processes computed: {computed} of {sum(r['prompt_tokens'] for r in rows)}.")
    print("MB moved: pages of the hand-off, the newest full pages (lag) and open pages raw among them. Bits per byte: lower is better.")
    return computed


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=pathlib.Path, help="also write the table to this file")
    parser.add_argument("--tokens", type=int, default=200, help="tokens to continue with, per codec (default 200)")
    parser.add_argument("--prompt-bytes", type=int, default=6000, help="bytes of docs/design.md to prefill (default 6000)")
    parser.add_argument("--temperature", type=float, default=0.5, help="of sampling; 0: the most likely byte (default 0.5)")
    parser.add_argument("--pool", default="512MiB", help="page memory of each daemon (default 512MiB)")
    parser.add_argument("--plugin", type=pathlib.Path, required=True, help="a codec's shared object, built by tools/demo")
    parser.add_argument("--plugin-codec", required=True, help="the name of its codec")
    options = parser.parse_args()

    begun, folder, daemons, rows = time.time(), pathlib.Path(tempfile.mkdtemp(prefix="kvmanager-demo-")), [], []
    progress = Progress(3 * len(CODECS) + 2)
    stop_on_signals()
    try:
        artifact = calibrate(folder, progress)
        flags = ["--calibration-dir", artifact.parent, "--codec-plugin", options.plugin]
        for name in ("prefill", "decode"):
            daemons.append(Daemon(name, folder, options.pool, flags))
        print(f"demo: two daemons are up; metrics at http://{daemons[0].metrics}/metrics and http://{daemons[1].metrics}/metrics", flush=True)
        for name, codec, lag in CODECS:
            codec = codec.replace("CALIBRATION", f"calibration={artifact}").replace("PLUGIN", options.plugin_codec)
            rows.append(one_codec(folder, *daemons, codec, lag, options, progress, name))
        measured = timeline(folder, daemons[1], flags, options, progress)
    except (RuntimeError, Stopped) as error:
        progress.finish()
        print(f"demo: {'stopped by ' if isinstance(error, Stopped) else ''}{error}", file=sys.stderr)
        return 1
    finally:
        progress.finish()
        statuses = {daemon.name: daemon.stop() for daemon in daemons}
        shutil.rmtree(folder, ignore_errors=True)
    computed = show(rows)
    print("\n" + "\n".join(draw(measured)))
    if options.json:
        options.json.write_text(json.dumps({"codecs": rows, "timeline": measured, "seconds": time.time() - begun}, indent=2) + "\n")
    print(f"demo: done in {time.time() - begun:.0f} s; both daemons were stopped (exit status {', '.join(map(str, statuses.values()))}).")
    return 1 if computed or any(statuses.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
