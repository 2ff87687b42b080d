"""The best tree out of a block's marginals: a best-first search over ranks (DDTree, 2604.12989).

A block says for each depth, independently of the path, how likely each id is. So a node is a tuple
of ranks, one a depth, and its score the sum of their log-scores. The heap holds the best nodes not
taken yet: popping one adds it to the tree and pushes its next sibling and its first child. Each
pop is the best remaining node of all, and ancestors come before descendants, so every prefix of
the order is the best tree of its size. How many nodes pay is decided by whoever knows the costs of
verifying: the planner asks for a number and its gate cuts the rest (`reference/dflash.md` 4.3).

Shapes: D depths, M ids ranked per depth.
"""

import heapq

import numpy as np
import numpy.typing as npt

from drafter_service.tree_builder import round_scores
from protos.tree import CandidateTree


def best_first(
    ids_DM: npt.NDArray[np.int64], scores_DM: npt.NDArray[np.float64], num_nodes: int
) -> CandidateTree:
    """At most `num_nodes` nodes in the order they were taken, best first.

    ids_DM, scores_DM: the best ids of every depth, falling; -inf marks ids that cannot be drafted.
    Equal scores go to the smaller tuple of ranks.
    """
    scores = scores_DM.tolist()
    depth, width = scores_DM.shape
    tokens: list[int] = []
    parents: list[int] = []
    totals: list[float] = []
    # (minus score, ranks, parent): ranks are distinct, so parents are never compared.
    heap: list[tuple[float, tuple[int, ...], int]] = []
    if depth and width and np.isfinite(scores[0][0]):
        heap.append((-scores[0][0], (0,), 0))
    while heap and len(tokens) < num_nodes:
        negative, ranks, parent = heapq.heappop(heap)
        level, rank = len(ranks) - 1, ranks[-1]
        tokens.append(int(ids_DM[level, rank]))
        parents.append(parent)
        totals.append(-negative)
        node = len(tokens)
        above = -negative - scores[level][rank]
        if rank + 1 < width and np.isfinite(scores[level][rank + 1]):
            sibling = (*ranks[:-1], rank + 1)
            heapq.heappush(heap, (-(above + scores[level][rank + 1]), sibling, parent))
        if level + 1 < depth and np.isfinite(scores[level + 1][0]):
            heapq.heappush(heap, (negative - scores[level + 1][0], (*ranks, 0), node))
    return CandidateTree(tuple(tokens), tuple(parents), round_scores(totals))
