"""Ranking of children: ties, filters, mixtures of requests, values that are not finite."""

import math

import pytest
import torch

from drafter_service.ranking import NodeRows, rank_children
from drafter_service.topk import stable_topk
from protos.params import SamplingParams

GREEDY = SamplingParams(temperature=0.0)


def random_logits(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("count", [1, 3, 8, 40])
@pytest.mark.parametrize("levels", [1, 2, 5, 1000])
def test_topk_is_a_stable_sort(count, levels):
    generator = torch.Generator().manual_seed(levels)
    values = torch.randint(0, levels, (6, 300), generator=generator).float()
    ids, best = stable_topk(values, count)
    expected = values.sort(dim=-1, descending=True, stable=True)
    assert ids.tolist() == expected.indices[:, :count].tolist()
    assert best.tolist() == expected.values[:, :count].tolist()


def test_greedy_scores_are_log_probabilities():
    logits = random_logits(3, 50)
    ranked = rank_children(logits, [NodeRows(3, GREEDY, 5)], torch.arange(50), 50)
    expected = logits.log_softmax(-1).gather(1, torch.from_numpy(ranked.ids))
    torch.testing.assert_close(torch.from_numpy(ranked.scores).float(), expected)
    assert torch.from_numpy(ranked.scores).exp().sum(-1).tolist() == pytest.approx([1.0] * 3)


def test_more_children_than_the_vocabulary_has_are_all_of_it():
    assert rank_children(
        torch.zeros(1, 3), [NodeRows(1, GREEDY, 0)], torch.arange(3), 9
    ).ids.shape == (
        1,
        3,
    )


@pytest.mark.parametrize(
    ("filters", "kept"),
    [({"top_k": 2}, 2), ({"top_p": 0.5}, 1), ({"top_p": 0.75}, 2), ({"min_p": 0.35}, 2), ({}, 4)],
)
def test_filtered_ids_are_never_children(filters, kept):
    logits = torch.tensor([[0.6, 0.25, 0.1, 0.05]]).log()
    params = SamplingParams(temperature=1.0, seed=1, **filters)
    ranked = rank_children(logits, [NodeRows(1, params, 3)], torch.arange(4), 4)
    alive = ranked.scores[0] > -math.inf
    assert sorted(ranked.ids[0][alive].tolist()) == list(range(kept))


def test_rows_of_many_requests_are_ranked_as_if_alone():
    logits = random_logits(7, 60)
    groups = [
        NodeRows(2, SamplingParams(temperature=0.8, seed=4), 9),
        NodeRows(1, GREEDY, 3),
        NodeRows(4, SamplingParams(temperature=1.2, seed=5, top_k=12), 4),
    ]
    together = rank_children(logits, groups, torch.arange(60), 8)
    first = 0
    for group in groups:
        rows = slice(first, first + group.num_rows)
        alone = rank_children(logits[rows], [group], torch.arange(60), 8)
        assert together.ids[rows].tolist() == alone.ids.tolist()
        assert together.scores[rows].tolist() == alone.scores.tolist()
        first = rows.stop


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("params", [GREEDY, SamplingParams(temperature=1.0, seed=1)])
def test_rows_that_are_not_finite_are_named(value, params):
    logits = random_logits(3, 20)
    logits[1, 4] = value
    ranked = rank_children(logits, [NodeRows(3, params, 0)], torch.arange(20), 4)
    assert ranked.finite.tolist() == [True, False, True]
