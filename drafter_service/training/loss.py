"""Cross entropy of the head against the target, both on the draft vocabulary.

Loss of a row = - sum_v p_v log q_v with p the target's softmax AFTER restriction to the draft
vocabulary (`reference/eagle.md` 5.1). `restricted_loss` is the definition; `FusedLoss` computes
the same value and its gradients in one pass over chunks, because [rows, W] float32 logits and
their softmax would otherwise be written and read several times. Knows no head and no optimiser.

Shapes: N loss rows, M target rows, C head hidden size, W draft vocabulary, H target hidden size.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

CHUNK_ROWS = 128


@dataclass(frozen=True, slots=True)
class RowLosses:
    """Per row: loss, the head's best draft id, and the weight the row had."""

    losses: Tensor  # [N] float32
    best: Tensor  # [N] int64


def target_probs(final_MH: Tensor, lm_head_WH: Tensor) -> Tensor:
    """[M, W] in the dtype of `final`: the target's distribution restricted to the draft ids."""
    probs_MW = torch.empty(len(final_MH), len(lm_head_WH), dtype=final_MH.dtype)
    for start in range(0, len(final_MH), CHUNK_ROWS):
        chunk = slice(start, start + CHUNK_ROWS)
        probs_MW[chunk] = (final_MH[chunk] @ lm_head_WH.T).softmax(-1, dtype=torch.float32)
    return probs_MW


def restricted_loss(logits_NW: Tensor, probs_NW: Tensor) -> Tensor:
    """[N] float32, the definition."""
    return -(probs_NW.float() * logits_NW.float().log_softmax(-1)).sum(-1)


class _Saved(Protocol):
    @property
    def saved_tensors(self) -> tuple[Tensor, ...]: ...


class FusedLoss(torch.autograd.Function):
    """sum_n weight_n * loss_n of `hidden @ weight.T`, gradients made in the forward pass."""

    @staticmethod
    def forward(
        ctx: FunctionCtx,
        hidden_NC: Tensor,
        weight_WC: Tensor,
        probs_MW: Tensor,
        target_rows_N: Tensor,
        row_weights_N: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(total, losses [N], best [N]); only the total is differentiable."""
        num_rows = len(hidden_NC)
        dlogits_NW = torch.empty(num_rows, len(weight_WC), dtype=hidden_NC.dtype)
        losses_N = torch.empty(num_rows)
        best_N = torch.empty(num_rows, dtype=torch.long)
        for start in range(0, num_rows, CHUNK_ROWS):
            chunk = slice(start, start + CHUNK_ROWS)
            probs = probs_MW[target_rows_N[chunk]].float()
            logits = (hidden_NC[chunk] @ weight_WC.T).float()
            best_N[chunk] = logits.argmax(-1)
            log_q = logits.log_softmax(-1)
            losses_N[chunk] = -torch.einsum("nw,nw->n", probs, log_q)
            grad = log_q.exp_().mul_(probs.sum(-1, keepdim=True)).sub_(probs)
            dlogits_NW[chunk] = grad.mul_(row_weights_N[chunk, None])
        ctx.save_for_backward(dlogits_NW @ weight_WC, dlogits_NW.T @ hidden_NC)
        ctx.mark_non_differentiable(losses_N, best_N)
        return (losses_N * row_weights_N).sum(), losses_N, best_N

    @staticmethod
    def backward(ctx: _Saved, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad_hidden, grad_weight = ctx.saved_tensors
        scale = grads[0].to(grad_hidden.dtype)
        return grad_hidden * scale, grad_weight * scale, None, None, None


def fused_loss(
    hidden_NC: Tensor,
    weight_WC: Tensor,
    probs_MW: Tensor,
    target_rows_N: Tensor,
    row_weights_N: Tensor,
) -> tuple[Tensor, RowLosses]:
    """Weighted total and the rows it is made of."""
    total, losses, best = FusedLoss.apply(  # type: ignore[no-untyped-call]
        hidden_NC, weight_WC, probs_MW, target_rows_N, row_weights_N
    )
    return total, RowLosses(losses=losses, best=best)
