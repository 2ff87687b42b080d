"""Survival of the nodes of drafts that were made: what a drafter's score is worth here.

A drafter's score is its own opinion; this turns it into a probability that the target agrees,
learnt online per group of sources that proposed the node (merged sources are right in different
places, so "both" is a group of its own), per depth and per bin of the score. Knows no shapes and
no costs. Invariant: a node never survives with more than its parent.
"""

import math
from bisect import bisect_right
from collections.abc import Sequence
from typing import Final

from protos.tree import CandidateTree, merge

Names = tuple[str, ...]

_EDGES: Final = (0.01, 0.03, 0.07, 0.15, 0.3, 0.5, 0.7, 0.85, 0.95, 0.99)
_MAX_LEVEL: Final = 4
_MASS: Final = 4.0
_MEMORY: Final = 0.998
_REQUEST_MASS: Final = 3.0
_REQUEST_MEMORY: Final = 0.97
_HIGHEST: Final = 0.985
_LOWEST: Final = 0.002


class _Cell:
    __slots__ = ("hits", "trials")

    def __init__(self) -> None:
        self.hits = 0.0
        self.trials = 0.0

    def add(self, hit: bool, memory: float) -> None:
        self.hits = self.hits * memory + hit
        self.trials = self.trials * memory + 1.0

    def mean(self, prior: float, mass: float) -> float:
        return (self.hits + mass * prior) / (self.trials + mass)


class _Level:
    """How a request's hits compare with what the overall table expected."""

    __slots__ = ("expected", "hits")

    def __init__(self) -> None:
        self.hits = 0.0
        self.expected = 0.0

    @property
    def factor(self) -> float:
        return (self.hits + _REQUEST_MASS) / (self.expected + _REQUEST_MASS)


class Calibration:
    """Probabilities of draft nodes, learnt from every child whose parent the target reached."""

    def __init__(self) -> None:
        self._by_bin: dict[tuple[Names, int], _Cell] = {}
        self._by_depth: dict[tuple[Names, int, int], _Cell] = {}
        self._by_request: dict[int, dict[Names, _Level]] = {}

    def survivals(self, key: int, tree: CandidateTree, sources: Sequence[Names]) -> list[float]:
        """Probability, per draft node, that the target's path goes through it.

        sources: per node the names that proposed it; empty when unknown.
        """
        levels = self._by_request.get(key, {})
        survival, depths = [1.0], [0]
        for index, parent in enumerate(tree.parents):
            names = _group(sources, index)
            depth = depths[parent] + 1
            p = self._probability(names, depth, _conditional(tree, index))
            level = levels.get(names)
            if level is not None:
                p *= level.factor
            depths.append(depth)
            survival.append(survival[parent] * min(max(p, _LOWEST), _HIGHEST))
        return survival[1:]

    def observe(
        self, key: int, tree: CandidateTree, sources: Sequence[Names], choices: Sequence[int]
    ) -> None:
        """Learn from a draft (before admission) and the target's choices along its path."""
        levels = self._by_request.setdefault(key, {})
        table = tree.children()
        node = 0
        for depth, choice in enumerate(choices, 1):
            for token, child in table[node].items():
                names = _group(sources, child - 1)
                self._add(levels, names, depth, _conditional(tree, child - 1), token == choice)
            following = table[node].get(choice)
            if following is None:
                break
            node = following

    def observe_drafts(
        self, key: int, drafts: Sequence[tuple[str, CandidateTree]], choices: Sequence[int]
    ) -> None:
        """Learn from what each named source proposed, as one tree."""
        merged, owners = merge([tree for _, tree in drafts])
        if merged.num_nodes:
            names = [tuple(drafts[i][0] for i in indices) for indices in owners]
            self.observe(key, merged, names, choices)

    def forget(self, key: int) -> None:
        """The request left."""
        self._by_request.pop(key, None)

    def _add(
        self, levels: dict[Names, _Level], names: Names, depth: int, q: float, hit: bool
    ) -> None:
        level = levels.setdefault(names, _Level())
        level.expected = level.expected * _REQUEST_MEMORY + self._probability(names, depth, q)
        level.hits = level.hits * _REQUEST_MEMORY + hit
        cell = bisect_right(_EDGES, q)
        self._by_bin.setdefault((names, cell), _Cell()).add(hit, _MEMORY)
        self._by_depth.setdefault((names, min(depth, _MAX_LEVEL), cell), _Cell()).add(hit, _MEMORY)

    def _probability(self, names: Names, depth: int, q: float) -> float:
        cell = bisect_right(_EDGES, q)
        coarse = self._by_bin.get((names, cell))
        fine = self._by_depth.get((names, min(depth, _MAX_LEVEL), cell))
        p = self._prior(names, depth, q)
        if coarse is not None:
            p = coarse.mean(p, _MASS)
        return p if fine is None else fine.mean(p, _MASS)

    def _prior(self, names: Names, depth: int, q: float) -> float:
        """Several sources that agree are wrong together only where each would be."""
        if len(names) < 2:
            return 0.02 + 0.7 * q
        wrong = 1.0
        for name in names:
            wrong *= 1.0 - self._probability((name,), depth, q)
        return 1.0 - wrong


def _group(sources: Sequence[Names], index: int) -> Names:
    """Who proposed a node, whatever the order in which their drafts came."""
    return tuple(sorted(set(sources[index]))) if sources else ()


def _conditional(tree: CandidateTree, index: int) -> float:
    """The drafter's probability of node `index + 1` given its parent, from summed log-scores."""
    parent = tree.parents[index]
    above = tree.scores[parent - 1] if parent else 0.0
    return math.exp(min(tree.scores[index] - above, 0.0))
