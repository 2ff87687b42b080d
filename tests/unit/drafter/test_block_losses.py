"""Losses of block drafters: against definitions, and against the public training code."""

import json

import pytest
import torch

from drafter_service.training.block_loss import BlockLoss, BlockLossShape, Targets, Weighting
from drafter_service.training.block_targets import (
    Compared,
    decay_weights,
    dpace_weights,
    draft_rows,
    hard_targets,
    top_targets,
)
from drafter_service.training.blocks import run_blocks
from drafter_service.training.sparse_loss import SparseTargets, cross_entropy, row_losses
from tests.unit.drafter.block_fakes import GOLDEN, PublicCase, tiny_block, tiny_target
from tests.unit.drafter.training_fakes import VOCAB, tiny_batch, tiny_records

needs_golden = pytest.mark.skipif(not GOLDEN.is_dir(), reason="shared/golden/dflash is not here")


def test_row_losses_and_their_gradients_equal_the_definition():
    torch.manual_seed(1)
    hidden, weight = torch.randn(600, 16, requires_grad=True), torch.randn(50, 16)
    ids = torch.stack([torch.randperm(50)[:4] for _ in range(600)])
    probs = torch.rand(600, 4)
    dropped = torch.rand(600, 4) < 0.3
    dropped[:, 0] = False
    probs, ids = probs.masked_fill(dropped, 0.0), torch.where(dropped, ids[:, :1], ids)
    targets, weights = SparseTargets(ids, probs), torch.rand(600)
    expected = cross_entropy(hidden @ weight.T, targets)
    (expected_grad,) = torch.autograd.grad((expected * weights).sum(), hidden)
    found = row_losses(hidden, weight, targets)
    (grad,) = torch.autograd.grad((found.losses * weights).sum(), hidden)
    torch.testing.assert_close(found.losses, expected)
    torch.testing.assert_close(grad, expected_grad, atol=1e-5, rtol=1e-5)
    assert torch.equal(found.hits, (hidden @ weight.T).argmax(-1) == ids[:, 0])


def test_a_confident_row_keeps_its_small_gradient_in_bfloat16():
    weight = torch.zeros(8, 4, dtype=torch.bfloat16)
    weight[0, 0], weight[1, 1] = 1.0, 1.0
    hidden = torch.tensor([[9.0, 0.0, 0.0, 0.0]], dtype=torch.bfloat16, requires_grad=True)
    targets = SparseTargets(torch.tensor([[0]]), torch.ones(1, 1))
    row_losses(hidden, weight, targets).losses.sum().backward()
    exact = hidden.detach().float().requires_grad_()
    cross_entropy(exact @ weight.float().T, targets).sum().backward()
    torch.testing.assert_close(hidden.grad.float(), exact.grad, atol=0, rtol=0.02)
    assert float(exact.grad[0, 0]) < 0


def test_draft_j_is_compared_with_the_id_and_the_choice_that_many_rows_on():
    records = tiny_records(6)
    batch = tiny_batch(records, (4,))
    record, index = records[4], torch.arange(VOCAB)
    drafts = draft_rows(batch, torch.tensor([2]), 3)
    answer = record.ids[record.prompt_len :]
    hard = hard_targets(batch, drafts, index)
    assert hard.targets.ids[:, 0].tolist() == answer[3:6].tolist()
    top = top_targets(batch, drafts, index)
    assert top.targets.ids[:, 0].tolist() == answer[3:6].tolist()
    torch.testing.assert_close(top.targets.probs.sum(-1), torch.ones(3))


def test_drafts_past_a_record_or_outside_the_loss_vocabulary_do_not_count():
    batch = tiny_batch(tiny_records(6), (4, 2))
    last = batch.records[0].answer.stop - 1
    index = torch.arange(VOCAB)
    drafts = draft_rows(batch, torch.tensor([last - 1, last]), 3)
    assert hard_targets(batch, drafts, index).counted.tolist() == [
        [True, False, False],
        [False] * 3,
    ]
    index[batch.ids[last]] = -1
    assert not hard_targets(batch, drafts, index).counted.any()


def test_dropped_ids_of_a_list_give_their_share_to_the_others():
    batch = tiny_batch(tiny_records(6), (4,))
    index = torch.arange(VOCAB)
    index[batch.top_ids[1, 1:3]] = -1
    compared = top_targets(batch, draft_rows(batch, torch.tensor([1]), 1), index)
    probs = compared.targets.probs[0]
    assert probs[1:3].tolist() == [0.0, 0.0]
    assert float(probs.sum()) == pytest.approx(1.0)
    assert compared.targets.ids[0, 1] == compared.targets.ids[0, 0]


def test_dpace_weighs_a_draft_by_all_that_its_acceptance_leads_to():
    losses = torch.tensor([[0.1, 2.0, 0.7, 0.3]])
    counted = torch.tensor([[True, True, False, True]])
    q = [0.5 * float(torch.exp(-loss)) + 0.5 for loss in losses[0]]
    first, second, last = q[0], q[0] * q[1], q[0] * q[1] * q[3]
    expected = [first + second + last, second + last, 0.0, last]
    assert dpace_weights(losses, counted, 0.5)[0].tolist() == pytest.approx(expected)


@needs_golden
@pytest.mark.parametrize(
    ("weighting", "case"),
    [(Weighting.DECAY, "dflash_ce_gamma4"), (Weighting.DPACE, "dflash_dpace_a0.5")],
)
def test_in_place_losses_and_gradients_equal_the_public_training_code(tmp_path, weighting, case):
    public = PublicCase("dflash_inplace", tmp_path)
    told = json.loads((GOLDEN / "losses.json").read_text())["specforge"][case]
    shape = BlockLossShape(1.0, Targets.HARD, weighting)
    loss = BlockLoss(public.net, public.lm_head, torch.arange(512), shape)
    total, denominator = torch.zeros(()), 0.0
    for text in (0, 1):
        batch, anchors = public.batch(text), public.anchors(text)
        hidden = run_blocks(public.net, batch, anchors)
        expected = public.kept(text, "inplace.hidden")
        torch.testing.assert_close(public.net.norm(hidden), expected, atol=1e-4, rtol=0)
        counted = public.kept(text, "inplace.weight_mask_before_decay")[:, 1:] > 0
        labels = public.kept(text, "inplace.labels")[:, 1:][counted][:, None]
        compared = Compared(counted, SparseTargets(labels, torch.ones(labels.shape)))
        losses, _ = loss.slot_losses(hidden, compared)
        expected = public.kept(text, "inplace.ce_per_slot")[:, 1:] * counted
        torch.testing.assert_close(losses, expected, atol=1e-4, rtol=0)
        weights, part = loss.weights(losses, counted)
        if weighting is Weighting.DPACE:
            expected = public.kept(text, "inplace.dpace_weights_a0.5")[:, 1:] * counted
            torch.testing.assert_close(weights, expected)
        total, denominator = total + (losses * weights).sum(), denominator + part
    assert float(total.detach()) == pytest.approx(told["loss_numerator"], rel=1e-5)
    if weighting is Weighting.DECAY:
        assert denominator == pytest.approx(told["loss_denominator"], rel=1e-6)
        (total / denominator).backward()
        net = public.net
        torch.testing.assert_close(net.fc.weight.grad, public.io["inplace.grad_fc"])
        k_proj = net.layers[0].self_attn.k_proj.weight
        torch.testing.assert_close(k_proj.grad, public.io["inplace.grad_layer0_k_proj"])


@needs_golden
def test_labels_of_the_public_training_code_are_those_found_here(tmp_path):
    public = PublicCase("dflash_inplace", tmp_path)
    for text in (0, 1):
        batch, anchors = public.batch(text), public.anchors(text)
        found = hard_targets(batch, draft_rows(batch, anchors, 7), torch.arange(512))
        expected = public.kept(text, "inplace.labels")[:, 1:]
        assert torch.equal(found.targets.ids[:, 0], expected[found.counted])
        public_mask = public.kept(text, "inplace.weight_mask_before_decay")[:, 1:] > 0
        assert bool((found.counted | ~public_mask).all())


def test_losses_of_passes_add_up_to_the_loss_of_the_whole():
    net, records = tiny_block(), tiny_records(9)
    shape = BlockLossShape(0.5)
    loss = BlockLoss(net, tiny_target().lm_head, torch.arange(VOCAB), shape)
    whole = loss(tiny_batch(records, tuple(range(9))), 3)
    parts = [loss(tiny_batch(records, share), 3) for share in ((0, 3, 6), (1, 4, 7), (2, 5, 8))]
    assert float(whole.total.detach()) == pytest.approx(
        sum(float(part.total.detach()) for part in parts), rel=1e-5
    )
    assert whole.denominator == pytest.approx(sum(part.denominator for part in parts))
    counts = zip(*[part.steps.counts for part in parts], strict=True)
    assert whole.steps.counts == tuple(sum(count) for count in counts)


def test_a_batch_without_anchors_costs_nothing_and_still_differentiates():
    net, records = tiny_block(), tiny_records(2)
    loss = BlockLoss(net, tiny_target().lm_head, torch.arange(VOCAB), BlockLossShape(1e-9))
    found = loss(tiny_batch(records, (0,)), 0)
    found.total.backward()
    assert found.denominator == 0.0
    assert float(found.total.detach()) == 0.0


def test_decay_falls_by_the_place_of_a_draft():
    counted = torch.tensor([[True, False, True]])
    expected = [1.0, 0.0, float(torch.exp(torch.tensor(-0.5)))]
    assert decay_weights(counted, 4.0)[0].tolist() == pytest.approx(expected)
