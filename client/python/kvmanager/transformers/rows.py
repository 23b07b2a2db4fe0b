"""The rows of a batch: a sequence of the daemon each, and which of a step's columns it takes."""

from array import array
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass
class Row:
    sequence: Any             # kvmanager.Sequence
    lead: int = 0             # columns of padding before its first token
    tokens: int = 0           # that the daemon has, in every layer
    ids: array | None = field(default_factory=lambda: array("I"))  # of these; None: the model got embeddings


@dataclass
class Step:
    """A forward pass of all layers. Of the `columns` that are new, row i takes the last new[i]."""
    columns: int
    new: list[int]
    entries: list[tuple[Any, int, int]]  # (sequence, position, tokens) of rows that take some
    plain: bool                          # each row takes all of them
    places: torch.Tensor | None          # else: where the tokens are among [rows * columns], in the entries' order
    layer: int = 0                       # that comes next


def leads_of_mask(mask: torch.Tensor, width: int) -> list[int]:
    """Columns before each row's first token. mask [rows, width], not 0 for tokens. Errors: ValueError for padding
    behind or between tokens."""
    if mask.dim() != 2 or mask.shape[1] != width:
        raise ValueError(f"attention_mask: its shape is {tuple(mask.shape)}; must be (rows, {width}), the columns that "
                         "the cache has and those of this step. A cache that begins with a prefix wants the whole "
                         "input_ids and attention_mask given to generate(), without prefill_chunk_size or assistants")
    real = mask != 0
    counts, firsts = torch.stack((real.sum(-1), real.int().argmax(-1))).tolist()
    for row, (count, first) in enumerate(zip(counts, firsts)):
        if count and first != width - count:
            raise ValueError(f"attention_mask: row {row} has padding behind its first token; pad on the left")
    return [width - count for count in counts]


def check_positions(positions: torch.Tensor, rows: list[Row], step: Step, before: int) -> None:
    """positions [1 or rows, step.columns]: each token's must be its place in its row, since pages are named by tokens
    from the first on. before: the columns that came before. Errors: ValueError."""
    if positions.dim() != 2:
        raise ValueError(f"position_ids: has {positions.dim()} dimensions; must have 2: text alone")
    leads = torch.tensor([row.lead for row in rows], device=positions.device)[:, None]
    columns = torch.arange(before, before + step.columns, device=positions.device)[None]
    taken = columns >= torch.tensor([before + step.columns - n for n in step.new], device=positions.device)[:, None]
    if bool(((positions != columns - leads) & taken).any()):
        raise ValueError("position_ids: a token's is not its place among its row's tokens; leave them to the model")
