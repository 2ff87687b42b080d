"""Verifier and drafter draw with one noise: equal distributions mean equal tokens (design 4)."""

import pytest
import torch

from drafter_service.ranking import NodeRows, rank_children
from protos.params import SamplingParams
from verifier_service.sampling.choice import ChoiceRow, choose

NUM_ROWS, VOCAB = 64, 400


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0.0},
        {"temperature": 0.7, "seed": 1},
        {"temperature": 1.0, "seed": -(2**63)},
        {"temperature": 1.0, "seed": 3, "top_k": 5},
        {"temperature": 1.3, "seed": 4, "top_p": 0.6},
        {"temperature": 0.9, "seed": 5, "min_p": 0.1},
        {"temperature": 2.0, "seed": 2**63 - 1, "top_k": 40, "top_p": 0.9, "min_p": 0.01},
    ],
)
def test_a_drafter_that_knows_the_target_guesses_its_choice(params):
    values = SamplingParams(**params)
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(NUM_ROWS, VOCAB, generator=generator) * 3
    positions = [7 * row + 1 for row in range(NUM_ROWS)]
    choices = choose(logits, [ChoiceRow(row, values, p) for row, p in enumerate(positions)])
    groups = [NodeRows(1, values, position) for position in positions]
    ranked = rank_children(logits, groups, torch.arange(VOCAB), 4)
    assert ranked.ids[:, 0].tolist() == choices
    assert ranked.finite.all()


def test_a_draft_vocabulary_keeps_the_noise_of_the_target_ids():
    values = SamplingParams(temperature=1.0, seed=9)
    generator = torch.Generator().manual_seed(2)
    target_ids = torch.arange(0, VOCAB, 4)
    kept = torch.randn(NUM_ROWS, len(target_ids), generator=generator)
    # A target that can choose nothing else than the draft vocabulary has.
    logits = torch.full((NUM_ROWS, VOCAB), -1e9)
    logits[:, target_ids] = kept
    choices = choose(logits, [ChoiceRow(row, values, row) for row in range(NUM_ROWS)])
    groups = [NodeRows(1, values, row) for row in range(NUM_ROWS)]
    assert rank_children(kept, groups, target_ids, 1).ids[:, 0].tolist() == choices
