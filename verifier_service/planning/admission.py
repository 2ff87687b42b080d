"""Cut the merged trees of one step to the nodes that pay.

Pure. Survivals of all requests are sorted together and admitted while the step's expected tokens
per second rise (reference/disagg.md 2.2 F); a wait already spent counts as part of the step. The
best chains are weighed against the trees, because branches cost more rows than they are; and trees
of one part against trees of more, because each part reads the prefix once more (readings.py).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from protos.tree import CandidateTree
from verifier_service.planning.readings import WeighedTree


@dataclass(frozen=True, slots=True)
class StepCosts:
    """Time with 0 .. n further draft nodes, as chains and as trees [n + 1]; wait already spent.

    limit_s: most that step and wait may take together. position_s: of every position that a part
    reads once more.
    """

    chain_s: NDArray[np.float64]
    tree_s: NDArray[np.float64]
    wait_s: float
    limit_s: float
    position_s: float = 0.0


def admit_nodes(
    trees: Sequence[WeighedTree], num_requests: int, costs: StepCosts
) -> tuple[list[CandidateTree], float]:
    """The trees to verify, and the tokens per second they promise.

    num_requests: requests of the step, each of which commits one token whatever is admitted.
    """
    paths = [best_path(one.tree, one.survival) for one in trees]
    alone = [WeighedTree(one.tree, one.survival) for one in trees]
    offers = [(alone, paths, costs.chain_s)]
    for num_parts in range(1, max((one.num_parts for one in trees), default=1) + 1):
        offers.append((list(trees), [one.within(num_parts) for one in trees], costs.tree_s))
    best_rate = -1.0
    best_kept: list[list[int]] = [[] for _ in trees]
    for weighed, nodes, cost_s in offers:
        kept, rate = _scan(weighed, nodes, num_requests, cost_s, costs)
        if rate > best_rate:
            best_rate, best_kept = rate, kept
    return [one.tree.keep(sorted(n)) for one, n in zip(trees, best_kept, strict=True)], best_rate


def best_path(tree: CandidateTree, survival: Sequence[float]) -> list[int]:
    """From the anchor on, the child most likely to survive; draft node numbers."""
    path: list[int] = []
    node = 0
    table = tree.children()
    while table[node]:
        node = max(table[node].values(), key=lambda n: (survival[n - 1], -n))
        path.append(node)
    return path


def best_nodes(survival: Sequence[float], count: int) -> list[int]:
    """The `count` nodes most likely to survive, ascending; closed under parents."""
    ranked = sorted(range(1, len(survival) + 1), key=lambda n: (-survival[n - 1], n))
    return sorted(ranked[: max(count, 0)])


def _scan(
    trees: Sequence[WeighedTree],
    nodes: Sequence[Sequence[int]],
    num_requests: int,
    cost_s: NDArray[np.float64],
    costs: StepCosts,
) -> tuple[list[list[int]], float]:
    flat = sorted(
        (-trees[owner].survival[node - 1], node, owner)
        for owner, members in enumerate(nodes)
        for node in members
    )[: len(cost_s) - 1]
    gains = np.array([-s for s, _, _ in flat])
    expected_n = num_requests + np.concatenate(([0.0], np.cumsum(gains)))
    again_n = np.array([0, *_positions_again(trees, [(owner, n) for _, n, owner in flat])])
    time_n = cost_s[: len(flat) + 1] + costs.wait_s + again_n * costs.position_s
    rate_n = np.where(time_n <= costs.limit_s + 1e-12, expected_n / time_n, -1.0)
    # A step with nothing admitted is always allowed: the wait is spent, progress is owed.
    rate_n[0] = expected_n[0] / time_n[0]
    count = int(np.argmax(rate_n))
    kept: list[list[int]] = [[] for _ in nodes]
    for _, node, owner in flat[:count]:
        kept[owner].append(node)
    return kept, float(rate_n[count])


def _positions_again(
    trees: Sequence[WeighedTree], admitted: Sequence[tuple[int, int]]
) -> list[int]:
    """Positions read again once each of these (owner, node) has joined those before it."""
    highest = [0] * len(trees)
    total, totals = 0, []
    for owner, node in admitted:
        more = max(trees[owner].part(node) - highest[owner], 0)
        highest[owner] += more
        total += more * trees[owner].start
        totals.append(total)
    return totals
