"""A minute of tools/chaos, another with a disk, half of one with power cuts where file systems can be mounted, and that a seed
says what happens."""

from __future__ import annotations

import os
import subprocess
import sys
import unittest

import kvmanager_testing
import source_tree

sys.path.append(os.path.join(source_tree.root(), "tools"))
import power_cut

_MINUTES = 1
_POWER_CUT_MINUTES = 0.5


def _chaos(*arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, os.path.join(source_tree.root(), "tools/chaos"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


class Chaos(unittest.TestCase):
    def test_a_minute(self) -> None:
        # A seed of its own each time: over many runs more is seen. A failure names it.
        done = _chaos(
            "--minutes",
            str(_MINUTES),
            "--kvmanagerd",
            kvmanager_testing.daemon_program(),
            "--chaos-client",
            kvmanager_testing.data_path("tests/chaos_client"),
        )
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        print(done.stdout)

    def test_a_minute_of_a_disk(self) -> None:
        self.disk("--minutes", str(_MINUTES))

    def test_half_a_minute_of_power_cuts(self) -> None:
        if lack := power_cut.missing("ext4"):
            self.skipTest(f"power cuts under a real file system need {lack}")
        said = self.disk("--minutes", str(_POWER_CUT_MINUTES), "--power-cut", "ext4")
        self.assertRegex(said, r"power cut [1-9]")  # what is not synced then is a matter of moments: volatile_disk_test

    def disk(self, *arguments: str) -> str:
        done = _chaos(
            "--disk",
            *arguments,
            "--kvmanagerd",
            kvmanager_testing.daemon_program(),
            "--disk-stress",
            kvmanager_testing.data_path("tests/disk_stress"),
            "--kvctl",
            kvmanager_testing.data_path("client/cli/kvctl"),
        )
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        # That nothing is lost says something only of what was looked for.
        self.assertRegex(done.stdout, r"texts: durable [1-9]\d*, purged \d+, compared [1-9]")
        print(done.stdout)
        return done.stdout

    def test_a_seed_is_a_schedule(self) -> None:
        plans = [_chaos("--plan", "--rounds", "50", "--seed", seed).stdout for seed in ("7", "7", "8")]
        self.assertEqual(plans[0], plans[1])
        self.assertNotEqual(plans[0], plans[2])
        later = _chaos("--plan", "--rounds", "1", "--seed", "7", "--first", "49").stdout
        self.assertTrue(plans[0].endswith(later), "a round does not depend on those before it")

    def test_wrong_usage(self) -> None:
        self.assertEqual(_chaos("--clients", "0").returncode, 2)
        self.assertEqual(_chaos("--power-cut", "ext4").returncode, 2)


if __name__ == "__main__":
    unittest.main()
