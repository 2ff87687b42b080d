"""Growing a chain or an EAGLE-2 dynamic tree out of ranked children (2406.16858).

Pure bookkeeping over numpy arrays: what to expand next, who descends from whom, which nodes stay.
Knows no model, no cache and no temperature: children arrive ranked and scored.

    pool     [ level 1: K ][ level 2: F1 * K ][ level 3: F2 * K ] ...   in order of index
    frontier the K best of the newest level, in falling score; each is expanded once

A child's score is its parent's plus its own, so it never outranks its parent. Ties go to the lower
index, and parents stand before their children: what is kept is closed under parents. For the same
reason a node that the best `num_nodes` of the pool already leave behind is not expanded: its
children could not be kept either. The tree is the same, and flat drafts end early.

Shapes: K children per node, F frontier nodes, S expanded nodes so far.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from protos.exchange import Plan, PlanKind
from protos.tree import CandidateTree

Ids = npt.NDArray[np.int64]
Scores = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]

NUM_RANKED = 8
"""Ids reported per depth of the best path."""

_LOWEST = -60000.0
"""Scores below are raised to this: float16 ends at -65504."""


class Grower(Protocol):
    """One session's draft while it grows, level by level, out of ranked children.

    `frontier_tokens` [F] are to be expanded next, children of the rows `frontier_parents` [F] of
    the frontier before; `mask` [F, S] says which expanded nodes each of them sees.
    """

    depth: int
    level: int
    frontier_tokens: Ids
    frontier_parents: Ids
    mask: Mask

    @property
    def num_children(self) -> int:
        """Children needed per expanded node, evidence included."""

    @property
    def is_done(self) -> bool:
        """True when no frontier is left to expand."""

    def grow(self, tokens_FN: Ids, scores_FN: Scores) -> None:
        """Take the ranked children of every frontier node (first of all, of the anchor)."""

    def finish(self) -> tuple[CandidateTree, tuple[tuple[int, ...], ...]]:
        """The tree, and the ranked ids along its best path."""


class TreeGrower:
    """One session's draft while it grows.

    `frontier_tokens` [F] are to be expanded next; `mask` [F, S] says which expanded nodes each of
    them sees (its ancestors and itself, which is the last F columns' diagonal).
    """

    def __init__(self, plan: Plan) -> None:
        self.depth = plan.depth
        self.is_chain = plan.kind is not PlanKind.TREE
        self.width = 1 if self.is_chain else plan.width
        self.num_nodes = plan.depth if self.is_chain else plan.nodes
        self.level = 0
        self.frontier_tokens: Ids = np.zeros(0, np.int64)
        self.frontier_parents: Ids = np.zeros(0, np.int64)
        self.mask: Mask = np.ones((1, 0), np.bool_)
        self._frontier_pool: Ids = np.full(1, -1, np.int64)
        self._frontier_scores: Scores = np.zeros(1)
        self._tokens: list[Ids] = []
        self._scores: list[Scores] = []
        self._parents: list[Ids] = []
        self._pool_len = 0
        self._ranked: list[tuple[int, ...]] = []
        self._best_pool = -1

    @property
    def num_children(self) -> int:
        """Children needed per expanded node, evidence included."""
        return max(self.width, NUM_RANKED)

    @property
    def is_done(self) -> bool:
        """True when no frontier is left to expand."""
        return self.level >= self.depth or not len(self._frontier_pool)

    def grow(self, tokens_FN: Ids, scores_FN: Scores) -> None:
        """Take the ranked children of every frontier node (first of all, of the anchor).

        tokens_FN, scores_FN: [F, at least K], best first; log-scores of the step alone. -inf
        marks ids that cannot be drafted.
        """
        self.level += 1
        self._note_ranking(tokens_FN, scores_FN)
        width = self.width
        scores = (self._frontier_scores[:, None] + scores_FN[:, :width]).reshape(-1)
        tokens = tokens_FN[:, :width].reshape(-1)
        parents = np.repeat(self._frontier_pool, min(width, tokens_FN.shape[1]))
        self._tokens.append(tokens)
        self._scores.append(scores)
        self._parents.append(parents)
        # Stable, so that equal scores keep the order of their index.
        best = np.argsort(-scores, kind="stable")[:width]
        best = best[scores[best] > self._least_kept()]
        rows = best // max(1, min(width, tokens_FN.shape[1]))
        self.frontier_tokens = tokens[best]
        self.frontier_parents = rows
        self.mask = np.concatenate([self.mask[rows], np.eye(len(best), dtype=np.bool_)], axis=1)
        self._frontier_pool = best + self._pool_len
        self._frontier_scores = scores[best]
        self._pool_len += len(tokens)

    def finish(self) -> tuple[CandidateTree, tuple[tuple[int, ...], ...]]:
        """The best nodes as a tree, and the ranked ids along its best path."""
        tokens = np.concatenate(self._tokens)
        scores = np.concatenate(self._scores)
        parents = np.concatenate(self._parents)
        kept = np.argsort(-scores, kind="stable")[: self.num_nodes]
        kept = np.sort(kept[np.isfinite(scores[kept])])
        number = np.zeros(self._pool_len + 1, np.int64)
        number[kept + 1] = np.arange(1, len(kept) + 1)
        tree = CandidateTree(
            tokens=tuple(tokens[kept].tolist()),
            parents=tuple(number[parents[kept] + 1].tolist()),
            scores=round_scores(scores[kept]),
        )
        return tree, tuple(self._ranked)

    def _least_kept(self) -> float:
        """Score that a node must exceed for a child of it to be kept."""
        scores = np.concatenate(self._scores)
        if len(scores) < self.num_nodes:
            return -np.inf
        return float(np.partition(scores, -self.num_nodes)[-self.num_nodes])

    def _note_ranking(self, tokens_FN: Ids, scores_FN: Scores) -> None:
        """Remember the best ids after the best path, as long as that path is being expanded."""
        found = np.flatnonzero(self._frontier_pool == self._best_pool)
        if len(self._ranked) != self.level - 1 or not len(found):
            return
        row = int(found[0])
        finite = np.isfinite(scores_FN[row, :NUM_RANKED])
        self._ranked.append(tuple(tokens_FN[row, :NUM_RANKED][finite].tolist()))
        self._best_pool = self._pool_len + row * min(self.width, tokens_FN.shape[1])


def round_scores(scores: Sequence[float] | npt.NDArray[Any]) -> tuple[float, ...]:
    """Scores as they survive the wire (float16), so that both forms of a drafter agree."""
    clipped = np.clip(np.asarray(scores, np.float64), _LOWEST, 0.0)
    return tuple(clipped.astype(np.float16).astype(np.float64).tolist())
