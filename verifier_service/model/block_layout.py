"""Blocks and groups of blocks: the units in which tiles and torch's fused kernel attend.

A block is some rows of one span and one order of the keys that they may see. A prompt chunk is cut
into blocks; a branching span becomes one block per leaf (the rows of its path that no earlier block
holds, behind the keys of the whole path), or stays a tree where its paths would read the prefix too
often (tree_layout.py), or is packed, for backends that reduce keys in one pass (packed_tree.py).
Blocks share groups, because a group costs several calls a layer whatever it holds: a shorter block
repeats its last row, and reads slot 0, masked, behind its end.

Shapes: B blocks of a group, n rows per block, T tiles, P = T * TILE columns.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import torch

from verifier_service.model.kv import TILE
from verifier_service.model.packed_tree import PackedPart, pack_tree
from verifier_service.model.tree_layout import TreeGroup, tree_group
from verifier_service.step import Span


@dataclass(frozen=True, slots=True)
class BlockRules:
    """How a backend likes spans cut and grouped.

    block_rows: rows of a prompt chunk whose attention is computed together.
    The rest is microseconds of one layer on two cores with SmolLM2's heads, of which only the
    proportions matter: a group's calls, a tree's (None: trees are packed), reading a tile of one
    block, and each row of it.
    """

    block_rows: int
    group_cost: float
    tree_cost: float | None
    tile_cost: float
    row_cost: float

    def cost(self, num_tiles: int, num_rows: int) -> float:
        """Of a block in a group, the group's own calls aside."""
        return num_tiles * (self.tile_cost + self.row_cost * num_rows)


Owner = tuple[int, int]
"""Whose a block is: its span's key, and which of the span's blocks."""

TILE_RULES: Final = BlockRules(
    block_rows=64, group_cost=95.0, tree_cost=130.0, tile_cost=2.5, row_cost=1.5
)


@dataclass(frozen=True, slots=True)
class BlockGroup:
    """Blocks of one size.

    Blocks shorter than num_rows repeat their last row. owners: of the blocks. first_row: set when
    the group's rows are B * n adjacent flat rows; else `rows` [B * n] names them. positions:
    [B, n].
    first_slot: set when B is 1 and the slots of all columns are one run; else `slots` [B, P] names
    them, 0 where a block is shorter. key_positions: [B, P], None where a column is its position.
    mask: [B, n, P - mask_start], 0 or -inf; earlier columns are visible to all rows; None when
    everything is.
    """

    first_row: int | None
    rows: torch.Tensor | None
    owners: tuple[Owner, ...]
    num_blocks: int
    num_rows: int
    positions: torch.Tensor
    num_tiles: int
    first_slot: int | None
    slots: torch.Tensor | None
    key_positions: torch.Tensor | None
    mask_start: int
    mask: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class PlacedSpan:
    """A span, its first row in the flat batch, and its rows' depths below its first."""

    span: Span
    first_row: int
    depths: list[int]


@dataclass(frozen=True, slots=True)
class _Block:
    """rows: flat. positions: of the rows. start: the first column that may be hidden from a row.
    slots: of all columns. packed: what stands in the columns from start on, and key_positions of
    these columns, where a column is not its position."""

    owner: Owner
    rows: Sequence[int]
    positions: Sequence[int]
    start: int
    slots: torch.Tensor
    first_slot: int | None = None
    packed: PackedPart | None = None
    key_positions: torch.Tensor | None = None

    @property
    def num_rows(self) -> int:
        return len(self.rows)

    @property
    def num_tiles(self) -> int:
        return -(-len(self.slots) // TILE)


def group_blocks(
    placed: Sequence[PlacedSpan], dtype: torch.dtype, rules: BlockRules
) -> list[BlockGroup | TreeGroup]:
    """Groups of all spans of a step; masks in `dtype`."""
    groups: list[BlockGroup | TreeGroup] = []
    shared: list[_Block] = []
    is_lone = len(placed) == 1
    for one in placed:
        if one.span.parents is None:
            blocks = list(_chunks(one, rules.block_rows))
            if is_lone or one.span.num_rows > rules.block_rows:
                groups += [_group([block], dtype) for block in blocks]
            else:
                shared += blocks
        elif rules.tree_cost is None:
            shared += _packed(one)
        else:
            paths = _paths(one)
            as_paths = sum(rules.cost(path.num_tiles, path.num_rows) for path in paths)
            tiles = max(path.num_tiles for path in paths)
            as_tree = rules.tree_cost + rules.cost(tiles, one.span.num_rows)
            if as_paths + rules.group_cost * is_lone < as_tree:
                shared += paths
            else:
                groups.append(tree_group(one.span, one.first_row, dtype))
    return [*groups, *(_group(bunch, dtype) for bunch in _bunches(shared, rules))]


def _chunks(placed: PlacedSpan, block_rows: int) -> Iterator[_Block]:
    """An unbranched span in blocks of at most so many rows."""
    span = placed.span
    for number, first in enumerate(range(0, span.num_rows, block_rows)):
        count = min(block_rows, span.num_rows - first)
        start = span.start + first
        yield _Block(
            owner=(span.key, number),
            rows=range(placed.first_row + first, placed.first_row + first + count),
            positions=range(start, start + count),
            start=start,
            slots=span.slots[: start + count],
            first_slot=span.first_slot,
        )


def _paths(placed: PlacedSpan) -> list[_Block]:
    """A branching span as one block per leaf, deepest first; every row is in exactly one."""
    span, depths, parents = placed.span, placed.depths, placed.span.parents
    assert parents is not None
    leaves = sorted(set(range(len(parents))) - set(parents), key=lambda leaf: -depths[leaf])
    taken: set[int] = set()
    blocks = []
    for number, leaf in enumerate(leaves):
        path = [leaf]
        while parents[path[-1]] >= 0:
            path.append(parents[path[-1]])
        path.reverse()
        own = [row for row in path if row not in taken]
        taken.update(own)
        keys = span.start + torch.tensor(path)
        blocks.append(
            _Block(
                owner=(span.key, number),
                rows=[placed.first_row + row for row in own],
                positions=[span.start + depths[row] for row in own],
                start=span.start + depths[own[0]],
                slots=torch.cat([span.slots[: span.start], span.slots[keys]]),
            )
        )
    return blocks


def _packed(placed: PlacedSpan) -> list[_Block]:
    """A branching span in one block, or in several where a part has no room for all of it."""
    span, start = placed.span, placed.span.start
    assert span.parents is not None
    blocks = []
    for number, part in enumerate(pack_tree(span.parents, start)):
        tail = torch.where(part.keys < 0, 0, span.slots[part.keys.clamp(min=0)])
        blocks.append(
            _Block(
                owner=(span.key, number),
                rows=[placed.first_row + row for row in part.rows],
                positions=[start + placed.depths[row] for row in part.rows],
                start=part.first,
                slots=torch.cat([span.slots[: part.first], tail]),
                key_positions=_positions_of(part.keys, placed),
                packed=part,
            )
        )
    return blocks


def _positions_of(keys: torch.Tensor, placed: PlacedSpan) -> torch.Tensor:
    """Of keys as PackedPart numbers them; 0 for none."""
    start = placed.span.start
    depths = torch.tensor(placed.depths)[(keys - start).clamp(min=0)]
    return torch.where(keys < start, keys.clamp(min=0), start + depths)


def _bunches(blocks: Sequence[_Block], rules: BlockRules) -> list[list[_Block]]:
    """Blocks in groups that cost least together: runs of the blocks ordered by rows and tiles.

    Within a group they keep their order.
    """
    order: dict[tuple[int, int], list[int]] = {}
    for number, block in enumerate(blocks):
        order.setdefault((block.num_rows, block.num_tiles), []).append(number)
    sizes = sorted(order)
    # best[i]: cost of the blocks of the first i sizes, and where the last of their groups begins.
    best: list[tuple[float, int]] = [(0.0, 0)]
    for end in range(1, len(sizes) + 1):
        rows, tiles, count, found = sizes[end - 1][0], 0, 0, (float("inf"), 0)
        for begin in range(end - 1, -1, -1):
            tiles = max(tiles, sizes[begin][1])
            count += len(order[sizes[begin]])
            cost = rules.group_cost + count * rules.cost(tiles, rows)
            found = min(found, (best[begin][0] + cost, begin))
        best.append(found)
    bunches = []
    end = len(sizes)
    while end:
        begin = best[end][1]
        numbers = sorted(number for size in sizes[begin:end] for number in order[size])
        bunches.append([blocks[number] for number in numbers])
        end = begin
    return bunches


def _group(blocks: Sequence[_Block], dtype: torch.dtype) -> BlockGroup:
    num_rows = max(block.num_rows for block in blocks)
    num_tiles = max(block.num_tiles for block in blocks)
    size = num_tiles * TILE
    places = [[min(n, block.num_rows - 1) for n in range(num_rows)] for block in blocks]
    rows = [block.rows[n] for block, own in zip(blocks, places, strict=True) for n in own]
    positions = torch.tensor(
        [[block.positions[n] for n in own] for block, own in zip(blocks, places, strict=True)]
    )
    first_slot = blocks[0].first_slot if len(blocks) == 1 else None
    slots = None
    if first_slot is None:
        slots = torch.zeros(len(blocks), size, dtype=torch.int64)
        for number, block in enumerate(blocks):
            slots[number, : len(block.slots)] = block.slots
    mask_start = min(block.start for block in blocks) // TILE * TILE
    hidden = _hidden(blocks, places, positions, range(mask_start, size))
    mask = None
    if bool(hidden.any()):
        mask = torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, float("-inf"))
    is_run = rows == list(range(rows[0], rows[0] + len(rows)))
    return BlockGroup(
        first_row=rows[0] if is_run else None,
        rows=None if is_run else torch.tensor(rows),
        owners=tuple(block.owner for block in blocks),
        num_blocks=len(blocks),
        num_rows=num_rows,
        positions=positions,
        num_tiles=num_tiles,
        first_slot=first_slot,
        slots=slots,
        key_positions=_key_positions(blocks, size),
        mask_start=mask_start,
        mask=mask,
    )


def _hidden(
    blocks: Sequence[_Block], places: list[list[int]], positions: torch.Tensor, columns: range
) -> torch.Tensor:
    """Which of these columns each row does not see, bool [B, n, len(columns)]."""
    last = positions.clone()
    for number, block in enumerate(blocks):
        if block.packed is not None:
            last[number] = block.start - 1
    hidden = torch.arange(columns.start, columns.stop) > last[..., None]
    for number, block in enumerate(blocks):
        if block.packed is not None:
            visible = block.packed.visible
            first = block.start - columns.start
            tail = hidden[number, :, first : first + visible.shape[1]]
            tail.copy_(~visible[places[number]])
    return hidden


def _key_positions(blocks: Sequence[_Block], size: int) -> torch.Tensor | None:
    """[B, P]; of columns that no row sees anything."""
    if all(block.key_positions is None for block in blocks):
        return None
    found = torch.arange(size).repeat(len(blocks), 1)
    for number, block in enumerate(blocks):
        if block.key_positions is not None:
            found[number, block.start :][: len(block.key_positions)] = block.key_positions
    return found
