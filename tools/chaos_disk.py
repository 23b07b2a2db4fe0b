"""tools/chaos --disk: a daemon with a disk, whose memory outlives it, is killed and started again, and must have what was
durable.

In each round kvmanagerd starts on the folder that the last one left, a client (tests/disk_stress.cc) checks it against a
file of what is expected, publishes more, and notes there what is durable; then, at a moment that the seed says, the
daemon is killed (kill -9), ended by SIGTERM, or upgraded (kvctl upgrade), after which it is the next round's. In half of
the rounds the keeper of its memory is killed behind it, so that the disk alone has what comes back. In some the disk fails now and then (failpoints: writes, reads, syncs).

With --power-cut the disk is a real file system on one whose power is cut in most rounds (power_cut.py): what the kernel
had not written is lost, and of what was written and not synced some, as the seed says, and the memory. Then the file
system is mounted anew. These are counted, and each must be 0:

  lost         a block that was durable is not there
  wrong        a block has other bytes than were published
  back         a block that was purged is found
  failed start a daemon did not start
  unexpected   an error that no fault explains
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import pathlib
import random
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time

import power_cut

COUNTS = ("lost", "wrong", "back", "failed start", "unexpected")
START_S = 30
VERIFY_S = 60
FAILPOINTS = ("disk.write", "disk.read", "disk.sync")
DISK_BYTES = 4 << 30
WORK_S, WORK_WITH_CUTS_S = 0.6, 1.8  # of a client behind its checks, at most; a disk of power_cut.py is slow
ENDS = {"kill -9": 5, "SIGTERM": 2, "upgrade": 3}  # and how often each is drawn
ENDS_WITH_CUTS = {"kill -9": 2, "SIGTERM": 1, "upgrade": 1, "power cut": 8}


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


class DiskChaos:
    def __init__(self, options: argparse.Namespace, folder: pathlib.Path) -> None:
        self._options, self._folder = options, folder
        self.counts = dict.fromkeys(COUNTS, 0)
        self._upgraded: tuple[subprocess.Popen, str, str] | None = None  # a daemon that runs
        self._faulty = False  # it has failpoints
        self._disk = folder / "disk"
        self._power: power_cut.PowerCutDisk | None = None
        if options.power_cut:
            self._power = power_cut.PowerCutDisk(folder / "power", options.power_cut, 2 * DISK_BYTES)
            self._power.mount()
            self._disk = self._power.path / "disk"
        self._ends = ENDS_WITH_CUTS if options.power_cut else ENDS
        self.events = {**dict.fromkeys(self._ends, 0), "keeper killed": 0, "with failpoints": 0}
        self.sums: dict[str, int] = {}
        self.notes: list[str] = []
        self.rounds = 0
        self.seconds = 0.0

    def _note(self, count: str, text: str) -> None:
        self.counts[count] += 1
        self.notes.append(f"round {self.rounds}: {count}: {text}")
        print(f"\n{self.notes[-1]}", file=sys.stderr, flush=True)

    def _start(self, failpoints: str) -> tuple[subprocess.Popen, str, str] | None:
        environment = {name: value for name, value in os.environ.items() if name != "KVMANAGER_FAILPOINTS"}
        if failpoints:
            environment["KVMANAGER_FAILPOINTS"] = failpoints
        listen = f"unix:{self._folder}/kv.sock"
        with open(self._folder / "daemon.log", "ab") as log:
            log.write(f"--- round {self.rounds} starts with failpoints {failpoints or 'off'}\n".encode())
            log.flush()
            daemon = subprocess.Popen(
                [self._options.kvmanagerd, "--listen", listen, "--host-pool-bytes", "24MiB"]
                + ["--disk-path", str(self._disk), "--disk-bytes", str(DISK_BYTES)]
                + ["--state-dir", str(self._folder / "state"), "--state-keep-s", "60"]
                + ["--metrics-listen", "127.0.0.1:0", "--threads", "2", "--drain-s", "2"],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=environment,
                preexec_fn=_die_with_parent,
            )
        for line in daemon.stdout:
            if line.startswith("kvmanagerd ready"):
                words = dict(word.split("=", 1) for word in line.split() if "=" in word)
                return daemon, listen, words["metrics"]
        self._note("failed start", f"kvmanagerd ended with {daemon.wait()}")
        return None

    def _upgrade(self, daemon: subprocess.Popen, listen: str) -> None:
        """Another program goes on in the daemon's process: the same one."""
        done = subprocess.run([self._options.kvctl, "--connect", listen, "upgrade"], capture_output=True, text=True, check=False)
        if done.returncode != 0:
            self._note("unexpected", f"kvctl upgrade: {done.stderr.strip()}")
        for line in daemon.stdout if daemon.poll() is None and done.returncode == 0 else ():
            if line.startswith("kvmanagerd ready"):
                break

    def _kill_keeper(self) -> bool:
        """The process that keeps the daemon's memory, if there is one."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as keeper:
            try:
                keeper.connect(str(self._folder / "state" / "keeper"))
            except OSError:
                return False
            process = struct.unpack("3i", keeper.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0]
            os.kill(process, signal.SIGKILL)
            try:
                while keeper.recv(1):  # until it has gone
                    pass
            except ConnectionResetError:
                pass
        return True

    def _round(self) -> None:
        draw = random.Random(f"{self._options.seed}/{self.rounds}")
        faulty = draw.random() < 0.3
        failpoints = ""
        started, self._upgraded = self._upgraded, None
        if started is not None:
            faulty = self._faulty
        elif faulty:
            self.events["with failpoints"] += 1
            names = draw.sample(FAILPOINTS, draw.randint(1, len(FAILPOINTS)))
            failpoints = ",".join([f"{name}=1/{draw.randint(3, 40)}" for name in names] + [f"seed={draw.randrange(1 << 32)}"])
        started = started or self._start(failpoints)
        if started is None:
            return
        self._faulty = faulty
        daemon, listen, metrics = started
        client = subprocess.Popen(
            [self._options.disk_stress, listen, metrics, str(self._folder / "expected"), str(draw.randrange(1 << 32))]
            + ["some" if faulty else "whole"],
            stdout=subprocess.PIPE,
            text=True,
            preexec_fn=_die_with_parent,
        )
        # Sometimes while it verifies, mostly while it publishes.
        if draw.random() < 0.8:
            for line in client.stdout:
                if self._take(line):
                    break
            else:
                self._note("unexpected", f"the client ended with {client.wait()} before it had verified")
        time.sleep(draw.uniform(0.0, WORK_S if self._power is None else WORK_WITH_CUTS_S))
        if daemon.poll() is not None:
            self._note("unexpected", f"the daemon ended with {daemon.returncode} by itself")
        how = draw.choices(list(self._ends), list(self._ends.values()))[0]
        gently = how == "SIGTERM"
        self.events[how] += 1
        if how == "power cut":
            client.send_signal(signal.SIGSTOP)  # else it takes what is given up for written
            os.waitid(os.P_PID, client.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
            self._power.cut(draw.randrange(1 << 32))
        if how in ("SIGTERM", "power cut"):
            client.kill()  # else its sequence is waited for
        if how == "upgrade":
            self._upgrade(daemon, listen)
            if daemon.poll() is None:
                self._upgraded = started
        else:
            daemon.send_signal(signal.SIGTERM if gently else signal.SIGKILL)
            code = daemon.wait(timeout=START_S)
            if gently and code != 0:
                self._note("unexpected", f"the daemon ended with {code} at SIGTERM")
            daemon.stdout.close()
        if draw.random() < 0.5 or how == "power cut":
            self.events["keeper killed"] += self._kill_keeper()
        if how == "power cut":
            self._power.unmount()
            self._power.mount()
        try:
            rest, _ = client.communicate(timeout=VERIFY_S)
        except subprocess.TimeoutExpired:
            client.kill()
            rest, _ = client.communicate()
            self._note("unexpected", "the client did not end with its daemon")
        for line in rest.splitlines():
            self._take(line)
        if how in ("kill -9", "upgrade") and client.returncode not in (0, 1):  # 1: it has said why
            self._note("unexpected", f"the client ended with {client.returncode}")

    def _take(self, line: str) -> bool:
        """Whether it says that the client has verified."""
        word, _, rest = line.strip().partition(" ")
        if word == "verified":
            for name, count in json.loads(rest).items():
                self.sums[name] = self.sums.get(name, 0) + count
            return True
        if word:
            self._note(word.lower() if word.lower() in COUNTS else "unexpected", rest)
        return False

    def run(self) -> None:
        begun = last = time.monotonic()
        terminal = sys.stderr.isatty()
        while True:
            self.seconds = time.monotonic() - begun
            if self._options.rounds is not None and self.rounds >= self._options.rounds:
                break
            if self._options.minutes is not None and self.seconds >= 60 * self._options.minutes:
                break
            self._round()
            self.rounds += 1
            if terminal or time.monotonic() - last > 10:
                last = time.monotonic()
                line = f"{self.seconds:5.0f} s  round {self.rounds}  " + ", ".join(f"{k} {v}" for k, v in self.counts.items())
                print(f"\r\033[K{line}" if terminal else line, end="" if terminal else "\n", file=sys.stderr, flush=True)

    def end(self) -> None:
        if self._upgraded is not None:
            self._upgraded[0].kill()
            self._upgraded[0].wait()
            self._upgraded[0].stdout.close()
        self._kill_keeper()
        if self._power is not None:
            self._power.close()

    def summary(self) -> str:
        lines = [f"{self.rounds} rounds in {self.seconds:.0f} s, seed {self._options.seed}"]
        lines.append("events: " + ", ".join(f"{name} {count}" for name, count in self.events.items()))
        if self._power is not None:
            lines.append("unsynced writes at cuts, by what was kept: "
                         + ", ".join(f"{kept} {count}" for kept, count in self._power.unsynced.items()))
        lines.append("texts: " + ", ".join(f"{name} {count}" for name, count in self.sums.items()))
        lines.append(", ".join(f"{name} {count}" for name, count in self.counts.items()))
        return "\n".join(lines)


def run(options: argparse.Namespace) -> int:
    """The exit code of tools/chaos --disk. options: as that has parsed them."""
    print(f"seed {options.seed}", flush=True)
    folder = pathlib.Path(tempfile.mkdtemp(prefix="kvchaos", dir=options.folder))
    chaos = DiskChaos(options, folder)
    try:
        chaos.run()
    finally:
        chaos.end()
    print("\n" + chaos.summary())
    for text in chaos.notes[:50]:
        print(text)
    if any(chaos.counts.values()):
        print(f"log of the daemons, and their disk: {folder}")
        return 1
    shutil.rmtree(folder)
    return 0
