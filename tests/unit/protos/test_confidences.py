"""A draft's confidences: bounded on the way in, and what they do to its scores."""

import math
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import trees

from protos.confidence_codec import decode_confidences, encode_confidences
from protos.errors import MalformedTree
from protos.tree import CandidateTree, chain

CHAIN = chain([5, 6, 7], [-0.5, -1.0, -4.0])


@pytest.mark.parametrize(
    "data",
    [
        struct.pack("<4e", 0.5, 0.5, 0.5, 0.5),
        struct.pack("<e", float("nan")),
        struct.pack("<e", float("inf")),
        struct.pack("<2e", 0.5, 1.5),
        struct.pack("<e", -0.25),
        b"\x00",
    ],
    ids=["deeper than the draft", "nan", "infinite", "above 1", "below 0", "half a number"],
)
def test_bytes_that_are_no_probabilities_are_refused(data):
    with pytest.raises(MalformedTree):
        decode_confidences(data, CHAIN)


def test_confidences_survive_the_wire():
    assert decode_confidences(encode_confidences([0.75, 0.5]), CHAIN) == (0.75, 0.5)
    assert decode_confidences(b"", CHAIN) == ()


def test_a_draft_without_a_path_takes_none():
    with pytest.raises(MalformedTree):
        decode_confidences(encode_confidences([0.5]), CandidateTree())


def test_a_chain_is_scored_by_its_confidences():
    believed = CHAIN.believing([0.5, 0.25])
    expected = [math.log(0.5), math.log(0.125), math.log(0.125) - 3.0]
    assert believed.scores == pytest.approx(expected)


def test_no_confidence_leaves_a_finite_score():
    assert all(math.isfinite(score) for score in CHAIN.believing([0.0, 0.0, 0.0]).scores)


@given(trees(), st.lists(st.floats(0.0, 1.0), max_size=6))
def test_the_best_path_stays_the_best_and_nodes_stay_below_parents(tree, confidences):
    falling = _falling(tree)
    path = falling.best_path()
    believed = falling.believing(confidences)
    assert (believed.tokens, believed.parents) == (falling.tokens, falling.parents)
    for node, parent in enumerate(believed.parents, 1):
        above = believed.scores[parent - 1] if parent else 0.0
        assert believed.scores[node - 1] <= above + 1e-9
    for node in path[: len(confidences)]:
        for sibling, parent in enumerate(believed.parents, 1):
            if parent == believed.parents[node - 1]:
                assert believed.scores[sibling - 1] <= believed.scores[node - 1] + 1e-9


def _falling(tree: CandidateTree) -> CandidateTree:
    """The same tree with scores that never rise along a path."""
    scores: list[float] = []
    for parent, score in zip(tree.parents, tree.scores, strict=True):
        scores.append((scores[parent - 1] if parent else 0.0) - abs(score) % 7.0)
    return CandidateTree(tree.tokens, tree.parents, tuple(scores))
