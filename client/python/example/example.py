"""The whole of the client in one page: what an engine does, without the model. docs/python.md walks through it.

    kvmanagerd --listen unix:/tmp/kv.sock --host-pool-bytes 256MiB --peer-listen 127.0.0.1:0 --hand-off-peers any &
    python example.py unix:/tmp/kv.sock [HOST:PORT of another daemon's --peer-listen, and that daemon's own address]
"""

from __future__ import annotations

import sys

import kvmanager as kv
import numpy

LAYERS, KV_HEADS, QUERY_HEADS, HEAD_DIM, PROMPT = 2, 2, 8, 64, 150
MODEL = {"model": "example-model", "revision": "1", "layers": LAYERS, "kv_heads": KV_HEADS,
         "query_heads": QUERY_HEADS, "head_dim": HEAD_DIM}


def run(address: str, peer: str = "", peer_client_address: str = "") -> None:
    # 1. Connect. Every call has the deadline; a lost daemon is UnavailableError at once.
    with kv.connect(address, name="example", deadline_ms=10000) as client:
        # 2. Open the cache of this model. Everything in the options is part of every block's name.
        cache = client.open_cache(**MODEL)

        # 3. Memory that both sides see. Over TCP there is none: tensors of one's own are copied.
        arena = client.create_arena(4 << 20)
        k = arena.tensor((PROMPT, KV_HEADS, HEAD_DIM), "float16", offset=0).numpy()
        v = arena.tensor((PROMPT, KV_HEADS, HEAD_DIM), "float16", offset=1 << 20).numpy()
        q = arena.tensor((PROMPT, QUERY_HEADS, HEAD_DIM), "float32", offset=2 << 20).numpy()
        out = arena.tensor((PROMPT, QUERY_HEADS, HEAD_DIM), "float32", offset=3 << 20).numpy()

        def layers(entries: kv.Entries) -> None:
            """Appends and attends in every layer. Here is where an engine computes k, v and q."""
            n = entries.tokens
            for layer in range(LAYERS):
                cache.step(layer, entries, k[:n], v[:n], q[:n], out[:n])

        # 4. A sequence that begins with whatever blocks of the prompt are known already. At least one token is left to
        # compute: its output is what the next token is sampled from.
        names = cache.block_names(range(PROMPT))
        sequence = cache.create_sequence(names)
        found = sequence.hit_blocks * cache.options.page_tokens
        print(f"prompt: {found} of {PROMPT} tokens were there")

        # 5. Prefill the rest: one call per layer, causal within the chunk.
        source = numpy.random.default_rng(0)
        for tensor in (k, v, q):
            tensor[:] = source.standard_normal(tensor.shape)
        layers(kv.Entries([(sequence, found, PROMPT - found)]))

        # 6. Publish the full blocks, so that the next prompt with this beginning finds them.
        print(sequence.publish(names))

        # 7. Fork: two continuations of one prompt. One call steps a whole batch: here both, one token each.
        fork = sequence.fork()
        layers(kv.Entries([(sequence, PROMPT, 1), (fork, PROMPT, 1)]))

        # 8. Take back what speculation got wrong; give back what is not needed.
        fork.crop(PROMPT)
        fork.close()

        # 9. Hand a sequence to the daemon of another host while it is prefilled. The ticket travels by the engine's own
        # means, and may be claimed at once.
        if peer:
            going = cache.create_sequence()
            hand_off = going.begin_hand_off(peer, PROMPT)
            with kv.connect(peer_client_address, name="example") as there:
                claim = there.open_cache(**MODEL).claim_async(hand_off.ticket)
                layers(kv.Entries([(going, 0, PROMPT)]))
                sent = hand_off.finish(b"sampling state")
                print(f"handed off {sent.pages_sent} pages, {sent.bytes_sent} bytes")
                claimed = claim.wait()
                print(f"claimed {claimed.tokens} tokens, blob {claimed.blob!r}")
    # 10. Leaving gives back every lease; published blocks stay.


if __name__ == "__main__":
    if len(sys.argv) not in (2, 4):
        sys.exit("usage: example.py ADDRESS [PEER_HOST:PORT PEER_CLIENT_ADDRESS]")
    try:
        run(*sys.argv[1:])
    except kv.Error as error:
        sys.exit(f"{error}" + (f"\nfield {error.field}, allowed: {error.bound}" if error.field else ""))
