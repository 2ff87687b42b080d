"""Contenders hold the winner of every draw, and hash as the definition does."""

import pytest
import torch

from protos.counter import noise_bits, noise_key
from protos.noise import Purpose, gumbel
from protos.params import SamplingParams
from verifier_service.sampling.choice import ChoiceRow, choose
from verifier_service.sampling.contenders import REACH, best_scored, contenders, noise_bits_of_all
from verifier_service.sampling.reference import choose_reference


def test_bits_of_a_whole_vocabulary_equal_the_definition():
    for seed, position in ((0, 0), (-(2**63), 7), (2**63 - 1, 2**31)):
        bits = noise_bits_of_all(noise_key(seed, Purpose.CHOICE, position), 300)
        assert bits.tolist() == [noise_bits(seed, Purpose.CHOICE, position, i) for i in range(300)]


@pytest.mark.parametrize("spread", [0.0, 0.3, 3.0, 12.0, 1e4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_total_that_reaches_the_best_scored_ids_is_among_them(
    spread: float, dtype: torch.dtype
):
    generator = torch.Generator().manual_seed(9)
    for position in range(20):
        scores = (torch.randn(20_000, generator=generator) * spread).to(dtype).float()
        scores[torch.randint(20_000, (500,), generator=generator)] = float("-inf")
        best = best_scored(scores)
        assert best is not None
        noise = gumbel(3, Purpose.CHOICE, torch.tensor([position]), torch.arange(20_000))[0]
        whole = scores.double() + noise
        ids, totals = contenders(scores, noise_key(3, Purpose.CHOICE, position), best)
        assert torch.equal(totals, whole[ids])
        reaching = torch.nonzero(whole >= whole[best]).flatten()
        assert set(reaching.tolist()) <= set(ids.tolist())
        assert set(torch.nonzero(noise > REACH).flatten().tolist()) <= set(ids.tolist())


@pytest.mark.parametrize("spread", [0.0, 0.3, 1.0, 3.0, 12.0])
def test_a_nucleus_of_any_width_gives_the_choice_of_a_full_ranking(spread: float):
    generator = torch.Generator().manual_seed(9)
    for top_p in (1e-9, 0.3, 0.9, 0.95, 0.999):
        # bf16 ties in plenty, with spread 0 everywhere.
        logits = (torch.randn(1, 4000, generator=generator) * spread).bfloat16()
        params = SamplingParams(top_p=top_p, seed=8)
        for position in range(4):
            row = ChoiceRow(0, params, position)
            assert choose(logits, [row]) == [choose_reference(logits[0], params, position)]


def test_no_best_score_without_a_finite_one():
    for bad in ("nan", "inf", "-inf"):
        scores = torch.full((8,), float("-inf"))
        scores[3] = float(bad)
        assert best_scored(scores) is None
