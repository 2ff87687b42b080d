"""Where the nodes of a branching span stand, so that each node reads its own path bit for bit.

A node's keys are the prefix and its ancestors. Whole tiles before the span are shared by all
nodes. In the tail tiles two orders of the same keys matter:

    position order   column p: the node's own ancestor (or prefix token) at position p; what
                     softmax reduces, [n, T * TILE]
    pair order       what the product of probabilities and values reduces, shared by all nodes:
                     every pair of positions (2i, 2i + 1) that occurs on some path, ascending

The matrix kernels accumulate keys in ascending order, two at a time in bf16. Skipping a pair
whose probabilities are zero changes nothing, splitting a pair would: so a node is repeated in as
many pairs as it has children at odd positions, and one product serves all nodes. The load-time
check (invariance.py) proves this of the kernels at hand.

Shapes: n nodes (rows), K = keys of the tail tiles: prefix remainder, then nodes in row order.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch.nn import functional

from verifier_service.model.kv import TILE
from verifier_service.step import Span

_ROUND = 32
"""Numbers of keys and of entries are padded to this, so that few distinct kernels are built."""


@dataclass(frozen=True, slots=True)
class PairTile:
    """One tail tile in pair order, E = padded number of entries.

    slots: [E] slot of each entry. columns: [E] its column in the tile. weight: [n, E] 1 where the
    entry is on the node's path, else 0.
    """

    slots: torch.Tensor
    columns: torch.Tensor
    weight: torch.Tensor


@dataclass(frozen=True, slots=True)
class TreeGroup:
    """A branching span. Rows are adjacent in the flat batch from first_row on.

    prefix_tiles: whole tiles before the span, shared. num_keys: of the prefix and all nodes,
    padded with slot 0. slots: [num_keys]. gather: [n, tail] the key (counted
    from the tail's first) at each position of the node's tail, 0 where masked; mask: [n, tail] 0
    or -inf.
    """

    first_row: int
    num_rows: int
    start: int
    positions: torch.Tensor
    prefix_tiles: int
    tail_tiles: int
    num_keys: int
    slots: torch.Tensor
    gather: torch.Tensor
    mask: torch.Tensor
    pair_tiles: tuple[PairTile, ...]


def tree_group(span: Span, first_row: int, dtype: torch.dtype) -> TreeGroup:
    """Lay a branching span out (span.parents is set)."""
    assert span.parents is not None
    parents = span.parents
    n = span.num_rows
    depths = np.zeros(n, dtype=np.int64)
    for row in range(1, n):
        depths[row] = depths[parents[row]] + 1
    positions = span.start + depths
    begin = span.start // TILE * TILE
    rest = span.start - begin
    tail_tiles = -(-(int(positions.max()) + 1 - begin) // TILE)
    keys = _position_order(parents, positions - begin, rest, tail_tiles * TILE)
    key_slots = span.slots[begin : span.start + n]
    num_keys = -(-(span.start + n) // _ROUND) * _ROUND
    slots = functional.pad(span.slots[: span.start + n], (0, num_keys - span.start - n))
    visible = torch.from_numpy(keys >= 0)
    mask = torch.zeros(visible.shape, dtype=dtype).masked_fill_(~visible, float("-inf"))
    pairs = _pairs(keys, parents, positions - begin, rest)
    return TreeGroup(
        first_row=first_row,
        num_rows=n,
        start=span.start,
        positions=torch.from_numpy(positions),
        prefix_tiles=begin // TILE,
        tail_tiles=tail_tiles,
        num_keys=num_keys,
        slots=slots,
        gather=torch.from_numpy(np.maximum(keys, 0)),
        mask=mask,
        pair_tiles=tuple(
            _pair_tile(pairs, keys, key_slots, tile, dtype) for tile in range(tail_tiles)
        ),
    )


def _position_order(
    parents: tuple[int, ...], columns: np.ndarray, rest: int, width: int
) -> np.ndarray:
    """Key number at every column of every row's tail, [n, width]; -1 where nothing is visible."""
    keys = np.full((len(parents), width), -1, dtype=np.int64)
    keys[0, :rest] = np.arange(rest)
    for row, parent in enumerate(parents):
        if row:
            keys[row] = keys[parent]
        keys[row, columns[row]] = rest + row
    return keys


def _pairs(
    keys: np.ndarray, parents: tuple[int, ...], columns: np.ndarray, rest: int
) -> list[tuple[int, int, int]]:
    """All pairs on any path as (even column, key there, key after it or -1), columns ascending."""
    pairs = [(c, c, c + 1) for c in range(0, rest - 1, 2)]
    if rest % 2:
        # Row 0 is the only row at the odd column `rest`: the last prefix key pairs with it.
        pairs.append((rest - 1, rest - 1, rest))
    led = set()
    for row, parent in enumerate(parents):
        if row and columns[row] % 2:
            pairs.append((int(columns[row]) - 1, rest + parent, rest + row))
            led.add(parent)
    for row in range(len(parents)):
        if columns[row] % 2 == 0 and row not in led:
            pairs.append((int(columns[row]), rest + row, -1))
    return sorted(pairs)


def _pair_tile(
    pairs: list[tuple[int, int, int]],
    keys: np.ndarray,
    key_slots: torch.Tensor,
    tile: int,
    dtype: torch.dtype,
) -> PairTile:
    """Tile number `tile` of the tail in pair order."""
    low, high = tile * TILE, (tile + 1) * TILE
    inside = [pair for pair in pairs if low <= pair[0] < high]
    length = -(-2 * len(inside) // _ROUND) * _ROUND
    entries = np.full(length, -2, dtype=np.int64)
    columns = np.zeros(length, dtype=np.int64)
    for number, (column, first, second) in enumerate(inside):
        entries[2 * number : 2 * number + 2] = first, second if second >= 0 else -2
        columns[2 * number : 2 * number + 2] = column, column + 1
    on_path = keys[:, columns] == entries
    _keep_one_pair(on_path, entries, columns)
    slots = torch.zeros(length, dtype=torch.int64)
    real = torch.from_numpy(entries >= 0)
    slots[real] = key_slots[torch.from_numpy(entries[entries >= 0])]
    return PairTile(
        slots=slots,
        columns=torch.from_numpy(np.maximum(columns - low, 0)),
        weight=torch.from_numpy(on_path).to(dtype),
    )


def _keep_one_pair(on_path: np.ndarray, entries: np.ndarray, columns: np.ndarray) -> None:
    """Where a repeated node lies on a row's path in several pairs, keep the right one.

    That is the pair whose second half is on the path too, else the first pair of the node.
    """
    seconds = on_path[:, 1::2]
    firsts = on_path[:, ::2]
    for number in range(firsts.shape[1]):
        twins = np.flatnonzero(entries[::2] == entries[2 * number])
        if entries[2 * number] < 0 or len(twins) < 2 or twins[0] != number:
            continue
        here = firsts[:, twins].any(axis=1)
        right = np.where(seconds[:, twins].any(axis=1), seconds[:, twins].argmax(axis=1), 0)
        firsts[:, twins] = False
        rows = np.flatnonzero(here)
        firsts[rows, twins[right[rows]]] = True
