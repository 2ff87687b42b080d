"""Shapes by name, and the heads they suit."""

import pytest

from drafter_service.shapes import BLOCK_TREE, TREE, default_shapes, parse_shape
from protos.errors import ConfigError
from protos.exchange import Capabilities, Plan, PlanKind


def offered(*kinds):
    return Capabilities("kind", "name", 1, kinds)


HEAD = offered(PlanKind.CHAIN, PlanKind.TREE, PlanKind.STATIC)
BLOCKS = offered(PlanKind.CHAIN, PlanKind.TREE, PlanKind.BLOCK)


@pytest.mark.parametrize(
    ("name", "plan"),
    [
        ("chain4", Plan(PlanKind.CHAIN, 4)),
        ("chain16", Plan(PlanKind.CHAIN, 16)),
        ("ngram8", Plan(PlanKind.CHAIN, 8)),
        ("tree", Plan(PlanKind.TREE, 6, 10, 31)),
        ("tree5x8x60", Plan(PlanKind.TREE, 5, 8, 60)),
        ("block_tree", BLOCK_TREE),
        ("merged", None),
    ],
)
def test_a_name_stands_for_a_plan(name, plan):
    shape = parse_shape(name)
    assert (shape.name, shape.plan) == (name, plan)
    assert shape.is_lookup == (name == "ngram8")


@pytest.mark.parametrize("name", ["", "chain", "chain0", "chain17", "tree6x10", "blocks", "Tree"])
def test_other_names_are_refused_with_the_known_ones(name):
    with pytest.raises(ConfigError, match="block_tree"):
        parse_shape(name)


def test_shapes_suit_the_heads_that_draft_them():
    suits = {
        name: (parse_shape(name).suits(HEAD), parse_shape(name).suits(BLOCKS))
        for name in ("chain4", "tree", "block", "block_tree", "merged", "ngram8")
    }
    assert suits == {
        "chain4": (True, True),
        "tree": (True, True),
        "block": (False, True),
        "block_tree": (False, True),
        "merged": (True, True),
        "ngram8": (False, False),
    }


def test_merged_takes_the_tree_that_the_head_is_made_for():
    assert parse_shape("merged").plan_for(HEAD) == TREE
    assert parse_shape("merged").plan_for(BLOCKS) == BLOCK_TREE


def test_defaults_are_each_heads_own_shapes_and_the_look_up():
    def names(*records):
        return [shape.name for shape in default_shapes(records)]

    assert names(HEAD) == ["chain4", "tree", "merged", "ngram8"]
    assert names(BLOCKS) == ["block", "block_tree", "merged", "ngram8"]
