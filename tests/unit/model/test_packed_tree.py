"""Packed trees keep what a kernel's sums depend on: order, lanes, pairs, blocks of keys."""

import random

import pytest

from tests.unit.model.stepping import path_to, random_parents
from verifier_service.model.packed_tree import pack_tree
from verifier_service.model.tree_parts import LANES, REDUCED, UNIT

STARTS = (0, 1, 2, 15, 16, 17, 31, 61, 127, 400, 497, 503, 510, 511, 512, 1023)


@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize("shape", [(7, 2), (24, 5), (40, 12), (64, 63)], ids=str)
def test_every_row_reads_its_path_as_plain_decoding_would(shape, start):
    parents = random_parents(random.Random(start), *shape)
    parts = pack_tree(parents, start)
    assert sorted(row for part in parts for row in part.rows) == list(range(len(parents)))
    for part in parts:
        assert part.first == start // UNIT * UNIT
        for number, row in enumerate(part.rows):
            columns = part.visible[number].nonzero().flatten()
            keys = part.keys[columns].tolist()
            expected = [start + node for node in path_to(parents, row)]
            assert keys == [*range(part.first, start), *expected], "in the order of positions"
            columns = (columns + part.first).tolist()
            positions = range(part.first, part.first + len(keys))
            assert [c % LANES for c in columns] == [p % LANES for p in positions]
            assert [c // REDUCED for c in columns] == [p // REDUCED for p in positions]
            units = [(p // UNIT, c // UNIT) for p, c in zip(positions, columns, strict=True)]
            assert len(set(units)) == len({unit for unit, _ in units}), "a unit is not split"
            pairs = [(p // 2, c // 2) for p, c in zip(positions, columns, strict=True)]
            assert len(set(pairs)) == len({pair for pair, _ in pairs}), "a pair is not split"


def test_a_tree_far_from_the_end_of_its_keys_is_one_part():
    parents = random_parents(random.Random(3), 24, 6)
    assert len(pack_tree(parents, 20)) == 1
    assert len(pack_tree(parents, REDUCED - 12)) > 1


def test_a_path_stands_in_its_own_positions():
    (part,) = pack_tree((-1, 0, 1, 2), 7)
    assert part.keys.tolist() == list(range(11))
    assert part.visible.tolist() == [[n <= 7 + row for n in range(11)] for row in range(4)]


def test_another_path_stands_in_the_same_lanes_of_the_unit_where_there_is_room():
    """The example of the module."""
    (part,) = pack_tree((-1, 0, 0, 2), 4)
    by_column = {n: key - 4 for n, key in enumerate(part.keys.tolist()) if key >= 4}
    assert by_column == {4: 0, 5: 2, 6: 3, 20: 0, 21: 1}
