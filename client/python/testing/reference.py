"""Attention as the daemon must compute it, in numpy and double precision; random K, V and Q to try it with."""

from __future__ import annotations

import numpy

MODEL = {"model": "m", "layers": 2, "kv_heads": 2, "query_heads": 8, "head_dim": 64}


def attention(k, v, q, position: int):
    """q[i] attends to tokens 0 .. position + i. k, v: [context][kv_heads][head_dim]; q: [tokens][query_heads][head_dim].
    Returns (out, lse), lse of the natural logarithm."""
    k, v, q = (numpy.asarray(each, dtype=numpy.float64) for each in (k, v, q))
    group = q.shape[1] // k.shape[1]
    out = numpy.empty_like(q)
    lse = numpy.empty(q.shape[:2])
    for i in range(q.shape[0]):
        for head in range(q.shape[1]):
            seen = position + i + 1
            scores = k[:seen, head // group] @ q[i, head] / numpy.sqrt(q.shape[2])
            top = scores.max()
            weights = numpy.exp(scores - top)
            lse[i, head] = top + numpy.log(weights.sum())
            out[i, head] = weights @ v[:seen, head // group] / weights.sum()
    return out, lse


def random_rows(seed: int, tokens: int, heads: int, head_dim: int, dtype=numpy.float16):
    return numpy.random.default_rng(seed).standard_normal((tokens, heads, head_dim)).astype(dtype)


class Prompt:
    """K, V of every layer and Q of a random prompt of MODEL's shape."""

    def __init__(self, seed: int, tokens: int, model: dict = MODEL) -> None:
        heads, head_dim = model["kv_heads"], model["head_dim"]
        self.tokens = tokens
        self.ids = list(range(seed * 1000, seed * 1000 + tokens))
        self.k = [random_rows(seed + 10 * i, tokens, heads, head_dim) for i in range(model["layers"])]
        self.v = [random_rows(seed + 10 * i + 5, tokens, heads, head_dim) for i in range(model["layers"])]
        self.q = random_rows(seed + 3, tokens, model["query_heads"], head_dim, numpy.float32)

    def append(self, cache, sequence, first: int = 0, last: int | None = None) -> None:
        """Tokens first..last to every layer."""
        last = self.tokens if last is None else last
        for layer in range(cache.options.layers):
            cache.step(layer, [(sequence, first, last - first)], self.k[layer][first:last], self.v[layer][first:last])
