"""The wheel as PyPI would take it, its types as a checker sees them, and its example in a fresh virtual environment
with the newest numpy."""

from __future__ import annotations

import glob
import os
import re
import subprocess
import sys
import tempfile
import unittest

from kvmanager_testing import Daemon, data_path


def wheel_path() -> str:
    (path,) = glob.glob(data_path("client/python/kvmanager-*.whl"))
    return path


def run(*command: str) -> str:
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise AssertionError(f"{command} ended with {done.returncode}: {done.stdout}\n{done.stderr}")
    return done.stdout


class Published(unittest.TestCase):
    def test_twine_finds_nothing_wrong(self) -> None:
        self.assertIn("PASSED", run(sys.executable, "-m", "twine", "check", "--strict", wheel_path()))

    def test_the_types_of_its_interface_are_known(self) -> None:
        program = data_path("client/python/engines/wheel/typed.py")
        with tempfile.TemporaryDirectory(prefix="kvtyped") as folder:
            run(sys.executable, "-m", "venv", folder)
            inside = os.path.join(folder, "bin", "python")
            run(inside, "-m", "pip", "install", "--quiet", wheel_path())
            check = (sys.executable, "-m", "mypy", "--strict", "--python-executable", inside, "--cache-dir", folder)
            self.assertIn("Success", run(*check, program))
            wrong = os.path.join(folder, "wrong.py")
            with open(wrong, "w", encoding="utf-8") as file:
                file.write("import kvmanager\nfrom kvmanager import aio\n\nkvmanager.connect(5).ping(1)\n\n\n"
                           "async def coroutine(client: aio.Client) -> None:\n"
                           "    await aio.connect('unix:/x', nam='x')\n    await client.open_cache(model=5)\n")
            done = subprocess.run([*check, wrong], capture_output=True, text=True, check=False)
            self.assertEqual({"4", "8", "9"}, set(re.findall(r"wrong.py:(\d+): error", done.stdout)), done.stdout)

    def test_the_example_runs_in_a_fresh_virtual_environment(self) -> None:
        """Of this Python, and of those of $KVMANAGER_PYTHONS (paths, ':' between them)."""
        others = [path for path in os.environ.get("KVMANAGER_PYTHONS", "").split(":") if path]
        for python in [sys.executable, *others]:
            with self.subTest(python), tempfile.TemporaryDirectory(prefix="kvwheel") as folder, Daemon() as daemon:
                run(python, "-m", "venv", folder)
                inside = os.path.join(folder, "bin", "python")
                run(inside, "-m", "pip", "install", "--quiet", "numpy", wheel_path())
                print(run(inside, "--version").strip())
                self.assertIn("0 of 150 tokens", run(inside, data_path("client/python/example/example.py"), daemon.listen))


if __name__ == "__main__":
    unittest.main()
