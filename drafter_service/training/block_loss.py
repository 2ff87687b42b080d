"""The loss of a plain block drafter: each draft of each block against what came, weighted by place.

Anchors are drawn anew every update, by row, so batches may be split. The softmax may run over the
most frequent ids of the answers only: on a CPU the whole vocabulary would cost more than the net.
Equations: `reference/dflash.md` 2.1, 2.3. Knows no files.

Shapes: X anchors of a batch, J drafts of a block, N drafts that count, C hidden size, W ids of the
loss, V target vocabulary.
"""

from dataclasses import dataclass
from enum import StrEnum

import torch
from torch import Tensor

from drafter_service.dflash.net import BlockNet
from drafter_service.training.batches import Batch
from drafter_service.training.block_targets import (
    Compared,
    decay_weights,
    dpace_weights,
    draft_rows,
    hard_targets,
    top_targets,
)
from drafter_service.training.blocks import draw_anchors, run_blocks
from drafter_service.training.recipe import Loss, StepSums
from drafter_service.training.sparse_loss import row_losses


class Weighting(StrEnum):
    """How much a draft of a block counts."""

    DECAY = "decay"
    """By its place alone; the denominator is the sum of weights."""
    DPACE = "dpace"
    """By what its acceptance would be worth now; the denominator is the number of drafts."""


class Targets(StrEnum):
    """What a draft is compared with."""

    HARD = "hard"
    """The recorded id."""
    TOP = "top"
    """The target's best ids by their probability."""


@dataclass(frozen=True, slots=True)
class BlockLossShape:
    """Share of answer rows that are anchors, and what their drafts are worth."""

    anchor_share: float
    targets: Targets = Targets.HARD
    weighting: Weighting = Weighting.DECAY
    gamma: float = 4.0
    alpha: float = 0.5


class BlockLoss:
    """A net's loss. rows_WC: rows of the target's lm_head that the loss compares; index_V: place
    of every id among them, -1 for none."""

    def __init__(
        self, net: BlockNet, rows_WC: Tensor, index_V: Tensor, shape: BlockLossShape
    ) -> None:
        self._net = net
        self._rows_WC = rows_WC
        self._index_V = index_V
        self._shape = shape

    def __call__(self, batch: Batch, number: int) -> Loss:
        """Weighted sum over the drafts of the anchors drawn for update `number`."""
        num_drafts = self._net.config.num_drafts
        anchors_X = draw_anchors(batch, self._shape.anchor_share, number)
        compared = self.compare(batch, anchors_X)
        if not compared.counted.any():
            none = (0.0,) * num_drafts
            nothing = self._net.fc.weight.sum() * 0.0
            return Loss(nothing, 0.0, StepSums(none, none, none))
        hidden_XBC = run_blocks(self._net, batch, anchors_X)
        losses_XJ, hits_XJ = self.slot_losses(hidden_XBC, compared)
        weights_XJ, denominator = self.weights(losses_XJ, compared.counted)
        with torch.no_grad():
            sums = StepSums(
                tuple(losses_XJ.sum(0).tolist()),
                tuple(hits_XJ.sum(0).tolist()),
                tuple(compared.counted.sum(0).tolist()),
            )
        return Loss((losses_XJ * weights_XJ).sum(), denominator, sums)

    def compare(self, batch: Batch, anchors_X: Tensor) -> Compared:
        """What the drafts of these anchors are compared with."""
        drafts = draft_rows(batch, anchors_X, self._net.config.num_drafts)
        if self._shape.targets is Targets.TOP:
            return top_targets(batch, drafts, self._index_V)
        return hard_targets(batch, drafts, self._index_V)

    def slot_losses(self, hidden_XBC: Tensor, compared: Compared) -> tuple[Tensor, Tensor]:
        """(losses [X, J], hits [X, J]) of blocks before `norm`; 0 where a draft does not count."""
        drafts_XJC = hidden_XBC[:, self._net.config.first_draft_slot :]
        found = row_losses(
            self._net.norm(drafts_XJC[compared.counted]), self._rows_WC, compared.targets
        )
        losses_XJ = torch.zeros(compared.counted.shape)
        losses_XJ = losses_XJ.masked_scatter(compared.counted, found.losses)
        hits_XJ = torch.zeros_like(compared.counted)
        return losses_XJ, hits_XJ.masked_scatter(compared.counted, found.hits)

    def weights(self, losses_XJ: Tensor, counted_XJ: Tensor) -> tuple[Tensor, float]:
        """(weights [X, J], denominator)."""
        if self._shape.weighting is Weighting.DPACE:
            weights_XJ = dpace_weights(losses_XJ, counted_XJ, self._shape.alpha)
            return weights_XJ, float(counted_XJ.sum())
        weights_XJ = decay_weights(counted_XJ, self._shape.gamma)
        return weights_XJ, float(weights_XJ.sum())
