"""Evidence of acceptance: where the target's choice stood in a drafter's ranked list, by depth.

Knows no costs and no trees' shapes. One observed round scores every narrower or shallower shape,
because a rank at depth i says for each width whether it would have held the choice; only depths
past the first miss are censored. Counts, never means, so evidence of requests and of the whole
process can be shrunk into each other (reference/disagg.md 2.2).

Shapes: D = MAX_DEPTH depths below the anchor, K = MAX_RANK ranks, column K counts misses.
"""

from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from protos.tree import CandidateTree

MAX_DEPTH: Final = 16
MAX_RANK: Final = 8

_FIRST_RANKS: Final = (0.42, 0.12, 0.06, 0.04, 0.03, 0.02, 0.015, 0.01)
"""What an unknown drafter is believed to do: roughly a weak head's rank distribution."""
_BASE_MASS: Final = 4.0
_PRIOR_MASS: Final = 6.0
_FLOOR_MASS: Final = 12.0
_SURPRISED_MASS: Final = 3.0
_SURPRISE: Final = 0.6
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

    Forgets exponentially: by `memory` per round observed, and `fade` per round elapsed without
    an observation, the latter only down to a floor that keeps the mean but little confidence.
    When the last rounds contradict the counts, the counts shrink to almost nothing, so that a
    drafter that turned bad or good is believed within a few rounds.
    """

    def __init__(self, memory: float = 0.98) -> None:
        self.counts_DK = np.zeros((MAX_DEPTH, MAX_RANK + 1))
        self.num_rounds = 0
        self._memory = memory
        self._drift = 0.0

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
            self._shrink(_SURPRISED_MASS)
            self._drift = 0.0
        for depth, rank in enumerate(ranks):
            self.counts_DK[depth] *= self._memory
            self.counts_DK[depth, rank] += 1.0
        return surprised

    def fade(self, factor: float) -> None:
        """Lose confidence, not the mean: scale counts above the floor by `factor`."""
        mass_D = self.counts_DK.sum(axis=1)
        floor_D = np.maximum(factor, _FLOOR_MASS / np.maximum(mass_D, 1e-9))
        self.counts_DK *= np.where(mass_D > _FLOOR_MASS, floor_D, 1.0)[:, None]

    def _shrink(self, mass: float) -> None:
        mass_D = self.counts_DK.sum(axis=1)
        self.counts_DK *= np.where(mass_D > mass, mass / np.maximum(mass_D, 1e-9), 1.0)[:, None]


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


def top_run(belief_DK: NDArray[np.float64], depth: int) -> float:
    """Expected number of leading tokens of a top-1 chain of `depth` tokens that are right."""
    return float(np.cumprod(belief_DK[:depth, 0]).sum())


class RankEvidence:
    """All rank counts: per source over the process, and per (request, source) shrunk into it."""

    def __init__(self, request_memory: float = 0.98, memory: float = 0.995) -> None:
        self._request_memory = request_memory
        self._memory = memory
        self._overall: dict[str, RankCounts] = {}
        self._beliefs: dict[str, tuple[int, NDArray[np.float64]]] = {}
        self._by_request: dict[int, dict[str, RankCounts]] = {}

    def belief(self, key: int, source: str) -> NDArray[np.float64]:
        """[D, K] rank probabilities of `source` for request `key`."""
        overall_DK = self.overall_belief(source)
        counts = self._by_request.get(key, {}).get(source)
        return overall_DK if counts is None else shrink(overall_DK, counts.counts_DK, _PRIOR_MASS)

    def overall_belief(self, source: str) -> NDArray[np.float64]:
        """[D, K] rank probabilities of `source` over all requests."""
        counts = self._overall.setdefault(source, RankCounts(self._memory))
        made_at, known = self._beliefs.get(source, (-_STALE_ROUNDS, None))
        if known is None or counts.num_rounds - made_at >= min(_STALE_ROUNDS, made_at + 1):
            known = shrink_downwards(counts.counts_DK, _BASE_MASS)
            self._beliefs[source] = (counts.num_rounds, known)
        return known

    def observe(self, key: int, source: str, ranks: Ranks, depth: int) -> None:
        """One round of `source` in request `key`, whose draft was `depth` levels deep."""
        expected_run = top_run(self.belief(key, source), depth)
        overall_run = top_run(self.overall_belief(source), depth)
        mine = self._by_request.setdefault(key, {})
        mine.setdefault(source, RankCounts(self._request_memory)).observe(ranks, expected_run)
        if self._overall[source].observe(ranks, overall_run):
            self._beliefs.pop(source, None)

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
