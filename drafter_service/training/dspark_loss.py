"""DSpark's loss: each draft of each block behind the token before it, and the head's confidence.

    0.1 CE + 0.9 L1 + 1.0 BCE(confidence, 1 - L1 / 2), each weighted by exp(-(k - 1) / gamma)

The token before is the recorded one. The serial head's w1 and w2 are trained with the layers.
Anchors are drawn by row, so batches may be split. Equations: `reference/dflash.md` 4.1. Knows no
files.

Shapes: X anchors of a batch, B slots of a block, J = B drafts, N drafts that count, C hidden size,
R rank, W ids of the loss, V target vocabulary.
"""

from dataclasses import dataclass, field
from enum import StrEnum

import torch
from torch import Tensor
from torch.nn import functional

from drafter_service.dflash.config import MarkovKind
from drafter_service.dflash.net import BlockNet
from drafter_service.training.batches import Batch
from drafter_service.training.block_loss import Targets
from drafter_service.training.block_targets import decay_weights, draft_rows
from drafter_service.training.blocks import draw_anchors, run_blocks
from drafter_service.training.dspark_rows import Shares, compare_rows
from drafter_service.training.dspark_targets import PathTargets, exact_teacher, top_teacher
from drafter_service.training.recipe import Loss, StepSums
from protos.errors import ConfigError


class Teacher(StrEnum):
    """Where the target's probabilities come from."""

    TOP = "top"
    """Its recorded best ids; the others by their sum."""
    FINAL = "final"
    """Its recorded last states: every id, at the price of its lm_head."""


@dataclass(frozen=True, slots=True)
class DsparkShape:
    """Share of answer rows that are anchors, and what the terms are worth."""

    anchor_share: float
    targets: Targets = Targets.HARD
    teacher: Teacher = Teacher.TOP
    gamma: float = 4.0
    shares: Shares = field(default_factory=Shares)
    confidence: float = 1.0


@dataclass(frozen=True, slots=True)
class LossHead:
    """lm_head: of the target [V, C]; kept: ids that the loss compares [W]; index [V]: place of
    every id among them, -1 for none."""

    lm_head: Tensor
    kept: Tensor
    index: Tensor


class DsparkLoss:
    """A net's loss. Raises ConfigError for a net without a vanilla serial head and confidence."""

    def __init__(self, net: BlockNet, head: LossHead, shape: DsparkShape) -> None:
        markov, confidence = net.markov_head, net.confidence_head
        if markov is None or markov.kind is not MarkovKind.VANILLA or confidence is None:
            raise ConfigError("DSpark trains a vanilla serial head and a confidence head")
        self._net, self._markov, self._confidence = net, markov, confidence
        self._head = head
        self._rows_WC = head.lm_head[head.kept]
        self._shape = shape

    def __call__(self, batch: Batch, number: int) -> Loss:
        """Weighted sum over the drafts of the anchors drawn for update `number`."""
        anchors_X = draw_anchors(batch, self._shape.anchor_share, number)
        compared = self.compare(batch, anchors_X)
        if not compared.counted.any():
            none = (0.0,) * self._net.config.num_drafts
            return Loss(self._net.fc.weight.sum() * 0.0, 0.0, StepSums(none, none, none))
        return self.of_blocks(run_blocks(self._net, batch, anchors_X), compared)

    def compare(self, batch: Batch, anchors_X: Tensor) -> PathTargets:
        """What the drafts of these anchors are compared with."""
        drafts = draft_rows(batch, anchors_X, self._net.config.num_drafts)
        head, targets = self._head, self._shape.targets
        if self._shape.teacher is Teacher.FINAL:
            full = (head.lm_head, head.kept)
            return exact_teacher(batch, drafts, head.index, targets, full)
        return top_teacher(batch, drafts, head.index, targets)

    def of_blocks(self, hidden_XBC: Tensor, compared: PathTargets) -> Loss:
        """hidden: states before `norm`. The losses told are CE and L1 with their shares."""
        counted_XJ, shape = compared.counted, self._shape
        drafts_XJC = hidden_XBC[:, self._net.config.first_draft_slot :]
        normed_NC = self._net.norm(drafts_XJC[counted_XJ])
        factors_NR = self._markov.token_rows(compared.before[counted_XJ])
        weights_XJ = decay_weights(counted_XJ, shape.gamma)
        weights_N = weights_XJ[counted_XJ]
        total, rows = compare_rows(
            (normed_NC, factors_NR),
            (self._rows_WC, self._markov.markov_w2.weight[self._head.kept]),
            compared.teacher,
            weights_N,
            shape.shares,
        )
        said_N = self._confidence.logits(normed_NC, factors_NR)
        accepted_N = 1.0 - rows.l1 / 2
        doubts_N = functional.binary_cross_entropy_with_logits(
            said_N, accepted_N.clamp(0.0, 1.0), reduction="none"
        )
        total = total + shape.confidence * (doubts_N * weights_N).sum()
        losses_N = shape.shares.ce * rows.ce + shape.shares.l1 * rows.l1
        sums = StepSums(
            _by_slot(losses_N, counted_XJ),
            _by_slot(rows.hits.float(), counted_XJ),
            _by_slot(torch.ones(len(losses_N)), counted_XJ),
        )
        return Loss(total, float(weights_XJ.sum()), sums)


def _by_slot(values_N: Tensor, counted_XJ: Tensor) -> tuple[float, ...]:
    spread_XJ = torch.zeros(counted_XJ.shape).masked_scatter(counted_XJ, values_N)
    return tuple(spread_XJ.sum(0).tolist())
