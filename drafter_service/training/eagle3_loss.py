"""The loss of EAGLE-3 over a batch: steps unrolled, rows compared, the hopeless spared.

The target's distribution is restricted to the draft vocabulary, whole or to its recorded best ids
(`targets`); a row whose choice cannot be drafted does not count. Equations: `reference/eagle.md`
5.1 (2503.01840). Knows no files.

Shapes: M answer rows of a batch, N of them still active, W draft vocabulary, V target vocabulary.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from drafter_service.eagle3.head import Eagle3Head
from drafter_service.training.batches import Batch
from drafter_service.training.draws import uniform
from drafter_service.training.loss import Comparison, fused_loss
from drafter_service.training.recipe import Loss, StepSums
from drafter_service.training.targets import Targets, dense_targets, top_targets
from drafter_service.training.ttt import StepOutput, unroll


@dataclass(frozen=True, slots=True)
class LossShape:
    """Steps of training-time test, weight of step j (decay to the j), the share of rows that
    missed and still take the next step, and how q is compared with p."""

    num_steps: int = 3
    step_decay: float = 0.8
    missed_share: float = 1.0
    comparison: Comparison = field(default_factory=Comparison)


class Eagle3Loss:
    """A head's loss; `target_rows_WH` are the rows of the target's lm_head that can be drafted,
    None to take the target's distribution from the ids recorded with the features."""

    def __init__(
        self,
        net: Eagle3Head,
        target_rows_WH: Tensor | None,
        draft_index_V: Tensor,
        shape: LossShape,
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

    def wanted(self, batch: Batch) -> Tensor:
        """[M] draft id of the target's choice, -1 where it cannot be drafted or there is none."""
        drafted_M = self._draft_index_V[batch.choices.clamp_min(0)]
        return torch.where(batch.choices >= 0, drafted_M, -1)

    def targets(self, batch: Batch, wanted_M: Tensor) -> Targets:
        """The target's distributions of a batch, on the draft vocabulary."""
        if self._target_rows_WH is None:
            return top_targets(batch.top_ids, batch.top_logps, self._draft_index_V)
        return dense_targets(batch.final, self._target_rows_WH, wanted_M, batch.top_logps[:, 0])

    def step_loss(
        self, output: StepOutput, wanted_M: Tensor, targets: Targets
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(weighted total, losses [those that count], hits [N]) of one step.

        Rows without a target, or whose target's choice cannot be drafted, do not count.
        """
        wanted_N = wanted_M[output.target_rows]
        counted = (output.valid & (wanted_N >= 0)).nonzero()[:, 0]
        y_NC = output.y if len(counted) == len(wanted_N) else output.y[counted]
        normed_NC = self._net.norm(y_NC) if self._net.config.norm_logits else y_NC
        total, rows = fused_loss(
            normed_NC,
            self._net.lm_head.weight,
            targets,
            output.target_rows[counted],
            wanted_N[counted],
            self._shape.comparison,
            self._shape.step_decay**output.step,
        )
        hits_N = torch.zeros(len(wanted_N), dtype=torch.bool)
        hits_N[counted] = rows.hits
        return total, rows.losses, hits_N

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
        self._wanted_M = loss.wanted(batch)
        self._targets = loss.targets(batch, self._wanted_M)
        self.total = torch.zeros(())
        self.losses = [0.0] * num_steps
        self.hits = [0] * num_steps
        self.counts = [0] * num_steps

    def after(self, output: StepOutput) -> Tensor | None:
        loss = self._loss
        total, losses, hits_N = loss.step_loss(output, self._wanted_M, self._targets)
        self.total = self.total + total
        self.losses[output.step] = float(losses.sum())
        self.hits[output.step] = int(hits_N.sum())
        self.counts[output.step] = len(losses)
        if output.step + 1 == len(self.losses):
            return None
        return loss.rows_to_go_on(self._batch, output, hits_N, self._number)
