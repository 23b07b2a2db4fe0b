"""The wheel installs without a network, brings what it needs, and its example runs; with Debian's numpy."""

from __future__ import annotations

import base64
import glob
import hashlib
import os
import subprocess
import sys
import tempfile
import unittest
import zipfile

from kvmanager_testing import Daemon, data_path

_PROBE = """
import time
began = time.monotonic()
import kvmanager
print(f"import kvmanager: {(time.monotonic() - began) * 1e3:.0f} ms")
import os, sys
folder = os.path.dirname(kvmanager.__file__)
assert folder.startswith(sys.prefix), folder
assert "numpy" not in sys.modules and "torch" not in sys.modules
for line in open("/proc/self/maps"):
    path = line.split()[-1]
    if any(name in path for name in ("libcapnp", "libkj", "libabsl")):
        assert path.startswith(folder), path
kvmanager.connect("unix:/nowhere", connect_ms=1)
"""

_OWN_DAEMON = """
import os, kvmanager
from kvmanager.programs import Daemon, program
assert program("kvmanagerd").startswith(os.path.dirname(kvmanager.__file__)), program("kvmanagerd")
with Daemon(program("kvmanagerd"), host_pool_bytes=64 << 20) as daemon:
    with kvmanager.connect(daemon.address) as client:
        client.ping()
    print(os.path.exists(daemon.address.removeprefix("unix:")), end=" ")
print(os.path.exists(daemon.address.removeprefix("unix:")))
try:
    Daemon(program("kvmanagerd"), host_pool_bytes=1)
except RuntimeError as error:
    assert "--host-pool-bytes" in str(error), error
else:
    raise AssertionError("a daemon with a pool of one byte")
"""


def wheel_path() -> str:
    (path,) = glob.glob(data_path("client/python/kvmanager-*.whl"))
    return path


class Wheel(unittest.TestCase):
    @classmethod
    def setUpClass(cls) -> None:
        cls.folder = cls.enterClassContext(tempfile.TemporaryDirectory(prefix="kvwheel"))
        python = os.environ.get("KVMANAGER_WHEEL_PYTHON", sys.executable)
        subprocess.run([python, "-m", "venv", "--system-site-packages", cls.folder], check=True)
        cls.python = os.path.join(cls.folder, "bin", "python")
        cls.environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
        subprocess.run([cls.python, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", wheel_path()],
                       check=True, env=cls.environment)

    def run_python(self, *arguments: str) -> subprocess.CompletedProcess:
        return subprocess.run([self.python, *arguments], env=self.environment, cwd=self.folder, capture_output=True,
                              text=True, check=False)

    def test_it_brings_its_libraries_and_imports_no_other_package(self) -> None:
        done = self.run_python("-c", _PROBE)
        print(done.stdout.strip())
        self.assertIn("UnavailableError: UNAVAILABLE: ", done.stderr)

    def test_a_missing_tool_is_named_with_what_installs_it(self) -> None:
        done = subprocess.run([sys.executable, data_path("client/python/make_wheel.py"), "out.whl", "README", "LICENSE"],
                              env={"PATH": self.folder}, capture_output=True, text=True, check=False)
        self.assertEqual(done.returncode, 1)
        self.assertRegex(done.stderr, r"^make_wheel: .*patchelf.* not installed; tools/setup installs")

    def test_every_file_is_recorded_with_its_digest(self) -> None:
        with zipfile.ZipFile(wheel_path()) as wheel:
            record = next(name for name in wheel.namelist() if name.endswith("RECORD"))
            recorded = dict(line.split(",")[:2] for line in wheel.read(record).decode().splitlines())
            self.assertEqual(recorded.pop(record), "")
            digests = {
                name: "sha256=" + base64.urlsafe_b64encode(hashlib.sha256(wheel.read(name)).digest()).decode().rstrip("=")
                for name in wheel.namelist()
                if name != record
            }
        self.assertEqual(recorded, digests)

    def test_the_example_runs_between_two_daemons(self) -> None:
        with Daemon(host_pool="64MiB") as one, Daemon(host_pool="64MiB") as other:
            example = data_path("client/python/example/example.py")
            first = self.run_python(example, one.listen)
            self.assertEqual((first.returncode, first.stdout.splitlines()[:1]), (0, ["prompt: 0 of 150 tokens were there"]),
                             first.stderr)
            second = self.run_python(example, one.listen, other.peer, other.listen)
            self.assertEqual(second.returncode, 0, second.stderr)
            self.assertIn("prompt: 128 of 150 tokens were there", second.stdout)
            self.assertIn("claimed 150 tokens, blob b'sampling state'", second.stdout)

    def test_its_programs_are_commands(self) -> None:
        for name, option, wanted in (("kvmanagerd", "--version", r"^kvmanagerd \d+\.\d+"), ("kvctl", "--help", "calibrate"),
                                     ("kvctl", "calibrate --help", "--capture")):
            command = [os.path.join(self.folder, "bin", name), *option.split()]
            done = subprocess.run(command, env=self.environment, capture_output=True, text=True, check=False)
            self.assertEqual((done.returncode, done.stderr), (0, ""))
            self.assertRegex(done.stdout, wanted)
        with zipfile.ZipFile(wheel_path()) as wheel:
            print(f"{os.path.getsize(wheel_path()) / 2**20:.1f} MiB, of which unpacked "
                  + ", ".join(f"{entry.filename.rpartition('/')[2]} {entry.file_size / 2**20:.1f}"
                              for entry in wheel.infolist() if entry.file_size > 1 << 20))

    def test_a_daemon_of_its_own_serves(self) -> None:
        done = self.run_python("-c", _OWN_DAEMON)
        self.assertEqual((done.returncode, done.stdout.strip()), (0, "True False"), done.stderr)

    def test_the_example_says_what_is_wrong(self) -> None:
        done = self.run_python(data_path("client/python/example/example.py"), "unix:/tmp/kv_nobody_is_there")
        self.assertEqual(done.returncode, 1)
        self.assertIn("UNAVAILABLE", done.stderr)


if __name__ == "__main__":
    unittest.main()
