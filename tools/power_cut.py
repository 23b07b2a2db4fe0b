"""A file system on a disk whose power can be cut (volatile_disk.py), for tools/chaos --power-cut. Needs root, loop devices, FUSE,
python3-fusepy, and the file system's mkfs. What is mounted is seen by this process and its children alone, and goes with them.
"""

from __future__ import annotations

import ctypes
import os
import pathlib
import shutil
import signal
import subprocess
import time

FILE_SYSTEMS = ("ext4", "xfs", "btrfs")
_PYTHON = "/usr/bin/python3"  # Debian's, which has fusepy
_SERVER = pathlib.Path(__file__).resolve().parent / "volatile_disk.py"
_WAIT_S = 30
_PATH = os.environ.get("PATH", "") + ":/usr/sbin:/sbin"  # mkfs and losetup; the PATH of others may lack these
_CLONE_NEWNS, _MS_REC, _MS_PRIVATE = 0x20000, 0x4000, 0x40000


def missing(file_system: str) -> str:
    """What this machine lacks; empty: nothing."""
    if os.geteuid() != 0:
        return "root"
    for path in ("/dev/fuse", "/dev/loop-control"):
        if not os.access(path, os.W_OK):
            return path
    if shutil.which(f"mkfs.{file_system}", path=_PATH) is None:
        return f"mkfs.{file_system}"
    if subprocess.run([_PYTHON, "-c", "import fusepy"], capture_output=True, check=False).returncode:
        return "python3-fusepy"
    return ""


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def _mount_for_oneself() -> None:
    """Else a service or a container that starts meanwhile has the file system mounted, too, and keeps the disk busy."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWNS) or libc.mount(b"none", b"/", None, _MS_REC | _MS_PRIVATE, None):
        raise RuntimeError(f"mounts of its own: {os.strerror(ctypes.get_errno())}")


class PowerCutDisk:
    """mount() and unmount() take turns; cut() in between. path: where the file system is. Errors: RuntimeError, in the words of the
    program that failed."""

    def __init__(self, folder: pathlib.Path, file_system: str, nbytes: int) -> None:
        """folder: is made, and has the disk's bytes as they are written."""
        _mount_for_oneself()
        self.path = folder / "mounted"
        self._folder, self._file_system = folder, file_system
        self._server: subprocess.Popen | None = None
        self._loop = ""
        self.unsynced = {"all": 0, "some": 0, "nothing": 0}  # writes that were not synced at a cut, by what was kept of them
        for each in (self.path, folder / "fuse"):
            each.mkdir(parents=True)
        for name in ("kept", "seen"):
            with open(folder / name, "wb") as image:
                image.truncate(nbytes)
        self._attach()
        _run(f"mkfs.{file_system}", "-q", self._loop)
        self._detach()

    def _attach(self) -> None:
        fuse = self._folder / "fuse"
        self._server = subprocess.Popen([_PYTHON, str(_SERVER), str(self._folder), str(fuse)], stdout=subprocess.PIPE, text=True,
                                        preexec_fn=_die_with_parent)
        if self._server.stdout.readline().strip() != "ready":
            raise RuntimeError(f"{_SERVER.name} ended with {self._server.wait()}")
        self._loop = _run("losetup", "--find", "--show", str(fuse / "disk")).strip()

    def _detach(self) -> None:
        _run("losetup", "--detach", self._loop)
        _unmount(self._folder / "fuse")  # a loop device goes a moment later
        self._server.wait(_WAIT_S)
        for line in self._server.stdout:
            word, *counts = line.split()
            if word == "cut":
                self.unsynced = {kept: before + int(count) for (kept, before), count in zip(self.unsynced.items(), counts)}
        self._server.stdout.close()
        self._server, self._loop = None, ""

    def mount(self) -> None:
        self._attach()
        _run("mount", "-t", self._file_system, self._loop, str(self.path))

    def cut(self, seed: int) -> None:
        """From now on nothing is written or synced. The file system is to be unmounted then."""
        (self._folder / "fuse" / "cut").write_text(str(seed))

    def unmount(self) -> None:
        """Once nobody has a file open there. What is written and not synced is lost behind a cut."""
        _unmount(self.path)  # the kernel closes files of a killed process a moment later
        self._detach()

    def close(self) -> None:
        """Whatever its state is."""
        if self._server is not None:
            subprocess.run(["umount", "--lazy", str(self.path)], capture_output=True, check=False)
            self._detach()


def _unmount(path: pathlib.Path) -> None:
    end = time.monotonic() + _WAIT_S
    while True:
        try:
            _run("umount", str(path))
            return
        except RuntimeError:
            if time.monotonic() > end:
                raise
            time.sleep(0.01)


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, "PATH": _PATH})
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout
