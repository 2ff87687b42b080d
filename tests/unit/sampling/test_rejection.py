"""The rejection rule at one row: what its definition says, and the target's distribution."""

import math
from types import SimpleNamespace

import pytest
import torch

from protos.noise import Purpose, draw, gumbel, uniform
from protos.params import Acceptance, SamplingParams
from protos.sparse import SparseQ, sparse_q
from protos.tree import chain
from verifier_service.sampling.choice import ChoiceRow, choose
from verifier_service.sampling.choice_batch import choose_batch
from verifier_service.sampling.rejection import Proposal, choose_by_rejection, draw_again
from verifier_service.sampling.walk import WalkStart, walk

LEAST_P = 1e-4
V = 6
LOGITS = torch.tensor([0.3, 1.9, -0.4, 0.8, -2.0, 1.1])
QS = {
    "near": sparse_q((1, 3, 5, 0), (0.5, 0.2, 0.2, 0.1)),
    "far": sparse_q((4, 2), (0.9, 0.1)),
    "one": sparse_q((4,), (1.0,)),
    "flat": sparse_q(range(V), (1 / V,) * V),
}


def asked(seed: int, **filters: float) -> SamplingParams:
    return SamplingParams(temperature=0.8, seed=seed, acceptance=Acceptance.REJECTION, **filters)


def proposed(q: SparseQ, params: SamplingParams, position: int) -> Proposal:
    return Proposal(q.ids[draw(params.seed, Purpose.DRAFT, position, q.ids, q.weights)], q)


def chi_square(counts: torch.Tensor, expected: torch.Tensor) -> float:
    """p of a chi-square test, by its regularised incomplete gamma function."""
    live = expected > 0
    assert not counts[~live].any(), "a token without probability was chosen"
    value = ((counts[live] - expected[live]) ** 2 / expected[live]).sum()
    freedom = torch.tensor((int(live.sum()) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom, value.double() / 2))


def truth(logits: torch.Tensor, kept: int = V) -> torch.Tensor:
    probs = torch.softmax(logits.double() / 0.8, -1)
    lowest = probs.sort(descending=True).values[kept - 1]
    probs[probs < lowest] = 0.0
    return probs / probs.sum()


@pytest.mark.parametrize("name", QS)
@pytest.mark.parametrize(
    ("filters", "kept"), [({}, V), ({"top_k": 3}, 3), ({"top_p": 0.8}, 3), ({"min_p": 0.2}, 3)]
)
def test_the_token_follows_the_target_whatever_q_is(name, filters, kept):
    counts, count = torch.zeros(V), 2000
    for seed in range(count):
        params = asked(seed, **filters)
        token = choose_by_rejection(LOGITS, params, 9, proposed(QS[name], params, 9))
        counts[token] += 1
    assert chi_square(counts, truth(LOGITS, kept) * count) > LEAST_P


def test_without_a_proposal_the_target_is_sampled():
    counts, count = torch.zeros(V), 2000
    for seed in range(count):
        counts[choose_by_rejection(LOGITS, asked(seed), 9, None)] += 1
    assert chi_square(counts, truth(LOGITS) * count) > LEAST_P


@pytest.mark.parametrize("shared", ["COIN", "RESIDUAL"])
def test_noise_that_is_shared_between_purposes_would_show(monkeypatch, shared):
    """The control: a coin or a residual out of the draft's own noise is found by the same test."""
    purposes = dict(Purpose.__members__) | {shared: Purpose.DRAFT}
    monkeypatch.setattr("verifier_service.sampling.rejection.Purpose", SimpleNamespace(**purposes))
    q = sparse_q((0, 1, 2), (0.6, 0.3, 0.1))
    counts, count = torch.zeros(V), 2000
    for seed in range(count):
        params = asked(seed)
        counts[choose_by_rejection(LOGITS, params, 9, proposed(q, params, 9))] += 1
    assert chi_square(counts, truth(LOGITS) * count) < 1e-9


@pytest.mark.parametrize("name", QS)
def test_coin_and_residual_are_the_definition(name):
    p = truth(LOGITS).tolist()
    q = QS[name]
    num_accepted = 0
    for seed in range(200):
        params = asked(seed)
        proposal = proposed(q, params, 4)
        token = choose_by_rejection(LOGITS, params, 4, proposal)
        ratio = p[proposal.token] / q.probability(proposal.token)
        if uniform(seed, Purpose.COIN, 4) < ratio:
            assert token == proposal.token
            num_accepted += 1
            continue
        noise = gumbel(seed, Purpose.RESIDUAL, torch.tensor([4]), torch.arange(V))[0].tolist()
        left = {t: p[t] - q.probability(t) for t in range(V) if p[t] > q.probability(t)}
        assert token == max(left, key=lambda t: math.log(left[t]) + noise[t])
        assert token != proposal.token
    expected = sum(min(p[t], q.probability(t)) for t in range(V))
    assert abs(num_accepted / 200 - expected) < 4 * math.sqrt(0.25 / 200)


def test_a_q_that_is_p_is_always_accepted():
    probs = (0.5, 0.25, 0.125, 0.0625, 0.0625)
    q = SparseQ(tuple(range(5)), probs)
    logits = torch.tensor(probs).log() * 0.8
    for seed in range(300):
        params = asked(seed)
        proposal = proposed(q, params, 2)
        assert choose_by_rejection(logits, params, 2, proposal) == proposal.token


def test_logits_that_are_not_finite_break_the_row_alone():
    logits = torch.stack([LOGITS, torch.full((V,), float("nan"))])
    params = asked(1)
    rows = [ChoiceRow(n, params, 3, proposed(QS["near"], params, 3)) for n in (1, 0)]
    broken, good = choose(logits, rows)
    assert broken is None
    assert good is not None


def test_a_batch_for_a_device_draws_the_same_tokens():
    logits = torch.randn(12, 200, generator=torch.Generator().manual_seed(3))
    q = sparse_q(range(40), [1 / 40] * 40)
    rows = []
    for n in range(12):
        params = asked(n) if n % 3 else SamplingParams(temperature=n / 10, seed=n)
        proposal = proposed(q, params, n) if n % 2 else None
        rows.append(ChoiceRow(n, params, n, proposal))
    assert choose_batch(logits, rows) == choose(logits, rows)


def test_exact_requests_pass_a_q_over():
    params = SamplingParams(temperature=0.8, seed=5)
    with_q = ChoiceRow(0, params, 3, Proposal(4, QS["one"]))
    assert choose(LOGITS[None], [with_q]) == choose(LOGITS[None], [ChoiceRow(0, params, 3)])


def test_a_chain_is_drawn_again_out_of_its_q():
    q = (QS["near"], QS["flat"], QS["near"])
    params = asked(8)
    honest = [proposed(part, params, 6 + depth).token for depth, part in enumerate(q)]
    assert draw_again(honest, q, params, 6) == tuple(honest)
    for depth in range(3):
        lying = list(honest)
        lying[depth] = next(i for i in q[depth].ids if i != honest[depth])
        assert draw_again(lying, q, params, 6) == tuple(honest[: depth + 1])


def test_the_walk_follows_accepted_tokens_and_ends_with_the_first_refused_one():
    """One path for both rules: a choice that is not the proposed token has no child."""
    logits = LOGITS.repeat(4, 1)
    lengths = set()
    for seed in range(60):
        params = asked(seed)
        drafted = [proposed(QS["near"], params, 10 + depth) for depth in range(3)]
        tree, q = chain([p.token for p in drafted]), (QS["near"],) * 3
        (end,) = walk([WalkStart(tree, 0, params, 10, q)], lambda rows: choose(logits, rows))
        assert end.choices[: end.num_accepted] == tree.tokens[: end.num_accepted]
        assert len(end.choices) == end.num_accepted + 1
        if end.num_accepted < 3:
            assert end.choices[-1] != tree.tokens[end.num_accepted]
        lengths.add(end.num_accepted)
    assert lengths == {0, 1, 2, 3}
