"""Chains for `acceptance: rejection` out of logits: each token from its q, in any company.

The draft model's are tested in `test_draft_model`, against its plain definition.
"""

import torch

from drafter_service.ranking import NodeRows, rank_children
from drafter_service.sampled import draw_chain_tokens
from drafter_service.service import plan_problem
from protos.exchange import Capabilities, DraftStatus, Plan, PlanKind
from protos.features import FeatureForm
from protos.noise import Purpose, draw
from protos.params import Acceptance, SamplingParams
from protos.sparse import MAX_Q_IDS
from tests.unit.drafter_service.drafter_cases import opening, rows_of, work
from tests.unit.drafter_service.eagle3_cases import (
    DRAFT_VOCAB,
    RAW_WIDTH,
    eagle3_drafter,
    features_of,
    tiny_head,
    tokens_of,
)

W = 200
IDS = torch.arange(W) * 3
LOGITS = 3.0 * torch.randn(5, W, generator=torch.Generator().manual_seed(1))


def asked(seed: int = 4, **filters: float) -> SamplingParams:
    return SamplingParams(temperature=0.7, seed=seed, acceptance=Acceptance.REJECTION, **filters)


def test_q_is_the_drafters_own_distribution_cut_to_its_best_ids():
    drawn = draw_chain_tokens(LOGITS, [asked()] * 5, range(5), IDS)
    for row, found in enumerate(drawn):
        best = LOGITS[row].topk(MAX_Q_IDS).indices
        assert found.q.ids == tuple((3 * best).tolist())
        expected = torch.softmax(LOGITS[row, best].double() / 0.7, -1)
        shares = torch.tensor([found.q.probability(i) for i in found.q.ids])
        torch.testing.assert_close(shares.double(), expected, atol=1e-3, rtol=1e-3)
        index = draw(4, Purpose.DRAFT, row, found.q.ids, found.q.weights)
        assert found.token == found.q.ids[index]


def test_filters_narrow_q():
    for filters, most in (({"top_k": 3}, 3), ({"top_p": 0.5}, 20), ({"min_p": 0.2}, 20)):
        (found,) = draw_chain_tokens(LOGITS[:1], [asked(**filters)], [0], IDS)
        assert 1 <= len(found.q.ids) <= most
        assert found.q.ids[0] == 3 * int(LOGITS[0].argmax())
    (one,) = draw_chain_tokens(LOGITS[:1], [asked(top_p=1e-6)], [0], IDS)
    assert len(one.q.ids) == 1


def test_tokens_are_drawn_in_proportion_to_q():
    counts: dict[int, int] = {}
    logits = torch.tensor([[2.0, 1.0, 0.0]])
    for seed in range(1500):
        (found,) = draw_chain_tokens(logits, [asked(seed)], [7], IDS[:3])
        counts[found.token] = counts.get(found.token, 0) + 1
    shares = {i: found.q.probability(i) for i in found.q.ids}
    value = sum((counts[i] - 1500 * p) ** 2 / (1500 * p) for i, p in shares.items())
    assert value < 18.4  # p = 1e-4 with two degrees of freedom


def test_rows_that_are_not_finite_draw_nothing():
    broken = torch.stack([LOGITS[0], torch.full((W,), float("nan"))])
    good, bad = draw_chain_tokens(broken, [asked()] * 2, [0, 1], IDS)
    assert good is not None
    assert bad is None


def test_sampled_rows_stand_beside_greedy_and_noised_ones():
    groups = [
        NodeRows(1, SamplingParams(temperature=0.0), 3),
        NodeRows(2, asked(), 3),
        NodeRows(2, SamplingParams(temperature=0.7, seed=4), 3),
    ]
    together = rank_children(LOGITS, groups, IDS, 8)
    first = 0
    for group in groups:
        rows = slice(first, first + group.num_rows)
        first = rows.stop
        alone = rank_children(LOGITS[rows], [group], IDS, 8)
        assert alone.ids.tolist() == together.ids[rows].tolist()
        assert alone.scores.tolist() == together.scores[rows].tolist()
    assert [q is not None for q in together.q] == [False, True, True, False, False]
    for row in (1, 2):
        ids = together.ids[row].tolist()
        assert len(set(ids)) == 8
        assert ids[1:] == [i for i in together.q[row].ids if i != ids[0]][:7]


def test_a_head_hands_over_the_q_of_every_token():
    drafter = eagle3_drafter(tiny_head(), gives_q=True)
    tokens, params = tokens_of(9), asked()
    given = work(
        7,
        tokens,
        plan=Plan(PlanKind.CHAIN, 5),
        open=opening(FeatureForm.RAW, RAW_WIDTH, params=params),
        rows=rows_of(features_of(8)),
    )
    (result,) = drafter.handle([given])
    assert result.status is DraftStatus.OK
    assert result.tree.num_nodes == len(result.q) == 5
    for depth, (token, q) in enumerate(zip(result.tree.tokens, result.q, strict=True)):
        assert len(q.ids) == min(DRAFT_VOCAB, MAX_Q_IDS)
        assert token == q.ids[draw(4, Purpose.DRAFT, 9 + depth, q.ids, q.weights)]


def test_trees_and_drafters_without_q_are_refused():
    kinds = tuple(PlanKind)
    sizes = {"max_depth": 8, "max_width": 8, "max_nodes": 32}
    able = Capabilities("k", "n", 1, kinds, gives_q=True, **sizes)
    unable = Capabilities("k", "n", 1, kinds, **sizes)
    trees = [
        Plan(PlanKind.TREE, 3, 2, 6),
        Plan(PlanKind.STATIC, 3, 1, 6),
        Plan(PlanKind.BLOCK, 4, 1, 8),
    ]
    chains = [Plan(PlanKind.CHAIN, 3), Plan(PlanKind.BLOCK, 4), Plan()]
    assert all(plan_problem(plan, able, asked()) for plan in trees)
    assert not any(plan_problem(plan, able, asked()) for plan in chains)
    assert plan_problem(chains[0], unable, asked())
    assert not plan_problem(trees[0], unable, SamplingParams())
