"""How far a head's distribution q is from the target's p, both on the draft vocabulary.

    kl          - sum_v p_v log q_v                              p normalised on the draft ids
    lk_alpha    - log a,  a = sum_v min(p'_v, q_v)               p' over the whole vocabulary
    lk_hybrid   s * kl + (1 - s) * (1 - a),  s = exp(-eta * a)   s takes no gradient

(`reference/eagle.md` 5.1 and 5.4; paper 2602.23881.) The share s is each row's own: with one share
for all rows of a step, as SpecForge has it, a loss would depend on how rows are grouped into
batches. `row_losses` is the definition; `FusedLoss` computes the same values and makes their
gradients in the forward pass, because logits and softmax of [rows, W] would otherwise be written
and read several times. Knows no head and no optimiser.

Shapes: N loss rows, C head hidden size, W draft vocabulary, K ids with a target probability
(K = W where all have one).
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from drafter_service.training.targets import TargetRows, Targets

CHUNK_ROWS = 64  # a chunk of float32 rows should stay in the cache of a core
TINY = 1e-30


class LossKind(StrEnum):
    """What is minimised; see the module."""

    KL = "kl"
    LK_ALPHA = "lk_alpha"
    LK_HYBRID = "lk_hybrid"


@dataclass(frozen=True, slots=True)
class Comparison:
    """The kind, and eta of `lk_hybrid`."""

    kind: LossKind = LossKind.KL
    eta: float = 3.0


@dataclass(frozen=True, slots=True)
class RowLosses:
    """Per row: loss, and whether the head's best id is the wanted one (or equally good)."""

    losses: Tensor  # [N] float32
    hits: Tensor  # [N] bool


def restricted_loss(logits_NW: Tensor, probs_NW: Tensor) -> Tensor:
    """[N] float32: the definition of `kl`."""
    return -(probs_NW.float() * logits_NW.float().log_softmax(-1)).sum(-1)


def acceptance(logits_NW: Tensor, probs_NW: Tensor, mass_N: Tensor) -> Tensor:
    """[N] float32: sum_v min(p', q), the chance that a sampled draft is accepted."""
    own_NW = probs_NW.float() * mass_N[:, None]
    return torch.minimum(own_NW, logits_NW.float().softmax(-1)).sum(-1)


def row_losses(
    comparison: Comparison,
    logits_NW: Tensor,
    probs_NW: Tensor,
    mass_N: Tensor,
    shared_alpha: Tensor | None = None,
) -> Tensor:
    """[N] float32, the definition. shared_alpha: what s is made of instead of each row's own a."""
    cross_N = restricted_loss(logits_NW, probs_NW)
    if comparison.kind is LossKind.KL:
        return cross_N
    alpha_N = acceptance(logits_NW, probs_NW, mass_N)
    if comparison.kind is LossKind.LK_ALPHA:
        return -alpha_N.clamp_min(TINY).log()
    share_N = _share(comparison, alpha_N if shared_alpha is None else shared_alpha)
    return share_N * cross_N + (1 - share_N) * (1 - alpha_N)


def _share(comparison: Comparison, alpha_N: Tensor) -> Tensor:
    return (-comparison.eta * alpha_N.detach()).exp()


def losses_and_slopes(
    comparison: Comparison, q_NK: Tensor, probs_NK: Tensor, mass_N: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """(losses [N], slope [N], extra [N, K]) with d loss / d logit_v = slope * q_v + extra_v.

    Only ids with a target probability matter to the loss, so they alone have an extra:
    d(-log q_v) = q - 1_v, and min(p', q) moves with q only where q is below p'.
    """
    cross_N = -(probs_NK * q_NK.clamp_min(TINY).log()).sum(-1)
    whole_N = probs_NK.sum(-1)
    if comparison.kind is LossKind.KL:
        return cross_N, whole_N, -probs_NK
    own_NK = probs_NK * mass_N[:, None]
    alpha_N = torch.minimum(own_NK, q_NK).sum(-1).clamp_min(TINY)
    below_NK = q_NK.masked_fill(q_NK >= own_NK, 0.0)
    moving_N = below_NK.sum(-1)  # d alpha / d logit_v = below_v - moving * q_v
    if comparison.kind is LossKind.LK_ALPHA:
        return -alpha_N.log(), moving_N / alpha_N, -below_NK / alpha_N[:, None]
    share_N = _share(comparison, alpha_N)
    rest_N = 1 - share_N
    extra_NK = -share_N[:, None] * probs_NK - rest_N[:, None] * below_NK
    losses_N = share_N * cross_N + rest_N * (1 - alpha_N)
    return losses_N, share_N * whole_N + rest_N * moving_N, extra_NK


class _Saved(Protocol):
    @property
    def saved_tensors(self) -> tuple[Tensor, ...]: ...


class FusedLoss(torch.autograd.Function):
    """weight * sum_n loss_n of `hidden @ lm_head.T`, gradients made in the forward pass."""

    @staticmethod
    def forward(
        ctx: FunctionCtx,
        hidden_NC: Tensor,
        lm_head_WC: Tensor,
        targets: Targets,
        target_rows_N: Tensor,
        wanted_N: Tensor,
        comparison: Comparison,
        weight: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(total, losses [N], hits [N]); only the total is differentiable."""
        logits_NW = hidden_NC @ lm_head_WC.T  # becomes its own gradient chunk by chunk
        losses_N, slopes_N = torch.empty(2, len(hidden_NC))
        hits_N = torch.empty(len(hidden_NC), dtype=torch.bool)
        for start in range(0, len(hidden_NC), CHUNK_ROWS):
            chunk = slice(start, start + CHUNK_ROWS)
            q_NW = logits_NW[chunk].softmax(-1, dtype=torch.float32)
            wanted = q_NW.gather(1, wanted_N[chunk, None])[:, 0]
            hits_N[chunk] = wanted >= q_NW.amax(-1)
            rows = targets.rows(target_rows_N[chunk])
            losses_N[chunk], slopes_N[chunk] = _to_gradient(q_NW, rows, comparison)
            logits_NW[chunk] = q_NW
        slopes_N1 = (slopes_N * weight)[:, None].to(hidden_NC.dtype)
        grad_hidden_NC = (logits_NW @ lm_head_WC).mul_(slopes_N1)
        gradients = [grad_hidden_NC]
        if lm_head_WC.requires_grad:
            gradients.append(logits_NW.T @ (hidden_NC * slopes_N1))
        ctx.save_for_backward(*gradients)
        ctx.mark_non_differentiable(losses_N, hits_N)
        return losses_N.sum() * weight, losses_N, hits_N

    @staticmethod
    def backward(ctx: _Saved, *grads: Tensor) -> tuple[Tensor | None, ...]:
        gradients = list(ctx.saved_tensors)
        if float(grads[0]) != 1.0:
            gradients = [gradient * grads[0].to(gradient.dtype) for gradient in gradients]
        grad_lm_head = gradients[1] if len(gradients) > 1 else None
        return gradients[0], grad_lm_head, None, None, None, None, None


def _to_gradient(q_NW: Tensor, rows: TargetRows, comparison: Comparison) -> tuple[Tensor, Tensor]:
    """(losses [N], slope [N]); q becomes d loss / d logits / slope in place.

    Rows are multiplied by their slope where they are narrow, before and after the products.
    """
    q_NK = q_NW if rows.ids is None else q_NW.gather(1, rows.ids)
    losses_N, slope_N, extra_NK = losses_and_slopes(comparison, q_NK, rows.probs, rows.mass)
    extra_NK = extra_NK / slope_N.clamp_min(TINY)[:, None]  # nothing where the slope is nothing
    if rows.ids is None:
        q_NW.add_(extra_NK)
    else:
        q_NW.scatter_add_(1, rows.ids, extra_NK)
    return losses_N, slope_N


def fused_loss(
    hidden_NC: Tensor,
    lm_head_WC: Tensor,
    targets: Targets,
    target_rows_N: Tensor,
    wanted_N: Tensor,
    comparison: Comparison,
    weight: float = 1.0,
) -> tuple[Tensor, RowLosses]:
    """The weighted total, and the unweighted rows it is made of. wanted: draft ids."""
    total, losses, hits = FusedLoss.apply(  # type: ignore[no-untyped-call]
        hidden_NC, lm_head_WC, targets, target_rows_N, wanted_N, comparison, weight
    )
    return total, RowLosses(losses=losses, hits=hits)
