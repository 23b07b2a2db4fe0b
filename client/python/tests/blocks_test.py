"""Whole blocks in stored form, encoded and decoded in this process, against a real daemon."""

from __future__ import annotations

import random
import unittest

import kvmanager as kv
import numpy
from engine_testing import metric
from kvmanager.page_codec import DECODE_ITEM_BYTES, ENCODE_ITEM_BYTES, LOADED, MISSING, PAGE_ALIGN
from kvmanager_testing import Daemon
from reference import MODEL, Prompt

BLOCKS = 4
CODECS = ("raw", "hack:k_bits=4,v_bits=3", "hack:k_bits=2,v_bits=2;sinks=0", "hack:k_bits=4,v_bits=4;1..1=raw;sinks=0")


class Pages:
    """Raw pages of a prompt's blocks, and what is stored of them, as the range of an arena has it."""

    def __init__(self, cache: kv.Cache, codec: kv.PageCodec, prompt: Prompt) -> None:
        self.codec, o = codec, cache.options
        self.layers, self.page_tokens = o.layers, o.page_tokens
        self.blocks = prompt.tokens // o.page_tokens
        pages = numpy.empty((self.blocks, o.layers, 2, o.kv_heads, o.page_tokens, o.head_dim), numpy.float16)
        for block in range(self.blocks):
            tokens = slice(block * o.page_tokens, (block + 1) * o.page_tokens)
            for layer in range(o.layers):
                for side, rows in enumerate((prompt.k[layer], prompt.v[layer])):
                    pages[block, layer, side] = rows[tokens].transpose(1, 0, 2)
        self.raw_pages = pages

    def stored(self, first: int = 0) -> tuple[bytes, bytes]:
        """(forms, bytes of the range) of blocks from `first` on."""
        forms, parts = [], []
        for block in range(first, self.blocks):
            for layer in range(self.layers):
                raw = self.raw_pages[block, layer].tobytes()
                page = None
                if not self.codec.keeps_raw(layer, block * self.page_tokens) and not self.codec.identity:
                    page = self.encode(raw, layer, block * self.page_tokens)
                forms.append(page is None and not self.codec.identity)
                part = raw if page is None else page
                parts.append(part + bytes(-len(part) % PAGE_ALIGN))
        return bytes(forms), b"".join(parts)

    def encode(self, raw: bytes, layer: int, first_token: int) -> bytes | None:
        source, target = aligned(len(raw)), aligned(self.codec.page_bytes[layer])
        source[:] = numpy.frombuffer(raw, numpy.uint8)
        item = numpy.array([source.ctypes.data, target.ctypes.data, first_token, layer], numpy.uint64)
        assert item.nbytes == ENCODE_ITEM_BYTES
        declined = numpy.ones(1, numpy.uint32)
        self.codec.encode(item.ctypes.data, 1, declined.ctypes.data)
        return None if declined[0] else target.tobytes()

    def decode(self, page: bytes, layer: int) -> bytes:
        source, target = aligned(len(page)), aligned(self.codec.raw_bytes)
        source[:] = numpy.frombuffer(page, numpy.uint8)
        item = numpy.array([source.ctypes.data, target.ctypes.data, layer], numpy.uint64)
        assert item.nbytes == DECODE_ITEM_BYTES
        self.codec.decode(item.ctypes.data, 1)
        return target.tobytes()


def aligned(nbytes: int):
    whole = numpy.zeros(nbytes + 64, numpy.uint8)
    begin = -whole.ctypes.data % 64
    return whole[begin : begin + nbytes]


class Blocks(unittest.TestCase):
    def setUp(self) -> None:
        # Of so few slabs none is cut: what is stored first may be mapped too.
        self.daemon = self.enterContext(Daemon(flags=("--slab-bytes", "16MiB")))
        self.client = self.enterContext(kv.connect(self.daemon.listen, name="test"))
        self.arena = self.client.create_arena(8 << 20)
        self.prompt = Prompt(3, BLOCKS * 64)

    def open(self, codec: str):
        self.cache = self.client.open_cache(**MODEL, codec=codec)
        self.names = self.cache.block_names(range(self.prompt.tokens))
        self.pages = Pages(self.cache, kv.PageCodec(self.cache), self.prompt)

    def range(self, nbytes: int):
        return self.arena.tensor((nbytes,), "uint8")

    def write(self, first: int = 0) -> kv.BlocksWritten:
        forms, stored = self.pages.stored(first)
        place = self.range(len(stored))
        place.numpy()[:] = numpy.frombuffer(stored, numpy.uint8)
        return self.cache.write_blocks(self.names[first:], forms, place, first)

    def test_blocks_that_are_written_are_attended_to_and_read(self) -> None:
        for codec in CODECS:
            with self.subTest(codec=codec):
                self.open(codec)
                self.assertEqual(self.write(), (BLOCKS, 0))
                self.assertEqual(self.write(), (0, BLOCKS))
                with self.cache.create_sequence(self.names) as sequence:
                    self.assertEqual(sequence.hit_blocks, BLOCKS)
                    for layer in range(2):
                        k, v = numpy.zeros_like(self.prompt.k[layer]), numpy.zeros_like(self.prompt.v[layer])
                        self.cache.read(layer, [(sequence, 0, self.prompt.tokens)], k, v)
                        for block in range(BLOCKS):
                            self.check_rows(k, v, layer, block)
                for first in (0, 1):
                    forms, stored = self.pages.stored(first)
                    place = self.range(len(stored) + 4096)
                    place.numpy()[:] = 0xEE
                    found = self.cache.read_blocks(self.names[first:], place, first)
                    self.assertEqual(found, (BLOCKS - first, "none", len(stored), forms))
                    got = place.numpy()[: len(stored)]
                    self.assert_pages_equal(got.tobytes(), stored, forms, first)

    def check_rows(self, k, v, layer: int, block: int) -> None:
        """What the daemon decodes is what this process does."""
        raw = self.pages.raw_pages[block, layer].tobytes()
        if not self.pages.codec.keeps_raw(layer, block * 64) and not self.pages.codec.identity:
            encoded = self.pages.encode(raw, layer, block * 64)
            raw = raw if encoded is None else self.pages.decode(encoded, layer)
        want = numpy.frombuffer(raw, numpy.float16).reshape(self.pages.raw_pages.shape[2:])
        tokens = slice(block * 64, block * 64 + 64)
        numpy.testing.assert_array_equal(k[tokens], want[0].transpose(1, 0, 2))
        numpy.testing.assert_array_equal(v[tokens], want[1].transpose(1, 0, 2))

    def assert_pages_equal(self, got: bytes, want: bytes, forms: bytes, first: int) -> None:
        at = 0
        for place, raw in enumerate(forms):
            layer = place % 2
            nbytes = self.pages.codec.raw_bytes if raw else self.pages.codec.page_bytes[layer]
            self.assertEqual(got[at : at + nbytes], want[at : at + nbytes], (first, place))
            at += -(-nbytes // PAGE_ALIGN) * PAGE_ALIGN

    def test_calls_under_way_are_waited_for_later(self) -> None:
        self.open("raw")
        forms, stored = self.pages.stored()
        place = self.range(len(stored))
        place.numpy()[:] = numpy.frombuffer(stored, numpy.uint8)
        pending = self.cache.write_blocks_async(self.names, forms, place)
        self.assertEqual(pending.wait(), (BLOCKS, 0))
        place.numpy()[:] = 0
        reads = [self.cache.read_blocks_async(self.names[i : i + 1], self.part(stored, i), i) for i in range(BLOCKS)]
        self.assertEqual([each.wait().blocks for each in reads], [1] * BLOCKS)
        self.assertEqual(place.numpy().tobytes(), stored)

    def part(self, stored: bytes, block: int):
        size = len(stored) // BLOCKS
        return self.arena.tensor((size,), "uint8", block * size)

    def test_a_read_ends_where_nothing_is_stored(self) -> None:
        self.open("raw")
        forms, stored = self.pages.stored()
        self.write()
        others = self.cache.block_names([*range(128), *range(1000, 1128)])
        found = self.cache.read_blocks(others, self.range(len(stored)))
        self.assertEqual((found.blocks, found.reason), (2, "not_found"))

    def test_what_is_wrong_is_refused_by_name(self) -> None:
        self.open("raw")
        forms, stored = self.pages.stored()
        place = self.range(len(stored))
        place.numpy()[:] = numpy.frombuffer(stored, numpy.uint8)
        place.numpy()[:2] = (0, 0x7C)  # infinity
        with self.assertRaises(kv.InvalidArgumentError) as raised:
            self.cache.write_blocks(self.names, forms, place)
        self.assertEqual(raised.exception.field, "pages[block 0][layer 0].k[head 0][token 0][channel 0]")
        for wrong, field in (
            (lambda: self.cache.write_blocks(self.names, forms[1:], place), "raw"),
            (lambda: self.cache.write_blocks(self.names, forms, self.range(64)), "pages.arena.bytes"),
            (lambda: self.cache.write_blocks(self.names, forms, numpy.zeros(64, numpy.uint8)), "pages"),
            (lambda: self.cache.read_blocks(self.names, place, -1), "first"),
            (lambda: self.cache.read_blocks(kv.BlockNames(), place), "names"),
        ):
            with self.assertRaises(kv.InvalidArgumentError) as raised:
                wrong()
            self.assertEqual(raised.exception.field, field)

    def test_damaged_pages_of_a_codec_are_refused(self) -> None:
        self.open("hack:k_bits=4,v_bits=3;sinks=0")
        forms, stored = self.pages.stored()
        place = self.range(len(stored))
        place.numpy()[:] = 0xFF
        with self.assertRaises(kv.DataLossError):
            self.cache.write_blocks(self.names, forms, place)
        self.assertEqual(self.cache.match([self.names])[0].hit_blocks, 0)

    def test_a_codec_of_one_form_encodes_nothing(self) -> None:
        self.open("raw")
        self.assertTrue(self.pages.codec.identity)
        with self.assertRaises(kv.FailedPreconditionError):
            self.pages.codec.encode(0, 0, 0)

    def test_layers_that_do_not_exist_are_refused(self) -> None:
        self.open("hack:k_bits=4,v_bits=3")
        item = numpy.zeros(4, numpy.uint64)
        item[3] = 2
        declined = numpy.zeros(1, numpy.uint32)
        with self.assertRaises(kv.InvalidArgumentError) as raised:
            self.pages.codec.encode(item.ctypes.data, 1, declined.ctypes.data)
        self.assertEqual(raised.exception.field, "items[0].layer")

    # Pages that are copied by this process.

    def test_pages_that_lie_as_they_will_are_one_copy(self) -> None:
        self.open("raw")
        codec, source, target = self.pages.codec, aligned(4096), aligned(4096)
        source[:] = numpy.random.default_rng(1).integers(0, 256, len(source), numpy.uint8)
        # Each behind the one before it but the third, whose place is taken, and the fifth, which leaves a gap.
        begins, sizes = [0, 128, 1024, 1344, 1792], [100, 128, 300, 64, 65]
        sources = numpy.array([source.ctypes.data + begin for begin in begins], numpy.uint64)
        nbytes = numpy.array(sizes, numpy.uint64)
        runs = codec.copy_pages(sources.ctypes.data, nbytes.ctypes.data, len(sizes), target.ctypes.data)
        self.assertEqual(runs, 3)
        at = 0
        for begin, size in zip(begins, sizes):
            numpy.testing.assert_array_equal(target[at : at + size], source[begin : begin + size])
            at += -(-size // PAGE_ALIGN) * PAGE_ALIGN
        self.assertFalse(target[at:].any())
        self.assertEqual(codec.copy_pages(0, 0, 0, 0), 0)

    def test_hashes_are_the_daemons(self) -> None:
        self.open("raw")
        self.assertTrue(self.pages.codec.copies)
        page = numpy.arange(256, dtype=numpy.uint8)
        address, nbytes = numpy.array([page.ctypes.data] * 2, numpy.uint64), numpy.array([256, 0], numpy.uint64)
        got = numpy.zeros(2, numpy.uint64)
        self.pages.codec.hash_pages(address.ctypes.data, nbytes.ctypes.data, 2, got.ctypes.data)
        self.assertEqual(got.tolist(), [0x9408A4433B952D71, 0x2D06800538D394C2])  # of xxHash itself

    # Pages that stay in the daemon's memory.

    def copy(self, mapped: kv.BlocksMapped) -> tuple[bytes, list[int]]:
        """The pages as read_blocks has them, and their checksums."""
        codec, layers = self.pages.codec, self.cache.options.layers
        sizes = [codec.raw_bytes if raw else codec.page_bytes[i % layers] for i, raw in enumerate(mapped.raw)]
        addresses, nbytes = numpy.frombuffer(mapped.addresses, numpy.uint64), numpy.array(sizes, numpy.uint64)
        target = aligned(sum(-(-size // PAGE_ALIGN) * PAGE_ALIGN for size in sizes))
        codec.copy_pages(addresses.ctypes.data, nbytes.ctypes.data, len(sizes), target.ctypes.data)
        got = numpy.zeros(len(sizes), numpy.uint64)
        codec.hash_pages(addresses.ctypes.data, nbytes.ctypes.data, len(sizes), got.ctypes.data)
        return target.tobytes(), got.tolist()

    def test_mapped_blocks_are_what_was_written(self) -> None:
        for codec in CODECS:
            with self.subTest(codec=codec):
                self.open(codec)
                self.write()
                for first in (0, 1):
                    forms, stored = self.pages.stored(first)
                    place = self.range(len(stored) + 4096)
                    with self.cache.map_blocks_async(self.names[first:], place, first).wait() as mapped:
                        found = (mapped.blocks, mapped.reason, mapped.raw)
                        self.assertEqual(found, (BLOCKS - first, "none", forms))
                        self.assertLess(mapped.nbytes, len(stored))  # some lie in slabs
                        got, checksums = self.copy(mapped)
                        self.assert_pages_equal(got, stored, forms, first)
                        self.assertEqual(checksums, list(mapped.checksums))
                        self.assertIsNone(mapped.release_async().wait())

    def test_blocks_are_mapped_without_a_range(self) -> None:
        self.open("raw")
        self.write()
        others = self.cache.block_names([*range(128), *range(1000, 1128)])
        mapped = self.cache.map_blocks_async(others).wait()
        self.assertEqual((mapped.blocks, mapped.reason, mapped.nbytes), (2, "not_found", 0))
        self.assertEqual(len(mapped.addresses), 2 * self.cache.options.layers)
        pending = mapped.release_async()
        mapped.close()
        self.assertIsNone(pending.wait())
        with self.assertRaises(kv.FailedPreconditionError):
            mapped.release_async()
        none = self.cache.map_blocks_async(others[2:], first=2).wait()
        self.assertEqual((none.blocks, none.raw, list(none.addresses)), (0, b"", []))
        self.assertIsNone(none.release_async().wait())

    def test_what_is_read_counts_as_asked_for_and_found(self) -> None:
        self.open("raw")
        self.write()

        def counted() -> list[float]:
            return [metric(self.daemon, f"kvmanager_prefix_{name}_blocks_total") for name in ("asked", "hit")]

        before = counted()
        others = self.cache.block_names([*range(128), *range(1000, 1128)])
        self.cache.map_blocks_async(others).wait().close()
        room = self.range(self.cache.description.raw_page_bytes * self.cache.options.layers)  # for one block
        self.assertEqual(1, self.cache.read_blocks(self.names, room).blocks)
        self.assertEqual([4 + 1, 2 + 1], [now - was for now, was in zip(counted(), before)])

    def test_a_block_that_is_said_to_be_corrupt_and_is_not_stays(self) -> None:
        self.open("raw")
        self.write()
        mapped = self.cache.map_blocks_async(self.names).wait()
        self.assertIsNone(mapped.release_async(corrupt_block=1).wait())
        self.assertEqual(self.cache.match([self.names])[0].hit_blocks, BLOCKS)

    def test_what_is_mapped_is_held(self) -> None:
        self.open("raw")
        self.write()
        mapped = self.cache.map_blocks_async(self.names).wait()
        before, checksums = self.copy(mapped)
        self.client.purge(self.cache.description.id)
        self.assertEqual(self.copy(mapped), (before, checksums))
        self.assertIsNone(mapped.release_async().wait())

    def test_memory_is_mapped_ahead(self) -> None:
        self.open("raw")
        slab = 16 << 20
        self.assertEqual(self.cache.bind_slabs(0), 0)
        self.assertEqual(self.cache.bind_slabs(slab + 5), slab)
        self.assertEqual(self.cache.bind_slabs(1 << 62), 3 * slab)  # 7/8 of the pool
        self.assertEqual(self.cache.bind_slabs(0), 0)  # it asks for none
        self.write()
        with self.cache.map_blocks_async(self.names).wait() as mapped:
            forms, stored = self.pages.stored(0)
            self.assertEqual((mapped.blocks, mapped.nbytes), (BLOCKS, 0))
            got, checksums = self.copy(mapped)
            self.assert_pages_equal(got, stored, forms, 0)
            self.assertEqual(checksums, list(mapped.checksums))

    # Blocks that are each a sequence's first, as rows of tokens and heads.

    def store_apart(self, codec: str, count: int) -> tuple[kv.BlockNames, list]:
        """Names of so many blocks, and what is decoded of each: [layers][K, V][heads][tokens][head_dim]."""
        self.cache = self.client.open_cache(**MODEL, codec=codec)
        local, names, decoded = kv.PageCodec(self.cache), kv.BlockNames(), []
        self.assertGreater(self.cache.bind_slabs(1 << 62), 0)
        for block in range(count):
            pages = self.pages = Pages(self.cache, local, Prompt(100 + block, 64))
            name = self.cache.external_names([block.to_bytes(32, "big")])
            forms, stored = pages.stored()
            place = self.range(len(stored))
            place.numpy()[:] = numpy.frombuffer(stored, numpy.uint8)
            self.assertEqual(self.cache.write_blocks(name, forms, place), (1, 0))
            values = pages.raw_pages[0].copy()
            for layer in range(pages.layers):
                if not forms[layer] and not local.identity:
                    page = pages.encode(pages.raw_pages[0, layer].tobytes(), layer, 0)
                    values[layer] = numpy.frombuffer(pages.decode(page, layer), numpy.float16).reshape(values[layer].shape)
            names, decoded = names + name, [*decoded, values]
        return names, decoded

    def test_blocks_are_loaded_to_rows(self) -> None:
        count = 90  # more than are held, or asked for, at once
        for codec in ("raw", "hack:k_bits=4,v_bits=3;sinks=0", "hack:k_bits=4,v_bits=4;1..1=raw;sinks=0"):
            names, decoded = self.store_apart(codec, count)
            o, local = self.cache.options, self.pages.codec
            shape = {"layer": o.layers, "token": o.page_tokens, "head": o.kv_heads, "value": o.head_dim}
            order = list(range(count))
            random.Random(5).shuffle(order)
            absent = self.cache.external_names([bytes(31) + b"x"])
            asked, expected = kv.BlockNames(), []
            for place, block in enumerate(order):
                if place % 7 == 3:
                    asked, expected = asked + absent, [*expected, None]
                asked, expected = asked + names[block : block + 1], [*expected, block]
            for axes, threads in ((("layer", "token", "head"), 1), (("token", "layer", "head"), 3), (("head", "token", "layer"), 64)):
                with self.subTest(codec=codec, axes=axes, threads=threads):
                    rows = numpy.full((2, len(asked), *(shape[axis] for axis in (*axes, "value"))), numpy.nan, numpy.float16)
                    strides = tuple(rows.strides[2 + axes.index(axis)] for axis in ("layer", "token", "head"))
                    k, v = ([side[place].ctypes.data for place in range(len(asked))] for side in rows)
                    results = local.load_rows(asked, k, v, strides, threads)
                    self.assertEqual([MISSING if block is None else LOADED for block in expected], list(results))
                    by_layer = numpy.moveaxis(rows, [2 + axes.index(axis) for axis in ("layer", "head", "token")], [2, 3, 4])
                    for place, block in enumerate(expected):
                        got = by_layer[:, place].swapaxes(0, 1)
                        if block is None:
                            self.assertTrue(numpy.isnan(got).all(), "nothing is written of what is missing")
                        else:
                            self.assertTrue((got == decoded[block]).all(), block)
        self.assertEqual(b"", local.load_rows(kv.BlockNames(), [], [], (0, 0, 0), 1))

    def test_rows_of_a_daemon_that_has_gone(self) -> None:
        names, _ = self.store_apart("raw", 3)
        self.daemon.kill()
        rows = numpy.zeros((2, 3, self.cache.description.raw_page_bytes), numpy.uint8)
        k, v = ([side[place].ctypes.data for place in range(3)] for side in rows)
        with self.assertRaises(kv.UnavailableError):
            self.pages.codec.load_rows(names, k, v, (0, 0, 0), 2)
        self.assertEqual(0, rows.max())

    def test_wrong_arguments_of_rows_are_named(self) -> None:
        names, _ = self.store_apart("raw", 1)
        local, other = self.pages.codec, self.client.open_cache(**{**MODEL, "model": "another"}, codec="raw")
        rows = numpy.zeros(2 * self.cache.description.raw_page_bytes, numpy.uint8)
        strides, at = (0, 0, 0), [rows.ctypes.data]
        local.cache, own = other, local.cache
        with self.assertRaises(kv.InvalidArgumentError) as raised:
            local.load_rows(names, at, at, strides, 1)
        self.assertEqual(raised.exception.field, "cache")
        local.cache = own
        for wrong, field in (
            (lambda: local.load_rows(names, at, [], strides, 1), "k, v (blocks)"),
            (lambda: local.load_rows(names, at, at, strides, 0), "threads"),
            (lambda: local.load_rows(names, at, at, strides, 65), "threads"),
        ):
            with self.assertRaises(kv.InvalidArgumentError) as raised:
                wrong()
            self.assertEqual(raised.exception.field, field)

    def test_wrong_arguments_of_mapping_are_named(self) -> None:
        self.open("raw")
        for wrong, field in (
            (lambda: self.cache.map_blocks_async(self.names, first=-1), "first"),
            (lambda: self.cache.map_blocks_async(self.names, device=-2), "device"),
            (lambda: self.cache.bind_slabs(-1), "nbytes"),
            (lambda: self.cache.bind_slabs(1, device=-2), "device"),
            (lambda: self.cache.map_blocks_async(self.names, numpy.zeros(64, numpy.uint8)), "pages"),
        ):
            with self.assertRaises(kv.InvalidArgumentError) as raised:
                wrong()
            self.assertEqual(raised.exception.field, field)

    def test_the_description_says_what_fits(self) -> None:
        self.open("raw")
        self.assertEqual(self.cache.description.pool_bytes, 64 << 20)


if __name__ == "__main__":
    unittest.main()
