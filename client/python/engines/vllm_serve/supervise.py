"""Runs a command, and ends it with every process that comes of it: supervise.py COMMAND...

For servers that start processes of their own. They all end when the command ends, when this process gets SIGTERM or SIGINT,
and when the process that started it ends in whatever way. Exits as the command does, or with 128 + the signal. Linux only.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_GRACE_S = 10.0  # between SIGTERM for the command and SIGKILL for all


class Told(Exception):
    pass


def children() -> list[int]:
    """Of this process; processes whose parents have ended are among them."""
    me = os.getpid()
    with open(f"/proc/{me}/task/{me}/children", encoding="ascii") as file:
        return [int(pid) for pid in file.read().split()]


def end_all() -> None:
    """Kills children until there are none: those of a child that is dead become ours."""
    while True:
        try:
            for pid in children():
                os.kill(pid, signal.SIGKILL)
            os.wait()
        except ProcessLookupError:
            continue
        except ChildProcessError:
            return


def tell(number: int, _frame: object) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    raise Told(number)


def main() -> int:
    parent = os.getppid()
    libc = ctypes.CDLL(None, use_errno=True)
    for option, value in ((_PR_SET_CHILD_SUBREAPER, 1), (_PR_SET_PDEATHSIG, signal.SIGTERM)):
        if libc.prctl(option, value, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), f"prctl({option})")
    signal.signal(signal.SIGTERM, tell)
    signal.signal(signal.SIGINT, tell)
    command = None
    try:
        if os.getppid() != parent:
            raise Told(signal.SIGTERM)
        command = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL)
        return command.wait()
    except Told as told:
        if command is not None and command.poll() is None:
            command.terminate()
            end = time.monotonic() + _GRACE_S
            while command.poll() is None and time.monotonic() < end:
                time.sleep(0.05)
        return 128 + told.args[0]
    finally:
        end_all()


if __name__ == "__main__":
    sys.exit(main())
