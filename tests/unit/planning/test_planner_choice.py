"""The fast choice and the fast admission equal plain loops over everything."""

import random
from itertools import combinations

import numpy as np
import pytest

from protos.tree import CandidateTree
from verifier_service.planning.admission import StepCosts, admit_nodes, best_path
from verifier_service.planning.choice import Option, choose, choose_slowly
from verifier_service.planning.readings import WeighedTree
from verifier_service.planning.shapes import (
    Node,
    Profile,
    chain_nodes,
    merge_nodes,
    tree_nodes,
)


def _random_option(rng: random.Random, index: int) -> Option:
    profiles = []
    for _ in range(rng.randint(1, 3)):
        gains = sorted((rng.random() for _ in range(rng.randint(0, 5))), reverse=True)
        profiles.append(Profile(tuple(gains), (1,) * len(gains), (0,) * len(gains)))
    steps = [rng.choice((0.0, 0.001, 0.004, 0.02)) for _ in range(rng.randint(0, 14))]
    cost_s = 0.03 + np.concatenate(([0.0], np.cumsum(steps)))
    return Option(
        (str(index),),
        tuple(profiles),
        cost_s,
        rng.choice((0.0, 0.005, 0.02)),
        0.03,
        rng.choice((0.001, 0.01, 1.0)),
    )


@pytest.mark.parametrize("seed", range(60))
def test_fast_choice_equals_every_combination(seed: int):
    rng = random.Random(seed)
    options = [_random_option(rng, i) for i in range(4)]
    fast, slow = choose(options), choose_slowly(options)
    assert [c.index for c in fast] == [c.index for c in slow]
    for a, b in zip(fast, slow, strict=True):
        assert a.rate == pytest.approx(b.rate, rel=1e-9)
        assert a.expected == pytest.approx(b.expected, rel=1e-9) or sum(a.num_nodes) != sum(
            b.num_nodes
        )


def test_an_option_that_cannot_be_paid_is_no_choice():
    profile = Profile((0.9,), (1,), (0,))
    dear = Option(("a",), (profile,), np.array([0.03, 0.03]), 0.01, 0.03, 0.009)
    paid = Option(("b",), (profile,), np.array([0.03, 0.03]), 0.01, 0.03, 0.011)
    assert [c.index for c in choose([dear, paid])] == [1]


def _random_tree(rng: random.Random, nodes: int) -> tuple[CandidateTree, list[float]]:
    parents = [rng.randint(0, i) for i in range(nodes)]
    survival: list[float] = []
    for parent in parents:
        above = survival[parent - 1] if parent else 1.0
        survival.append(above * rng.uniform(0.05, 0.95))
    return CandidateTree(tuple(range(nodes)), tuple(parents), (0.0,) * nodes), survival


def _best_rate_of_all_subsets(
    tree: CandidateTree, survival: list[float], costs: StepCosts
) -> float:
    best = 0.0
    path = set(best_path(tree, survival))
    for size in range(tree.num_nodes + 1):
        for chosen in combinations(range(1, tree.num_nodes + 1), size):
            kept = set(chosen)
            if any(tree.parents[n - 1] not in kept | {0} for n in kept):
                continue
            expected = 1.0 + sum(survival[n - 1] for n in chosen)
            for cost_s, able in ((costs.tree_s, True), (costs.chain_s, kept <= path)):
                time_s = float(cost_s[size]) + costs.wait_s
                if able and (size == 0 or time_s <= costs.limit_s):
                    best = max(best, expected / time_s)
    return best


@pytest.mark.parametrize("seed", range(40))
def test_admission_is_the_best_of_all_closed_subsets(seed: int):
    rng = random.Random(seed)
    tree, survival = _random_tree(rng, rng.randint(1, 8))
    steps = [rng.choice((0.0, 0.002, 0.01)) for _ in range(tree.num_nodes)]
    chain_s = 0.03 + np.concatenate(([0.0], np.cumsum(steps)))
    tree_s = chain_s + 0.0007 * np.arange(tree.num_nodes + 1)
    costs = StepCosts(chain_s, tree_s, rng.choice((0.0, 0.01)), rng.choice((0.035, 0.06, 9.0)))
    (kept,), rate = admit_nodes([WeighedTree(tree, survival)], 1, costs)
    assert rate == pytest.approx(_best_rate_of_all_subsets(tree, survival, costs), rel=1e-9)
    assert kept.num_nodes <= tree.num_nodes


def test_admitted_nodes_are_closed_under_parents_across_requests():
    rng = random.Random(5)
    made = [_random_tree(rng, 12) for _ in range(4)]
    trees = [WeighedTree(tree, survival) for tree, survival in made]
    flat = np.full(49, 0.03)
    flat[20:] += 1.0
    kept, _ = admit_nodes(trees, 4, StepCosts(flat, flat, 0.0, 0.04))
    # keep() would have failed on a node without its parent.
    assert sum(t.num_nodes for t in kept) == 19


def test_tree_nodes_match_an_exhaustive_search():
    belief_DK = np.array([[0.5, 0.2, 0.1], [0.6, 0.1, 0.05], [0.4, 0.3, 0.1]])
    every: list[tuple[float, int]] = []

    def grow(above: float, depth: int) -> None:
        for p in belief_DK[depth]:
            every.append((above * float(p), depth + 1))
            if depth + 1 < len(belief_DK):
                grow(above * float(p), depth + 1)

    grow(1.0, 0)
    every.sort(reverse=True)
    found = tree_nodes(belief_DK, 3, 3, 12)
    assert [n.survival for n in found] == pytest.approx([s for s, _ in every[:12]])


def test_merged_sources_gain_less_than_their_sum_and_more_than_either():
    belief_DK = np.full((4, 2), 0.4)
    nodes = chain_nodes(belief_DK, 4)
    alone = merge_nodes([nodes], 8)
    both = merge_nodes([nodes, nodes], 8)
    assert sum(alone.gains) < sum(both.gains) < 2 * sum(alone.gains)
    assert list(both.gains) == sorted(both.gains, reverse=True)


def test_profile_shares_tell_what_to_ask_of_each_source():
    profile = merge_nodes([[Node(0.9, 1), Node(0.8, 2)], [Node(0.5, 1)]], 3)
    assert profile.share(3, 0) == (2, 2)
    assert profile.share(3, 1) == (1, 1)
    assert profile.share(1, 1) == (0, 0)
