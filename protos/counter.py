"""The counter hash behind all noise, in plain integers: the definition.

`noise_bits(seed, purpose, position, token_id)`: the first three are mixed into a 64-bit key (three
rounds of the splitmix64 finaliser), the token id advances a splitmix64 stream from that key. Knows
no tensors, so whoever only derives seeds needs no torch; `noise` has the same for tensors.
"""

from enum import IntEnum
from typing import Final

MASK: Final = (1 << 64) - 1
GOLDEN: Final = 0x9E3779B97F4A7C15
MIX_A: Final = 0xBF58476D1CE4E5B9
MIX_B: Final = 0x94D049BB133111EB


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
    x = ((x ^ (x >> 30)) * MIX_A) & MASK
    x = ((x ^ (x >> 27)) * MIX_B) & MASK
    return x ^ (x >> 31)


def noise_key(seed: int, purpose: Purpose, position: int) -> int:
    """The unsigned 64-bit key of one (seed, purpose, position)."""
    key = _mix((seed + GOLDEN) & MASK)
    key = _mix((key ^ _mix((int(purpose) + 1) * GOLDEN & MASK)) & MASK)
    return _mix((key + (position + 1) * GOLDEN) & MASK)


def noise_bits(seed: int, purpose: Purpose, position: int, token_id: int) -> int:
    """64 random bits (unsigned) for one token at one position."""
    return _mix((noise_key(seed, purpose, position) + (token_id + 1) * GOLDEN) & MASK)


def derived_seed(seed: int, index: int) -> int:
    """The seed of choice `index` of a request: the seed itself for 0, else a hash; signed."""
    if index == 0:
        return seed
    return signed(noise_bits(seed, Purpose.SEED, index, 0))


def signed(x: int) -> int:
    """The same 64 bits as a signed integer."""
    return x - (1 << 64) if x >= 1 << 63 else x
