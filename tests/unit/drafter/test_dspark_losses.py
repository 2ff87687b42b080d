"""Losses of anchor-first blocks: against definitions, and against the public training code."""

import itertools
import json

import pytest
import torch

from drafter_service.dflash.config import ConfidenceInput, Layout, Markov, MarkovKind
from drafter_service.training.block_loss import Targets
from drafter_service.training.block_targets import decay_weights, draft_rows
from drafter_service.training.blocks import run_blocks
from drafter_service.training.dspark_loss import DsparkLoss, DsparkShape, LossHead, Teacher
from drafter_service.training.dspark_rows import (
    Shares,
    TeacherRows,
    compare_rows,
    rows_by_definition,
)
from drafter_service.training.dspark_targets import PathTargets, exact_rows, top_teacher
from protos.errors import ConfigError
from tests.unit.drafter.block_fakes import GOLDEN, PublicCase, tiny_block, tiny_target
from tests.unit.drafter.training_fakes import VOCAB, tiny_batch, tiny_records

needs_golden = pytest.mark.skipif(not GOLDEN.is_dir(), reason="shared/golden/dflash is not here")
SPARK = {
    "layout": Layout.ANCHOR_FIRST,
    "markov": Markov(MarkovKind.VANILLA, 4),
    "confidence": ConfidenceInput.HIDDEN_AND_TOKEN,
}


def spark_block(seed=0):
    return tiny_block(seed, **SPARK)


def whole_head(lm_head, kept=None):
    kept = torch.arange(len(lm_head)) if kept is None else kept
    index = torch.full((len(lm_head),), -1)
    index[kept] = torch.arange(len(kept))
    return LossHead(lm_head, kept, index)


def some_teacher(num_rows, num_ids, width):
    """Lists with dropped entries and, in every second row, a label that is not listed."""
    ids = torch.stack([torch.randperm(width)[: num_ids + 1] for _ in range(num_rows)])
    probs = torch.rand(num_rows, num_ids + 1).softmax(-1) * 0.8
    listed = torch.rand(num_rows, num_ids + 1) > 0.3
    listed[:, 0], listed[:, -1] = True, False
    labels = torch.zeros(num_rows, num_ids + 1)
    labels[0::2, -1] = 1.0
    labels[1::2, 0] = 1.0
    counts = listed | (labels > 0)
    ids = torch.where(counts, ids, ids[:, :1])
    return TeacherRows(ids[:, 0], ids, probs * listed, listed, labels)


@pytest.mark.parametrize("shares", [Shares(), Shares(1.0, 0.0), Shares(0.0, 1.0)])
def test_compared_rows_and_all_their_gradients_equal_the_definition(shares):
    torch.manual_seed(1)
    hidden = torch.randn(600, 16, requires_grad=True)
    factors, w2 = torch.randn(600, 4, requires_grad=True), torch.randn(50, 4, requires_grad=True)
    rows, teacher, weights = torch.randn(50, 16), some_teacher(600, 6, 50), torch.rand(600)
    given = (hidden, factors, w2)
    logits = hidden @ rows.T + factors @ w2.T
    ce, l1 = rows_by_definition(logits, teacher)
    expected = (weights * (shares.ce * ce + shares.l1 * l1)).sum()
    total, figures = compare_rows((hidden, factors), (rows, w2), teacher, weights, shares)
    torch.testing.assert_close(total, expected)
    torch.testing.assert_close(figures.ce, ce.detach())
    torch.testing.assert_close(figures.l1, l1.detach())
    assert torch.equal(figures.hits, logits.argmax(-1) == teacher.wanted)
    expected_grads = torch.autograd.grad(expected * 3, given)
    for grad, wanted in zip(torch.autograd.grad(total * 3, given), expected_grads, strict=True):
        torch.testing.assert_close(grad, wanted, atol=2e-4, rtol=1e-4)


def test_listing_every_id_gives_the_exact_distance_and_lists_never_more():
    torch.manual_seed(2)
    logits, target = torch.randn(30, 40), torch.randn(30, 40) * 2
    p, q = target.softmax(-1), logits.softmax(-1)
    exact = (p - q).abs().sum(-1)
    order = p.argsort(descending=True)
    found = []
    for num in (1, 6, 20, 40):
        ids = order[:, :num]
        every = torch.ones(ids.shape, dtype=torch.bool)
        teacher = TeacherRows(ids[:, 0], ids, p.gather(1, ids), every, torch.zeros(ids.shape))
        found.append(rows_by_definition(logits, teacher)[1])
    torch.testing.assert_close(found[-1], exact, atol=1e-5, rtol=1e-5)
    for fewer, more in itertools.pairwise(found):
        assert bool((fewer <= more + 1e-6).all())


def test_a_confident_row_keeps_its_small_gradient_in_bfloat16():
    rows = torch.zeros(8, 4, dtype=torch.bfloat16)
    rows[0, 0], rows[1, 1] = 1.0, 1.0
    hidden = torch.tensor([[9.0, 0.0, 0.0, 0.0]], dtype=torch.bfloat16, requires_grad=True)
    factor, w2 = torch.zeros(1, 2, dtype=torch.bfloat16), torch.zeros(8, 2, dtype=torch.bfloat16)
    one, ids = torch.ones(1, 1), torch.tensor([[0]])
    teacher = TeacherRows(ids[0], ids, one, one.bool(), one)
    compare_rows((hidden, factor), (rows, w2), teacher, torch.ones(1), Shares())[0].backward()
    exact = hidden.detach().float().requires_grad_()
    ce, l1 = rows_by_definition(exact @ rows.float().T, teacher)
    (0.1 * ce + 0.9 * l1).sum().backward()
    torch.testing.assert_close(hidden.grad.float(), exact.grad, atol=0, rtol=0.02)
    assert float(exact.grad[0, 0]) < 0


@pytest.mark.parametrize("targets", list(Targets))
def test_lists_say_of_a_draft_what_the_record_says(targets):
    records = tiny_records(6)
    batch = tiny_batch(records, (4,))
    answer = records[4].ids[records[4].prompt_len :]
    kept = torch.arange(VOCAB)
    kept = kept[kept != int(batch.top_ids[3, 2])]
    head = whole_head(tiny_target().lm_head, kept)
    drafts = draft_rows(batch, torch.tensor([2]), 3)
    found = top_teacher(batch, drafts, head.index, targets)
    assert found.counted.tolist() == [[True, True, True]]
    assert found.before.tolist() == [answer[2:5].tolist()]
    assert kept[found.teacher.wanted].tolist() == answer[3:6].tolist()
    probs = batch.top_logps[3].exp()
    row = found.teacher
    listed = [place for place in range(6) if place != 2]
    assert row.listed[1, :6].tolist() == [place != 2 for place in range(6)]
    torch.testing.assert_close(row.probs[1, listed], probs[listed])
    assert kept[row.ids[1, listed]].tolist() == batch.top_ids[3, listed].tolist()
    if targets is Targets.HARD:
        assert float(row.labels[1].sum()) == float(row.labels[1, 0]) == 1.0
    else:
        torch.testing.assert_close(row.labels[1, listed], probs[listed] / probs[listed].sum())


def test_a_recorded_id_outside_the_target_s_list_is_a_label_of_its_own():
    records = tiny_records(6)
    batch = tiny_batch(records, (4,))
    batch.ids[4] = (batch.top_ids[3, 0] - 1) % VOCAB
    drafts = draft_rows(batch, torch.tensor([2]), 3)
    row = top_teacher(batch, drafts, torch.arange(VOCAB), Targets.HARD).teacher
    assert int(row.ids[1, -1]) == int(batch.ids[4])
    assert row.labels[1].tolist() == [0.0] * 6 + [1.0]
    assert not bool(row.listed[1, -1])


def test_a_block_counts_up_to_its_first_draft_without_a_target():
    batch = tiny_batch(tiny_records(6), (4, 2))
    last = batch.records[0].answer.stop - 1
    index = torch.arange(VOCAB)
    drafts = draft_rows(batch, torch.tensor([1, last - 1, last]), 4)
    hard = top_teacher(batch, drafts, index, Targets.HARD).counted
    assert hard.tolist() == [[True] * 4, [True, False, False, False], [False] * 4]
    index[batch.ids[3]] = -1
    cut = top_teacher(batch, drafts, index, Targets.HARD).counted
    assert cut[0].tolist() == [True, False, False, False]


@needs_golden
@pytest.mark.parametrize(
    ("case", "gamma", "shares"),
    [
        ("default", 4.0, Shares()),
        ("ce_only", 4.0, Shares(1.0, 0.0)),
        ("no_decay", 1e9, Shares()),
    ],
)
def test_losses_and_gradients_equal_the_public_training_code(tmp_path, case, gamma, shares):
    public = PublicCase("dspark_vanilla", tmp_path)
    told = json.loads((GOLDEN / "losses.json").read_text())["deepspec"]["dspark_vanilla"][case]
    head = whole_head(public.lm_head)
    confidence = 0.0 if case == "ce_only" else 1.0
    shape = DsparkShape(
        1.0, teacher=Teacher.FINAL, gamma=gamma, shares=shares, confidence=confidence
    )
    loss = DsparkLoss(public.net, head, shape)
    total, denominator = torch.zeros(()), 0.0
    for text in (0, 1):
        batch, anchors = public.batch(text), public.anchors(text)
        compared = _as_public(public, text, batch, anchors)
        found = loss.of_blocks(run_blocks(public.net, batch, anchors), compared)
        total, denominator = total + found.total, denominator + found.denominator
        _check_rows(public, text, batch, anchors, compared)
    numbers = told["metrics_num_den"]
    assert denominator == pytest.approx(numbers["ce_loss"][1], rel=1e-5)
    assert float(total.detach()) / denominator == pytest.approx(told["loss"], rel=1e-5)
    if "grad_norm_fc" not in told:
        return
    (total / denominator).backward()
    net = public.net
    norms = {
        "fc": net.fc.weight.grad.norm(),
        "markov_w1": net.markov_head.markov_w1.weight.grad.norm(),
        "confidence": net.confidence_head.proj.weight.grad.norm(),
    }
    for name, norm in norms.items():
        assert float(norm) == pytest.approx(told[f"grad_norm_{name}"], rel=2e-4), name
    torch.testing.assert_close(
        net.fc.weight.grad, public.io["dspark.grad_fc"], atol=1e-5, rtol=1e-3
    )


def _as_public(public, text, batch, anchors) -> PathTargets:
    """What the public code compared, its masks with holes included."""
    counted = public.kept(text, "dspark.eval_mask")
    drafts = draft_rows(batch, anchors, 7)
    rows = drafts.rows[counted]
    labels = public.kept(text, "dspark.labels")[counted]
    every = (public.lm_head, torch.arange(512))
    teacher = exact_rows(batch.final[rows], batch.choices[rows], labels, every)
    return PathTargets(counted, batch.ids[drafts.rows], teacher)


def _check_rows(public, text, batch, anchors, compared):
    counted, net = compared.counted, public.net
    weights = public.kept(text, "dspark.loss_weights")
    torch.testing.assert_close(decay_weights(counted, 4.0), weights)
    with torch.no_grad():
        normed = net.norm(run_blocks(net, batch, anchors)[counted])
        factors = net.markov_head.token_rows(compared.before[counted])
        w2 = net.markov_head.markov_w2.weight
        ones = torch.ones(len(normed))
        _, figures = compare_rows(
            (normed, factors), (public.lm_head, w2), compared.teacher, ones, Shares()
        )
        said = net.confidence_head.logits(normed, factors)
        drafted = (net.logits(normed) + factors @ w2.T).argmax(-1)
    near = {"atol": 1e-4, "rtol": 1e-4}
    expected = public.kept(text, "dspark_vanilla.ce_per_slot")[counted]
    torch.testing.assert_close(figures.ce, expected, **near)
    expected = public.kept(text, "dspark_vanilla.accept_rate_per_slot")[counted]
    torch.testing.assert_close(1 - figures.l1 / 2, expected, **near)
    expected = public.kept(text, "dspark_vanilla.confidence_pred")[counted]
    torch.testing.assert_close(said, expected, **near)
    assert torch.equal(drafted, public.kept(text, "dspark_vanilla.draft_argmax")[counted])


@pytest.mark.parametrize("teacher", list(Teacher))
@pytest.mark.parametrize("targets", list(Targets))
def test_losses_of_passes_add_up_to_the_loss_of_the_whole(teacher, targets):
    net, records = spark_block(), tiny_records(9)
    head = whole_head(tiny_target().lm_head, torch.arange(3, VOCAB))
    loss = DsparkLoss(net, head, DsparkShape(0.5, targets, teacher))
    whole = loss(tiny_batch(records, tuple(range(9))), 3)
    parts = [loss(tiny_batch(records, share), 3) for share in ((0, 3, 6), (1, 4, 7), (2, 5, 8))]
    assert float(whole.total.detach()) == pytest.approx(
        sum(float(part.total.detach()) for part in parts), rel=1e-5
    )
    assert whole.denominator == pytest.approx(sum(part.denominator for part in parts))
    counts = zip(*[part.steps.counts for part in parts], strict=True)
    assert whole.steps.counts == tuple(sum(count) for count in counts)
    assert whole.steps.counts[0] > 0


def test_a_batch_without_anchors_costs_nothing_and_still_differentiates():
    net, records = spark_block(), tiny_records(2)
    loss = DsparkLoss(net, whole_head(tiny_target().lm_head), DsparkShape(1e-9))
    found = loss(tiny_batch(records, (0,)), 0)
    found.total.backward()
    assert (found.denominator, float(found.total.detach())) == (0.0, 0.0)


def test_a_block_without_the_small_heads_is_refused():
    with pytest.raises(ConfigError, match="serial head"):
        DsparkLoss(tiny_block(), whole_head(tiny_target().lm_head), DsparkShape(1.0))
