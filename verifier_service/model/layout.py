"""How a step's spans lie in the flat batch, and in which groups attention works through them.

Pure index work, done once per step and used by every layer. Spans lie in the flat batch as they
come. For attention every span becomes blocks: runs of rows that follow one another. A prompt chunk
is cut after BLOCK_ROWS rows; a branching span becomes one block per leaf (the rows of its path that
no earlier block holds, behind the keys of the whole path), or stays a tree where its paths would
read the prefix too often. Blocks that must be gathered anyway share groups, because a group costs
a dozen calls a layer whatever it holds: a shorter block repeats its last row, and reads slot 0,
masked, behind its end. FlexAttention has groups of its own (flex_layout.py).

    flat rows   [ span a | span b | span c | ... | padding ]

Rows are padded to a multiple, and more than a tile's worth of them to multiples of MANY_ROWS, so
that few distinct shapes occur: a CPU's kernels are compiled per shape and kept (a millisecond and
about 3 MB for each matrix). Padding rows carry token 0, position 0 and slot 0 (scrap).

Shapes: R flat rows, B blocks of a group, n rows per block, T tiles, P = T * TILE positions.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import torch

from verifier_service.model.flex_layout import FlexGroup, flex_groups
from verifier_service.model.kv import TILE
from verifier_service.model.tree_layout import TreeGroup, tree_group
from verifier_service.step import Span

BLOCK_ROWS = 64
"""Rows of a prompt chunk whose attention is computed together."""

MANY_ROWS: Final = 16
"""What steps of more than BLOCK_ROWS rows are padded to."""

_GROUP_COST: Final = 95.0
_TREE_COST: Final = 130.0
_TILE_COST: Final = 2.5
_ROW_COST: Final = 1.5
"""Microseconds of one layer on two cores, measured with SmolLM2's heads: a group's calls, a tree's,
reading a tile of one block, and each row of it. Only their proportions matter."""


@dataclass(frozen=True, slots=True)
class ChainGroup:
    """Blocks without branches: row i of block b stands at position starts[b] + i.

    Blocks shorter than num_rows repeat their last row. first_row: set when the group's rows are
    B * n adjacent flat rows; else `rows` [B * n] names them. first_slot: set when B is 1 and the
    slots of all positions are one run; else `slots` [B, P] names them, 0 where a block is shorter.
    positions: [B, n]. mask: [B, n, P - mask_start], 0 or -inf; earlier positions are visible to
    all rows; None when everything is.
    """

    first_row: int | None
    rows: torch.Tensor | None
    num_blocks: int
    num_rows: int
    positions: torch.Tensor
    num_tiles: int
    first_slot: int | None
    slots: torch.Tensor | None
    mask_start: int
    mask: torch.Tensor | None


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
    groups: tuple[ChainGroup | TreeGroup, ...]
    flex_groups: tuple[FlexGroup, ...]
    logit_rows: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Block:
    """Rows of one span that follow one another. slots: of all positions up to the last row's.

    rows: flat. start: position of the first row.
    """

    rows: Sequence[int]
    start: int
    slots: torch.Tensor
    first_slot: int | None = None

    @property
    def num_rows(self) -> int:
        return len(self.rows)

    @property
    def num_tiles(self) -> int:
        return -(-(self.start + len(self.rows)) // TILE)

    @property
    def cost(self) -> float:
        """Of this block in a group, the group's own calls aside."""
        return self.num_tiles * (_TILE_COST + _ROW_COST * self.num_rows)


def lay_out(
    spans: Sequence[Span], multiple: int, dtype: torch.dtype, for_flex: bool = False
) -> StepLayout:
    """The layout of one step; flat rows padded to `multiple`, masks in `dtype`.

    for_flex: in groups for FlexAttention instead of tiles.
    """
    first_rows = [0, *itertools.accumulate(span.num_rows for span in spans)]
    num_rows = first_rows[-1]
    ids = [token for span in spans for token in span.token_ids]
    padding = -num_rows % (multiple if num_rows <= BLOCK_ROWS else max(multiple, MANY_ROWS))
    depths = [_depths(span) for span in spans]
    positions = [
        span.start + depth for span, own in zip(spans, depths, strict=True) for depth in own
    ]
    logit_rows = [
        row
        for span, end in zip(spans, first_rows[1:], strict=True)
        for row in range(end - span.num_logits, end)
    ]
    placed = list(zip(spans, first_rows[:-1], depths, strict=True))
    only = spans[0] if len(spans) == 1 else None
    own_slots = [span.slots[span.start :] for span in spans]
    return StepLayout(
        ids=torch.tensor(ids + [0] * padding),
        positions=torch.tensor(positions + [0] * padding),
        slots=torch.cat([*own_slots, torch.zeros(padding, dtype=torch.int64)]),
        num_rows=num_rows,
        first_slot=(only.first_slot + only.start if only and only.first_slot is not None else None),
        groups=() if for_flex else tuple(_tile_groups(placed, dtype)),
        flex_groups=flex_groups(list(zip(spans, first_rows, strict=False))) if for_flex else (),
        logit_rows=tuple(logit_rows),
    )


def _tile_groups(
    placed: Sequence[tuple[Span, int, list[int]]], dtype: torch.dtype
) -> list[ChainGroup | TreeGroup]:
    """Groups of all spans, given with their first flat rows and their rows' depths."""
    groups: list[ChainGroup | TreeGroup] = []
    shared: list[_Block] = []
    is_lone = len(placed) == 1
    for span, first, depths in placed:
        if span.parents is None:
            blocks = list(_chunks(span, first))
            if is_lone or span.num_rows > BLOCK_ROWS:
                groups += [_chain_group([block], dtype) for block in blocks]
            else:
                shared += blocks
            continue
        paths = _paths(span, span.parents, depths, first)
        if sum(block.cost for block in paths) + _GROUP_COST * is_lone < _tree_cost(span, depths):
            shared += paths
        else:
            groups.append(tree_group(span, first, dtype))
    return [*groups, *(_chain_group(bunch, dtype) for bunch in _bunches(shared))]


def _chunks(span: Span, first_row: int) -> Iterator[_Block]:
    """An unbranched span in blocks of at most BLOCK_ROWS rows."""
    for first in range(0, span.num_rows, BLOCK_ROWS):
        count = min(BLOCK_ROWS, span.num_rows - first)
        rows = range(first_row + first, first_row + first + count)
        start = span.start + first
        yield _Block(rows, start, span.slots[: start + count], span.first_slot)


def _depths(span: Span) -> list[int]:
    """Of every row below the span's first."""
    if span.parents is None:
        return list(range(span.num_rows))
    depths = [0] * span.num_rows
    for row, parent in enumerate(span.parents):
        if row:
            depths[row] = depths[parent] + 1
    return depths


def _paths(
    span: Span, parents: Sequence[int], depths: Sequence[int], first_row: int
) -> list[_Block]:
    """A branching span as one block per leaf, deepest first; every row is in exactly one."""
    leaves = sorted(set(range(len(parents))) - set(parents), key=lambda leaf: -depths[leaf])
    taken: set[int] = set()
    blocks = []
    for leaf in leaves:
        path = [leaf]
        while parents[path[-1]] >= 0:
            path.append(parents[path[-1]])
        path.reverse()
        own = [row for row in path if row not in taken]
        taken.update(own)
        keys = span.start + torch.tensor(path)
        blocks.append(
            _Block(
                rows=[first_row + row for row in own],
                start=span.start + depths[own[0]],
                slots=torch.cat([span.slots[: span.start], span.slots[keys]]),
            )
        )
    return blocks


def _tree_cost(span: Span, depths: Sequence[int]) -> float:
    tiles = -(-(span.start + max(depths) + 1) // TILE)
    return _TREE_COST + tiles * (_TILE_COST + _ROW_COST * span.num_rows)


def _bunches(blocks: Sequence[_Block]) -> list[list[_Block]]:
    """Blocks in groups that cost least together: runs of the blocks ordered by rows and tiles."""
    order = sorted(blocks, key=lambda block: (block.num_rows, block.num_tiles))
    # best[i]: cost of the first i blocks, and where the last of their groups begins.
    best: list[tuple[float, int]] = [(0.0, 0)]
    for end in range(1, len(order) + 1):
        rows, tiles, found = order[end - 1].num_rows, 0, (float("inf"), 0)
        for begin in range(end - 1, -1, -1):
            tiles = max(tiles, order[begin].num_tiles)
            cost = _GROUP_COST + (end - begin) * tiles * (_TILE_COST + _ROW_COST * rows)
            found = min(found, (best[begin][0] + cost, begin))
        best.append(found)
    bunches = []
    end = len(order)
    while end:
        begin = best[end][1]
        bunches.append(order[begin:end])
        end = begin
    return bunches


def _chain_group(blocks: Sequence[_Block], dtype: torch.dtype) -> ChainGroup:
    num_rows = max(block.num_rows for block in blocks)
    num_tiles = max(block.num_tiles for block in blocks)
    size = num_tiles * TILE
    places = [[min(n, block.num_rows - 1) for n in range(num_rows)] for block in blocks]
    rows = [block.rows[n] for block, own in zip(blocks, places, strict=True) for n in own]
    starts = torch.tensor([block.start for block in blocks])
    positions = starts[:, None] + torch.tensor(places)
    first_slot = blocks[0].first_slot if len(blocks) == 1 else None
    slots = None
    if first_slot is None:
        slots = torch.zeros(len(blocks), size, dtype=torch.int64)
        for number, block in enumerate(blocks):
            slots[number, : len(block.slots)] = block.slots
    mask_start = min(block.start for block in blocks) // TILE * TILE
    hidden = torch.arange(mask_start, size) > positions[..., None]
    mask = None
    if bool(hidden.any()):
        mask = torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, float("-inf"))
    is_run = rows == list(range(rows[0], rows[0] + len(rows)))
    return ChainGroup(
        first_row=rows[0] if is_run else None,
        rows=None if is_run else torch.tensor(rows),
        num_blocks=len(blocks),
        num_rows=num_rows,
        positions=positions,
        num_tiles=num_tiles,
        first_slot=first_slot,
        slots=slots,
        mask_start=mask_start,
        mask=mask,
    )
