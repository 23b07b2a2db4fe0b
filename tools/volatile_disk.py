#!/usr/bin/env python3
"""A disk with a volatile cache, as a file of a FUSE file system, whose power can be cut: volatile_disk.py FOLDER MOUNT

    MOUNT/disk   the disk. What is written there is in its cache until it is synced.
    MOUNT/cut    a number that is written there cuts the power. Of each write in the cache the disk then has nothing, all, or some
                 sectors, as that seed says. From then on nothing can be written or synced.

FOLDER/kept is what the disk has for certain, FOLDER/seen what is read. They are of equal size, and equal before the first write and
behind a cut; then another volatile_disk.py may go on with them. A loop device over MOUNT/disk has whatever file system one likes,
and what the kernel has not written to the disk is lost as well once that is unmounted.

Needs python3-fusepy, and root or fuse's fusermount. Prints "ready" once it is mounted, and at a cut "cut ALL SOME NOTHING", how many
writes were in the cache by what is kept of them. Ends when MOUNT is unmounted.
"""

from __future__ import annotations

import errno
import os
import pathlib
import random
import stat
import sys
import threading

SECTOR = 512  # bytes that a disk writes as a whole
_LOST, _WHOLE = 0.4, 0.3  # shares of the writes that a cut leaves nothing of, or all


class VolatileDisk:
    """Any thread."""

    def __init__(self, kept: pathlib.Path, seen: pathlib.Path) -> None:
        self._kept, self._seen = os.open(kept, os.O_RDWR), os.open(seen, os.O_RDWR)
        self.size = os.fstat(self._kept).st_size
        self._lock = threading.Lock()
        self._cache: list[tuple[int, bytes]] = []  # writes since the last sync, in their order
        self._off = False

    def read(self, offset: int, size: int) -> bytes:
        return os.pread(self._seen, size, offset)

    def write(self, offset: int, data: bytes) -> int:
        """OSError: beyond the end, or the power is off."""
        with self._lock:
            self._check()
            if offset + len(data) > self.size:
                raise OSError(errno.ENOSPC, "beyond the disk's end")
            self._cache.append((offset, bytes(data)))
            _write(self._seen, offset, data)
        return len(data)

    def sync(self) -> None:
        """OSError: the power is off."""
        with self._lock:
            self._check()
            for offset, data in self._cache:
                _write(self._kept, offset, data)
            self._cache.clear()

    def cut(self, seed: int) -> tuple[int, int, int]:
        """Writes of the cache of which all, some sectors, and nothing is kept."""
        draw, whole, some, lost = random.Random(seed), 0, 0, 0
        with self._lock:
            if self._off:
                return 0, 0, 0
            self._off = True
            for offset, data in self._cache:
                fate = draw.random()
                if fate < _LOST:
                    lost += 1
                elif fate < _LOST + _WHOLE:
                    whole += 1
                    _write(self._kept, offset, data)
                else:
                    some += 1
                    self._tear(draw, offset, data)
            for offset, data in self._cache:
                _write(self._seen, offset, os.pread(self._kept, len(data), offset))
            self._cache.clear()
        return whole, some, lost

    def _tear(self, draw: random.Random, offset: int, data: bytes) -> None:
        """Keeps each sector or not."""
        end = offset + len(data)
        for sector in range(offset - offset % SECTOR, end, SECTOR):
            if draw.random() < 0.5:
                first, last = max(sector, offset), min(sector + SECTOR, end)
                _write(self._kept, first, data[first - offset : last - offset])

    def _check(self) -> None:
        if self._off:
            raise OSError(errno.EIO, "the power is off")

    def close(self) -> None:
        os.close(self._kept)
        os.close(self._seen)


def _write(file: int, offset: int, data: bytes) -> None:
    while data:
        done = os.pwrite(file, data, offset)
        offset, data = offset + done, data[done:]


def main() -> int:
    if len(sys.argv) != 3 or sys.argv[1] in ("-h", "--help"):
        print(__doc__)
        return 0 if sys.argv[1:] in (["-h"], ["--help"]) else 2
    import fusepy

    folder, disk_name, cut_name = pathlib.Path(sys.argv[1]), "/disk", "/cut"
    disk = VolatileDisk(folder / "kept", folder / "seen")

    class Files(fusepy.Operations):
        def init(self, path: str) -> None:
            print("ready", flush=True)

        def getattr(self, path: str, fh: int | None = None) -> dict[str, int]:
            if path == "/":
                return {"st_mode": stat.S_IFDIR | 0o700, "st_nlink": 2}
            if path not in (disk_name, cut_name):
                raise fusepy.FuseOSError(errno.ENOENT)
            return {"st_mode": stat.S_IFREG | 0o600, "st_nlink": 1, "st_size": disk.size if path == disk_name else 0}

        def readdir(self, path: str, fh: int) -> list[str]:
            return [".", "..", disk_name[1:], cut_name[1:]]

        def truncate(self, path: str, length: int, fh: int | None = None) -> None:
            if path != cut_name:
                raise fusepy.FuseOSError(errno.EPERM)

        def read(self, path: str, size: int, offset: int, fh: int) -> bytes:
            return disk.read(offset, size) if path == disk_name else b""

        def write(self, path: str, data: bytes, offset: int, fh: int) -> int:
            if path == disk_name:
                return disk.write(offset, data)
            print("cut", *disk.cut(int(data)), flush=True)
            return len(data)

        def fsync(self, path: str, datasync: int, fh: int) -> None:
            if path == disk_name:
                disk.sync()

    fusepy.FUSE(Files(), sys.argv[2], foreground=True, big_writes=True, fsname="volatile_disk")
    disk.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
