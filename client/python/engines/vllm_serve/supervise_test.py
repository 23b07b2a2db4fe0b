"""Nothing that a supervised command starts outlives it, its supervisor or whoever started that."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import unittest

DEADLINE_S = 60
SUPERVISE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "supervise.py")
# Starts a process in a session of its own whose parent has ended, which has our pipe open; then waits.
TREE = "(setsid sh -c 'trap \"\" TERM; echo started; while :; do sleep 1000; done' &); exec sleep 1000"


class SuperviseTest(unittest.TestCase):
    def start(self, *before: str, tree: str = TREE) -> subprocess.Popen:
        command = [*before, sys.executable, SUPERVISE, "sh", "-c", tree]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        self.addCleanup(process.stdout.close)
        self.addCleanup(process.kill)
        self.assertEqual("started\n", process.stdout.readline())
        return process

    def assert_all_end(self, process: subprocess.Popen) -> None:
        """The pipe is closed once no process has it open, and not before."""
        output, _ = process.communicate(timeout=DEADLINE_S)
        self.assertEqual("", output)

    def test_told_to_end(self) -> None:
        process = self.start()
        process.send_signal(signal.SIGTERM)
        self.assert_all_end(process)
        self.assertEqual(128 + signal.SIGTERM, process.returncode)

    def test_the_command_ends(self) -> None:
        process = self.start(tree=TREE.replace("exec sleep 1000", "sleep 1; exit 7"))
        self.assert_all_end(process)
        self.assertEqual(7, process.returncode)

    def test_whoever_started_it_is_killed(self) -> None:
        starter = "import subprocess, sys; sys.exit(subprocess.call(sys.argv[1:]))"
        process = self.start(sys.executable, "-c", starter)
        process.kill()
        self.assert_all_end(process)


if __name__ == "__main__":
    unittest.main()
