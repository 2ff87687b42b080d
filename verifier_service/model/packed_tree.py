"""Where the nodes of a branching span stand so that one order of keys serves many of them.

A fused kernel reduces scores and values in one pass over the keys. A row's bits are those of its
path alone when the keys that weigh something come to the same places in its sums:

    sums of exponentials run in LANES interleaved lanes,
    products with values take pairs (2i, 2i + 1), and UNIT keys at a time before they are added up
    (the matrix units' own instruction, Intel's TDPBF16PS, sums even and odd keys of 32 apart),
    both start anew for every REDUCED keys.

Hidden keys weigh zero and change nothing. So positions are taken by units: all that a row sees of
the UNIT positions [32k, 32k + 32) stands, in order, in UNIT columns that begin at a multiple of
UNIT, each in its own lane and beside its neighbour. The first path stands in the columns of its
positions. Another path gets a copy of the unit, with the prefix's keys in it, behind: as far as the
unit's REDUCED columns reach. What finds no room goes to a part of its own. The load-time trial
(sdpa_trial.py) proves all this of the kernel at hand.

Example: start 4, node 0 with children 1 and 2, 2 with child 3; p: keys of the prefix:

    column    0 1 2 3 4 5 6   ..   20 21
    key       p p p p 0 2 3         0  1

Rows 2 and 3 see columns 0 to 6, row 1 sees 0 to 3, 20 and 21. With a longer prefix, row 1 would see
columns 32 and up, its last keys among them.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import torch

LANES: Final = 16
UNIT: Final = 32
REDUCED: Final = 512


@dataclass(frozen=True, slots=True)
class PackedPart:
    """Some rows of a span and the keys that they need, from column `first` on.

    Columns before `first` are the positions of the prefix, which all rows see. rows: of the span,
    ascending. keys: [W] the number of the key (its position in the prefix, or the span's start plus
    its row) in column first + w, -1 for none. visible: bool [len(rows), W].
    """

    first: int
    rows: tuple[int, ...]
    keys: torch.Tensor
    visible: torch.Tensor


@dataclass(slots=True)
class _Part:
    """A part under construction.

    units: first column -> the unit of positions that stands there. keys: column -> key. columns:
    row -> the columns that it sees from the span's first unit on.
    """

    units: dict[int, int] = field(default_factory=dict)
    keys: dict[int, int] = field(default_factory=dict)
    columns: dict[int, list[int]] = field(default_factory=dict)


def pack_tree(parents: Sequence[int], depths: Sequence[int], start: int) -> list[PackedPart]:
    """Lay out a branching span that begins at position `start`; every row is in one part.

    parents and depths: of the span's rows, row 0 being the root at depth 0.
    """
    leaves = sorted(set(range(len(parents))) - set(parents), key=lambda leaf: -depths[leaf])
    waiting = [_path_to(leaf, parents) for leaf in leaves]
    done: set[int] = set()
    parts = []
    while waiting:
        part, left, rows = _Part(), [], set[int]()
        for path in waiting:
            if _place(part, path, start):
                rows.update(row for row in path if row not in done)
            else:
                left.append(path)
        done |= rows
        parts.append(_finished(part, sorted(rows), start))
        waiting = left
    return parts


def _path_to(leaf: int, parents: Sequence[int]) -> list[int]:
    path = [leaf]
    while parents[path[-1]] >= 0:
        path.append(parents[path[-1]])
    return path[::-1]


def _place(part: _Part, path: Sequence[int], start: int) -> bool:
    """Put a path into a part; False, and nothing put, where it does not fit."""
    begin = start // UNIT * UNIT
    keys = [*range(begin, start), *(start + row for row in path)]
    placed: list[tuple[int, int, list[int]]] = []
    base = -1
    for low in range(0, len(keys), UNIT):
        unit = begin + low
        # Whole pairs of the prefix stand at the same place in every copy.
        fixed = (start - begin) // 2 * 2 if low == 0 else 0
        found = _room(part, unit, keys[low + fixed : low + UNIT], fixed, base)
        if found is None:
            return False
        base, columns = found
        placed.append((base, unit, [*range(base, base + fixed), *columns]))
    for base, unit, columns in placed:
        part.units[base] = unit
        part.keys.update(zip(columns, keys[unit - begin :], strict=False))
    seen = [column for _, _, columns in placed for column in columns]
    for number, row in enumerate(path, start - begin + 1):
        part.columns.setdefault(row, seen[:number])
    return True


def _room(
    part: _Part, unit: int, keys: Sequence[int], fixed: int, after: int
) -> tuple[int, list[int]] | None:
    """(first column, columns of keys) for a unit's keys from its offset `fixed` on.

    after: the unit of columns that it must stand behind.
    """
    for base in range(unit, (unit // REDUCED + 1) * REDUCED, UNIT):
        if base > after and part.units.get(base, unit) == unit:
            columns = _columns(part, base, keys, fixed)
            if columns is not None:
                return base, columns
    return None


def _columns(part: _Part, base: int, keys: Sequence[int], fixed: int) -> list[int] | None:
    """Columns for keys in the unit of columns at `base`, pair by pair in order; None: no room."""
    columns: list[int] = []
    standing = part.keys
    after = -1
    for low in range(0, len(keys), 2):
        first, second = keys[low], keys[low + 1] if low + 1 < len(keys) else None
        for column in range(base + fixed + low, base + UNIT, LANES):
            if (
                column > after
                and standing.get(column, first) == first
                and (second is None or standing.get(column + 1, second) == second)
            ):
                break
        else:
            return None
        after = column
        columns += (column,) if second is None else (column, column + 1)
    return columns


def _finished(part: _Part, rows: Sequence[int], start: int) -> PackedPart:
    first = start // UNIT * UNIT
    keys = np.full(max(part.keys) + 1 - first, -1)
    keys[np.fromiter(part.keys, np.int64) - first] = list(part.keys.values())
    visible = np.zeros((len(rows), len(keys)), dtype=np.bool_)
    own = [part.columns[row] for row in rows]
    counts = [len(columns) for columns in own]
    seen = np.fromiter(itertools.chain.from_iterable(own), np.int64, sum(counts))
    visible[np.repeat(np.arange(len(rows)), counts), seen - first] = True
    return PackedPart(first, tuple(rows), torch.from_numpy(keys), torch.from_numpy(visible))
