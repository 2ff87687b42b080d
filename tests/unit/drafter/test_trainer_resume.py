"""The trainer learns, and continues from its checkpoint as if it had never stopped."""

from dataclasses import replace

import pytest
import torch

from drafter_service.training.batches import epoch_batches, split_share
from drafter_service.training.eagle3_loss import Eagle3Loss, LossShape
from drafter_service.training.evaluate import evaluate, replay_chains
from drafter_service.training.records import Split, share_of, split_records, without_shared_prompts
from drafter_service.training.schedule import DeadlineSchedule, StepSchedule
from drafter_service.training.trainer import OptimiserSettings, Position, Trainer
from drafter_service.training.vocab import choose_draft_vocab, draft_index
from tests.unit.drafter.training_fakes import (
    DRAFT,
    HIDDEN,
    VOCAB,
    tiny_batch,
    tiny_head,
    tiny_records,
)

RECORDS = tiny_records(12)
BATCHES = epoch_batches(RECORDS, range(12), 40, seed=0, epoch=0)


def _trainer(dtype=torch.bfloat16, workers=None, clip_norm=1.0, **shape) -> Trainer:
    rows = torch.randn(DRAFT, HIDDEN, generator=torch.Generator().manual_seed(2)).to(dtype)
    index = torch.full((VOCAB,), -1)
    index[torch.arange(DRAFT) + 3] = torch.arange(DRAFT)
    head = tiny_head()
    loss = Eagle3Loss(head, rows, index, LossShape(**shape))
    return Trainer(head, loss, OptimiserSettings(clip_norm=clip_norm), dtype, workers)


def _run(trainer: Trainer, updates: range):
    reports = []
    for number in updates:
        batch = tiny_batch(RECORDS, BATCHES[number % len(BATCHES)], dtype=trainer.dtype)
        reports.append(trainer.update([batch], 1e-2, number))
    return reports


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_resumed_run_equals_an_unbroken_one_bit_for_bit(tmp_path, dtype):
    unbroken = _trainer(dtype, missed_share=0.3)
    expected = _run(unbroken, range(8))

    first = _trainer(dtype, missed_share=0.3)
    _run(first, range(5))
    first.save(tmp_path / "state.safetensors", Position(5, 1, 2, 100), {"started": "1.5"})
    second = _trainer(dtype, missed_share=0.3)
    position, extra = second.load(tmp_path / "state.safetensors")
    assert position == Position(5, 1, 2, 100)
    assert extra == {"started": "1.5"}
    assert _run(second, range(5, 8)) == expected[5:]
    for name, weight in unbroken.master_weights().items():
        assert torch.equal(weight, second.master_weights()[name]), name
    for ours, theirs in zip(
        unbroken.averaged_net().parameters(), second.averaged_net().parameters(), strict=True
    ):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("clip_norm", [1e-3, 1e3])
def test_an_update_is_adamw_on_the_clipped_mean_gradient(clip_norm):
    trainer, plain = _trainer(torch.float32, clip_norm=clip_norm), _trainer(torch.float32)
    batches = [tiny_batch(RECORDS, indices) for indices in BATCHES[:2]]
    head = plain.net
    trained = [p for p in head.parameters() if p.requires_grad]
    settings = OptimiserSettings()
    groups = [
        {"params": [p for p in trained if p.dim() > 1], "weight_decay": settings.weight_decay},
        {"params": [p for p in trained if p.dim() == 1], "weight_decay": 0.0},
    ]
    adam = torch.optim.AdamW(groups, lr=1e-2, betas=(settings.beta1, settings.beta2), fused=False)
    for number in range(3):
        report = trainer.update(batches, 1e-2, number)
        adam.zero_grad()
        losses = [plain._loss_of(batch, number) for batch in batches]
        rows = sum(loss.denominator for loss in losses)
        (sum(loss.total for loss in losses) / rows).backward()
        norm = torch.nn.utils.clip_grad_norm_(trained, clip_norm)
        adam.step()
        assert report.grad_norm == pytest.approx(norm.item(), rel=1e-4)
    for name, weight in head.named_parameters():
        if weight.requires_grad:
            ours = trainer.master_weights()[name]
            torch.testing.assert_close(ours, weight.detach(), atol=2e-4, rtol=1e-3)
            # Adam forgives a wrong scale of all gradients; its running mean does not.
            mean, expected = (
                trainer._optimiser.state[ours]["exp_avg"],
                adam.state[weight]["exp_avg"],
            )
            torch.testing.assert_close(mean, expected, atol=1e-7, rtol=5e-3)


def test_training_lowers_the_loss_and_leaves_the_embedding_alone():
    trainer = _trainer(torch.float32)
    embedding = trainer.net.embed_tokens.weight.clone()
    reports = _run(trainer, range(60))
    first = sum(r.steps.losses[0] for r in reports[:10]) / sum(
        r.steps.counts[0] for r in reports[:10]
    )
    last = sum(r.steps.losses[0] for r in reports[-10:]) / sum(
        r.steps.counts[0] for r in reports[-10:]
    )
    assert last < first - 0.2
    assert torch.equal(embedding, trainer.net.embed_tokens.weight)


def test_later_steps_run_on_hits_and_a_share_of_misses():
    (everyone,) = _run(_trainer(missed_share=1.0), range(1))
    (few,) = _run(_trainer(missed_share=0.0), range(1))
    assert few.steps.counts[0] == everyone.steps.counts[0]
    assert few.steps.counts[1] <= few.steps.hits[0] < everyone.steps.counts[1]


@pytest.mark.parametrize("count", [2, 3])
def test_passes_and_workers_only_group_the_terms_of_one_update(count):
    """The same update in one batch, in several passes, and by several workers in turn."""
    indices = BATCHES[0] + BATCHES[1]
    whole, split = (
        _trainer(torch.float32, missed_share=0.3),
        _trainer(torch.float32, missed_share=0.3),
    )
    shares = [split_share(indices, rank, count) for rank in range(count)]
    for number in range(3):
        one = whole.update([tiny_batch(RECORDS, indices)], 1e-2, number)
        many = split.update([tiny_batch(RECORDS, share) for share in shares], 1e-2, number)
        assert many.loss == pytest.approx(one.loss, rel=1e-5)
        assert many.steps.counts == one.steps.counts
    for name, weight in whole.master_weights().items():
        torch.testing.assert_close(weight, split.master_weights()[name], atol=1e-5, rtol=1e-4)


def test_epochs_differ_and_every_record_comes_once():
    again = epoch_batches(RECORDS, range(12), 40, seed=0, epoch=0)
    other = epoch_batches(RECORDS, range(12), 40, seed=0, epoch=1)
    assert again == BATCHES != other
    assert sorted(i for batch in other for i in batch) == list(range(12))


def test_the_split_is_a_function_of_index_and_seed():
    split = split_records(100, 0.1, seed=3)
    assert split == split_records(100, 0.1, seed=3) != split_records(100, 0.1, seed=4)
    assert len(split.held_out) == 10
    assert not set(split.held_out) & set(split.train)


def test_smaller_shares_of_the_training_records_lie_within_larger_ones():
    split = split_records(100, 0.1, seed=3)
    quarter, half = share_of(split, 0.25, 3), share_of(split, 0.5, 3)
    assert len(quarter.train) == 22
    assert set(quarter.train) < set(half.train) < set(split.train)
    assert quarter.held_out == half.held_out == split.held_out


def test_a_prompt_answered_twice_is_not_held_out_when_training_shows_it():
    twin = replace(RECORDS[0], index=12)
    split = Split(train=(0, 1, 2), held_out=(5, 12))
    assert without_shared_prompts([*RECORDS, twin], split) == Split(train=(0, 1, 2), held_out=(5,))


def test_draft_vocabulary_keeps_frequent_ids_and_fills_with_the_lowest():
    vocab = choose_draft_vocab(RECORDS[:1], VOCAB, 20)
    answer = set(RECORDS[0].ids[RECORDS[0].prompt_len :].tolist())
    assert answer <= set(vocab.target_ids.tolist())
    assert {0, 1, 2} <= set(vocab.target_ids.tolist())
    assert list(vocab.target_ids) == sorted(vocab.target_ids)
    index = draft_index(vocab.target_ids, VOCAB)
    assert (index >= 0).sum() == 20
    assert index[vocab.target_ids[7]] == 7


def test_chains_are_replayed_from_hits():
    # Depth by row. Row 0 accepts 2, so the round commits 3 and the next one starts at row 3.
    agreed = torch.tensor([[1, 0, 0, 0, 1], [1, 1, 1, 1, 1], [0, 1, 1, 1, 1]], dtype=torch.bool)
    accepted = [0, 0, 0, 0]
    replay_chains(agreed, accepted)
    assert accepted == [1, 0, 1, 1]


def test_evaluation_counts_a_choice_outside_the_draft_vocabulary_as_a_miss():
    batch = tiny_batch(RECORDS, (0, 1))
    report = evaluate(tiny_head(), [(batch, (True, False))], depth=3, chain_depth=2)
    assert report.num_rows[0] > report.num_rows[1] > report.num_rows[2]
    assert 1.0 <= report.chain_tau <= 3.0
    assert report.num_rounds > 0


def test_the_rate_follows_updates_or_the_clock():
    steps = StepSchedule(peak=1.0, num_updates=100, warmup_updates=10)
    assert steps.rate(0) == pytest.approx(0.1)
    assert steps.rate(50) == pytest.approx(0.5)
    assert steps.is_over(100)
    now = [0.0]
    clock = DeadlineSchedule(1.0, 0.0, 60.0, warmup_updates=0, now=lambda: now[0])
    assert clock.rate(7) == pytest.approx(1.0)
    now[0] = 30.0
    assert clock.rate(7) == pytest.approx(0.5)
    assert not clock.is_over(7)
    now[0] = 60.0
    assert clock.rate(7) == pytest.approx(0.0)
    assert clock.is_over(7)
