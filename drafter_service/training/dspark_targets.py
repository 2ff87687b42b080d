"""What the drafts of anchor-first blocks are compared with: the target's p and the recorded id.

`top_teacher` lists the target's recorded best ids, `exact_teacher` every id of the loss, from
`final`. A block counts up to its first draft without a target (`reference/dflash.md` 2.2): what
comes after is not reached. Knows no net.

Shapes: X anchors, J drafts of a block, N drafts that count, K ids a row, V target vocabulary, W ids
of the loss, C hidden size.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from drafter_service.training.batches import Batch
from drafter_service.training.block_loss import Targets
from drafter_service.training.block_targets import DraftRows
from drafter_service.training.dspark_rows import TeacherRows

EXACT_ROWS = 256


@dataclass(frozen=True, slots=True)
class PathTargets:
    """counted [X, J]; before [X, J]: recorded ids that the drafts follow; teacher: of those that
    count, in order."""

    counted: Tensor
    before: Tensor
    teacher: TeacherRows


@dataclass(frozen=True, slots=True)
class _Labelled:
    counted: Tensor  # [X, J]
    labels: Tensor  # [X, J], recorded ids in the loss's vocabulary, -1 for none


def _labelled(batch: Batch, drafts: DraftRows, index_V: Tensor, targets: Targets) -> _Labelled:
    following_XJ = drafts.rows + 1
    last_XJ = batch.last_row[drafts.rows]
    labels_XJ = index_V[batch.ids[torch.minimum(following_XJ, last_XJ)]]
    labels_XJ = labels_XJ.masked_fill(following_XJ > last_XJ, -1)
    choices_XJ = batch.choices[drafts.rows]
    known_XJ = drafts.exists & (choices_XJ >= 0) & (index_V[choices_XJ.clamp_min(0)] >= 0)
    if targets is Targets.HARD:
        known_XJ &= labels_XJ >= 0
    return _Labelled(known_XJ.cumprod(1).bool(), labels_XJ)


def top_teacher(batch: Batch, drafts: DraftRows, index_V: Tensor, targets: Targets) -> PathTargets:
    """index_V: place of every id in the loss's vocabulary, -1 for none."""
    found = _labelled(batch, drafts, index_V, targets)
    rows_N = drafts.rows[found.counted]
    ids_NK = index_V[batch.top_ids[rows_N]]
    probs_NK = batch.top_logps[rows_N].exp() * (ids_NK >= 0)
    listed_NK = probs_NK > 0
    wanted_N = ids_NK[:, 0]  # the target's choice is the first of the list, and kept
    ids_NK = torch.where(listed_NK, ids_NK, wanted_N[:, None])
    if targets is Targets.TOP:
        labels_NK = probs_NK / probs_NK.sum(-1, keepdim=True)
        teacher = TeacherRows(wanted_N, ids_NK, probs_NK, listed_NK, labels_NK)
        return PathTargets(found.counted, batch.ids[drafts.rows], teacher)
    label_N1 = found.labels[found.counted][:, None]
    same_NK = listed_NK & (ids_NK == label_N1)
    missing_N1 = ~same_NK.any(-1, keepdim=True)
    teacher = TeacherRows(
        wanted_N,
        torch.cat([ids_NK, torch.where(missing_N1, label_N1, ids_NK[:, :1])], dim=-1),
        torch.cat([probs_NK, torch.zeros(missing_N1.shape)], dim=-1),
        torch.cat([listed_NK, torch.zeros_like(missing_N1)], dim=-1),
        torch.cat([same_NK, missing_N1], dim=-1).float(),
    )
    return PathTargets(found.counted, batch.ids[drafts.rows], teacher)


def exact_teacher(
    batch: Batch, drafts: DraftRows, index_V: Tensor, targets: Targets, head: tuple[Tensor, Tensor]
) -> PathTargets:
    """head: the target's lm_head [V, C], and the ids of the loss [W]. Takes memory of N * W."""
    found = _labelled(batch, drafts, index_V, targets)
    rows_N = drafts.rows[found.counted]
    labels_N = found.labels[found.counted] if targets is Targets.HARD else None
    wanted_N = index_V[batch.choices[rows_N]]
    teacher = exact_rows(batch.final[rows_N], wanted_N, labels_N, head)
    return PathTargets(found.counted, batch.ids[drafts.rows], teacher)


def exact_rows(
    final_NC: Tensor, wanted_N: Tensor, labels_N: Tensor | None, head: tuple[Tensor, Tensor]
) -> TeacherRows:
    """p of every id of the loss; cross entropy with `labels`, or with p itself without them."""
    rows_VC, kept_W = head
    starts = range(0, len(final_NC), EXACT_ROWS)
    parts = [
        (final_NC[start : start + EXACT_ROWS] @ rows_VC.T).float().softmax(-1)[:, kept_W]
        for start in starts
    ]
    probs_NW = torch.cat(parts) if parts else torch.zeros(0, len(kept_W))
    if labels_N is None:
        labels_NW = probs_NW / probs_NW.sum(-1, keepdim=True)
    else:
        labels_NW = torch.zeros_like(probs_NW).scatter_(1, labels_N[:, None], 1.0)
    ids_NW = torch.arange(len(kept_W)).expand(probs_NW.shape)
    return TeacherRows(
        wanted_N, ids_NW, probs_NW, torch.ones_like(probs_NW, dtype=torch.bool), labels_NW
    )
