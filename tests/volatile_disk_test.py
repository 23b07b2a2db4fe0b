"""What tools/volatile_disk.py keeps when its power is cut, without FUSE."""

from __future__ import annotations

import collections
import pathlib
import random
import sys
import tempfile
import unittest

import source_tree

sys.path.append(str(pathlib.Path(source_tree.root()) / "tools"))
from volatile_disk import SECTOR, VolatileDisk

SECTORS = 64


def sectors(data: bytes) -> list[bytes]:
    return [data[begin : begin + SECTOR] for begin in range(0, len(data), SECTOR)]


class VolatileDiskTest(unittest.TestCase):
    def setUp(self) -> None:
        folder = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))
        self.images = folder / "kept", folder / "seen"
        for image in self.images:
            image.write_bytes(bytes(SECTORS * SECTOR))

    def opened(self) -> VolatileDisk:
        disk = VolatileDisk(*self.images)
        self.addCleanup(disk.close)
        return disk

    def test_random_writes_syncs_and_cuts(self) -> None:
        fates: collections.Counter[str] = collections.Counter()
        draw, synced = random.Random(7), sectors(bytes(SECTORS * SECTOR))
        for power in range(200):
            disk, now = self.opened(), list(synced)
            since: list[set[bytes]] = [set() for _ in now]  # what each sector was written with
            whole: list[tuple[int, bytes]] = []
            for _ in range(draw.randrange(20)):
                if draw.random() < 0.15:
                    disk.sync()
                    synced, since, whole = list(now), [set() for _ in now], []
                    continue
                at, count = draw.randrange(SECTORS), draw.randint(1, 8)
                data = draw.randbytes(min(count, SECTORS - at) * SECTOR)
                self.assertEqual(len(data), disk.write(at * SECTOR, data))
                whole.append((at, data))
                for place, each in enumerate(sectors(data), at):
                    now[place] = each
                    since[place].add(each)
                self.assertEqual(b"".join(now), disk.read(0, SECTORS * SECTOR))
            self.assertEqual(len(whole), sum(disk.cut(power)))
            for broken in (disk.sync, lambda: disk.write(0, bytes(SECTOR))):
                with self.assertRaisesRegex(OSError, "the power is off"):
                    broken()
            kept = [image.read_bytes() for image in self.images]
            self.assertEqual(kept[0], kept[1])
            found = sectors(kept[0])
            for place, each in enumerate(found):
                self.assertTrue(each == synced[place] or each in since[place], f"power {power}, sector {place}")
            for at, data in whole:
                there = [found[place] == each for place, each in enumerate(sectors(data), at)]
                fates["all" if all(there) else "some" if any(there) else "nothing"] += 1
            synced = found
        self.assertGreater(min(fates[fate] for fate in ("all", "some", "nothing")), 100, fates)

    def test_a_seed_says_what_is_kept(self) -> None:
        kept = []
        for seed in (1, 1, 2):
            for image in self.images:
                image.write_bytes(bytes(SECTORS * SECTOR))
            disk = self.opened()
            for at in range(SECTORS):
                disk.write(at * SECTOR, bytes([at + 1]) * SECTOR)
            disk.cut(seed)
            kept.append(self.images[0].read_bytes())
        self.assertEqual(kept[0], kept[1])
        self.assertNotEqual(kept[0], kept[2])

    def test_nothing_is_written_beyond_the_end(self) -> None:
        disk = self.opened()
        with self.assertRaisesRegex(OSError, "beyond the disk's end"):
            disk.write(SECTORS * SECTOR - 1, b"ab")


if __name__ == "__main__":
    unittest.main()
