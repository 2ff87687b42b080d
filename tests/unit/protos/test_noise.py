"""The noise: one definition, finite always, and even between neighbours.

One threshold for all chi-square tests: p >= 1e-4 with fixed seeds, so a run either always passes
or always fails.
"""

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from protos.noise import (
    Purpose,
    derived_seed,
    gumbel,
    gumbel_from_bits,
    noise_bits,
    noise_bits_tensor,
    noise_key,
)
from protos.params import SEED_MAX, SEED_MIN

LEAST_P = 1e-4
BINS = 64
NUM_DRAWS = 100_000_000
"""Draws of the finiteness test."""

seeds = st.integers(SEED_MIN, SEED_MAX)
positions = st.integers(0, 2**31)
ids = st.integers(0, 2**31)


def signed(bits: int) -> int:
    return bits - (1 << 64) if bits >= 1 << 63 else bits


def p_value(counts: torch.Tensor) -> float:
    """Chance of a spread at least as uneven, over equally likely cells (upper gamma)."""
    expected = counts.sum().item() / counts.numel()
    statistic = ((counts.double() - expected) ** 2 / expected).sum()
    freedom = torch.tensor((counts.numel() - 1) / 2.0, dtype=torch.float64)
    return torch.special.gammaincc(freedom, statistic / 2).item()


def top_bits(bits: torch.Tensor, count: int) -> torch.Tensor:
    """The uppermost `count` bits of signed int64 as small integers."""
    return (bits >> (64 - count)) & ((1 << count) - 1)


def fields(seed: int, purpose: Purpose, num_positions: int, num_ids: int) -> torch.Tensor:
    """Bits [positions, ids]."""
    keys = torch.tensor([signed(noise_key(seed, purpose, p)) for p in range(num_positions)])
    return noise_bits_tensor(keys.unsqueeze(1), torch.arange(num_ids).unsqueeze(0))


@given(seeds, st.sampled_from(list(Purpose)), positions, st.lists(ids, min_size=1, max_size=8))
def test_the_tensor_form_is_the_integer_form(seed, purpose, position, token_ids):
    key = torch.tensor([signed(noise_key(seed, purpose, position))])
    bits = noise_bits_tensor(key, torch.tensor(token_ids))
    plain = [signed(noise_bits(seed, purpose, position, i)) for i in token_ids]
    assert bits.tolist() == plain


@given(seeds, st.lists(positions, min_size=1, max_size=3), st.lists(ids, min_size=1, max_size=5))
def test_gumbel_is_its_definition(seed, where, token_ids):
    noise = gumbel(seed, Purpose.CHOICE, torch.tensor(where), torch.tensor(token_ids))
    for row, position in enumerate(where):
        for column, token in enumerate(token_ids):
            u = ((noise_bits(seed, Purpose.CHOICE, position, token) >> 11) + 0.5) * 2.0**-53
            assert noise[row, column].item() == pytest.approx(-math.log(-math.log(u)), rel=1e-12)


def test_gumbel_takes_ids_per_position():
    per_row = torch.tensor([[4, 9], [2, 4]])
    noise = gumbel(3, Purpose.DRAFT, torch.tensor([7, 8]), per_row)
    for row, position in enumerate((7, 8)):
        alone = gumbel(3, Purpose.DRAFT, torch.tensor([position]), per_row[row])
        assert torch.equal(noise[row], alone[0])


def test_the_extreme_bits_give_finite_noise():
    """All bits set is the case: (2^53 - 1) + 0.5 rounds up to 2^53 in float64."""
    bits = torch.tensor([0, -1, 2**63 - 1, -(2**63), 1, -2])
    noise = gumbel_from_bits(bits)
    assert torch.isfinite(noise).all()
    assert noise[0] < noise[1]


def test_many_draws_are_finite_and_gumbel_distributed():
    count, total, square = 0, 0.0, 0.0
    chunk = torch.arange(1_000_000)
    key = torch.tensor([signed(noise_key(1, Purpose.CHOICE, 0))])
    for start in range(0, NUM_DRAWS, len(chunk)):
        noise = gumbel_from_bits(noise_bits_tensor(key, chunk + start))
        assert torch.isfinite(noise).all()
        count += noise.numel()
        total += noise.sum().item()
        square += (noise * noise).sum().item()
    mean = total / count
    variance = square / count - mean**2
    assert mean == pytest.approx(0.5772156649, abs=5 * 1.2825 / math.sqrt(count))
    assert variance == pytest.approx(math.pi**2 / 6, rel=5e-3)


def test_every_purpose_draws_for_itself():
    drawn = {noise_bits(5, purpose, 3, 9) for purpose in Purpose}
    assert len(drawn) == len(Purpose)


@pytest.mark.parametrize("seed", [0, 1, 2, -1, SEED_MAX, SEED_MIN])
def test_bits_are_even_over_ids_and_positions(seed):
    bits = fields(seed, Purpose.CHOICE, 100, 2000)
    counts = torch.bincount(top_bits(bits, 6).flatten(), minlength=BINS)
    assert p_value(counts) >= LEAST_P


@pytest.mark.parametrize("gap", [1, 2, 64, 2**32, 2**63 - 1])
def test_neighbouring_seeds_are_independent(gap):
    """Joint cells of the top three bits under seed s and seed s + gap."""
    pairs = torch.zeros(BINS, dtype=torch.int64)
    for seed in range(40):
        here = fields(seed, Purpose.CHOICE, 10, 500)
        there = fields(seed + gap, Purpose.CHOICE, 10, 500)
        joint = top_bits(here, 3) * 8 + top_bits(there, 3)
        pairs += torch.bincount(joint.flatten(), minlength=BINS)
    assert p_value(pairs) >= LEAST_P


def test_neighbouring_positions_are_independent():
    bits = top_bits(fields(11, Purpose.CHOICE, 401, 500), 3)
    pairs = torch.bincount((bits[:-1] * 8 + bits[1:]).flatten(), minlength=BINS)
    assert p_value(pairs) >= LEAST_P


def test_neighbouring_ids_are_independent():
    bits = top_bits(fields(12, Purpose.CHOICE, 400, 501), 3)
    pairs = torch.bincount((bits[:, :-1] * 8 + bits[:, 1:]).flatten(), minlength=BINS)
    assert p_value(pairs) >= LEAST_P


def test_purposes_are_independent():
    choice = top_bits(fields(13, Purpose.CHOICE, 400, 500), 3)
    draft = top_bits(fields(13, Purpose.DRAFT, 400, 500), 3)
    pairs = torch.bincount((choice * 8 + draft).flatten(), minlength=BINS)
    assert p_value(pairs) >= LEAST_P


def test_derived_seeds_are_independent_of_each_other_and_of_their_seed():
    pairs = torch.zeros(BINS, dtype=torch.int64)
    for seed in range(20):
        family = [derived_seed(seed, i) for i in range(5)]
        assert family[0] == seed
        assert len(set(family)) == 5
        drawn = [top_bits(fields(s, Purpose.CHOICE, 5, 500), 3) for s in family]
        for here, there in itertools.pairwise(drawn):
            pairs += torch.bincount((here * 8 + there).flatten(), minlength=BINS)
    assert p_value(pairs) >= LEAST_P


def test_derived_seeds_are_int64_and_distinct():
    drawn = {derived_seed(seed, i) for seed in range(100) for i in range(1, 50)}
    assert len(drawn) == 100 * 49
    assert all(SEED_MIN <= seed <= SEED_MAX for seed in drawn)


def test_the_chi_square_test_can_fail():
    even = torch.full((BINS,), 1000)
    uneven = even.clone()
    uneven[0] += 500
    assert p_value(even) > 0.99
    assert p_value(uneven) < LEAST_P
