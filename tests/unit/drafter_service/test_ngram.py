"""Prompt look-up against a plain search, and its trees."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drafter_service.ngram.drafter import NgramSession
from drafter_service.ngram.index import (
    LONGEST,
    PRIORS,
    NgramIndex,
    continuation,
    draft_chain,
    draft_tree,
)
from protos.exchange import Plan, PlanKind
from tests.unit.drafter_service.drafter_cases import tokens_only

texts = st.lists(st.integers(0, 4), min_size=1, max_size=60)


def naive_chain(tokens, depth):
    """The definition: longest suffix first, most recent occurrence, copied token by token."""
    for n in range(min(LONGEST, len(tokens)), 0, -1):
        for end in range(len(tokens) - 1, n - 1, -1):
            if tokens[end - n : end] == tokens[-n:]:
                extended = list(tokens)
                for step in range(depth):
                    extended.append(extended[end + step])
                return extended[len(tokens) :]
    return []


def indexed(tokens):
    index = NgramIndex()
    index.extend(tokens)
    return index


@settings(max_examples=300, deadline=None)
@given(texts, st.integers(1, 10))
def test_chain_equals_a_plain_search(tokens, depth):
    assert list(draft_chain(indexed(tokens), tokens, depth).tokens) == naive_chain(tokens, depth)


@settings(max_examples=100, deadline=None)
@given(texts, st.lists(st.integers(1, 7), max_size=12))
def test_growing_in_pieces_equals_indexing_at_once(tokens, pieces):
    index = NgramIndex()
    end = 0
    for piece in pieces:
        end = min(len(tokens), end + piece)
        index.extend(tokens[:end])
    index.extend(tokens)
    assert draft_chain(index, tokens, 6) == draft_chain(indexed(tokens), tokens, 6)


@settings(max_examples=200, deadline=None)
@given(texts, st.integers(1, 6), st.integers(1, 6), st.integers(1, 12))
def test_tree_holds_the_chain_and_keeps_its_bounds(tokens, depth, width, nodes):
    tree = draft_tree(indexed(tokens), tokens, depth, width, nodes)
    chain = draft_chain(indexed(tokens), tokens, depth)
    assert tree.num_nodes <= nodes
    assert tree.depth <= depth
    if nodes >= depth * width:
        table = tree.children()
        node = 0
        for token in chain.tokens:
            node = table[node][token]


@settings(max_examples=100, deadline=None)
@given(texts, st.integers(1, 10))
def test_scores_fall_along_the_chain(tokens, depth):
    scores = draft_chain(indexed(tokens), tokens, depth).scores
    assert list(scores) == sorted(scores, reverse=True)
    assert all(score <= 0.0 for score in scores)


def test_periodic_text_is_continued_past_its_end():
    tokens = [1, 2, 3, 1, 2, 3]
    assert draft_chain(indexed(tokens), tokens, 7).tokens == (1, 2, 3, 1, 2, 3, 1)
    assert continuation([4, 4], 1, 3) == [4, 4, 4]


def test_nothing_is_drafted_when_the_last_token_is_new():
    assert draft_chain(indexed([1, 2, 3]), [1, 2, 3], 4).num_nodes == 0
    assert draft_tree(indexed([1]), [1], 4, 2, 8).num_nodes == 0


def test_longer_agreement_scores_better():
    assert list(PRIORS) == sorted(PRIORS)
    short, long = [9, 1, 5, 8, 1], [9, 3, 1, 5, 8, 9, 3, 1]
    assert draft_chain(indexed(short), short, 1).scores < draft_chain(indexed(long), long, 1).scores


def test_tree_branches_where_earlier_occurrences_went_on_differently():
    tokens = [1, 2, 7, 1, 2, 8, 1, 2]
    tree = draft_tree(indexed(tokens), tokens, 2, 4, 16)
    assert set(tree.children()[0]) == {7, 8}


def session_of(tokens):
    session = NgramSession(1, tokens_only())
    session.extend(tuple(tokens))
    return session


@pytest.mark.parametrize("plan", [Plan(PlanKind.CHAIN, 3), Plan(PlanKind.TREE, 3, 4, 16)])
@pytest.mark.parametrize("tokens", [[1, 2, 7, 1, 2, 8, 1, 2], [3, 3, 3], [9, 2, 5, 1, 2, 7, 1, 2]])
def test_ranked_ids_are_what_every_earlier_occurrence_proposes(tokens, plan):
    """As deep as the best path, its own tokens first; a chain's list names what it left out."""
    session = session_of(tokens)
    tree = session.draft(plan)
    ranked = session.ranked(tree)
    assert [ids[0] for ids in ranked] == [tree.tokens[n - 1] for n in tree.best_path()]
    widest = draft_tree(session.index, tokens, 3, 64, 256)
    table, node = widest.children(), 0
    for ids in ranked:
        assert set(ids) == set(table[node])
        node = table[node][ids[0]]


def test_nothing_is_ranked_where_nothing_is_drafted():
    session = session_of([1, 2, 3])
    assert session.ranked(session.draft(Plan(PlanKind.CHAIN, 4))) == ()
