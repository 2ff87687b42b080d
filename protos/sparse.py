"""A sparse q: the distribution that one draft token was sampled from (`acceptance: rejection`).

At most MAX_Q_IDS ids with positive weights; q(id) = weight / sum of weights, computed so at both
ends, which makes rounding on the wire harmless: weights are rounded to float16 before the token is
sampled, never after. Knows no noise and no model. Ids are not checked here against a vocabulary.
"""

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from protos.errors import MalformedTree

MAX_Q_IDS: Final = 64
"""Ids that may carry probability at one position."""


@dataclass(frozen=True, slots=True)
class SparseQ:
    """ids: distinct. weights: float16 values above 0, as many; they need not sum to 1."""

    ids: tuple[int, ...]
    weights: tuple[float, ...]

    def __post_init__(self) -> None:
        count = len(self.ids)
        if not 1 <= count <= MAX_Q_IDS or len(self.weights) != count:
            raise MalformedTree(
                f"a sparse q has 1 to {MAX_Q_IDS} ids with a weight each, "
                f"not {count} ids and {len(self.weights)} weights"
            )
        if len(set(self.ids)) != count:
            raise MalformedTree("the ids of a sparse q must be distinct")
        if not all(math.isfinite(weight) and weight > 0.0 for weight in self.weights):
            raise MalformedTree("the weights of a sparse q must be finite and above 0")

    @property
    def total(self) -> float:
        """Sum of the weights."""
        return math.fsum(self.weights)

    def probability(self, token_id: int) -> float:
        """q(token_id); 0 for ids that are not listed."""
        if token_id not in self.ids:
            return 0.0
        return self.weights[self.ids.index(token_id)] / self.total


def sparse_q(ids: Sequence[int], probabilities: Sequence[float]) -> SparseQ:
    """Probabilities rounded to float16; ids that round to 0 carry none and are left out.

    Raises MalformedTree when nothing is left, or something is not finite.
    """
    rounded = struct.unpack(f"<{len(ids)}e", struct.pack(f"<{len(ids)}e", *probabilities))
    kept = [(i, weight) for i, weight in zip(ids, rounded, strict=True) if weight != 0.0]
    return SparseQ(tuple(i for i, _ in kept), tuple(weight for _, weight in kept))
