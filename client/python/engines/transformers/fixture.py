"""What the tests of transformers share: a daemon, models, prompts, and a comparison of greedy tokens.

KVMANAGER_TEST_MODEL: a model's directory instead of examples/model, with KVMANAGER_TEST_TEXT, one byte a token.
KVMANAGER_TEST_DEVICE: cuda instead of cpu. KVMANAGER_TEST_DTYPE: float16 instead of float32.
"""

import contextlib
import os
import pathlib

import torch
from transformers import LlamaForCausalLM

import kvmanager.transformers as kvt
from kvmanager_testing import Daemon, data_path

MODEL = pathlib.Path(os.environ.get("KVMANAGER_TEST_MODEL") or data_path("examples/model"))
TEXT = pathlib.Path(os.environ.get("KVMANAGER_TEST_TEXT", MODEL / "held_out.txt"))
DEVICE = os.environ.get("KVMANAGER_TEST_DEVICE", "cpu")
DTYPE = getattr(torch, os.environ.get("KVMANAGER_TEST_DTYPE", "float32"))
K3V2 = "hack:k_bits=3,v_bits=2"
torch.set_num_threads(1)  # the daemon's workers want cores, too
NEAR = 1e-2  # logits closer than this may swap places


def daemon(*flags: str) -> Daemon:
    """A kvmanagerd of its own, with a pool on the GPU where the tests run on one."""
    if DEVICE == "cuda":
        flags += ("--device-pool-bytes", os.environ.get("KVMANAGER_TEST_POOL", "8GiB"))
    return Daemon(host_pool="512MiB", flags=flags)


def load(attention: str) -> LlamaForCausalLM:
    return LlamaForCausalLM.from_pretrained(MODEL, dtype=DTYPE, attn_implementation=attention).to(DEVICE).eval()


def prompt(offset: int, length: int) -> torch.Tensor:
    """[1, length]"""
    data = TEXT.read_bytes()[offset : offset + length]
    assert len(data) == length, f"{TEXT} has no {length} bytes at {offset}"
    return torch.tensor([list(data)], device=DEVICE)


def batch(prompts: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """input_ids and attention_mask, padded on the left."""
    width = max(ids.shape[1] for ids in prompts)
    ids = torch.zeros((len(prompts), width), dtype=torch.long, device=DEVICE)
    mask = torch.zeros_like(ids)
    for row, one in enumerate(prompts):
        ids[row, width - one.shape[1] :] = one[0]
        mask[row, width - one.shape[1] :] = 1
    return ids, mask


GREEDY = dict(do_sample=False, eos_token_id=None, pad_token_id=0)


def generate(model, ids: torch.Tensor, mask: torch.Tensor | None = None, **options) -> torch.Tensor:
    mask = torch.ones_like(ids) if mask is None else mask
    return model.generate(ids, attention_mask=mask, **(GREEDY | options))


def generate_here(model, kv: kvt.Attachment, ids: torch.Tensor, mask: torch.Tensor | None = None, expand: int = 1,
                  **options) -> torch.Tensor:
    mask = torch.ones_like(ids) if mask is None else mask
    with kv.cache(ids, mask, expand=expand) as cache:
        return generate(model, ids, mask, past_key_values=cache, **options)


@torch.no_grad()
def first_differences(own, expected: torch.Tensor, got: torch.Tensor, mask: torch.Tensor) -> list:
    """(row, column, gap) of each row's first difference: the gap is between the two tokens' logits, as `own`, a model
    with transformers' attention, has them there. mask: of the prompt."""
    differences = []
    for row in range(expected.shape[0]):
        unlike = (expected[row] != got[row]).nonzero()
        if not len(unlike):
            continue
        column = int(unlike[0])
        lead = int((mask[row] == 0).sum())
        logits = own(expected[row : row + 1, lead:column]).logits[0, -1].float()
        gap = abs(float(logits[expected[row, column]] - logits[got[row, column]]))
        differences.append((row, column, gap))
    return differences


@contextlib.contextmanager
def tokens_fed(model):
    """A list that gets the number of tokens of each forward pass: what was computed, not what a cache says."""
    fed: list[int] = []
    hook = model.get_input_embeddings().register_forward_pre_hook(lambda module, args: fed.append(args[0].numel()))
    try:
        yield fed
    finally:
        hook.remove()
