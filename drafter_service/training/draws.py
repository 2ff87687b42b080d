"""Random numbers that depend on an update and a row of data, and on nothing else.

A row draws the same number whichever batch or worker holds it, so splitting a batch changes no
update and a resumed run repeats itself. splitmix64 in int64 arithmetic. Knows no data.
"""

import torch
from torch import Tensor

_INCREMENT = -7046029254386353131  # 0x9E3779B97F4A7C15
_FIRST = -4658895280553007687  # 0xBF58476D1CE4E5B9
_SECOND = -7723592293110705685  # 0x94D049BB133111EB


def uniform(number: int, purpose: int, keys_N: Tensor) -> Tensor:
    """[N] float64 in [0, 1) for update `number` and int64 keys."""
    start = torch.tensor(number * 64 + purpose, dtype=torch.int64)
    return (_mixed(keys_N + _mixed(start)) & ((1 << 53) - 1)).double() * 2.0**-53


def _mixed(bits: Tensor) -> Tensor:
    z = bits * 1 + _INCREMENT
    z = (z ^ _shifted(z, 30)) * _FIRST
    z = (z ^ _shifted(z, 27)) * _SECOND
    return z ^ _shifted(z, 31)


def _shifted(z: Tensor, count: int) -> Tensor:
    # torch shifts int64 arithmetically: the sign bits are cleared.
    return (z >> count) & ((1 << (64 - count)) - 1)
