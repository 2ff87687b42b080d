"""Choices follow design 4: equal to the plain-loop reference, row by row, ties to the lowest id."""

import random

import pytest
import torch

from protos.params import SamplingParams
from verifier_service.sampling.choice import ChoiceRow, choose
from verifier_service.sampling.processors import (
    is_in_nucleus,
    score_floor,
    survivors,
)
from verifier_service.sampling.reference import choose_reference, survivors_reference


def random_params(rng: random.Random) -> SamplingParams:
    return SamplingParams(
        temperature=rng.choice([0.0, 1e-6, 1e-4, 0.3, 1.0, 2.0]),
        top_k=rng.choice([0, 0, 1, 2, 5, 400]),
        top_p=rng.choice([1.0, 1.0, 1e-9, 0.5, 0.9, 0.999]),
        min_p=rng.choice([0.0, 0.0, 0.05, 1.0]),
        seed=rng.randrange(-(2**63), 2**63),
    )


@pytest.mark.parametrize("vocab_size", [2, 17, 300])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_choices_equal_the_plain_loop_reference(vocab_size: int, dtype: torch.dtype):
    rng = random.Random(vocab_size)
    generator = torch.Generator().manual_seed(vocab_size)
    for spread in (0.5, 3.0, 10.0) * 12:
        logits = (torch.randn(3, vocab_size, generator=generator) * spread).to(dtype)
        rows = [
            ChoiceRow(rng.randrange(3), random_params(rng), rng.randrange(1000)) for _ in range(8)
        ]
        expected = [choose_reference(logits[r.row], r.params, r.position) for r in rows]
        assert choose(logits, rows) == expected


def test_choices_over_a_large_vocabulary_equal_the_reference():
    generator = torch.Generator().manual_seed(5)
    logits = (torch.randn(2, 49_152, generator=generator) * 2.0).bfloat16()
    for params in (
        SamplingParams(seed=1),
        SamplingParams(seed=2, top_p=0.95),
        SamplingParams(seed=3, top_k=40, top_p=0.9, min_p=0.01),
    ):
        rows = [ChoiceRow(row, params, 7) for row in range(2)]
        expected = [choose_reference(logits[row], params, 7) for row in range(2)]
        assert choose(logits, rows) == expected


def test_a_row_is_chosen_alike_alone_and_among_neighbours():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(16, 5000, generator=generator).bfloat16()
    rng = random.Random(0)
    rows = [ChoiceRow(row, random_params(rng), 50 + row) for row in range(16)]
    together = choose(logits, rows)
    assert [
        choose(logits[r.row : r.row + 1], [ChoiceRow(0, r.params, r.position)])[0] for r in rows
    ] == together
    assert choose(logits, rows[::-1]) == together[::-1]


@pytest.mark.parametrize("num_rows", [1, 2, 9])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_greedy_ties_go_to_the_lowest_id(num_rows: int, dtype: torch.dtype):
    logits = torch.zeros(num_rows, 49_152, dtype=dtype)
    tied = [3, 40_000, 9_999, 33_000, 20_000]
    for row in range(num_rows):
        logits[row, tied[row % 5 :]] = 2.5
    rows = [ChoiceRow(row, SamplingParams(temperature=0.0), 1) for row in range(num_rows)]
    assert choose(logits, rows) == [min(tied[row % 5 :]) for row in range(num_rows)]


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"top_k": 3}, [1, 4, 0]),
        ({"top_k": 1}, [1]),
        ({"min_p": 1.0}, [1, 4]),
        ({"top_k": 3, "min_p": 0.9}, [1, 4]),
        ({"top_p": 1e-9}, [1]),
    ],
)
def test_ties_at_a_threshold_keep_the_lowest_ids(values: dict, expected: list[int]):
    logits = torch.tensor([1.0, 2.0, 1.0, 0.0, 2.0, 1.0])
    params = SamplingParams(**values)
    assert survivors(logits, params, score_floor(logits, params)).tolist() == expected
    assert survivors_reference(logits, params) == expected


def test_membership_in_the_nucleus_agrees_with_ranking_it():
    generator = torch.Generator().manual_seed(3)
    for top_p in (0.01, 0.5, 0.9):
        # Rounded, so that probabilities tie; halves, so that sums are exact.
        scores = torch.randint(0, 4, (40,), generator=generator).float()
        kept = set(survivors(scores, SamplingParams(top_p=top_p), None).tolist())
        probs = torch.softmax(scores, dim=-1)
        assert {i for i in range(40) if is_in_nucleus(probs, i, top_p)} == kept


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_rows_without_a_finite_best_score_have_no_choice(temperature: float, bad: float):
    logits = torch.zeros(2, 8)
    logits[1, 5] = bad
    params = SamplingParams(temperature=temperature, seed=1)
    first, second = choose(logits, [ChoiceRow(0, params, 0), ChoiceRow(1, params, 0)])
    assert first is not None
    assert second is None


def test_tiny_temperatures_behave_as_greedy():
    logits = torch.tensor([[0.5, 3.0, 2.999]])
    for temperature in (1e-4, 1e-5, 1e-8, 0.0):
        params = SamplingParams(temperature=temperature, seed=4)
        assert choose(logits, [ChoiceRow(0, params, 3)]) == [1]
