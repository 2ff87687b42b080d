"""Rotary positions of a draft head: inverse frequencies by type, and the rotation.

Knows `default` and `llama3`; other types are refused by the checkpoint readers, by name.
Invariant: frequencies are float32 whatever the dtype of the head.

Shapes: N rows, X heads, D head_dim.
"""

import math

import torch
from torch import Tensor

from drafter_service.eagle3.config import Rope


def inverse_frequencies(rope: Rope, head_dim: int) -> Tensor:
    """[D / 2] float32. Llama 3's rule: long waves divided by `factor`, short ones kept, between
    them a linear blend in the number of waves that fit the original context."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).to(torch.float32) / head_dim
    inv_freq = 1.0 / (rope.theta**exponents)
    if rope.kind == "default":
        return inv_freq
    waves = rope.original_max_positions * inv_freq / (2 * math.pi)
    span = rope.high_freq_factor - rope.low_freq_factor
    keep = ((waves - rope.low_freq_factor) / span).clamp(0.0, 1.0)
    return inv_freq * (keep + (1.0 - keep) / rope.factor)


def rotate(x_NXD: Tensor, cos_sin: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate halves: pairs are (i, i + D / 2), as in the Llama family."""
    cos_N1D, sin_N1D = cos_sin
    first, second = x_NXD.chunk(2, dim=-1)
    return x_NXD * cos_N1D + torch.cat([-second, first], dim=-1) * sin_N1D
