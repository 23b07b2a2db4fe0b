"""Blocks that are read where they lie, in the daemon's memory."""

from __future__ import annotations

import ctypes
import json
import warnings
from ctypes import byref, c_uint64, c_void_p

from ._lib import Handle, check, lib
from .errors import integer
from .pending import Pending

_UINT32_MAX = 2**32 - 1


class BlocksMapped(Handle):
    """Blocks whose pages lie where they are, until this is closed or let go, or release_async() is answered.

    blocks: from the first name on. reason: why no more, one of MISS_REASONS; "none": all were, or no more fit. nbytes: of
    `pages` that pages take which are copied there. Of each page, [blocks][layers]: raw, 1 where it is raw, else 0;
    addresses, where it begins, a multiple of 64, in memory that can be read alone; checksums, the XXH3-64 that its bytes
    should have: the daemon has not compared them. Both are arrays of 64 bits that numpy.frombuffer and torch.frombuffer
    take as they are.

    The addresses are valid until this is closed, or the client, which waits for no GPU. PageCodec.copy_pages copies from them,
    PageCodec.hash_pages compares. It belongs to its client's thread."""

    __slots__ = ("blocks", "reason", "nbytes", "raw", "addresses", "checksums", "_keep")

    def __init__(self, keep: object, address: int, blocks: int, reason: str, nbytes: int) -> None:
        super().__init__(address)
        self._keep = keep
        self.blocks = blocks
        self.reason = reason
        self.nbytes = nbytes
        addresses, checksums, raw, count = c_void_p(), c_void_p(), c_void_p(), c_uint64()
        check(lib.kvm_mapped_pages(address, byref(addresses), byref(checksums), byref(raw), byref(count)))
        pages = count.value
        self.raw = ctypes.string_at(raw, pages) if pages else b""
        self.addresses = (c_uint64 * pages)()
        self.checksums = (c_uint64 * pages)()
        ctypes.memmove(self.addresses, addresses, 8 * pages)
        ctypes.memmove(self.checksums, checksums, 8 * pages)

    def release_async(self, corrupt_block: int | None = None) -> Pending[None]:
        """Gives the pages back, once they were copied: they were held all the time. UnavailableError: they were not, and
        what was copied is of no use. corrupt_block: of those that were mapped, one whose bytes had not their checksums;
        the daemon compares it itself, and forgets it if that is so."""
        pending = c_void_p()
        corrupt = _UINT32_MAX if corrupt_block is None else integer("corrupt_block", corrupt_block, 0, _UINT32_MAX - 1)
        check(lib.kvm_release_blocks_async(self._object, corrupt, byref(pending)))
        return Pending(pending.value, lambda values, made: None, self)


def warn_unpinned(said: bytes) -> None:
    """What a call that maps blocks left as text."""
    why = json.loads(said)["unpinned"]
    warnings.warn(f"the daemon's memory could not be pinned for the GPU, copies are slower: {why}", RuntimeWarning)
