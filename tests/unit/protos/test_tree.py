"""Candidate trees against plain references: best nodes, re-rooting, merging."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protos.errors import MalformedTree
from protos.tree import CandidateTree, chain, merge
from tests.unit.protos.strategies import tokens, trees


def paths(tree):
    """Node -> tokens from the anchor down; node 0 is the anchor. The plainest view of a tree."""
    found = {0: ()}
    for node, (token, parent) in enumerate(zip(tree.tokens, tree.parents, strict=True), 1):
        found[node] = (*found[parent], token)
    return found


def scored_paths(tree):
    """Path -> score, the anchor left out."""
    return {path: tree.scores[node - 1] for node, path in paths(tree).items() if node}


def least_on_path(tree, node):
    """The smallest score from the anchor's child down to `node`."""
    least = tree.scores[node - 1]
    while node := tree.parents[node - 1]:
        least = min(least, tree.scores[node - 1])
    return least


@given(trees(), st.integers(-1, 14))
def test_best_keeps_the_highest_scores_closed_under_parents(tree, num_nodes):
    kept = tree.best(num_nodes)
    assert kept.num_nodes == min(max(num_nodes, 0), tree.num_nodes)
    before, after = scored_paths(tree), scored_paths(kept)
    assert all(before[path] == score for path, score in after.items())
    assert [p for p in before if p in after] == list(after), "order is kept"
    everyone = list(paths(tree).items())[1:]
    inside = [least_on_path(tree, node) for node, path in everyone if path in after]
    outside = [least_on_path(tree, node) for node, path in everyone if path not in after]
    assert not inside or not outside or min(inside) >= max(outside)


@given(trees(max_nodes=7), st.integers(0, 7))
def test_best_equals_the_best_of_all_closed_subsets(tree, num_nodes):
    """Plain search, by the smallest and then the sum of effective scores."""
    size = min(num_nodes, tree.num_nodes)
    effective = [least_on_path(tree, node) for node in range(1, tree.num_nodes + 1)]
    closed = [
        nodes
        for nodes in itertools.combinations(range(1, tree.num_nodes + 1), size)
        if all(tree.parents[n - 1] in (0, *nodes) for n in nodes)
    ]
    most = max(sum(effective[n - 1] for n in nodes) for nodes in closed)
    kept = set(scored_paths(tree.best(size)))
    chosen = [n for n, path in paths(tree).items() if path in kept]
    assert sum(effective[n - 1] for n in chosen) == pytest.approx(most)


@given(trees(), st.lists(tokens, max_size=4))
def test_reroot_keeps_exactly_the_paths_below_the_committed_tokens(tree, committed):
    committed = tuple(committed)
    expected = {
        path[len(committed) :]: score
        for path, score in scored_paths(tree).items()
        if path[: len(committed)] == committed and len(path) > len(committed)
    }
    base = scored_paths(tree).get(committed, 0.0)
    rooted = scored_paths(tree.reroot(committed))
    assert list(rooted) == list(expected)
    assert [score + base for score in rooted.values()] == pytest.approx(list(expected.values()))


@given(trees(), st.data())
def test_reroot_along_an_own_path_in_two_steps_equals_one(tree, data):
    path = data.draw(st.sampled_from(list(paths(tree).values())))
    cut = data.draw(st.integers(0, len(path)))
    once = tree.reroot(path)
    twice = tree.reroot(path[:cut]).reroot(path[cut:])
    assert scored_paths(once).keys() == scored_paths(twice).keys()


@given(st.lists(trees(), max_size=4))
def test_merge_is_the_union_of_paths_with_the_better_scores(given_trees):
    merged, sources = merge(given_trees)
    union = {}
    proposed = {}
    for index, tree in enumerate(given_trees):
        for path, score in scored_paths(tree).items():
            union[path] = max(score, union.get(path, score))
            proposed.setdefault(path, []).append(index)
    assert scored_paths(merged) == union
    for node, path in list(paths(merged).items())[1:]:
        assert list(sources[node - 1]) == proposed[path]


@given(trees())
def test_depths_children_and_shape_agree_with_paths(tree):
    found = paths(tree)
    assert tree.depths() == tuple(len(found[n]) for n in range(1, tree.num_nodes + 1))
    assert tree.depth == max(map(len, found.values()))
    for node, children in enumerate(tree.children()):
        assert all(found[child] == (*found[node], token) for token, child in children.items())
    assert tree.is_chain == (tree.depth == tree.num_nodes)


def test_a_chain_is_a_chain():
    assert chain([5, 6, 7]) == CandidateTree((5, 6, 7), (0, 1, 2), (0.0, 0.0, 0.0))
    assert chain([]).is_chain
    assert not CandidateTree((1, 2), (0, 0), (0.0, 0.0)).is_chain


@pytest.mark.parametrize(
    ("given_tokens", "parents", "scores"),
    [
        ((1,), (1,), (0.0,)),
        ((1,), (-1,), (0.0,)),
        ((1, 1), (0, 0), (0.0, 0.0)),
        ((1, 2), (0,), (0.0, 0.0)),
        ((1, 2), (0, 1), (0.0,)),
        ((1, 2, 1), (0, 3, 0), (0.0, 0.0, 0.0)),
    ],
)
def test_what_is_no_tree_is_refused(given_tokens, parents, scores):
    with pytest.raises(MalformedTree):
        CandidateTree(given_tokens, parents, scores)


@given(trees(), st.lists(tokens, max_size=6))
def test_following_stops_where_the_tokens_leave_the_tree(tree, text):
    named = {path: node for node, path in paths(tree).items()}
    expected = []
    for length in range(1, len(text) + 1):
        if tuple(text[:length]) not in named:
            break
        expected.append(named[tuple(text[:length])])
    assert list(tree.follow(text)) == expected
