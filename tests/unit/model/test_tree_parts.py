"""Rows of a span share parts by first fit, and what is kept of a tree takes the parts it was told.

The plain reference tries every part for every row, and every place for every path.
"""

from collections.abc import Iterator, Sequence

from hypothesis import given
from hypothesis import strategies as st

from tests.unit.model.stepping import path_to
from verifier_service.model.packed_tree import pack_tree
from verifier_service.model.tree_parts import LANES, REDUCED, UNIT, Part, place_tree, tree_parts

starts = st.one_of(st.integers(0, 1100), st.integers(470, 512), st.integers(1000, 1024))


@st.composite
def trees(draw, most: int = 24, depth: int = 40) -> tuple[int, ...]:
    """Parents of a span's rows: bushes and combs, at most `depth` levels."""
    parents, depths = [-1], [0]
    back = draw(st.integers(1, 24))
    for row in range(1, draw(st.integers(2, most))):
        parent = draw(st.integers(max(row - back, 0), row - 1))
        while depths[parent] >= depth:
            parent = parents[parent]
        parents.append(parent)
        depths.append(depths[parent] + 1)
    return tuple(parents)


class PlainPart:
    """A part as lists of (column, key), filled by trying columns in order, one path at a time."""

    def __init__(self, start: int) -> None:
        self.start = start
        self.begin = start // UNIT * UNIT
        self.keys: dict[int, int] = {}
        self.columns: dict[int, tuple[int, ...]] = {}

    def place(self, path: Sequence[int]) -> bool:
        keys = [*range(self.begin, self.start), *(self.start + row for row in path)]
        found = next(self._ways(keys, self.begin, ()), None)
        if found is None:
            return False
        self.keys.update(zip(found, keys, strict=True))
        for number, row in enumerate(path, self.start - self.begin + 1):
            self.columns.setdefault(row, found[:number])
        return True

    def _ways(
        self, keys: list[int], position: int, columns: tuple[int, ...]
    ) -> Iterator[tuple[int, ...]]:
        """All columns of all keys: unit after unit, lowest first."""
        if not keys:
            yield columns
            return
        here = keys[:UNIT]
        after = columns[-1] if columns else -1
        for base in range(position, (position // REDUCED + 1) * REDUCED, UNIT):
            if base <= after or not self._is_free_for(base, position):
                continue
            fixed = (self.start - position) // 2 * 2 if position == self.begin else 0
            for own in self._in_unit(here, base, 0, fixed):
                yield from self._ways(keys[UNIT:], position + UNIT, columns + own)

    def _is_free_for(self, base: int, position: int) -> bool:
        """Whether nothing stands in the unit at `base`, or positions of this unit do."""
        for column in range(base, base + UNIT):
            key = self.keys.get(column)
            if key is not None and self._position(key) // UNIT * UNIT != position:
                return False
        return True

    def _position(self, key: int) -> int:
        if key < self.start:
            return key
        return self.begin + len(self.columns[key - self.start]) - 1

    def _in_unit(
        self, keys: list[int], base: int, offset: int, fixed: int
    ) -> Iterator[tuple[int, ...]]:
        """All columns of a unit's keys, the first of them at `offset` or LANES behind."""
        if not keys:
            yield ()
            return
        pair = keys[:2]
        for first in (offset,) if offset < fixed else (offset, offset + LANES):
            own = tuple(range(base + first, base + first + len(pair)))
            if first >= UNIT or any(
                self.keys.get(c, k) != k for c, k in zip(own, pair, strict=True)
            ):
                continue
            for rest in self._in_unit(keys[2:], base, offset + 2, fixed):
                if not rest or rest[0] > own[-1]:
                    yield (*own, *rest)


def plain_parts(parents: Sequence[int], start: int) -> tuple[list[PlainPart], list[int]]:
    leaves = [row for row in range(len(parents)) if row not in parents]
    paths = sorted((path_to(parents, leaf) for leaf in leaves), key=lambda path: -len(path))
    whole = PlainPart(start)
    if all(whole.place(path) for path in paths):
        return [whole], [0] * len(parents)
    parts: list[PlainPart] = []
    numbers = []
    for row in range(len(parents)):
        path = path_to(parents, row)
        number = next((n for n, part in enumerate(parts) if part.place(path)), len(parts))
        if number == len(parts):
            parts.append(PlainPart(start))
            assert parts[-1].place(path)
        numbers.append(number)
    return parts, numbers


@given(trees(depth=10), starts)
def test_rows_stand_where_trying_everything_puts_them(parents, start):
    parts, numbers = place_tree(parents, start)
    expected, expected_numbers = plain_parts(parents, start)
    assert numbers == expected_numbers == tree_parts(parents, start, len(parents))
    assert len(parts) == len(expected)
    for row, number in enumerate(numbers):
        assert tuple(parts[number].columns[row]) == expected[number].columns[row]
    assert [part.keys for part in parts] == [part.keys for part in expected]


@given(trees(most=64), starts, st.integers(1, 5))
def test_rows_of_the_first_parts_are_a_tree_that_takes_so_many(parents, start, most):
    numbers = tree_parts(parents, start, most)
    assert numbers == [min(most, number) for number in place_tree(parents, start)[1]]
    assert all(p < 0 or numbers[p] <= numbers[row] for row, p in enumerate(parents))
    kept = [row for row, number in enumerate(numbers) if number < most]
    new = {-1: -1} | {row: place for place, row in enumerate(kept)}
    left = tuple(new[parents[row]] for row in kept)
    again = [numbers[row] for row in kept]
    assert len(pack_tree(left, start)) <= max(again) + 1 <= most
    for count in range(1, len(left) + 1 if max(numbers) else 1):
        own = tree_parts(left[:count], start, count)
        assert own == again[:count] or set(own) == {0}, "the first rows are placed alike"


@given(st.integers(0, 3000), st.integers(1, 60))
def test_a_chain_is_one_part(start, count):
    assert tree_parts(range(-1, count - 1), start, 4) == [0] * count


def test_a_star_at_the_end_of_reduced_keys_takes_a_part_for_each_leaf():
    assert tree_parts((-1, *[0] * 9), REDUCED - 2, 99) == [0, *range(9)]
    assert set(tree_parts((-1, *[0] * 9), REDUCED - 1, 99)) == {0}


def test_a_refused_path_leaves_nothing_behind():
    part = Part(REDUCED - 2)
    assert part.place([0, 1])
    before = dict(part.keys), {row: list(own) for row, own in part.columns.items()}
    assert not part.place([0, 2])
    assert (part.keys, part.columns) == before
