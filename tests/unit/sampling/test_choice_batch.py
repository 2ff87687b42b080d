"""Choices drawn in one batch equal those drawn row by row."""

import random

import pytest
import torch

from protos.params import SamplingParams
from tests.unit.sampling.test_choice import random_params
from verifier_service.sampling import choice_batch
from verifier_service.sampling.choice import ChoiceRow, choose
from verifier_service.sampling.choice_batch import choose_batch


@pytest.mark.parametrize("vocab_size", [2, 17, 3000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_batch_equals_row_by_row(vocab_size: int, dtype: torch.dtype):
    rng = random.Random(vocab_size)
    generator = torch.Generator().manual_seed(vocab_size)
    for spread in (0.5, 3.0, 10.0) * 8:
        # bf16 and narrow spreads tie often: at thresholds, in ranks, at the top.
        logits = (torch.randn(5, vocab_size, generator=generator) * spread).to(dtype)
        rows = [
            ChoiceRow(rng.randrange(5), random_params(rng), rng.randrange(1000)) for _ in range(24)
        ]
        assert choose_batch(logits, rows) == choose(logits, rows)


def test_a_batch_over_a_large_vocabulary_equals_row_by_row():
    generator = torch.Generator().manual_seed(5)
    logits = (torch.randn(4, 49_152, generator=generator) * 2.0).bfloat16()
    values = ({}, {"top_p": 0.95}, {"top_k": 40, "top_p": 0.9, "min_p": 0.01}, {"temperature": 0.0})
    rows = [
        ChoiceRow(row, SamplingParams(seed=seed, **value), 7)
        for seed, value in enumerate(values)
        for row in range(4)
    ]
    assert choose_batch(logits, rows) == choose(logits, rows)


def test_small_batches_change_no_choice(monkeypatch: pytest.MonkeyPatch):
    logits = torch.randn(6, 300, generator=torch.Generator().manual_seed(1))
    rng = random.Random(1)
    rows = [ChoiceRow(row, random_params(rng), 9) for row in (*range(6), *range(6))]
    together = choose_batch(logits, rows)
    monkeypatch.setattr(choice_batch, "_MAX_ELEMENTS", 700)
    assert choose_batch(logits, rows) == together


@pytest.mark.parametrize("values", [{"temperature": 0.0}, {}, {"top_p": 0.5}], ids=str)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_rows_without_a_finite_best_score_have_no_choice(values: dict, bad: float):
    logits = torch.zeros(3, 8)
    logits[1] = bad
    logits[2, 5] = float("nan")
    rows = [ChoiceRow(row, SamplingParams(seed=1, **values), 0) for row in range(3)]
    first, second, third = choose_batch(logits, rows)
    assert first is not None
    assert second is None
    assert third is None


def test_no_rows_have_no_choices():
    assert choose_batch(torch.zeros(1, 8), []) == []
