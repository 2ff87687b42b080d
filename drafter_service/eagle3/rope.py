"""Rotary positions of a draft head: frequencies by type, and the rotation.

A row's rotation is a function of its own position: `dynamic` scales by that position, `longrope`
takes its long factors from the original length on. Neighbours and the length of a prompt do not
matter, so a row computed in any batch is the same. Invariant: angles are float32 whatever the
dtype of the head.

Shapes: N rows, X heads, D head_dim.
"""

import math

import torch
from torch import Tensor

from drafter_service.eagle3.config import Rope


def inverse_frequencies(rope: Rope, head_dim: int) -> Tensor:
    """[D / 2] float32, of positions below the original length where the type looks at that."""
    if rope.kind == "longrope":
        return _frequencies(rope.theta, head_dim) / torch.tensor(rope.short_factors)
    inv_freq = _frequencies(rope.theta, head_dim)
    if rope.kind == "linear":
        return inv_freq / rope.factor
    if rope.kind == "yarn":
        return _yarn(rope, inv_freq, head_dim)
    return _llama3(rope, inv_freq) if rope.kind == "llama3" else inv_freq


def rotary_factors(
    rope: Rope, inv_freq: Tensor, positions_N: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """(cos, sin), each [N, 1, D]. `inv_freq` is what `inverse_frequencies` gave."""
    inv_freq = inv_freq.to(positions_N.device)
    angles = positions_N.to(torch.float32)[:, None] * _by_position(rope, inv_freq, positions_N)
    angles_N1D = torch.cat([angles, angles], dim=-1)[:, None]
    scale = rope.attention_factor
    if scale == 1.0:
        return angles_N1D.cos().to(dtype), angles_N1D.sin().to(dtype)
    return (angles_N1D.cos() * scale).to(dtype), (angles_N1D.sin() * scale).to(dtype)


def rotate(x_NXD: Tensor, cos_sin: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate halves: pairs are (i, i + D / 2), as in the Llama family."""
    cos_N1D, sin_N1D = cos_sin
    first, second = x_NXD.chunk(2, dim=-1)
    return x_NXD * cos_N1D + torch.cat([-second, first], dim=-1) * sin_N1D


def _by_position(rope: Rope, inv_freq: Tensor, positions_N: Tensor) -> Tensor:
    """[D / 2], or [N, D / 2] where they differ by position."""
    head_dim = 2 * len(inv_freq)
    original = rope.original_max_positions
    if rope.kind == "longrope":
        long_factors = torch.tensor(rope.long_factors, device=inv_freq.device)
        long_freq = _frequencies(rope.theta, head_dim).to(inv_freq.device) / long_factors
        return torch.where((positions_N >= original)[:, None], long_freq, inv_freq)
    if rope.kind == "dynamic":
        length_N1 = (positions_N + 1).clamp_min(original)[:, None].to(torch.float32)
        grown_N1 = rope.factor * length_N1 / original - (rope.factor - 1)
        # (theta * g ** (D / (D - 2))) ** -e, with e = 0, 2/D, ...: the same as below.
        exponents = torch.arange(0, head_dim, 2, device=inv_freq.device) / (head_dim - 2)
        return inv_freq / grown_N1**exponents
    return inv_freq


def _frequencies(theta: float, head_dim: int) -> Tensor:
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).to(torch.float32) / head_dim
    return 1.0 / (theta**exponents)


def _llama3(rope: Rope, inv_freq: Tensor) -> Tensor:
    """Long waves divided by `factor`, short ones kept, between them a linear blend in the number
    of waves that fit the original context."""
    waves = rope.original_max_positions * inv_freq / (2 * math.pi)
    span = rope.high_freq_factor - rope.low_freq_factor
    keep = ((waves - rope.low_freq_factor) / span).clamp(0.0, 1.0)
    return inv_freq * (keep + (1.0 - keep) / rope.factor)


def _yarn(rope: Rope, inv_freq: Tensor, head_dim: int) -> Tensor:
    """Dimensions that turn at least beta_fast times in the original context are kept, those that
    turn at most beta_slow times divided by `factor`, a linear ramp between (2309.00071)."""

    def dimension(turns: float) -> float:
        waves = rope.original_max_positions / (turns * 2 * math.pi)
        return head_dim * math.log(waves) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    width = max(high - low, 0.001)
    ramp = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / width).clamp(0.0, 1.0)
    return inv_freq / rope.factor * ramp + inv_freq * (1 - ramp)
