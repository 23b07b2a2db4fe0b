"""transfer_bench.py in little, with a real daemon: what it measures is loaded as it was stored, and written down."""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys
import tempfile
import unittest

from kvmanager_testing import daemon_program

_BENCH = pathlib.Path(__file__).resolve().parent / "transfer_bench.py"


class TransferTest(unittest.TestCase):
    def test_both_forms_are_measured_in_a_pool_that_was_written_before(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            out = pathlib.Path(folder, "figures.json")
            subprocess.run(
                [sys.executable, str(_BENCH), "--layers", "2", "--tokens", "128", "256", "--repeats", "2", "--pool-gib", "0.0625",
                 "--churn", "1", "--daemon", daemon_program(), "--out", str(out)],
                check=True, timeout=300,
            )
            rows = json.loads(out.read_text(encoding="utf-8"))["rows"]
        self.assertEqual([("raw", 2), ("raw", 4), ("k4v3", 2), ("k4v3", 4)], [(row["codec"], row["blocks"]) for row in rows])
        for row in rows:
            self.assertEqual((2, 2), (len(row["loads"]), len(row["stores"])))
            self.assertEqual(row["load_bytes"], row["store_bytes"])
        self.assertEqual(rows[1]["raw_bytes"], rows[1]["load_bytes"])
        self.assertLess(rows[3]["load_bytes"], rows[1]["load_bytes"])

    def test_a_pool_keeps_the_newest_prompts(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            out = pathlib.Path(folder, "figures.json")
            subprocess.run(
                [sys.executable, str(_BENCH), "--capacity", "--codecs", "raw", "k3v2", "--layers", "2", "--tokens", "1024", "--pool-gib",
                 "0.125", "--daemon", daemon_program(), "--out", str(out)],
                check=True, timeout=300,
            )
            raw, encoded = json.loads(out.read_text(encoding="utf-8"))["rows"]
        for row, least in ((raw, 0.9), (encoded, 4.1)):  # a prompt, of 16 blocks of which one stays raw, is a sixteenth of what fits raw
            self.assertLess(len(row["found"]), row["prompts"])
            self.assertGreater(sum(row["found"]), least * row["raw_tokens"])
            self.assertEqual([1024] * (len(row["found"]) - 1), row["found"][:-1], "the newest are whole")


if __name__ == "__main__":
    unittest.main()
