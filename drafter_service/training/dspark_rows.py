"""How far drafts behind a serial head are from the target: cross entropy and full L1, in one pass.

    q    = softmax(hidden @ weight.T + factor @ w2.T)        factor: of the token before
    ce   = - sum_k label_k log q[id_k]
    l1   = sum over listed ids |p - q|  +  |rest of p - rest of q|
    loss = weight_n * (ce_share * ce + l1_share * l1)

With every id listed l1 is the exact sum of |p - q|; with the target's best ids it is what these
and the two rests show, never more than the exact one. `rows_by_definition` is the definition;
`compare_rows` makes the same values and all gradients in the forward pass, chunk by chunk: logits
are written once and changed in place. Knows no net and no optimiser.

Shapes: N rows, C hidden size, R rank, W ids of the loss, K ids of a row.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

CHUNK_ROWS = 256


@dataclass(frozen=True, slots=True)
class TeacherRows:
    """What rows are compared with, in ids of the loss.

    An entry that is neither listed nor a label counts for nothing and repeats another id of its
    row; entries that count are distinct. wanted: the target's own choice.
    """

    wanted: Tensor  # [N]
    ids: Tensor  # [N, K]
    probs: Tensor  # [N, K] float32, of the target over its whole vocabulary; 0 if not listed
    listed: Tensor  # [N, K] bool
    labels: Tensor  # [N, K] float32, shares of the cross entropy


@dataclass(frozen=True, slots=True)
class Shares:
    """What cross entropy and L1 are worth."""

    ce: float = 0.1
    l1: float = 0.9


@dataclass(frozen=True, slots=True)
class RowFigures:
    """Per row, without gradients. hits: the wanted id has the best logit."""

    ce: Tensor  # [N] float32
    l1: Tensor  # [N] float32
    hits: Tensor  # [N] bool


def rows_by_definition(logits_NW: Tensor, teacher: TeacherRows) -> tuple[Tensor, Tensor]:
    """(ce [N], l1 [N]) float32."""
    log_q_NW = logits_NW.float().log_softmax(-1)
    ce_N = -(teacher.labels * log_q_NW.gather(1, teacher.ids)).sum(-1)
    q_NK = log_q_NW.exp().gather(1, teacher.ids) * teacher.listed
    rest_N = (1.0 - teacher.probs.sum(-1)) - (1.0 - q_NK.sum(-1))
    return ce_N, (teacher.probs - q_NK).abs().sum(-1) + rest_N.abs()


def compare_rows(
    hidden: tuple[Tensor, Tensor],
    head: tuple[Tensor, Tensor],
    teacher: TeacherRows,
    weights_N: Tensor,
    shares: Shares,
) -> tuple[Tensor, RowFigures]:
    """The weighted total, and what it is made of.

    hidden: states [N, C] and factors [N, R]; head: rows [W, C], not trained, and w2 [W, R].
    """
    given_NX = torch.cat(hidden, dim=-1)
    total, ce_N, l1_N, hits_N = _CompareRows.apply(  # type: ignore[no-untyped-call]
        given_NX, *head, teacher, weights_N, shares
    )
    return total, RowFigures(ce_N, l1_N, hits_N)


class _Kept(Protocol):
    """What a backward pass finds."""

    @property
    def saved_tensors(self) -> tuple[Tensor, ...]: ...

    def save_for_backward(self, *tensors: Tensor) -> None: ...

    def mark_non_differentiable(self, *tensors: Tensor) -> None: ...


class _CompareRows(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: _Kept,
        given_NX: Tensor,
        rows_WC: Tensor,
        w2_WR: Tensor,
        teacher: TeacherRows,
        weights_N: Tensor,
        shares: Shares,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        both_WX = torch.cat([rows_WC, w2_WR], dim=-1)
        first_factor = rows_WC.shape[-1]
        num_rows = len(given_NX)
        ce_N, l1_N = torch.empty(num_rows), torch.empty(num_rows)
        hits_N = torch.empty(num_rows, dtype=torch.bool)
        grad_NX = torch.empty_like(given_NX)
        grad_w2 = torch.zeros(w2_WR.shape)
        for start in range(0, num_rows, CHUNK_ROWS):
            rows = slice(start, start + CHUNK_ROWS)
            logits = given_NX[rows] @ both_WX.T
            best = logits.amax(-1, keepdim=True)
            hits_N[rows] = logits.gather(1, teacher.wanted[rows, None])[:, 0] >= best[:, 0]
            ce_N[rows], l1_N[rows] = _to_gradient(
                logits, best, _part(teacher, rows), weights_N[rows, None], shares
            )
            grad_NX[rows] = logits @ both_WX
            grad_w2 += logits.T @ given_NX[rows, first_factor:]
        ctx.save_for_backward(grad_NX, grad_w2.to(w2_WR.dtype))
        ctx.mark_non_differentiable(ce_N, l1_N, hits_N)
        total = ((shares.ce * ce_N + shares.l1 * l1_N) * weights_N).sum()
        return total, ce_N, l1_N, hits_N

    @staticmethod
    def backward(ctx: _Kept, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad_NX, grad_w2 = ctx.saved_tensors
        scale = grads[0].to(grad_NX.dtype)
        return grad_NX * scale, None, grad_w2 * scale, None, None, None


def _part(teacher: TeacherRows, rows: slice) -> TeacherRows:
    return TeacherRows(
        teacher.wanted[rows],
        teacher.ids[rows],
        teacher.probs[rows],
        teacher.listed[rows],
        teacher.labels[rows],
    )


def _to_gradient(
    logits: Tensor, best: Tensor, teacher: TeacherRows, weights_N1: Tensor, shares: Shares
) -> tuple[Tensor, Tensor]:
    """(ce [N], l1 [N]); logits become weight * d loss / d logits in place.

    With s = sign(q - p), the same for all ids of the rest: d l1 / d logit_v = q_v (s_v - <s, q>).
    A row's own ids are kept apart in float32: near the end of training they are nearly all of q.
    """
    at = logits.gather(1, teacher.ids).float()
    scaled = logits.sub_(best).exp_()
    scaled.scatter_(1, teacher.ids, 0.0)
    own = (at - best).exp_().mul_(teacher.listed | (teacher.labels > 0))
    others = scaled.sum(-1, keepdim=True).float()
    total = others + own.sum(-1, keepdim=True)
    q = own / total
    q_rest = (others + (own * ~teacher.listed).sum(-1, keepdim=True)) / total
    p_rest = (1.0 - teacher.probs.sum(-1, keepdim=True)).clamp_min(0.0)
    mass = teacher.labels.sum(-1, keepdim=True)
    ce = mass * (total.log() + best) - (teacher.labels * at).sum(-1, keepdim=True)
    away = (q - teacher.probs) * teacher.listed
    l1 = away.abs().sum(-1, keepdim=True) + (q_rest - p_rest).abs()
    sign_rest = (q_rest - p_rest).sign()
    sign = torch.where(teacher.listed, away.sign(), sign_rest)
    mean_sign = (sign * q).sum(-1, keepdim=True) + sign_rest * others / total
    slope = shares.ce * mass + shares.l1 * (sign_rest - mean_sign)
    near = shares.ce * (mass * q - teacher.labels) + shares.l1 * q * (sign - mean_sign)
    scaled.mul_((weights_N1 * slope / total).to(scaled.dtype))
    scaled.scatter_add_(1, teacher.ids, (weights_N1 * near).to(scaled.dtype))
    return ce[:, 0], l1[:, 0]
