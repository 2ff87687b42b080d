"""What rounds teach about ranks and scores."""

import random

import numpy as np
import pytest

from protos.tree import CandidateTree, chain
from verifier_service.planning.acceptance import (
    MAX_RANK,
    RankEvidence,
    ranks_of,
)
from verifier_service.planning.calibration import Calibration


def test_ranks_follow_the_accepted_path_to_the_first_miss():
    draft = chain((5, 6, 7))
    ranked = ((5, 9), (6, 8), (7, 3))
    assert ranks_of(draft, ranked, (5, 6, 7, 1)) == (0, 0, 0)
    assert ranks_of(draft, ranked, (5, 8)) == (0, 1)
    assert ranks_of(draft, ranked, (4,)) == (MAX_RANK,)


def test_a_rank_beyond_the_first_scores_wider_shapes_without_having_drafted_them():
    assert ranks_of(chain((5,)), ((5, 9, 4),), (4,)) == (2,)


def test_ranks_off_the_best_path_come_from_the_children_in_order_of_score():
    tree = CandidateTree((5, 9, 1, 2), (0, 0, 2, 2), (-0.1, -0.5, -0.9, -0.8))
    assert ranks_of(tree, ((5, 9),), (9, 1, 7)) == (1, 1)


def test_an_empty_draft_is_a_miss_at_the_first_depth():
    assert ranks_of(CandidateTree(), (), (3, 4)) == (MAX_RANK,)
    assert ranks_of(CandidateTree(), (), ()) == ()


def test_belief_converges_to_the_drafters_own_rates():
    rng = random.Random(1)
    evidence = RankEvidence()
    for _ in range(400):
        ranks = []
        for p in (0.7, 0.4):
            ranks.append(0 if rng.random() < p else MAX_RANK)
            if ranks[-1]:
                break
        evidence.observe(1, "d", tuple(ranks), 2)
    belief_DK = evidence.belief(1, "d")
    assert belief_DK[0, 0] == pytest.approx(0.7, abs=0.1)
    assert belief_DK[1, 0] == pytest.approx(0.4, abs=0.12)


def test_a_new_request_starts_from_what_others_showed():
    evidence = RankEvidence()
    for _ in range(50):
        evidence.observe(1, "d", (0, 0), 2)
    evidence.forget(1)
    assert evidence.belief(2, "d")[0, 0] > 0.8


def test_depths_never_reached_are_guessed_from_shallower_ones():
    evidence = RankEvidence()
    for _ in range(60):
        evidence.observe(1, "good", (0, 0), 2)
        evidence.observe(1, "bad", (MAX_RANK,), 2)
    assert evidence.overall_belief("good")[5, 0] > 0.7
    assert evidence.overall_belief("bad")[5, 0] < 0.2


def top_run(belief_DK, depth: int) -> float:
    return float(np.cumprod(belief_DK[:depth, 0]).sum())


@pytest.mark.parametrize(("before", "after"), [((0, 0, 0), (MAX_RANK,)), ((MAX_RANK,), (0, 0, 0))])
def test_a_drafter_that_turns_is_believed_within_fifteen_rounds(before, after):
    evidence = RankEvidence()
    for _ in range(300):
        evidence.observe(1, "d", before, 3)
    old = top_run(evidence.belief(1, "d"), 3)
    for _ in range(15):
        evidence.observe(1, "d", after, 3)
    new = top_run(evidence.belief(1, "d"), 3)
    assert (old > 2.5 and new < 0.7) or (old < 0.2 and new > 1.5)


def test_fading_keeps_the_mean_and_some_confidence():
    evidence = RankEvidence()
    for _ in range(200):
        evidence.observe(1, "d", (0,), 1)
    before = evidence.overall_belief("d")[0, 0]
    evidence.fade("d", 1e-6)
    after = evidence.overall_belief("d")[0, 0]
    assert 0.75 < after < before


def _teach(calibration: Calibration, rounds: int, agree_is_right: float) -> None:
    rng = random.Random(3)
    tree = CandidateTree((10, 20, 30), (0, 0, 0), (-0.7, -0.7, -0.7))
    names = (("a",), ("b",), ("a", "b"))
    for _ in range(rounds):
        choice = 30 if rng.random() < agree_is_right else 99
        calibration.observe(1, tree, names, (choice,))


def test_sources_that_agree_are_calibrated_apart_from_each_alone():
    calibration = Calibration()
    _teach(calibration, 200, 0.9)
    tree = CandidateTree((10, 20, 30), (0, 0, 0), (-0.7, -0.7, -0.7))
    alone_a, alone_b, both = calibration.survivals(1, tree, (("a",), ("b",), ("a", "b")))
    assert both == pytest.approx(0.9, abs=0.08)
    assert alone_a < 0.05
    assert alone_b < 0.05


def test_survival_never_rises_towards_the_leaves():
    rng = random.Random(7)
    parents = [rng.randint(0, i) for i in range(30)]
    scores = [rng.uniform(-3, 1) for _ in range(30)]
    tree = CandidateTree(tuple(range(30)), tuple(parents), tuple(scores))
    survival = Calibration().survivals(1, tree, ())
    for index, parent in enumerate(parents):
        assert survival[index] < (survival[parent - 1] if parent else 1.0)


def test_a_boastful_drafter_is_not_believed_for_long():
    calibration = Calibration()
    tree = chain((1, 2, 3), (-0.01, -0.02, -0.03))
    names = (("liar",),) * 3
    before = sum(calibration.survivals(1, tree, names))
    for _ in range(40):
        calibration.observe(1, tree, names, (9,))
    assert sum(calibration.survivals(1, tree, names)) < 0.1 < before
    assert np.isfinite(before)


@pytest.mark.parametrize("order", [("ngram", "head"), ("head", "ngram")])
def test_what_two_sources_agree_on_is_learnt_whoever_came_first(order):
    calibration = Calibration()
    tree = chain((5,), (-0.7,))
    before = calibration.survivals(1, tree, [order])[0]
    for _ in range(50):
        calibration.observe_drafts(2, [("ngram", tree), ("head", tree)], (4,))
    assert calibration.survivals(1, tree, [order])[0] < 0.3 * before
    assert calibration.survivals(1, tree, [order]) == calibration.survivals(1, tree, [order[::-1]])
