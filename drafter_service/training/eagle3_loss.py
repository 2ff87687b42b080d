"""The loss of EAGLE-3 over a batch: steps unrolled, rows compared, the hopeless spared.

The target's distribution is restricted to the draft vocabulary; a row whose choice cannot be
drafted does not count. Equations: `reference/eagle.md` 5.1 (2503.01840). Knows no files.

Shapes: M answer rows of a batch, N of them still active, W draft vocabulary, V target vocabulary.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from drafter_service.eagle3.head import Eagle3Head
from drafter_service.training.batches import Batch
from drafter_service.training.draws import uniform
from drafter_service.training.loss import fused_loss, target_probs
from drafter_service.training.recipe import Loss, StepSums
from drafter_service.training.ttt import StepOutput, unroll


@dataclass(frozen=True, slots=True)
class LossShape:
    """Steps of training-time test, weight of step j (decay to the j), and the share of rows that
    missed and still take the next step."""

    num_steps: int = 3
    step_decay: float = 0.8
    missed_share: float = 1.0


class Eagle3Loss:
    """A head's loss; `target_rows_WH` are the rows of the target's lm_head that can be drafted."""

    def __init__(
        self, net: Eagle3Head, target_rows_WH: Tensor, draft_index_V: Tensor, shape: LossShape
    ) -> None:
        self._net = net
        self._target_rows_WH = target_rows_WH
        self._draft_index_V = draft_index_V
        self._shape = shape

    def __call__(self, batch: Batch, number: int) -> Loss:
        """Weighted sum over steps and rows; the denominator is all rows (EAGLE#340)."""
        collected = _BatchLoss(self, batch, number, self._shape.num_steps)
        unroll(self._net, batch, self._shape.num_steps, collected.after)
        sums = StepSums(tuple(collected.losses), tuple(collected.hits), tuple(collected.counts))
        return Loss(collected.total, float(batch.num_rows), sums)

    def target_probs(self, batch: Batch) -> Tensor:
        """[M, W] the target's distributions of a batch, on the draft vocabulary."""
        return target_probs(batch.final, self._target_rows_WH)

    def step_loss(
        self, batch: Batch, output: StepOutput, probs_MW: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """(weighted total, losses [N], hits [N], counted [N]) of one step.

        Rows without a target, or whose target's choice cannot be drafted, do not count.
        """
        choices_N = batch.choices[output.target_rows]
        wanted_N = torch.where(choices_N >= 0, self._draft_index_V[choices_N.clamp_min(0)], -1)
        counted_N = output.valid & (wanted_N >= 0)
        weight = self._shape.step_decay**output.step
        normed_NC = self._net.norm(output.y) if self._net.config.norm_logits else output.y
        total, rows = fused_loss(
            normed_NC, self._net.lm_head.weight, probs_MW, output.target_rows, counted_N * weight
        )
        return total, rows.losses, (rows.best == wanted_N) & counted_N, counted_N

    def rows_to_go_on(
        self, batch: Batch, output: StepOutput, hits_N: Tensor, number: int
    ) -> Tensor:
        """[N] rows worth another step: those a draft would really reach, and some others.

        A draft reaches depth d + 1 only where depth d was right, so the rows that missed are
        mostly spared the cost of later steps.
        """
        lucky_N = uniform(number, output.step, batch.keys[output.rows]) < self._shape.missed_share
        return (hits_N | lucky_N) & output.valid


class _BatchLoss:
    """Collects the loss of a batch while it is unrolled."""

    def __init__(self, loss: Eagle3Loss, batch: Batch, number: int, num_steps: int) -> None:
        self._loss, self._batch, self._number = loss, batch, number
        self._probs_MW = loss.target_probs(batch)
        self.total = torch.zeros(())
        self.losses = [0.0] * num_steps
        self.hits = [0] * num_steps
        self.counts = [0] * num_steps

    def after(self, output: StepOutput) -> Tensor:
        loss = self._loss
        total, losses_N, hits_N, counted_N = loss.step_loss(self._batch, output, self._probs_MW)
        self.total = self.total + total
        self.losses[output.step] = float((losses_N * counted_N).sum())
        self.hits[output.step] = int(hits_N.sum())
        self.counts[output.step] = int(counted_N.sum())
        return loss.rows_to_go_on(self._batch, output, hits_N, self._number)
