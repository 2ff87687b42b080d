"""What the slots of blocks are compared with, and how much each slot counts.

In-place, slot k >= 1 of an anchor at answer row m stands for ids[m + k], whose distribution row
m + k - 1 predicts; anchor-first, slot k stands for ids[m + k + 1]. The drafts of a block are
numbered j = 0 .. J-1 here, so draft j of row m is compared with row m + j whatever the layout.
Knows no net. Sources: `reference/dflash.md` 2.1 to 2.3.

Shapes: M answer rows of a batch, X anchors, J drafts of a block, N drafts that count, K ids a row.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from drafter_service.training.batches import Batch
from drafter_service.training.sparse_loss import SparseTargets


@dataclass(frozen=True, slots=True)
class DraftRows:
    """Per draft the row whose `final` predicts it, and whether that row's record goes so far."""

    rows: Tensor  # [X, J]
    exists: Tensor  # [X, J]


def draft_rows(batch: Batch, anchors_X: Tensor, num_drafts: int) -> DraftRows:
    """Row m + j for draft j of the anchor at row m, within the record."""
    wanted_XJ = anchors_X[:, None] + torch.arange(num_drafts)
    last_X1 = batch.last_row[anchors_X][:, None]
    return DraftRows(torch.minimum(wanted_XJ, last_X1), wanted_XJ <= last_X1)


@dataclass(frozen=True, slots=True)
class Compared:
    """counted [X, J]: drafts that have a target; targets: of those, in order."""

    counted: Tensor
    targets: SparseTargets


def hard_targets(batch: Batch, drafts: DraftRows, index_V: Tensor) -> Compared:
    """The recorded id itself; index_V: place of every id in the loss's vocabulary, -1 for none."""
    following_XJ = drafts.rows + 1
    last_XJ = batch.last_row[drafts.rows]
    labels_XJ = index_V[batch.ids[torch.minimum(following_XJ, last_XJ)]]
    counted_XJ = drafts.exists & (following_XJ <= last_XJ) & (labels_XJ >= 0)
    ids_N1 = labels_XJ[counted_XJ][:, None]
    return Compared(counted_XJ, SparseTargets(ids_N1, torch.ones(ids_N1.shape)))


def top_targets(batch: Batch, drafts: DraftRows, index_V: Tensor) -> Compared:
    """The target's best ids with their shares among those that the loss compares.

    A draft counts when the target's own choice is one of them.
    """
    chosen_XJ = batch.choices[drafts.rows]
    counted_XJ = drafts.exists & (chosen_XJ >= 0) & (index_V[chosen_XJ.clamp_min(0)] >= 0)
    rows_N = drafts.rows[counted_XJ]
    ids_NK = index_V[batch.top_ids[rows_N]]
    kept_NK = ids_NK >= 0
    probs_NK = batch.top_logps[rows_N].exp() * kept_NK
    # The first id is the target's choice, which is kept.
    ids_NK = torch.where(kept_NK & (probs_NK > 0), ids_NK, ids_NK[:, :1])
    return Compared(counted_XJ, SparseTargets(ids_NK, probs_NK / probs_NK.sum(-1, keepdim=True)))


def decay_weights(counted_XJ: Tensor, gamma: float) -> Tensor:
    """[X, J]: exp(-j / gamma) where a draft counts."""
    return torch.exp(-torch.arange(counted_XJ.shape[1]) / gamma) * counted_XJ


def dpace_weights(losses_XJ: Tensor, counted_XJ: Tensor, alpha: float) -> Tensor:
    """[X, J] D-PACE (2605.18810): what a draft's acceptance is worth, from what comes after it.

    w_j = sum over m >= j of prod over i <= m of ((1 - alpha) exp(-loss_i) + alpha). Drafts that do
    not count are passed over: they neither weigh nor end a block.
    """
    likely_XJ = (1.0 - alpha) * torch.exp(-losses_XJ.detach()) + alpha
    reached_XJ = torch.where(counted_XJ, likely_XJ, 1.0).cumprod(1) * counted_XJ
    return reached_XJ.flip(1).cumsum(1).flip(1) * counted_XJ
