"""How a step's spans lie in the flat batch.

Pure index work, done once per step and used by every layer. Spans lie in the flat batch as they
come; how attention works through them is block_layout.py's, and flex_layout.py's for
FlexAttention.

    flat rows   [ span a | span b | span c | ... | padding ]

Rows are padded to a multiple, and more than a tile's worth of them to multiples of MANY_ROWS, so
that few distinct shapes occur: a CPU's kernels are compiled per shape and kept (a millisecond and
about 3 MB for each matrix). Padding rows carry token 0, position 0 and slot 0 (scrap).

Shapes: R flat rows.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch

from verifier_service.model.block_layout import (
    TILE_RULES,
    BlockGroup,
    BlockRules,
    PlacedSpan,
    group_blocks,
)
from verifier_service.model.flex_layout import FlexGroup, flex_groups
from verifier_service.model.kv import TILE
from verifier_service.model.tree_layout import TreeGroup
from verifier_service.step import Span

MANY_ROWS: Final = 16
"""What steps of more rows than a tile has positions are padded to."""


@dataclass(frozen=True, slots=True)
class StepLayout:
    """One step, laid out. ids, positions, slots: int64 [R], padding included.

    first_slot: set when all real rows' slots are one run in row order. logit_rows: flat rows with
    logits, in span order (no padding).
    """

    ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    num_rows: int
    first_slot: int | None
    groups: tuple[BlockGroup | TreeGroup, ...]
    flex_groups: tuple[FlexGroup, ...]
    logit_rows: tuple[int, ...]


def lay_out(
    spans: Sequence[Span],
    multiple: int,
    dtype: torch.dtype,
    rules: BlockRules | None = TILE_RULES,
) -> StepLayout:
    """The layout of one step; flat rows padded to `multiple`, masks in `dtype`.

    rules: of the backend that will attend; None: FlexAttention, in groups of its own.
    """
    first_rows = [0, *itertools.accumulate(span.num_rows for span in spans)]
    num_rows = first_rows[-1]
    ids = [token for span in spans for token in span.token_ids]
    padding = -num_rows % (multiple if num_rows <= TILE else max(multiple, MANY_ROWS))
    depths = [_depths(span) for span in spans]
    positions = [
        span.start + depth for span, own in zip(spans, depths, strict=True) for depth in own
    ]
    logit_rows = [
        row
        for span, end in zip(spans, first_rows[1:], strict=True)
        for row in range(end - span.num_logits, end)
    ]
    placed = [PlacedSpan(*one) for one in zip(spans, first_rows[:-1], depths, strict=True)]
    only = spans[0] if len(spans) == 1 else None
    own_slots = [span.slots[span.start :] for span in spans]
    return StepLayout(
        ids=torch.tensor(ids + [0] * padding),
        positions=torch.tensor(positions + [0] * padding),
        slots=torch.cat([*own_slots, torch.zeros(padding, dtype=torch.int64)]),
        num_rows=num_rows,
        first_slot=(only.first_slot + only.start if only and only.first_slot is not None else None),
        groups=() if rules is None else tuple(group_blocks(placed, dtype, rules)),
        flex_groups=flex_groups(list(zip(spans, first_rows, strict=False))) if not rules else (),
        logit_rows=tuple(logit_rows),
    )


def _depths(span: Span) -> list[int]:
    """Of every row below the span's first."""
    if span.parents is None:
        return list(range(span.num_rows))
    depths = [0] * span.num_rows
    for row, parent in enumerate(span.parents):
        if row:
            depths[row] = depths[parent] + 1
    return depths
