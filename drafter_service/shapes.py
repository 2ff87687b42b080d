"""Shapes of drafts by name, as evaluations and their tables call them. Torch-free.

    chain4        a chain of 4 (any number)
    tree          the dynamic tree of at most 31 nodes on 6 levels; tree5x8x60: levels, width, nodes
    block         a block drafter's whole block
    block_tree    a tree of at most 31 nodes out of one block
    ngram8        prompt look-up alone, a chain of 8 (any number); no head takes part
    merged        a head's tree (out of its block where it drafts those) with the look-ups

A merged shape asks both for one plan, which each of them answers as far as it can, as a request
with a fixed plan does.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from protos.errors import ConfigError
from protos.exchange import Capabilities, Plan, PlanKind
from protos.plans import MAX_DEPTH

TREE: Final = Plan(PlanKind.TREE, depth=6, width=10, nodes=31)
BLOCK: Final = Plan(PlanKind.BLOCK, depth=MAX_DEPTH)
BLOCK_TREE: Final = Plan(PlanKind.BLOCK, depth=MAX_DEPTH, nodes=31)
KNOWN: Final = "chainN, tree, treeDxWxN, block, block_tree, ngramN, merged"

_CHAIN: Final = re.compile(r"(chain|ngram)([1-9]\d?)")
_TREE: Final = re.compile(r"tree([1-9]\d?)x([1-9]\d?)x([1-9]\d{0,2})")
_FIXED: Final = {"tree": TREE, "block": BLOCK, "block_tree": BLOCK_TREE}


@dataclass(frozen=True, slots=True)
class Shape:
    """plan: None for `merged`, whose plan depends on the head. is_lookup: no head takes part."""

    name: str
    plan: Plan | None
    is_lookup: bool = False

    @property
    def is_merged(self) -> bool:
        """True when look-ups take part beside a head."""
        return self.plan is None

    def plan_for(self, offered: Capabilities) -> Plan:
        """The plan that is asked of a head and of whoever drafts beside it."""
        if self.plan is not None:
            return self.plan
        return BLOCK_TREE if PlanKind.BLOCK in offered.plan_kinds else TREE

    def suits(self, offered: Capabilities) -> bool:
        """Whether this head drafts the shape as it is meant."""
        if self.is_lookup:
            return False
        return self.plan_for(offered).kind in offered.plan_kinds


def parse_shape(name: str) -> Shape:
    """Raises ConfigError, naming the shapes there are."""
    if name == "merged":
        return Shape(name, None)
    if name in _FIXED:
        return Shape(name, _FIXED[name])
    if found := _CHAIN.fullmatch(name):
        depth = int(found[2])
        if depth <= MAX_DEPTH:
            return Shape(name, Plan(PlanKind.CHAIN, depth=depth), found[1] == "ngram")
    if found := _TREE.fullmatch(name):
        depth, width, nodes = (int(number) for number in found.groups())
        if depth <= MAX_DEPTH:
            return Shape(name, Plan(PlanKind.TREE, depth, width, nodes))
    raise ConfigError(f"shapes are {KNOWN}, at most {MAX_DEPTH} deep; not {name!r}")


def default_shapes(offered: Iterable[Capabilities]) -> list[Shape]:
    """What is asked when nothing is named: each head's own shapes, and the look-up alone."""
    names: list[str] = []
    for record in offered:
        blocks = PlanKind.BLOCK in record.plan_kinds
        names += ["block", "block_tree"] if blocks else ["chain4", "tree"]
    return [parse_shape(name) for name in dict.fromkeys([*names, "merged", "ngram8"])]
