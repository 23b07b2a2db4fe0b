"""Names of blocks."""

from __future__ import annotations

import ctypes
from ctypes import c_uint32
from typing import Iterable, Sequence, overload

from ._lib import Hashes
from .errors import invalid

HASH_BYTES_MAX = 64
NAME_BYTES = 64  # a block's key and the digest of its tokens, 32 each


class BlockNames(Sequence[bytes]):
    """Names of consecutive blocks from the first on; slices are names too. Each is 64 bytes: key, digest of tokens."""

    __slots__ = ("data",)

    def __init__(self, data: bytes = b"") -> None:
        if len(data) % NAME_BYTES:
            raise invalid("names (bytes)", len(data), f"a multiple of {NAME_BYTES}")
        self.data = bytes(data)

    def __len__(self) -> int:
        return len(self.data) // NAME_BYTES

    @overload
    def __getitem__(self, index: int) -> bytes: ...

    @overload
    def __getitem__(self, index: slice) -> BlockNames: ...

    def __getitem__(self, index: int | slice) -> bytes | BlockNames:
        if isinstance(index, slice):
            first, last, step = index.indices(len(self))
            if step != 1:
                raise invalid("step of a slice", step, "1")
            return BlockNames(self.data[first * NAME_BYTES : max(first, last) * NAME_BYTES])
        if index < 0:
            index += len(self)
        if not 0 <= index < len(self):
            raise IndexError(f"block {index} of {len(self)}")
        return self.data[index * NAME_BYTES : (index + 1) * NAME_BYTES]

    def __add__(self, other: BlockNames) -> BlockNames:
        return BlockNames(self.data + other.data)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BlockNames) and self.data == other.data

    def __hash__(self) -> int:
        return hash(self.data)

    def __repr__(self) -> str:
        return f"BlockNames({len(self)} blocks)"


class BlockHashes:
    """An engine's own hashes of consecutive blocks, of 1..64 bytes each, as the client's library reads them."""

    __slots__ = ("count", "data", "sizes")

    def __init__(self, hashes: Iterable[bytes]) -> None:
        given = list(hashes)
        for each in given:
            if not isinstance(each, (bytes, bytearray, memoryview)) or not 1 <= len(each) <= HASH_BYTES_MAX:
                raise invalid("hash", each, f"bytes, 1..{HASH_BYTES_MAX} of them")
        self.count, self.data, self.sizes = len(given), b"".join(given), (c_uint32 * len(given))(*map(len, given))

    def given(self) -> Hashes:
        """Valid as long as this."""
        return Hashes(self.data, ctypes.addressof(self.sizes), self.count)


def checked(names: object) -> BlockNames:
    if not isinstance(names, BlockNames):
        raise invalid("names", type(names).__name__, "BlockNames: block_names() or external_names() makes them")
    return names
