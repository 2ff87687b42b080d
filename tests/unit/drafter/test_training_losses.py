"""Losses on the draft vocabulary: the fast form equals the definition, the definition SpecForge."""

import json
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from drafter_service.checkpoint.eagle3_reader import read_eagle3_head
from drafter_service.training.eagle3_loss import Eagle3Loss, LossShape
from drafter_service.training.eagle3_settings import Eagle3Settings
from drafter_service.training.loss import (
    Comparison,
    LossKind,
    acceptance,
    fused_loss,
    restricted_loss,
    row_losses,
)
from drafter_service.training.settings import load_settings
from drafter_service.training.targets import dense_targets, top_targets
from drafter_service.training.ttt import unroll
from protos.errors import ConfigError
from tests.unit.drafter.training_fakes import (
    DRAFT,
    HIDDEN,
    VOCAB,
    draft_index_of,
    one_record_batch,
    tiny_batch,
    tiny_head,
    tiny_records,
)

GOLDEN = Path(__file__).resolve().parents[4] / "shared" / "golden" / "eagle"
needs_golden = pytest.mark.skipif(not GOLDEN.is_dir(), reason="shared/golden/eagle is not here")
KINDS = [LossKind.KL, LossKind.LK_ALPHA, LossKind.LK_HYBRID]
KEPT = torch.arange(0, 80, 2)  # draft ids of a vocabulary of 80
INDEX = draft_index_of(KEPT, 80)


@dataclass(frozen=True)
class Case:
    """Head states, lm_head, and a target over 80 ids whose even ones can be drafted."""

    hidden: Tensor
    weight: Tensor
    full: Tensor  # [M, 80] probabilities
    targets: object
    target_rows: Tensor
    wanted: Tensor


def _case(kind: str, num_top: int = 12) -> Case:
    torch.manual_seed(1)
    hidden = torch.randn(150, 16, requires_grad=True)
    weight = torch.randn(len(KEPT), 16, requires_grad=True)
    final, lm_head = torch.randn(40, 8), torch.randn(80, 8)
    full = (final @ lm_head.T).softmax(-1)
    values, ids = full.topk(num_top)
    wanted = INDEX[full[:, KEPT].argmax(-1) * 2]
    if kind == "full":
        logps = full.gather(1, KEPT[wanted][:, None])[:, 0].log()
        targets = dense_targets(final, lm_head[KEPT], wanted, logps)
    else:
        targets = top_targets(ids, values.log(), INDEX)
        full = torch.zeros_like(full).scatter_(1, ids, values)  # the rest is taken for zero
    rows = torch.randint(0, 40, (150,))
    return Case(hidden, weight, full, targets, rows, wanted[rows])


@pytest.mark.parametrize("source", ["full", "top"])
@pytest.mark.parametrize("kind", KINDS)
def test_fused_losses_and_gradients_equal_the_definition(kind, source):
    case, comparison = _case(source), Comparison(kind, 3.0)
    logits = case.hidden @ case.weight.T
    own = case.full[case.target_rows][:, KEPT]
    mass = own.sum(-1)
    defined = row_losses(comparison, logits, own / mass[:, None], mass)
    expected_grads = torch.autograd.grad(defined.sum() * 0.8, (case.hidden, case.weight))
    total, rows = fused_loss(
        case.hidden,
        case.weight,
        case.targets,
        case.target_rows,
        case.wanted,
        comparison,
        weight=0.8,
    )
    torch.testing.assert_close(rows.losses, defined.detach(), atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(total, defined.sum() * 0.8)
    grads = torch.autograd.grad(total, (case.hidden, case.weight))
    torch.testing.assert_close(grads, expected_grads, atol=1e-4, rtol=1e-4)
    assert torch.equal(rows.hits, logits.argmax(-1) == case.wanted)
    assert 0 < rows.hits.sum() < len(rows.hits)


def test_the_gradient_of_a_scaled_total_is_scaled():
    case = _case("top")
    arguments = (case.hidden, case.weight, case.targets, case.target_rows, case.wanted)
    plain = torch.autograd.grad(fused_loss(*arguments, Comparison())[0], (case.hidden,))[0]
    halved = torch.autograd.grad(fused_loss(*arguments, Comparison())[0] / 2, (case.hidden,))[0]
    torch.testing.assert_close(halved, plain / 2)


def test_acceptance_is_the_overlap_of_draft_and_target():
    logits = torch.tensor([[0.5, 0.25, 0.25]]).log()
    overlap = acceptance(logits, torch.tensor([[0.5, 0.5, 0.0]]), torch.tensor([0.8]))
    torch.testing.assert_close(overlap, torch.tensor([0.4 + 0.25]))


def test_targets_from_recorded_ids_equal_the_full_ones_when_nothing_was_left_out():
    full, top = _case("full").targets.rows(torch.arange(40)), _case("top", 80).targets
    rows = top.rows(torch.arange(40))
    torch.testing.assert_close(rows.dense(len(KEPT)), full.probs, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(rows.mass, full.mass, atol=1e-6, rtol=1e-5)


def test_a_row_none_of_whose_recorded_ids_can_be_drafted_has_no_target():
    targets = top_targets(torch.tensor([[1, 3]]), torch.tensor([[-0.1, -3.0]]), INDEX)
    rows = targets.rows(torch.tensor([0]))
    assert rows.dense(len(KEPT)).sum() == 0
    assert rows.mass.item() == 0


def _batch_loss(records, indices, **shape):
    head = tiny_head()
    rows = torch.randn(DRAFT, HIDDEN, generator=torch.Generator().manual_seed(2))
    index = draft_index_of(head.target_ids, VOCAB)
    sources = {"full": rows, "top": None}
    loss = Eagle3Loss(head, sources[shape.pop("targets", "top")], index, LossShape(**shape))
    return head, loss(tiny_batch(records, indices), 3)


@pytest.mark.parametrize("targets", ["full", "top"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_adds_up_from_its_records_whatever_the_loss(kind, targets):
    """No row's loss depends on the rows beside it, so passes and workers may share them out."""
    records = tiny_records(6)
    shape = {"comparison": Comparison(kind), "missed_share": 0.3, "targets": targets}
    head, together = _batch_loss(records, (1, 4, 5), **shape)
    alone = [_batch_loss(records, (index,), **shape)[1] for index in (1, 4, 5)]
    total = sum(loss.total.item() for loss in alone)
    assert together.total.item() == pytest.approx(total, rel=1e-5)
    assert together.steps.counts[0] == sum(loss.steps.counts[0] for loss in alone)
    together.total.backward()
    assert head.fc.weight.grad.abs().sum() > 0


@needs_golden
@pytest.mark.parametrize("case", ["eagle3_specforge", "eagle3_1_specforge_fcnorm"])
def test_lk_losses_equal_specforge(case):
    """Its divisors: rows with a target for alpha, batch times length for the cross entropy; its
    share comes from the mean acceptance of the step."""
    io = load_file(GOLDEN / case / "io.safetensors")
    told = json.loads((GOLDEN / case / "stats.json").read_text())
    kept = load_file(GOLDEN / case / "model.safetensors")["t2d"].bool()
    for step in range(4):
        target = _moved(io["ttt.target_logits"], step + 1)
        counted = _moved(io["ttt.loss_mask"], step).bool() & kept[target.argmax(-1)]
        own = target.softmax(-1)[counted][:, kept]
        mass = own.sum(-1)
        probs, logits = own / mass[:, None], io[f"ttt.logits.{step}"][counted]
        alpha = acceptance(logits, probs, mass)
        told_alpha = io["ttt.step_acceptance_rate"][step].item()
        assert alpha.mean().item() == pytest.approx(told_alpha, rel=1e-4)
        losses = row_losses(Comparison(LossKind.LK_ALPHA), logits, probs, mass)
        assert losses.mean().item() == pytest.approx(
            told["ttt_lk"]["alpha"]["step_loss"][step], rel=1e-4
        )
        # Rows weigh 1 / (B * T) in the cross entropy and 1 / counted in the acceptance there.
        share = row_losses(Comparison(LossKind.LK_HYBRID), logits, probs, mass, alpha.mean())
        kl = restricted_loss(logits, probs)
        weight = (-3.0 * alpha.mean()).exp()
        torch.testing.assert_close(share, weight * kl + (1 - weight) * (1 - alpha))
        hybrid = weight * kl.sum() / counted.numel() + (share - weight * kl).mean()
        assert hybrid.item() == pytest.approx(told["ttt_lk"]["lambda"]["step_loss"][step], rel=1e-4)


@needs_golden
@pytest.mark.parametrize("case", ["eagle3_specforge", "eagle3_1_specforge_fcnorm"])
def test_the_fused_alpha_loss_gives_specforges_gradient(case):
    told = json.loads((GOLDEN / case / "stats.json").read_text())["ttt_lk"]["alpha"]
    head, losses, grad_norm = specforge_alpha(GOLDEN / case)
    assert losses == pytest.approx(told["step_loss"], rel=1e-4)
    assert grad_norm == pytest.approx(told["fc_grad_norm"], rel=1e-3)
    assert head.config.num_aux == 3


def _moved(values, num):
    """Left by `num` along the time axis, zeros entering at the end."""
    zeros = torch.zeros_like(values[:, :num])
    return torch.cat([values[:, num:], zeros], dim=1)


def specforge_alpha(directory: Path):
    """(head, loss of every step, norm of fc's gradient of their sum weighted by 0.8^j)."""
    io = load_file(directory / "io.safetensors")
    embedding = load_file(directory / "target.safetensors")["model.embed_tokens.weight"]
    head = read_eagle3_head(directory, embedding, torch.float32, num_target_layers=8)
    assert head.fc is not None
    head.fc.weight.requires_grad_(True)
    index = draft_index_of(head.target_ids, head.config.vocab_size)
    totals, counts = [torch.zeros(()) for _ in range(4)], [0] * 4
    for text in range(2):
        ids = _moved(io["ttt.input_ids"], 1)[text]
        target = _moved(io["ttt.target_logits"], 1)[text]
        target = torch.cat([target, torch.zeros(4, target.shape[1])])
        mask = torch.cat([io["ttt.loss_mask"][text], torch.zeros(4, dtype=torch.long)])
        features = torch.cat([io["ttt.features"][text], torch.zeros(4, 192)])
        ids = torch.cat([ids, torch.zeros(4, dtype=torch.long)])
        batch = one_record_batch(features, ids, target, target.argmax(-1))
        wanted = index[target.argmax(-1)]
        logps = target.log_softmax(-1).amax(-1)
        rows_of_lm_head = torch.eye(target.shape[1])[head.target_ids]
        targets = dense_targets(target, rows_of_lm_head, wanted, logps)

        def after(output, mask=mask, wanted=wanted, targets=targets):
            rows = output.target_rows[:16]
            kept = (mask[rows].bool() & (wanted[rows] >= 0)).nonzero()[:, 0]
            total, _ = fused_loss(
                head.norm(output.y[kept]) if head.config.norm_logits else output.y[kept],
                head.lm_head.weight,
                targets,
                rows[kept],
                wanted[rows[kept]],
                Comparison(LossKind.LK_ALPHA),
            )
            totals[output.step] = totals[output.step] + total
            counts[output.step] += len(kept)

        unroll(head, batch, 4, after)
    losses = [total / count for total, count in zip(totals, counts, strict=True)]
    weighted = sum(0.8**step * loss for step, loss in enumerate(losses))
    (grad,) = torch.autograd.grad(weighted, (head.fc.weight,))
    return head, [loss.item() for loss in losses], grad.norm().item()


def test_an_unknown_loss_is_refused_with_the_known_ones(tmp_path):
    path = tmp_path / "bad.yaml"
    path.write_text("answers: a\ntarget: b\nfeatures: c\nrun: d\nloss: lk\n")
    with pytest.raises(ConfigError, match=r"(?s)loss.*lk_hybrid"):
        load_settings(path, Eagle3Settings)
    path.write_text("answers: a\ntarget: b\nfeatures: c\nrun: d\nloss: lk_hybrid\ntargets: top\n")
    settings = load_settings(path, Eagle3Settings)
    assert settings.comparison == Comparison(LossKind.LK_HYBRID, 3.0)
