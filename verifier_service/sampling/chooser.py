"""The chooser of one step: draws choices as the walk asks on a CPU, all at once behind a device.

On a CPU a draw at 49k ids takes a millisecond, so only rows that the walk reaches are drawn. Behind
a device draws of many rows cost one, and every look at a result waits for all that was launched: so
all nodes of all trees are drawn in one batch and the walk reads a list. Invariant: both give the
same choices, because a choice is a function of its own row alone.
"""

import functools
from collections.abc import Sequence

import torch

from verifier_service.sampling.choice import ChoiceRow, choose
from verifier_service.sampling.choice_batch import choose_batch
from verifier_service.sampling.walk import Chooser, WalkStart


def chooser_of(logits: torch.Tensor, starts: Sequence[WalkStart]) -> Chooser:
    """What `walk(starts, ...)` asks, over a step's logits [*, V]."""
    if logits.device.type == "cpu":
        return functools.partial(choose, logits)
    rows = [row for start in starts for row in _rows(start)]
    tokens = choose_batch(logits, rows)
    drawn = {row.row: token for row, token in zip(rows, tokens, strict=True)}
    return lambda asked: [drawn[row.row] for row in asked]


def _rows(start: WalkStart) -> list[ChoiceRow]:
    """The anchor's row and every draft node's."""
    return [start.row(node, depth) for node, depth in enumerate((0, *start.tree.depths()))]
