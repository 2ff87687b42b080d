"""Which ids of a whole vocabulary can win a draw, found without noise for each of them.

The best-scored id has some total L = score + noise. Another id beats it only if its score lies
within REACH of L or its noise is above REACH. Noise grows with the hash's bits, so the second is
one comparison of integers; what costs, two logarithms a value, is left to the caller and the few.
Invariant: the id of the highest total is among the contenders, whatever the scores; and so is every
id whose total reaches L.

Shapes: V vocabulary, C contenders.
"""

import functools
import math
from typing import Final

import numpy as np
import torch

from protos.counter import GOLDEN, MASK, MIX_A, MIX_B, signed
from protos.noise import gumbel_from_bits, noise_bits_tensor

REACH: Final = 6.0
"""Of 49k ids about 120 have more noise than this."""
_FEWEST_BITS: Final = int(math.exp(-math.exp(-REACH)) * 2.0**64) - (1 << 13)
"""Noise above REACH has at least these bits; the margin covers every rounding on the way."""


def best_scored(scores_V: torch.Tensor) -> int | None:
    """The lowest id of the best score; None where that is not finite."""
    on_cpu = scores_V.device.type == "cpu"
    best = int(scores_V.numpy().argmax() if on_cpu else scores_V.argmax())
    return best if math.isfinite(scores_V[best].item()) else None


def contenders(scores_V: torch.Tensor, key: int, best: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Ascending ids, int64 [C], and their totals, float64 [C].

    scores_V: float32. key: `noise_key` of the row. best: `best_scored` id.
    """
    if scores_V.device.type != "cpu":
        ids_V = torch.arange(scores_V.shape[0], device=scores_V.device)
        bits_V = noise_bits_tensor(torch.tensor(signed(key), device=scores_V.device), ids_V)
        return ids_V, scores_V.to(torch.float64) + gumbel_from_bits(bits_V)
    scores = scores_V.numpy()
    bits = noise_bits_of_all(key, scores.shape[0])
    level = float(scores[best]) + _noise(bits[best : best + 1]).item()
    # Scores are float32: a little more than their rounding is added to the reach.
    near = np.float32(level - REACH - 1e-3 - 1e-6 * abs(level))
    ids = np.flatnonzero((scores >= near) | (bits >= np.uint64(_FEWEST_BITS)))
    total_C = torch.from_numpy(scores[ids].astype(np.float64)) + _noise(bits[ids])
    return torch.from_numpy(ids), total_C


def _noise(bits: np.ndarray[tuple[int], np.dtype[np.uint64]]) -> torch.Tensor:
    return gumbel_from_bits(torch.from_numpy(bits.view(np.int64)))


def noise_bits_of_all(key: int, vocab_size: int) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
    """`noise_bits` of every id under a noise key, unsigned [V]; a few passes over one buffer."""
    bits = _steps(vocab_size) + np.uint64(key & MASK)
    held = bits >> np.uint64(30)
    bits ^= held
    bits *= np.uint64(MIX_A)
    np.right_shift(bits, np.uint64(27), out=held)
    bits ^= held
    bits *= np.uint64(MIX_B)
    np.right_shift(bits, np.uint64(31), out=held)
    bits ^= held
    return bits


@functools.lru_cache(maxsize=4)
def _steps(vocab_size: int) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
    """Where each id's stream stands before its key is added."""
    return (np.arange(vocab_size, dtype=np.uint64) + np.uint64(1)) * np.uint64(GOLDEN)
