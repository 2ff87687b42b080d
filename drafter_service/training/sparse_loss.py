"""Cross entropy of a frozen lm_head's softmax against few ids a row: one, or the target's best.

    loss = - sum_k p_k log q[id_k]        q = softmax(hidden @ weight.T)

`cross_entropy` is the definition; `row_losses` makes the same value and its gradient by the hidden
states in one pass over chunks of rows: logits of a chunk are written once and changed in place. The
weight is not trained, so a row's gradient is its own and weights may be chosen after the losses
are known. Knows no head and no optimiser.

Shapes: N rows, C hidden size, W ids of the loss, K ids of a row.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

CHUNK_ROWS = 256


@dataclass(frozen=True, slots=True)
class SparseTargets:
    """What rows are compared with: K ids of the loss's vocabulary and what each is worth.

    An entry worth 0 counts for nothing; it must repeat an id of its row that is worth something.
    Ids worth something are distinct.
    """

    ids: Tensor  # [N, K] int64
    probs: Tensor  # [N, K] float32


@dataclass(frozen=True, slots=True)
class RowLosses:
    """losses [N] float32, differentiable by the hidden states; hits [N]: the first id of the row
    has the best logit."""

    losses: Tensor
    hits: Tensor


def cross_entropy(logits_NW: Tensor, targets: SparseTargets) -> Tensor:
    """[N] float32, the definition."""
    log_q = logits_NW.float().log_softmax(-1).gather(1, targets.ids)
    return -(targets.probs * log_q).sum(-1)


def row_losses(hidden_NC: Tensor, weight_WC: Tensor, targets: SparseTargets) -> RowLosses:
    """Losses of rows; no gradient for the weight."""
    losses, hits = _RowLosses.apply(  # type: ignore[no-untyped-call]
        hidden_NC, weight_WC, targets.ids, targets.probs
    )
    return RowLosses(losses, hits)


class _Kept(Protocol):
    """What a backward pass finds."""

    @property
    def saved_tensors(self) -> tuple[Tensor, ...]: ...

    def save_for_backward(self, *tensors: Tensor) -> None: ...

    def mark_non_differentiable(self, *tensors: Tensor) -> None: ...


class _RowLosses(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: _Kept, hidden_NC: Tensor, weight_WC: Tensor, ids_NK: Tensor, probs_NK: Tensor
    ) -> tuple[Tensor, Tensor]:
        num_rows = len(hidden_NC)
        losses_N = torch.empty(num_rows)
        hits_N = torch.empty(num_rows, dtype=torch.bool)
        grad_NC = torch.empty_like(hidden_NC)
        for start in range(0, num_rows, CHUNK_ROWS):
            rows = slice(start, start + CHUNK_ROWS)
            ids, probs = ids_NK[rows], probs_NK[rows]
            logits = hidden_NC[rows] @ weight_WC.T
            at = logits.gather(1, ids).float()
            best = logits.amax(-1, keepdim=True)
            hits_N[rows] = at[:, 0] >= best[:, 0]
            scaled = logits.sub_(best).exp_()
            # The row's own ids apart and in float32: near the end of training they are nearly all
            # of the sum, and q - p nearly nothing.
            scaled.scatter_(1, ids, 0.0)
            own = (at - best).exp_().mul_(probs > 0)
            total = scaled.sum(-1, keepdim=True).float() + own.sum(-1, keepdim=True)
            mass = probs.sum(-1, keepdim=True)
            losses_N[rows] = (mass * (total.log() + best))[:, 0] - (probs * at).sum(-1)
            near = own - probs * total / mass.clamp_min(1e-12)
            scaled.scatter_add_(1, ids, near.to(scaled.dtype))
            grad_NC[rows] = (scaled @ weight_WC) * (mass / total).to(scaled.dtype)
        ctx.save_for_backward(grad_NC)
        ctx.mark_non_differentiable(hits_N)
        return losses_N, hits_N

    @staticmethod
    def backward(ctx: _Kept, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad_NC,) = ctx.saved_tensors
        return grad_NC * grads[0][:, None].to(grad_NC.dtype), None, None, None
