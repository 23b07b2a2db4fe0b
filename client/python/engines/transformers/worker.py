"""A second process of the tests: worker.py ACTION JSON, prints JSON."""

import json
import sys

import kvmanager.transformers as kvt
from fixture import generate, generate_here, load, prompt, tokens_fed


def reuse(address: str, offset: int, length: int, new_tokens: int) -> dict:
    """Generates from a prompt whose beginning another process may have published."""
    model = load("kvmanager")
    with kvt.attach(model, address) as kv, tokens_fed(model) as fed:
        out = generate_here(model, kv, prompt(offset, length), max_new_tokens=new_tokens)
        return {"tokens": out[0, length:].tolist(), "fed": fed, "computed": kv.tokens_computed}


def decode(address: str, codec: str, tickets: list[str], new_tokens: int) -> dict:
    """Goes on with rows that another process handed to this daemon."""
    model = load("kvmanager")
    with kvt.attach(model, address, codec=codec) as kv, tokens_fed(model) as fed:
        claimed = kv.claim([bytes.fromhex(ticket) for ticket in tickets])
        with claimed.cache as cache:
            out = generate(model, claimed.input_ids, claimed.attention_mask, past_key_values=cache,
                           max_new_tokens=new_tokens)
        return {"tokens": out.tolist(), "fed": fed, "blobs": [blob.decode() for blob in claimed.blobs]}


if __name__ == "__main__":
    print(json.dumps({"reuse": reuse, "decode": decode}[sys.argv[1]](**json.loads(sys.argv[2]))))
