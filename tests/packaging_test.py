"""The configurations of packaging/ start a daemon, and systemd accepts its unit."""

from __future__ import annotations

import json
import os
import shutil
import socket
import stat
import subprocess
import tempfile
import unittest
import urllib.request
from unittest import mock

import kvmanager_testing
from kvmanager_testing import data_path


class Packaging(unittest.TestCase):
    def test_configurations_start_a_daemon(self) -> None:
        for name in ("kvmanagerd.conf", "container.conf"):
            # Addresses and sizes of the command line win: a test takes free ports and little memory.
            flags = ("--config", data_path("packaging/" + name), "--http-listen", "127.0.0.1:0")
            with self.subTest(name=name), kvmanager_testing.Daemon(flags=flags) as daemon:
                with urllib.request.urlopen(f"http://{daemon.http}/", timeout=60) as page:
                    self.assertEqual(page.status, 200)

    @unittest.skipUnless(shutil.which("systemd-analyze"), "systemd is not installed")
    def test_units(self) -> None:
        for name in ("kvmanagerd.service", "kvmanager-keeper.service", "kvmanager.slice"):
            with open(data_path("packaging/" + name), encoding="utf-8") as file:
                text = file.read()
            with self.subTest(name), tempfile.TemporaryDirectory(prefix="kvunit") as folder:
                unit = os.path.join(folder, name)
                program = os.path.realpath(kvmanager_testing.daemon_program())
                with open(unit, "w", encoding="utf-8") as file:
                    file.write(text.replace("/usr/local/bin/kvmanagerd", program).replace("/usr/local/bin/kvctl", program))
                done = subprocess.run(["systemd-analyze", "verify", unit], capture_output=True, text=True, check=False)
                self.assertEqual((done.returncode, done.stdout + done.stderr), (0, ""))

    def test_the_keepers_unit_keeps_what_a_daemon_had(self) -> None:
        """Its command, which a daemon finds by --state-dir."""
        with open(data_path("packaging/kvmanager-keeper.service"), encoding="utf-8") as file:
            (command,) = [line.removeprefix("ExecStart=").split() for line in file if line.startswith("ExecStart=")]
        with tempfile.TemporaryDirectory(prefix="kvkeep") as folder:
            os.chmod(folder, 0o700)
            program = os.path.realpath(kvmanager_testing.daemon_program())
            words = [{"/usr/local/bin/kvmanagerd": program, "/var/lib/kvmanager/state": folder}.get(word, word) for word in command]
            self.assertEqual(words, [program, "--keeper", folder])
            with subprocess.Popen(words) as keeper:
                while not os.path.exists(f"{folder}/keeper"):
                    self.assertIsNone(keeper.poll())
                for _ in range(2):
                    with kvmanager_testing.Daemon(flags=("--state-dir", folder)) as daemon:
                        self.assertTrue(daemon.listen)
                        with open(f"/proc/{keeper.pid}/maps", encoding="utf-8") as maps:
                            self.assertNotIn("kvmanager-pool", maps.read())
                        held = [os.readlink(f"/proc/{keeper.pid}/fd/{fd}") for fd in os.listdir(f"/proc/{keeper.pid}/fd")]
                        self.assertTrue(any("kvmanager-pool-0" in each for each in held), held)
                keeper.terminate()
                self.assertEqual(keeper.wait(timeout=60), -15)

    def test_the_keeper_says_when_daemons_can_reach_it(self) -> None:
        program = os.path.realpath(kvmanager_testing.daemon_program())
        with tempfile.TemporaryDirectory(prefix="kvkeep") as folder, socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as supervisor:
            os.chmod(folder, 0o700)
            supervisor.bind(f"{folder}/notify")
            with subprocess.Popen([program, "--keeper", folder], env={**os.environ, "NOTIFY_SOCKET": f"{folder}/notify"}) as keeper:
                self.assertEqual(supervisor.recv(100), b"READY=1")
                with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as daemon:
                    daemon.connect(f"{folder}/keeper")
                keeper.terminate()

    def test_memory_that_ends_with_the_service_is_not_kept(self) -> None:
        """systemd ends all processes of a service with it, also the keeper that a daemon started."""
        with tempfile.TemporaryDirectory(prefix="kvkeep") as folder, socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as supervisor:
            os.chmod(folder, 0o700)
            supervisor.bind(f"{folder}/notify")
            for notify, kept in (("", 1), (f"{folder}/notify", 0)):
                flags = ("--state-dir", folder, "--state-keep-s", "1")
                with mock.patch.dict(os.environ, NOTIFY_SOCKET=notify), kvmanager_testing.Daemon(flags=flags) as daemon:
                    with urllib.request.urlopen(f"http://{daemon.metrics}/metrics", timeout=60) as page:
                        self.assertIn(f"\nkvmanager_memory_kept {kept}\n", page.read().decode())

    def test_says_when_it_can_serve(self) -> None:
        """As systemd's Type=notify expects it."""
        with tempfile.TemporaryDirectory(prefix="kvnotify") as folder:
            for name, address in ((f"{folder}/notify", f"{folder}/notify"), (f"@{folder}", f"\0{folder}")):
                with self.subTest(name), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as supervisor:
                    supervisor.bind(address)
                    with mock.patch.dict(os.environ, NOTIFY_SOCKET=name), kvmanager_testing.Daemon() as daemon:
                        self.assertEqual(supervisor.recv(100), b"READY=1")
                        path = daemon.listen.removeprefix("unix:")
                        self.assertTrue(stat.S_ISSOCK(os.stat(path).st_mode))

    def test_serves_where_nobody_wants_to_know(self) -> None:
        for name in ("", "x", "/nowhere/notify", "@nobody", "/" + 200 * "x"):
            with self.subTest(name), mock.patch.dict(os.environ, NOTIFY_SOCKET=name):
                with kvmanager_testing.Daemon(flags=("--http-listen", "127.0.0.1:0")) as daemon:
                    with urllib.request.urlopen(f"http://{daemon.http}/", timeout=60) as page:
                        self.assertEqual(page.status, 200)

    def test_the_container_s_socket_is_for_its_group(self) -> None:
        with open(data_path("packaging/Containerfile"), encoding="utf-8") as file:
            (entry,) = [line.removeprefix("ENTRYPOINT ") for line in file if line.startswith("ENTRYPOINT ")]
        with tempfile.TemporaryDirectory(prefix="kventry") as folder:
            os.symlink(os.path.realpath(kvmanager_testing.daemon_program()), f"{folder}/kvmanagerd")
            words = [word.replace("/etc/kvmanagerd.conf", data_path("packaging/container.conf")) for word in json.loads(entry)]
            flags = ["--listen", f"unix:{folder}/kv.sock", "--host-pool-bytes", "64MiB"]
            flags += ["--metrics-listen", "127.0.0.1:0", "--http-listen", "127.0.0.1:0"]
            path = {"PATH": f"{folder}:{os.environ['PATH']}"}
            with subprocess.Popen(words + flags, stdout=subprocess.PIPE, text=True, env=os.environ | path) as process:
                self.assertIn("kvmanagerd ready", process.stdout.readline())
                mode = os.stat(f"{folder}/kv.sock").st_mode
                process.terminate()  # reaches the daemon, which has nothing to wait for
                self.assertEqual(process.wait(timeout=60), 0)
            self.assertEqual(stat.S_IMODE(mode), 0o770)

    def test_the_container_copies_what_is_there(self) -> None:
        with open(data_path("packaging/Containerfile"), encoding="utf-8") as file:
            words = [line.split() for line in file if line.startswith("COPY ") and "--from" not in line]
        self.assertGreater(len(words), 1)
        for _, source, _ in words:
            self.assertTrue(source == "." or source == "tools/setup" or os.path.exists(data_path(source)), source)


if __name__ == "__main__":
    unittest.main()
