"""The API without kvmanager's client: pycapnp, the schema, and tensors inline."""

from __future__ import annotations

import hashlib
import math
import os
import random
import struct
import unittest

import capnp
from kvmanager_testing import Daemon, data_path

capnp.remove_import_hook()

HEAD_DIM, QUERY_HEADS, PAGE, TOKENS = 64, 2, 16, 40


def load_schema():
    standard = os.path.dirname(os.path.dirname(capnp.__file__))  # where /capnp/c++.capnp lies
    return capnp.load(data_path("kvmanager/api/kvmanager.capnp"), imports=[standard])


def halves(values: list[float]) -> bytes:
    return struct.pack(f"<{len(values)}e", *values)


def rounded(values: list[float]) -> list[float]:
    return list(struct.unpack(f"<{len(values)}e", halves(values)))


def names_of(digest: bytes, ids: list[int]) -> list[dict]:
    """As BlockName in the schema says it."""
    names, parent = [], bytes(32)
    for first in range(0, len(ids) - PAGE + 1, PAGE):
        tokens = struct.pack(f"<{PAGE}I", *ids[first : first + PAGE])
        parent = hashlib.sha256(parent + digest + tokens).digest()
        names.append({"key": parent, "tokens": hashlib.sha256(tokens).digest()})
    return names


def attention(k: list[float], v: list[float], q: list[float]) -> list[float]:
    """One query head over all tokens; rows of HEAD_DIM."""
    rows = range(len(k) // HEAD_DIM)
    scores = [sum(a * b for a, b in zip(q, k[row * HEAD_DIM : (row + 1) * HEAD_DIM])) / 8.0 for row in rows]
    weights = [math.exp(score - max(scores)) for score in scores]
    return [sum(w * v[row * HEAD_DIM + i] for row, w in zip(rows, weights)) / sum(weights) for i in range(HEAD_DIM)]


class WithoutTheClient(unittest.IsolatedAsyncioTestCase):
    async def asyncSetUp(self) -> None:
        self.daemon = self.enterContext(Daemon())
        await self.enterAsyncContext(capnp.kj_loop())
        self.schema = load_schema()
        stream = await capnp.AsyncIoStream.create_unix_connection(self.daemon.listen.removeprefix("unix:"))
        self.rpc = capnp.TwoPartyClient(stream)
        self.kvmanager = self.rpc.bootstrap().cast_as(self.schema.Daemon)

    async def asyncTearDown(self) -> None:
        self.rpc.close()

    def good(self, status) -> None:
        self.assertEqual(status.code, 0, f"{status.message} ({status.field}: {status.value}, {status.bound})")

    async def open_cache(self, **changed):
        major = int(self.schema.apiMajor)
        hello = await self.kvmanager.hello({"apiMajor": major, "client": "pycapnp", "pid": os.getpid()})
        self.good(hello.reply.status)
        self.assertIn("inline", list(hello.reply.features))
        config = {"model": "m", "layers": 1, "kvHeads": 1, "queryHeads": QUERY_HEADS, "headDim": HEAD_DIM,
                  "pageTokens": PAGE, **changed}
        return await self.kvmanager.openCache(config)

    async def test_a_wrong_request_is_answered_with_field_value_and_bound(self) -> None:
        opened = await self.open_cache(layers=0)
        self.assertEqual((opened.status.code, opened.status.field, opened.status.value), (3, "layers", "0"))
        self.assertTrue(opened.status.bound)

    async def test_append_attend_publish_and_find(self) -> None:
        opened = await self.open_cache()
        self.good(opened.status)
        cache = opened.cache
        made = (await cache.createSequences([{"prefix": []}])).replies[0]
        self.good(made.status)
        source = random.Random(7)
        k, v = (rounded([source.gauss(0, 1) for _ in range(TOKENS * HEAD_DIM)]) for _ in range(2))
        q = [source.gauss(0, 1) for _ in range(QUERY_HEADS * HEAD_DIM)]
        append = {"layer": 0, "entries": [{"sequenceId": made.sequenceId, "position": 0, "tokens": TOKENS}],
                  "k": {"inline": halves(k)}, "v": {"inline": halves(v)}}
        self.good((await cache.step(append)).reply.status)
        attend = {"layer": 0, "entries": [{"sequenceId": made.sequenceId, "position": TOKENS - 1, "tokens": 1}],
                  "q": {"inline": struct.pack(f"<{len(q)}f", *q)}, "qDtype": "float32", "wantLse": True}
        attended = (await cache.step(attend)).reply
        self.good(attended.status)
        self.assertEqual(attended.rawPairs, TOKENS)
        self.assertEqual(len(attended.lse), 4 * QUERY_HEADS)
        out = struct.unpack(f"<{len(q)}f", attended.out)
        for head in range(QUERY_HEADS):
            want = attention(k, v, q[head * HEAD_DIM : (head + 1) * HEAD_DIM])
            for got, expected in zip(out[head * HEAD_DIM : (head + 1) * HEAD_DIM], want):
                self.assertAlmostEqual(got, expected, delta=2e-3)

        ids = list(range(TOKENS))
        names = names_of(bytes(opened.info.digest), ids)
        published = (await made.sequence.publish(names)).reply
        self.good(published.status)
        self.assertEqual(published.published, TOKENS // PAGE)
        matched = await cache.match([{"prefix": names}, {"prefix": names_of(bytes(opened.info.digest), ids[1:])}])
        self.good(matched.status)
        self.assertEqual([match.hitBlocks for match in matched.results], [TOKENS // PAGE, 0])
        self.assertEqual(str(matched.results[1].reason), "notFound")
        again = (await cache.createSequences([{"prefix": names}])).replies[0]
        self.good(again.status)
        self.assertEqual(again.match.hitBlocks, TOKENS // PAGE)


if __name__ == "__main__":
    unittest.main()
