"""The noise that decides sampled tokens: a 64-bit counter hash, equal on every device.

`noise_bits(seed, purpose, position, token_id)` in integer arithmetic: the first three are mixed
into a 64-bit key (three rounds of the splitmix64 finaliser), the token id advances a splitmix64
stream from that key. Gumbel noise in float64 from 53 of the bits: u = ((bits >> 11) + 0.5) * 2^-53
is never 0, and 1 only where all 53 bits are set, because 2^53 - 0.5 rounds up in float64; that
one value is taken as the largest below 1, so the noise is always finite (design 4).

The plain-integer form is the definition; the tensor form must agree bit for bit (tested). torch's
int64 shift is arithmetic, so every right shift is masked; products wrap as in two's complement.
This is the one file of `protos` that needs torch; the ingress never imports it.
"""

from collections.abc import Sequence
from enum import IntEnum
from typing import Final

import torch

_MASK: Final = (1 << 64) - 1
_GOLDEN: Final = 0x9E3779B97F4A7C15
_MIX_A: Final = 0xBF58476D1CE4E5B9
_MIX_B: Final = 0x94D049BB133111EB


class Purpose(IntEnum):
    """What a draw is for; one purpose never shares bits with another."""

    CHOICE = 0
    DRAFT = 1
    COIN = 2
    RESIDUAL = 3
    BONUS = 4
    SEED = 5


def _mix(x: int) -> int:
    """splitmix64's finaliser on an unsigned 64-bit integer."""
    x = ((x ^ (x >> 30)) * _MIX_A) & _MASK
    x = ((x ^ (x >> 27)) * _MIX_B) & _MASK
    return x ^ (x >> 31)


def noise_key(seed: int, purpose: Purpose, position: int) -> int:
    """The unsigned 64-bit key of one (seed, purpose, position)."""
    key = _mix((seed + _GOLDEN) & _MASK)
    key = _mix((key ^ _mix((int(purpose) + 1) * _GOLDEN & _MASK)) & _MASK)
    return _mix((key + (position + 1) * _GOLDEN) & _MASK)


def noise_bits(seed: int, purpose: Purpose, position: int, token_id: int) -> int:
    """64 random bits (unsigned) for one token at one position."""
    return _mix((noise_key(seed, purpose, position) + (token_id + 1) * _GOLDEN) & _MASK)


def derived_seed(seed: int, index: int) -> int:
    """The seed of choice `index` of a request: the seed itself for 0, else a hash; signed."""
    if index == 0:
        return seed
    return _signed(noise_bits(seed, Purpose.SEED, index, 0))


def _signed(x: int) -> int:
    return x - (1 << 64) if x >= 1 << 63 else x


def _shift_right(x: torch.Tensor, count: int) -> torch.Tensor:
    """Logical right shift of an int64 tensor."""
    return (x >> count) & ((1 << (64 - count)) - 1)


def _mix_tensor(x: torch.Tensor) -> torch.Tensor:
    x = (x ^ _shift_right(x, 30)) * _signed(_MIX_A)
    x = (x ^ _shift_right(x, 27)) * _signed(_MIX_B)
    return x ^ _shift_right(x, 31)


def noise_bits_tensor(keys: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """`noise_bits` for int64 keys and ids that broadcast together; bits as signed int64."""
    return _mix_tensor(keys + (token_ids + 1) * _signed(_GOLDEN))


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
        [_signed(noise_key(seed, purpose, p)) for p in positions.tolist()],
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
