"""What the target says about rows, on the draft vocabulary: every id, or its most likely ones.

Both kinds hold p normalised over the ids that can be drafted (`reference/eagle.md` 5.1), and beside
it the mass p has there within the whole vocabulary, so that mass * p is the target's own
distribution. `DenseTargets` costs a product with the target's lm_head per row; `TopTargets` come
from the ids recorded with the features, and take everything beyond them for zero. Knows no head.

Shapes: M target rows, N of them asked for, W draft vocabulary, K ids kept per row, H target hidden
size.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

CHUNK_ROWS = 128


@dataclass(frozen=True, slots=True)
class TargetRows:
    """`probs` of `ids` per row, or of the whole draft vocabulary in order where `ids` is None."""

    probs: Tensor  # [N, K] or [N, W] float32, rows summing to 1
    mass: Tensor  # [N] float32
    ids: Tensor | None  # [N, K] int64 draft ids; ids that cannot be drafted are 0, at probability 0

    def dense(self, num_ids: int) -> Tensor:
        """[N, W] probs of every draft id."""
        if self.ids is None:
            return self.probs
        return self.probs.new_zeros(len(self.probs), num_ids).scatter_add_(1, self.ids, self.probs)


class Targets(Protocol):
    """The targets of a batch."""

    def rows(self, rows_N: Tensor) -> TargetRows:
        """Those of these rows."""


@dataclass(frozen=True, slots=True)
class DenseTargets:
    """p over the whole draft vocabulary."""

    probs: Tensor  # [M, W]
    mass: Tensor  # [M] float32

    def rows(self, rows_N: Tensor) -> TargetRows:
        """See `Targets`."""
        return TargetRows(self.probs[rows_N].float(), self.mass[rows_N], None)


@dataclass(frozen=True, slots=True)
class TopTargets:
    """p over the recorded ids that can be drafted."""

    ids: Tensor  # [M, K] int64 draft ids
    probs: Tensor  # [M, K] float32
    mass: Tensor  # [M] float32

    def rows(self, rows_N: Tensor) -> TargetRows:
        """See `Targets`."""
        return TargetRows(self.probs[rows_N], self.mass[rows_N], self.ids[rows_N])


def target_probs(final_MH: Tensor, lm_head_WH: Tensor) -> Tensor:
    """[M, W] in the dtype of `final`: the target's distribution restricted to the draft ids."""
    probs_MW = torch.empty(len(final_MH), len(lm_head_WH), dtype=final_MH.dtype)
    for start in range(0, len(final_MH), CHUNK_ROWS):
        chunk = slice(start, start + CHUNK_ROWS)
        probs_MW[chunk] = (final_MH[chunk] @ lm_head_WH.T).softmax(-1, dtype=torch.float32)
    return probs_MW


def dense_targets(
    final_MH: Tensor, lm_head_WH: Tensor, wanted_M: Tensor, wanted_logps_M: Tensor
) -> DenseTargets:
    """wanted: a draft id whose log-probability over the whole vocabulary is known, -1 for none.

    That one id gives the mass of them all; rows without one are taken to have all of it.
    """
    probs_MW = target_probs(final_MH, lm_head_WH)
    known_M = probs_MW.gather(1, wanted_M.clamp_min(0)[:, None])[:, 0].float()
    mass_M = wanted_logps_M.float().exp() / known_M.clamp_min(1e-12)
    return DenseTargets(probs_MW, torch.where(wanted_M >= 0, mass_M, 1.0).clamp_max(1.0))


def top_targets(top_ids_MK: Tensor, top_logps_MK: Tensor, draft_index_V: Tensor) -> TopTargets:
    """From target ids and their log-probabilities; `draft_index` is -1 where nothing is drafted.

    A row of which nothing can be drafted has probabilities and mass 0.
    """
    ids_MK = draft_index_V[top_ids_MK]
    probs_MK = top_logps_MK.float().exp().masked_fill(ids_MK < 0, 0.0)
    mass_M = probs_MK.sum(-1)
    probs_MK = probs_MK / mass_M.clamp_min(1e-12)[:, None]
    return TopTargets(ids_MK.clamp_min(0), probs_MK, mass_M.clamp_max(1.0))
