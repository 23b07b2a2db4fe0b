"""SIGHUP that comes while kvmanagerd still reads its flags.

The test holds a lease on the file of flags: the daemon's open() of it waits until the test has sent the signal and given the lease back."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import tempfile
import unittest

from kvmanager_testing import daemon_program

_DEADLINE_S = 60  # of what should take milliseconds


class EarlySignal(unittest.TestCase):
    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory(prefix="kvearly")
        self.addCleanup(folder.cleanup)
        self.folder = folder.name
        # SIGIO says that somebody waits for the lease.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGIO})

    def write(self, name: str, text: str) -> str:
        path = os.path.join(self.folder, name)
        with open(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600), "w") as file:
            file.write(text)
        return path

    def started(self, flags: str) -> subprocess.Popen:
        """A daemon to which SIGHUP was sent before it had read its file of flags."""
        path = self.write("flags.conf", f'listen = "unix:{self.folder}/kv.sock"\nhost-pool-bytes = "64MiB"\n{flags}')
        lease = os.open(path, os.O_RDWR)
        try:
            try:
                fcntl.fcntl(lease, fcntl.F_SETLEASE, fcntl.F_WRLCK)
            except OSError as error:
                self.skipTest(f"no leases on files of {self.folder}: {error}")
            daemon = subprocess.Popen(
                [daemon_program(), "--config", path], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True
            )
            self.addCleanup(self.end, daemon)
            self.assertIsNotNone(signal.sigtimedwait({signal.SIGIO}, _DEADLINE_S), "it does not read its flags")
            daemon.send_signal(signal.SIGHUP)
            fcntl.fcntl(lease, fcntl.F_SETLEASE, fcntl.F_UNLCK)
        finally:
            os.close(lease)
        return daemon

    @staticmethod
    def end(daemon: subprocess.Popen) -> None:
        daemon.kill()
        daemon.wait(_DEADLINE_S)
        daemon.stdout.close()

    def test_a_daemon_that_reads_files_again_starts(self) -> None:
        tenants = self.write("tenants.json", '{"tenants": [{"name": "team-a", "uids": [61001]}]}')
        daemon = self.started(f'tenants = "{tenants}"\n')
        self.assertTrue(daemon.stdout.readline().startswith("kvmanagerd ready"))
        daemon.send_signal(signal.SIGTERM)
        self.assertEqual(daemon.wait(_DEADLINE_S), 0)

    def test_another_ends(self) -> None:
        daemon = self.started("")
        self.assertEqual(daemon.wait(_DEADLINE_S), -signal.SIGHUP)
        self.assertEqual(daemon.stdout.read(), "")


if __name__ == "__main__":
    unittest.main()
