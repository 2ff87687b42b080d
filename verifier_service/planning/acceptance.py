"""Evidence of acceptance: where the target's choice stood in a drafter's ranked list, by depth.

Knows no costs and no trees' shapes. One observed round scores every narrower or shallower shape,
because a rank at depth i says for each width whether it would have held the choice; only depths
past the first miss are censored. Counts, never means, so evidence of requests and of the whole
process can be shrunk into each other (reference/disagg.md 2.2).

Shapes: D = MAX_DEPTH depths below the anchor, K = MAX_RANK ranks, column K counts misses.
"""

import itertools
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from protos import plans
from protos.tree import CandidateTree

MAX_DEPTH: Final = plans.MAX_DEPTH
MAX_RANK: Final = 8

_FIRST_RANKS: Final = (0.42, 0.12, 0.06, 0.04, 0.03, 0.02, 0.015, 0.01)
"""What an unknown drafter is believed to do: roughly a weak head's rank distribution."""
_BASE_MASS: Final = 8.0
_PRIOR_MASS: Final = 6.0
_FLOOR_MASS: Final = 12.0
_SURPRISED_MASS: Final = 3.0
_SURPRISE: Final = 0.9
_FAST: Final = 0.2
_STALE_ROUNDS: Final = 4
"""A belief over all requests is made anew after so many rounds, or when it was overturned."""

Ranks = tuple[int, ...]


def ranks_of(
    tree: CandidateTree, ranked_ids: Sequence[Sequence[int]], choices: Sequence[int]
) -> Ranks:
    """Rank of the target's choice at each depth the draft reached, MAX_RANK for a miss.

    Follows `tree` along `choices`. While the walk is on the draft's best path the ranked lists
    (which are wider than the tree) say the rank; off it, the order of the children by score. Ends
    with the first miss, or where choices or the draft end; an empty draft is a miss at depth 1.
    """
    if not choices:
        return ()
    if not tree.num_nodes:
        return (MAX_RANK,)
    table = tree.children()
    node, on_best, ranks = 0, True, []
    for depth, choice in enumerate(choices):
        children = table[node]
        if depth >= MAX_DEPTH or (not children and depth > 0):
            break
        order = sorted(children, key=lambda token: -tree.scores[children[token] - 1])
        wide = list(ranked_ids[depth]) if on_best and depth < len(ranked_ids) else order
        rank = wide.index(choice) if choice in wide else MAX_RANK
        ranks.append(min(rank, MAX_RANK))
        if choice not in children:
            break
        on_best = on_best and choice == order[0]
        node = children[choice]
    return tuple(ranks)


class RankCounts:
    """Rank counts of one drafter, for one request or for all of them.

    Forgets exponentially: by `memory` per round observed, and by `fade` for rounds elapsed without
    an observation, the latter only down to a floor that keeps the mean but little confidence.
    When the last rounds contradict the counts, the counts shrink to almost nothing, so that a
    drafter that turned bad or good is believed within a few rounds. Plain lists: a round touches
    few of the numbers, and every round of every request comes through here.
    """

    def __init__(self, memory: float = 0.98) -> None:
        self.num_rounds = 0
        self._counts = [[0.0] * (MAX_RANK + 1) for _ in range(MAX_DEPTH)]
        self._memory = memory
        self._drift = 0.0

    def counts(self) -> NDArray[np.float64]:
        """The counts [D, K + 1], misses in the last column."""
        return np.array(self._counts)

    def expected_run(self, prior_D: Sequence[float], mass: float, depth: int) -> float:
        """Leading top-1 tokens that a draft of `depth` levels is expected to have right."""
        total, survival = 0.0, 1.0
        for row, prior in zip(self._counts[:depth], prior_D, strict=False):
            survival *= (mass * prior + row[0]) / (mass + sum(row))
            total += survival
        return total

    def observe(self, ranks: Ranks, expected_run: float) -> bool:
        """Add one round; True when it overturned the belief.

        expected_run: the top-1 run predicted for a draft of that depth.
        """
        if not ranks:
            return False
        self.num_rounds += 1
        run = next((i for i, rank in enumerate(ranks) if rank > 0), len(ranks))
        self._drift += _FAST * (run - expected_run - self._drift)
        surprised = abs(self._drift) > max(_SURPRISE, 0.5 * expected_run)
        if surprised:
            self._scale_down(_SURPRISED_MASS, 0.0)
            self._drift = 0.0
        for row, rank in zip(self._counts, ranks, strict=False):
            for place, count in enumerate(row):
                row[place] = count * self._memory
            row[rank] += 1.0
        return surprised

    def fade(self, factor: float) -> None:
        """Lose confidence, not the mean: scale counts above the floor by `factor`."""
        self._scale_down(_FLOOR_MASS, factor)

    def _scale_down(self, mass: float, factor: float) -> None:
        """Scale every depth by `factor`, or just down to `mass` where that is more."""
        for row in self._counts:
            total = sum(row)
            if total > mass:
                scale = max(factor, mass / total)
                row[:] = [count * scale for count in row]


def shrink(
    prior_DK: NDArray[np.float64], counts_DK: NDArray[np.float64], mass: float
) -> NDArray[np.float64]:
    """Dirichlet posterior mean of the rank probabilities [D, K], given that depth was reached."""
    total_D1 = counts_DK.sum(axis=1, keepdims=True)
    posterior: NDArray[np.float64] = (mass * prior_DK + counts_DK[:, :MAX_RANK]) / (mass + total_D1)
    return posterior


def shrink_downwards(counts_DK: NDArray[np.float64], mass: float) -> NDArray[np.float64]:
    """The same with each depth's posterior as the prior of the next: depths resemble each other.

    What was seen at shallow depths is thereby the guess for depths never reached (censored).
    """
    prior_K = np.array(_FIRST_RANKS)
    rows = []
    for row in counts_DK:
        prior_K = (mass * prior_K + row[:MAX_RANK]) / (mass + row.sum())
        rows.append(prior_K)
    return np.stack(rows)


@dataclass(frozen=True, slots=True)
class _Belief:
    """What is believed of a source over all requests: ranks [D, K] and their first column [D]."""

    made_at: int
    ranks: NDArray[np.float64]
    top: list[float]


class RankEvidence:
    """All rank counts: per source over the process, and per (request, source) shrunk into it."""

    def __init__(self, request_memory: float = 0.98, memory: float = 0.995) -> None:
        self._request_memory = request_memory
        self._memory = memory
        self._overall: dict[str, RankCounts] = {}
        self._beliefs: dict[str, _Belief] = {}
        self._by_request: dict[int, dict[str, RankCounts]] = {}

    def belief(self, key: int, source: str) -> NDArray[np.float64]:
        """[D, K] rank probabilities of `source` for request `key`."""
        overall_DK = self.overall_belief(source)
        counts = self._by_request.get(key, {}).get(source)
        return overall_DK if counts is None else shrink(overall_DK, counts.counts(), _PRIOR_MASS)

    def overall_belief(self, source: str) -> NDArray[np.float64]:
        """[D, K] rank probabilities of `source` over all requests."""
        return self._belief_of(source).ranks

    def observe(self, key: int, source: str, ranks: Ranks, depth: int) -> None:
        """One round of `source` in request `key`, whose draft was `depth` levels deep."""
        belief = self._belief_of(source)
        mine = self._by_request.setdefault(key, {})
        own = mine.get(source)
        if own is None:
            own = mine[source] = RankCounts(self._request_memory)
        own.observe(ranks, own.expected_run(belief.top, _PRIOR_MASS, depth))
        overall_run = sum(itertools.accumulate(belief.top[:depth], operator.mul))
        if self._overall[source].observe(ranks, overall_run):
            self._beliefs.pop(source, None)

    def _belief_of(self, source: str) -> "_Belief":
        counts = self._overall.setdefault(source, RankCounts(self._memory))
        known = self._beliefs.get(source)
        stale = _STALE_ROUNDS if known is None else min(_STALE_ROUNDS, known.made_at + 1)
        if known is None or counts.num_rounds - known.made_at >= stale:
            ranks_DK = shrink_downwards(counts.counts(), _BASE_MASS)
            known = _Belief(counts.num_rounds, ranks_DK, ranks_DK[:, 0].tolist())
            self._beliefs[source] = known
        return known

    def fade(self, source: str, factor: float) -> None:
        """Rounds passed without `source`: trust what is known of it less."""
        if source in self._overall:
            self._overall[source].fade(factor)
            self._beliefs.pop(source, None)

    def num_rounds(self, source: str) -> int:
        """Rounds of this source that were observed."""
        counts = self._overall.get(source)
        return counts.num_rounds if counts else 0

    def forget(self, key: int) -> None:
        """The request left; what it taught the overall counts stays."""
        self._by_request.pop(key, None)
