"""How a step's spans lie in the flat batch, and in which groups attention works through them.

Pure index work, done once per step and used by every layer. Spans without branches become blocks
of at most BLOCK_ROWS rows; blocks of equal row count and similar length that must be gathered
anyway share one group. A branching span is a group of its own. For FlexAttention spans stand in
their own order and are grouped by size (flex_layout.py).

    flat rows   [ span a | span b | span c, block 1 | c, block 2 | ... | padding ]

Rows are padded to a multiple; padding rows carry token 0, position 0 and slot 0 (scrap).

Shapes: R flat rows, B blocks of a group, n rows per block, T tiles, P = T * TILE positions.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from verifier_service.model.flex_layout import FlexGroup, NodeOrder, flex_groups, node_order
from verifier_service.model.kv import TILE
from verifier_service.model.tree_layout import TreeGroup, tree_group
from verifier_service.step import Span

BLOCK_ROWS = 64
"""Rows of a prompt chunk whose attention is computed together."""


@dataclass(frozen=True, slots=True)
class ChainGroup:
    """Blocks without branches: row i of block b stands at position starts[b] + i.

    first_row: of the group's B * n adjacent flat rows. first_slot: set when B is 1 and the slots
    of all positions are one run; else `slots` [B, P] names them, 0 where a block is shorter.
    mask: [B, n, P - mask_start], 0 or -inf; earlier positions are visible to all rows; None when
    everything is.
    """

    first_row: int
    num_rows: int
    starts: tuple[int, ...]
    num_tiles: int
    first_slot: int | None
    slots: torch.Tensor | None
    mask_start: int
    mask: torch.Tensor | None

    @property
    def positions(self) -> torch.Tensor:
        """Positions of the rows, [B, n]."""
        return torch.tensor(self.starts)[:, None] + torch.arange(self.num_rows)


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
    groups: tuple[ChainGroup | TreeGroup | FlexGroup, ...]
    logit_rows: tuple[int, ...]


@dataclass(slots=True)
class _Block:
    span: Span
    first: int
    """First row of the span in this block."""
    num_rows: int

    @property
    def start(self) -> int:
        return self.span.start + self.first

    @property
    def num_tiles(self) -> int:
        return -(-(self.start + self.num_rows) // TILE)


def lay_out(
    spans: Sequence[Span], multiple: int, dtype: torch.dtype, for_flex: bool = False
) -> StepLayout:
    """The layout of one step; flat rows padded to `multiple`, masks in `dtype`.

    for_flex: in groups for FlexAttention instead of tiles.
    """
    groups: list[ChainGroup | TreeGroup | FlexGroup] = []
    ids: list[int] = []
    positions: list[int] = []
    slots: list[torch.Tensor] = []
    first_rows: dict[int, list[int]] = {}
    order = {id(span): number for number, span in enumerate(spans)}

    def place(span: Span, first: int, count: int, where: Sequence[int] | None = None) -> int:
        row = len(ids)
        first_rows.setdefault(order[id(span)], []).extend(range(row, row + count))
        ids.extend(span.token_ids[first : first + count])
        start = span.start + first
        positions.extend(where if where is not None else range(start, start + count))
        slots.append(span.slots[start : start + count])
        return row

    if for_flex:
        placed: list[tuple[Span, int, NodeOrder]] = []
        for span in spans:
            nodes = node_order(span)
            where = (span.start + nodes.depth).tolist()
            placed.append((span, place(span, 0, span.num_rows, where), nodes))
        groups += flex_groups(placed)
    else:
        for bunch in _bunches(spans):
            rows = [place(block.span, block.first, block.num_rows) for block in bunch]
            groups.append(_chain_group(bunch, rows[0], dtype))
        for span in spans:
            if span.parents is not None:
                tree = tree_group(span, len(ids), dtype)
                place(span, 0, span.num_rows, tree.positions.tolist())
                groups.append(tree)

    num_rows = len(ids)
    padding = -num_rows % multiple
    logit_rows = [
        row
        for number, span in enumerate(spans)
        for row in first_rows[number][span.num_rows - span.num_logits :]
    ]
    only = spans[0] if len(spans) == 1 else None
    return StepLayout(
        ids=torch.tensor(ids + [0] * padding),
        positions=torch.tensor(positions + [0] * padding),
        slots=torch.cat([*slots, torch.zeros(padding, dtype=torch.int64)]),
        num_rows=num_rows,
        first_slot=(only.first_slot + only.start if only and only.first_slot is not None else None),
        groups=tuple(groups),
        logit_rows=tuple(logit_rows),
    )


def _bunches(spans: Sequence[Span]) -> list[list[_Block]]:
    """Blocks of the unbranched spans, bunched into groups."""
    alone: list[list[_Block]] = []
    shared: dict[tuple[int, int], list[_Block]] = {}
    lone_span = len(spans) == 1
    for span in spans:
        if span.parents is not None:
            continue
        for first in range(0, span.num_rows, BLOCK_ROWS):
            block = _Block(span, first, min(BLOCK_ROWS, span.num_rows - first))
            if lone_span or span.num_rows > BLOCK_ROWS:
                alone.append([block])
            else:
                shared.setdefault((block.num_rows, _bucket(block.num_tiles)), []).append(block)
    return [*alone, *shared.values()]


def _bucket(num_tiles: int) -> int:
    """Tile counts that share a group: the padding they cost stays under a third."""
    bucket = 1
    while bucket < num_tiles:
        bucket += max(1, bucket // 3)
    return bucket


def _chain_group(blocks: Sequence[_Block], first_row: int, dtype: torch.dtype) -> ChainGroup:
    num_rows = blocks[0].num_rows
    num_tiles = max(block.num_tiles for block in blocks)
    starts = tuple(block.start for block in blocks)
    size = num_tiles * TILE
    first_slot = blocks[0].span.first_slot if len(blocks) == 1 else None
    slots = None
    if first_slot is None:
        slots = torch.zeros(len(blocks), size, dtype=torch.int64)
        for number, block in enumerate(blocks):
            end = block.start + num_rows
            slots[number, :end] = block.span.slots[:end]
    mask_start = min(starts) // TILE * TILE
    last = torch.tensor(starts)[:, None, None] + torch.arange(num_rows)[None, :, None]
    hidden = torch.arange(mask_start, size) > last
    mask = None
    if bool(hidden.any()):
        mask = torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, float("-inf"))
    return ChainGroup(
        first_row=first_row,
        num_rows=num_rows,
        starts=starts,
        num_tiles=num_tiles,
        first_slot=first_slot,
        slots=slots,
        mask_start=mask_start,
        mask=mask,
    )
