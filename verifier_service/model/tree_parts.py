"""Which rows of a branching span find room in one order of keys, and in how many orders all do.

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
unit's REDUCED columns reach. What finds no room goes to a part of its own, which reads the prefix
once more. The load-time trial (sdpa_trial.py) proves all this of the kernel at hand.

Example: start 4, node 0 with children 1 and 2, 2 with child 3; p: keys of the prefix:

    column    0 1 2 3 4 5 6   ..   20 21
    key       p p p p 0 2 3         0  1

Rows 2 and 3 see columns 0 to 6, row 1 sees 0 to 3, 20 and 21. With a longer prefix, row 1 would see
columns 32 and up, its last keys among them.

Invariant: a path goes to the lowest columns where it can stand, so it is refused only where it
cannot stand at all, and what joins a part never makes room there. Knows no tensors.
"""

from collections.abc import Sequence
from typing import Final

LANES: Final = 16
UNIT: Final = 32
REDUCED: Final = 512


class Part:
    """Paths of one span that stand together.

    keys: column -> the number of the key there (its position in the prefix, or the span's start
    plus its row). columns: row -> the columns that it sees, from the span's first unit on.
    """

    def __init__(self, start: int) -> None:
        self.keys: dict[int, int] = {}
        self.columns: dict[int, list[int]] = {}
        self._start = start
        self._begin = start // UNIT * UNIT
        self._units: dict[int, int] = {}
        """First column -> the unit of positions that stands there."""

    def place(self, path: Sequence[int]) -> bool:
        """Put a path in, rows from the span's first down; False, and nothing put, without room."""
        start, begin = self._start, self._begin
        keys = [*range(begin, start), *(start + row for row in path)]
        placed: list[tuple[int, int, list[int]]] = []
        base = -1
        for low in range(0, len(keys), UNIT):
            unit = begin + low
            # Whole pairs of the prefix stand at the same place in every copy.
            fixed = (start - begin) // 2 * 2 if low == 0 else 0
            found = self._room(unit, keys[low + fixed : low + UNIT], fixed, base)
            if found is None:
                return False
            base, columns = found
            placed.append((base, unit, [*range(base, base + fixed), *columns]))
        for base, unit, columns in placed:
            self._units[base] = unit
            self.keys.update(zip(columns, keys[unit - begin :], strict=False))
        seen = [column for _, _, columns in placed for column in columns]
        for number, row in enumerate(path, start - begin + 1):
            if row not in self.columns:
                self.columns[row] = seen[:number]
        return True

    def _room(
        self, unit: int, keys: Sequence[int], fixed: int, after: int
    ) -> tuple[int, list[int]] | None:
        """(first column, columns of keys) for a unit's keys from its offset `fixed` on.

        after: the unit of columns that it must stand behind.
        """
        for base in range(unit, (unit // REDUCED + 1) * REDUCED, UNIT):
            if base > after and self._units.get(base, unit) == unit:
                columns = self._columns(base, keys, fixed)
                if columns is not None:
                    return base, columns
        return None

    def _columns(self, base: int, keys: Sequence[int], fixed: int) -> list[int] | None:
        """Columns for keys in the unit at `base`, pair by pair in order; None: no room."""
        columns: list[int] = []
        standing = self.keys
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


def tree_parts(parents: Sequence[int], start: int, most: int) -> list[int]:
    """In which part each row of a branching span at position `start` stands, numbered from 0.

    parents: as `Span.parents`. All 0 when one part holds the span. Otherwise rows are given room in
    their order, so a row's part is never before its parent's, and the rows of the first n parts
    alone take n parts. Rows that find no room in `most` parts are numbered `most`.
    """
    return place_tree(parents, start, most)[1]


def place_tree(
    parents: Sequence[int], start: int, most: int | None = None
) -> tuple[list[Part], list[int]]:
    """The parts of a branching span, `most` at most, and `tree_parts`; None: for every row one."""
    paths: list[list[int]] = []
    for row, parent in enumerate(parents):
        paths.append([*paths[parent], row] if parent >= 0 else [row])
    whole = Part(start)
    leaves = set(range(len(parents))).difference(parents)
    if all(map(whole.place, sorted((paths[leaf] for leaf in leaves), key=_deepest_first))):
        return [whole], [0] * len(parents)
    return _row_by_row(parents, paths, start, len(parents) if most is None else most)


def _row_by_row(
    parents: Sequence[int], paths: Sequence[Sequence[int]], start: int, most: int
) -> tuple[list[Part], list[int]]:
    """The first part with room for each row.

    None before the parent's has any; nor has one before the elder sibling's, whose path needs the
    same columns.
    """
    parts: list[Part] = []
    numbers: list[int] = []
    elder: dict[int, int] = {}
    for row, parent in enumerate(parents):
        number = elder.get(parent, numbers[parent] if parent >= 0 else 0)
        while number < most:
            if number == len(parts):
                parts.append(Part(start))
            if parts[number].place(paths[row]):
                break
            number += 1
        elder[parent] = number
        numbers.append(number)
    return parts, numbers


def _deepest_first(path: Sequence[int]) -> tuple[int, int]:
    return -len(path), path[-1]
