"""Trees that fall into parts, each of which reads the positions before it once more.

Knows no kernels: which nodes belong to which part is the target's (`Target.tree_parts`), what a
position costs is `VerifyCosts`'. Invariant: nodes are numbered in the order in which the target
gives them room, so what admission keeps takes the parts that it was priced for.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from protos.tree import CandidateTree
from verifier_service.planning.costs import VerifyCosts

MOST_PARTS: Final = 4
"""Nodes that need more are not looked at: the best of a draft stand in the first parts."""


@dataclass(frozen=True, slots=True)
class WeighedTree:
    """A merged tree with what its nodes are worth and what they make a step read again.

    survival and parts: per draft node; parts from 0, `MOST_PARTS` for nodes to leave out. start:
    positions that each further part reads.
    """

    tree: CandidateTree
    survival: Sequence[float]
    start: int = 0
    parts: Sequence[int] = ()

    @property
    def num_parts(self) -> int:
        """Of the whole tree, as far as they are looked at."""
        return min(max(self.parts, default=0) + 1, MOST_PARTS)

    def part(self, node: int) -> int:
        """From 0, of draft node `node`, from 1."""
        return self.parts[node - 1] if self.parts else 0

    def within(self, num_parts: int) -> list[int]:
        """Draft nodes of the first parts, ascending; closed under parents."""
        return [n for n in range(1, self.tree.num_nodes + 1) if self.part(n) < num_parts]


def weigh(
    tree: CandidateTree, survival: Sequence[float], start: int, costs: VerifyCosts
) -> WeighedTree:
    """The tree as it is while one part holds it; else its nodes in order of survival.

    start: the anchor's position. survival: per draft node, never above the parent's.
    """
    if not any(costs.parts(tree, start, MOST_PARTS)):
        return WeighedTree(tree, survival)
    order = sorted(range(1, tree.num_nodes + 1), key=lambda n: (-survival[n - 1], n))
    ordered = tree.keep(order)
    parts = costs.parts(ordered, start, MOST_PARTS)
    return WeighedTree(ordered, [survival[n - 1] for n in order], start, parts)


def positions_again(tree: CandidateTree, start: int, costs: VerifyCosts) -> int:
    """Positions that the parts of this tree beyond the first read."""
    return max(costs.parts(tree, start, tree.num_nodes + 1), default=0) * start
