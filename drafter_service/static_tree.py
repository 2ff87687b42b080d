"""EAGLE-1's static tree: 25 nodes of five levels whose places are fixed before the draft.

    level 1   4 children of the anchor, best first (rank 0 to 3)
    level 2   8: three under rank 0, two under 1 and under 2, one under 3
    level 3   8: three under 0.0, two under 0.1 and under 0.2, one under 1.0
    level 4   3 under 0.0.0          level 5   2 under 0.0.0.0

A node is named by the ranks on the way to it. Scores are kept but decide nothing. Knows no model
and no temperature. Source: the public shape `mc_sim_7b_63` (widths 4, 8, 8, 3, 2).

Shapes: K children per node, F frontier nodes, S expanded nodes so far.
"""

import numpy as np

from drafter_service.tree_builder import NUM_RANKED, Ids, Mask, Scores, round_scores
from protos.exchange import Plan
from protos.tree import CandidateTree

_NUM_CHILDREN: dict[tuple[int, ...], int] = {
    (): 4,
    (0,): 3,
    (1,): 2,
    (2,): 2,
    (3,): 1,
    (0, 0): 3,
    (0, 1): 2,
    (0, 2): 2,
    (1, 0): 1,
    (0, 0, 0): 3,
    (0, 0, 0, 0): 2,
}
STATIC_DEPTH = 5
STATIC_NODES = sum(_NUM_CHILDREN.values())


def num_static_rows(depth: int) -> int:
    """Nodes that are expanded when the tree is cut at this depth."""
    return sum(0 < len(path) < depth for path in _NUM_CHILDREN)


class StaticGrower:
    """See `Grower`. A plan of fewer levels or nodes cuts the tree there."""

    def __init__(self, plan: Plan) -> None:
        self.depth = min(plan.depth, STATIC_DEPTH)
        self._most = plan.nodes or STATIC_NODES
        self.level = 0
        self.frontier_tokens: Ids = np.zeros(0, np.int64)
        self.frontier_parents: Ids = np.zeros(0, np.int64)
        self.mask: Mask = np.ones((1, 0), np.bool_)
        self._frontier: list[tuple[int, ...]] = [()]
        self._tokens: list[int] = []
        self._scores: list[float] = []
        self._parents: list[int] = []
        self._number: dict[tuple[int, ...], int] = {(): 0}
        self._ranked: list[tuple[int, ...]] = []

    @property
    def num_children(self) -> int:
        """Children needed per expanded node, evidence included."""
        return NUM_RANKED

    @property
    def is_done(self) -> bool:
        """True when no frontier is left to expand."""
        return self.level >= self.depth or not self._frontier

    def grow(self, tokens_FN: Ids, scores_FN: Scores) -> None:
        """Take the ranked children of every frontier node; ids scored -inf are left out."""
        self.level += 1
        frontier: list[tuple[int, ...]] = []
        rows: list[int] = []
        for row, path in enumerate(self._frontier):
            if path == (0,) * len(path):
                finite = np.isfinite(scores_FN[row, :NUM_RANKED])
                self._ranked.append(tuple(tokens_FN[row, :NUM_RANKED][finite].tolist()))
            for rank in range(min(_NUM_CHILDREN[path], tokens_FN.shape[1])):
                if not np.isfinite(scores_FN[row, rank]) or len(self._tokens) == self._most:
                    continue
                child = (*path, rank)
                self._add(child, int(tokens_FN[row, rank]), float(scores_FN[row, rank]))
                if child in _NUM_CHILDREN:
                    frontier.append(child)
                    rows.append(row)
        tokens = [self._tokens[self._number[path] - 1] for path in frontier]
        self.frontier_tokens = np.array(tokens, np.int64)
        self.frontier_parents = np.array(rows, np.int64)
        own = np.eye(len(frontier), dtype=np.bool_)
        self.mask = np.concatenate([self.mask[self.frontier_parents], own], axis=1)
        self._frontier = frontier

    def finish(self) -> tuple[CandidateTree, tuple[tuple[int, ...], ...]]:
        """The tree, level by level, and the ranked ids along its best path."""
        tree = CandidateTree(
            tokens=tuple(self._tokens),
            parents=tuple(self._parents),
            scores=round_scores(self._scores),
        )
        return tree, tuple(self._ranked)

    def _add(self, path: tuple[int, ...], token: int, score: float) -> None:
        parent = self._number[path[:-1]]
        self._tokens.append(token)
        self._parents.append(parent)
        self._scores.append(score + (self._scores[parent - 1] if parent else 0.0))
        self._number[path] = len(self._tokens)
