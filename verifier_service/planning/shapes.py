"""What a shape is expected to commit: node survivals, best first, for one request.

Knows neither costs nor drafts that were made: it turns rank probabilities into an ordered list of
imagined nodes. Invariants: gains never increase along a profile, and every prefix is closed under
parents, so the best n nodes are always the first n (Sequoia's positional model).
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Node:
    """An imagined node: probability that the target's path goes through it, and its depth."""

    survival: float
    depth: int


@dataclass(frozen=True, slots=True)
class Profile:
    """Nodes worth verifying for one request, best first.

    gains: expected tokens that each further node adds. depths, sources: of each node; sources
    are indices into the list the profile was made from.
    """

    gains: tuple[float, ...] = ()
    depths: tuple[int, ...] = ()
    sources: tuple[int, ...] = ()

    def share(self, count: int, source: int) -> tuple[int, int]:
        """Nodes and greatest depth of `source` among the first `count` nodes."""
        depths = [
            d for d, s in zip(self.depths[:count], self.sources[:count], strict=True) if s == source
        ]
        return len(depths), max(depths, default=0)


def chain_nodes(belief_DK: NDArray[np.float64], depth: int) -> list[Node]:
    """The top-1 chain of `depth` nodes."""
    survivals = np.cumprod(belief_DK[:depth, 0])
    return [Node(float(s), d) for d, s in enumerate(survivals, 1)]


def tree_nodes(belief_DK: NDArray[np.float64], depth: int, width: int, limit: int) -> list[Node]:
    """The best `limit` nodes of the tree with `width` children a node and `depth` levels.

    A child of rank j survives with its parent's survival times belief[depth, j]; ranks are
    made non-increasing first, so a lazy best-first search yields them in order.
    """
    width = min(width, belief_DK.shape[1])
    table = np.minimum.accumulate(belief_DK[:depth, :width], axis=1).tolist()
    if not table or not table[0]:
        return []
    heap = [(-table[0][0], 1, 0, 1.0)]
    nodes: list[Node] = []
    while heap and len(nodes) < limit:
        negative, level, rank, above = heapq.heappop(heap)
        nodes.append(Node(-negative, level))
        if rank + 1 < width:
            heapq.heappush(heap, (-above * table[level - 1][rank + 1], level, rank + 1, above))
        if level < len(table):
            heapq.heappush(heap, (negative * table[level][0], level + 1, 0, -negative))
    return nodes


def merge_nodes(lists: Sequence[Sequence[Node]], limit: int) -> Profile:
    """One profile out of several sources' nodes, taken greedily by what each adds.

    Sources are treated as right independently of one another: a node that survives with S at
    depth d adds S times the chance that no other source holds the path there already.
    """
    max_depth = max((node.depth for nodes in lists for node in nodes), default=0)
    held = [[0.0] * (max_depth + 1) for _ in lists]
    place = [0] * len(lists)
    gains: list[float] = []
    depths: list[int] = []
    sources: list[int] = []
    last = 1.0
    while len(gains) < limit:
        best, best_gain = -1, 0.0
        for index, nodes in enumerate(lists):
            if place[index] >= len(nodes):
                continue
            node = nodes[place[index]]
            gain = node.survival
            for other, by_depth in enumerate(held):
                if other != index:
                    gain *= 1.0 - by_depth[node.depth]
            if best < 0 or gain > best_gain:
                best, best_gain = index, gain
        if best < 0:
            break
        node = lists[best][place[best]]
        place[best] += 1
        held[best][node.depth] = min(held[best][node.depth] + node.survival, 1.0)
        last = min(last, best_gain)
        gains.append(last)
        depths.append(node.depth)
        sources.append(best)
    return Profile(tuple(gains), tuple(depths), tuple(sources))
