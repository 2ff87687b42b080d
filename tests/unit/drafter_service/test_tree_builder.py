"""The dynamic tree against its plain definition, ties and filtered ids included."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drafter_service.tree_builder import NUM_RANKED, TreeGrower, round_scores
from protos.exchange import Plan, PlanKind

GRID = (-0.0, -0.25, -0.5, -0.5, -1.0, -2.0, -math.inf)


def children_of(path, count, seed, grid):
    """Ranked children of a path: any fixed function of the path will do; ties on purpose."""
    rng = np.random.default_rng([seed, *path])
    scores = -np.sort(-rng.choice(grid, count)) if grid else -np.sort(rng.exponential(1.5, count))
    tokens = rng.permutation(1000)[:count]
    return tokens, scores


def plain_tree(plan, seed, grid):
    """EAGLE-2 as it is described: expand the k best of every level, then keep the best nodes."""
    pool, frontier = [], [(-1, (), 0.0)]
    for _ in range(plan.depth):
        level = []
        for parent, path, base in frontier:
            for token, score in zip(
                *children_of(path, max(plan.width, NUM_RANKED), seed, grid), strict=True
            ):
                if len([e for e in level if e[1] == parent]) == plan.width:
                    break
                level.append((len(pool), parent, (*path, int(token)), base + score))
                pool.append((int(token), parent, base + score))
        best = sorted(level, key=lambda entry: (-entry[3], entry[0]))[: plan.width]
        frontier = [(index, path, score) for index, _, path, score in best if score > -math.inf]
    order = sorted(range(len(pool)), key=lambda index: (-pool[index][2], index))
    kept = sorted(index for index in order[: plan.nodes] if pool[index][2] > -math.inf)
    number = {-1: 0} | {index: place for place, index in enumerate(kept, 1)}
    return [(pool[i][0], number[pool[i][1]], pool[i][2]) for i in kept]


def grown(plan, seed, grid):
    """The same through the grower; paths are followed from outside."""
    grower = TreeGrower(plan)
    paths = [()]
    num_expanded = 0
    while not grower.is_done:
        rows = [children_of(path, grower.num_children, seed, grid) for path in paths]
        grower.grow(np.stack([r[0] for r in rows]), np.stack([r[1] for r in rows]))
        parents, tokens = grower.frontier_parents, grower.frontier_tokens
        paths = [(*paths[p], int(t)) for p, t in zip(parents, tokens, strict=True)]
        num_expanded += len(paths)
    return grower, num_expanded


plans = st.builds(
    Plan,
    kind=st.just(PlanKind.TREE),
    depth=st.integers(1, 5),
    width=st.integers(1, 5),
    nodes=st.integers(1, 30),
)


@settings(max_examples=300, deadline=None)
@given(plans, st.integers(0, 10**6), st.sampled_from([None, GRID, GRID[:5]]))
def test_tree_equals_the_plain_definition(plan, seed, grid):
    expected = plain_tree(plan, seed, grid)
    tree, _ = grown(plan, seed, grid)[0].finish()
    assert list(zip(tree.tokens, tree.parents, strict=True)) == [e[:2] for e in expected]
    assert tree.scores == round_scores([e[2] for e in expected])
    assert tree.depth <= plan.depth


@settings(max_examples=100, deadline=None)
@given(plans, st.integers(0, 10**6))
def test_ranked_ids_follow_the_best_path(plan, seed):
    grower, _ = grown(plan, seed, None)
    _, ranked = grower.finish()
    path = ()
    for ids in ranked:
        tokens, _ = children_of(path, max(plan.width, NUM_RANKED), seed, None)
        assert list(ids) == tokens[:NUM_RANKED].tolist()
        path = (*path, ids[0])


def test_nodes_that_cannot_be_kept_are_not_expanded():
    plan = Plan(kind=PlanKind.TREE, depth=6, width=8, nodes=10)
    _, num_expanded = grown(plan, 1, None)
    assert num_expanded < 6 * 8


@pytest.mark.parametrize("depth", [1, 4])
def test_chain_is_the_best_child_each_time(depth):
    grower, _ = grown(Plan(kind=PlanKind.CHAIN, depth=depth), 3, None)
    tree, ranked = grower.finish()
    assert tree.is_chain
    assert tree.tokens == tuple(ids[0] for ids in ranked)
    assert len(ranked) == depth


def test_scores_survive_the_wire_and_stay_finite():
    assert round_scores([-0.1, -1e9, 0.0]) == (float(np.float16(-0.1)), -60000.0, 0.0)
