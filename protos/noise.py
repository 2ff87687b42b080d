"""The noise that decides sampled tokens: a 64-bit counter hash, equal on every device.

The hash is `counter`'s. Gumbel noise in float64 from 53 of its bits: u = ((bits >> 11) + 0.5) *
2^-53 is never 0, and 1 only where all 53 bits are set, because 2^53 - 0.5 rounds up in float64;
that one value is taken as the largest below 1, so the noise is always finite (design 4).

The plain-integer form is the definition; the tensor form must agree bit for bit (tested). torch's
int64 shift is arithmetic, so every right shift is masked; products wrap as in two's complement.
This is the one file of `protos` that needs torch; the ingress never imports it.
"""

from collections.abc import Sequence

import torch

from protos.counter import (
    GOLDEN,
    MIX_A,
    MIX_B,
    Purpose,
    derived_seed,
    noise_bits,
    noise_key,
    signed,
)

__all__ = [
    "Purpose",
    "derived_seed",
    "draw",
    "gumbel",
    "gumbel_from_bits",
    "noise_bits",
    "noise_bits_tensor",
    "noise_key",
    "uniform",
]


def _shift_right(x: torch.Tensor, count: int) -> torch.Tensor:
    """Logical right shift of an int64 tensor."""
    return (x >> count) & ((1 << (64 - count)) - 1)


def _mix_tensor(x: torch.Tensor) -> torch.Tensor:
    x = (x ^ _shift_right(x, 30)) * signed(MIX_A)
    x = (x ^ _shift_right(x, 27)) * signed(MIX_B)
    return x ^ _shift_right(x, 31)


def noise_bits_tensor(keys: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """`noise_bits` for int64 keys and ids that broadcast together; bits as signed int64."""
    return _mix_tensor(keys + (token_ids + 1) * signed(GOLDEN))


def gumbel_from_bits(bits: torch.Tensor) -> torch.Tensor:
    """Standard Gumbel noise, float64, from signed int64 bits of any shape; always finite."""
    u = (_shift_right(bits, 11).to(torch.float64) + 0.5) * 2.0**-53
    u = u.clamp_max(1.0 - 2.0**-53)
    return -torch.log(-torch.log(u))


def gumbel(
    seed: int, purpose: Purpose, positions: torch.Tensor, token_ids: torch.Tensor
) -> torch.Tensor:
    """Gumbel noise, float64 [P, N], for int64 positions [P] and token ids [N] or [P, N]."""
    keys = torch.tensor(
        [signed(noise_key(seed, purpose, p)) for p in positions.tolist()],
        dtype=torch.int64,
        device=token_ids.device,
    )
    ids = token_ids if token_ids.dim() == 2 else token_ids.unsqueeze(0)
    return gumbel_from_bits(noise_bits_tensor(keys.unsqueeze(1), ids))


def uniform(seed: int, purpose: Purpose, position: int) -> float:
    """One draw in (0, 1), float64: the coin of a position."""
    bits = noise_bits(seed, purpose, position, 0) >> 11
    return min((bits + 0.5) * 2.0**-53, 1.0 - 2.0**-53)


def draw(
    seed: int, purpose: Purpose, position: int, ids: Sequence[int], weights: Sequence[float]
) -> int:
    """The index drawn with probability weight / sum of weights; weights are above 0.

    argmax of log weight + gumbel(seed, position, id), on the CPU: both ends of the wire compute
    it. A tie goes to the lower index.
    """
    noise_1N = gumbel(seed, purpose, torch.tensor([position]), torch.tensor(list(ids)))
    return int((torch.tensor(list(weights), dtype=torch.float64).log() + noise_1N[0]).argmax())
