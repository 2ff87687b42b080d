"""Attention of blocks over their contexts, with gradients made by hand.

    O = (P V + P' V') / (sum P + sum P'),   P = exp(q K - m) on the context rows a block sees,
                                            P' the same on the slots of its own block

The scores of a whole batch are the largest tensors of a pass: here each is written once and
changed in place. Sums are accumulated in float32 and come in the rows' own type: asking torch for
a float32 result costs ten times as much on a CPU. `attend_by_definition` is what it computes.
Knows no layer and no loss.

Shapes: X blocks of a share, B slots of a block, N = X * B rows, T context rows, L of one share, Q
query heads, K key-value heads, S = Q / K, D head_dim, R = S * B rows of one block and kv head.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

Pair = tuple[Tensor, Tensor]


@dataclass(frozen=True, slots=True)
class Share:
    """Blocks of one record. context: the rows that the last of them sees; seen [X]: how many of
    those each sees, ascending."""

    context: slice
    blocks: slice
    seen: Tensor


def attend_shares(
    q_NQD: Tensor, block: Pair, context: Pair, shares: Sequence[Share], block_size: int
) -> Tensor:
    """[N, Q * D]. block: keys and values [N, K, D] of the slots; context: of rows [T, K, D]."""
    mixed: Tensor = _Attend.apply(  # type: ignore[no-untyped-call]
        q_NQD, *block, *context, tuple(shares), block_size
    )
    return mixed


def attend_by_definition(
    q_NQD: Tensor, block: Pair, context: Pair, shares: Sequence[Share], block_size: int
) -> Tensor:
    """The same, row by row and head by head."""
    num_rows, num_heads, dim = q_NQD.shape
    out = torch.zeros(num_rows, num_heads, dim, dtype=q_NQD.dtype)
    group = num_heads // block[0].shape[1]
    for share in shares:
        for place, seen in zip(
            range(share.blocks.start, share.blocks.stop), share.seen, strict=True
        ):
            own = slice(place * block_size, (place + 1) * block_size)
            before = slice(share.context.start, share.context.start + int(seen))
            k_LKD = torch.cat([context[0][before], block[0][own]])
            v_LKD = torch.cat([context[1][before], block[1][own]])
            for row in range(own.start, own.stop):
                for head in range(num_heads):
                    scores = k_LKD[:, head // group] @ q_NQD[row, head] * dim**-0.5
                    out[row, head] = scores.softmax(-1) @ v_LKD[:, head // group]
    return out.reshape(num_rows, num_heads * dim)


class _Kept(Protocol):
    """What a backward pass finds."""

    shares: tuple[Share, ...]
    block_size: int

    @property
    def saved_tensors(self) -> tuple[Tensor, ...]: ...

    def save_for_backward(self, *tensors: Tensor) -> None: ...


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: _Kept,
        q_NQD: Tensor,
        k_NKD: Tensor,
        v_NKD: Tensor,
        k_TKD: Tensor,
        v_TKD: Tensor,
        shares: tuple[Share, ...],
        block_size: int,
    ) -> Tensor:
        num_heads, dim = q_NQD.shape[1:]
        out = torch.empty(len(q_NQD), num_heads, dim, dtype=q_NQD.dtype)
        saved: list[Tensor] = []
        for share in shares:
            rows = slice(share.blocks.start * block_size, share.blocks.stop * block_size)
            shape = _Shape(len(share.seen), block_size, num_heads, k_NKD.shape[1], dim)
            q_KYD = shape.fold(q_NQD[rows]).mul_(dim**-0.5)
            on_context = q_KYD @ k_TKD[share.context].permute(1, 2, 0)
            on_block = shape.by_block(q_KYD) @ shape.own(k_NKD[rows]).transpose(1, 2)
            total = _exponentials(on_context, on_block, share, shape)
            mixed = on_context @ v_TKD[share.context].transpose(0, 1)
            mixed += (on_block @ shape.own(v_NKD[rows])).view_as(mixed)
            out[rows] = shape.unfold(mixed.mul_((1.0 / total).to(mixed.dtype)))
            saved += [on_context, on_block, total, q_KYD]
        ctx.save_for_backward(k_NKD, v_NKD, k_TKD, v_TKD, out, *saved)
        ctx.shares, ctx.block_size = shares, block_size
        return out.view(len(q_NQD), num_heads * dim)

    @staticmethod
    def backward(ctx: _Kept, *grads: Tensor) -> tuple[Tensor | None, ...]:
        k_NKD, v_NKD, k_TKD, v_TKD, out_NQD, *saved = ctx.saved_tensors
        num_heads, dim = out_NQD.shape[1:]
        grad_NQD = grads[0].view_as(out_NQD)
        dq, dk, dv = torch.empty_like(out_NQD), torch.empty_like(k_NKD), torch.empty_like(v_NKD)
        dk_ctx, dv_ctx = torch.zeros_like(k_TKD), torch.zeros_like(v_TKD)
        for number, share in enumerate(ctx.shares):
            on_context, on_block, total, q_KYD = saved[4 * number : 4 * number + 4]
            rows = slice(share.blocks.start * ctx.block_size, share.blocks.stop * ctx.block_size)
            shape = _Shape(len(share.seen), ctx.block_size, num_heads, k_NKD.shape[1], dim)
            grad = shape.fold(grad_NQD[rows]).mul_((1.0 / total).to(grad_NQD.dtype))
            along = (grad * shape.fold(out_NQD[rows])).sum(-1, keepdim=True)
            k_KLD = k_TKD[share.context].transpose(0, 1)
            dscore = (grad @ v_TKD[share.context].permute(1, 2, 0)).sub_(along).mul_(on_context)
            dv_ctx[share.context] += (on_context.transpose(1, 2) @ grad).transpose(0, 1)
            dk_ctx[share.context] += (dscore.transpose(1, 2) @ q_KYD).transpose(0, 1)
            grad_b, along_b = shape.by_block(grad), shape.by_block(along)
            own_k, own_v = shape.own(k_NKD[rows]), shape.own(v_NKD[rows])
            dscore_b = (grad_b @ own_v.transpose(1, 2)).sub_(along_b).mul_(on_block)
            dv[rows] = shape.disown(on_block.transpose(1, 2) @ grad_b)
            dk[rows] = shape.disown(dscore_b.transpose(1, 2) @ shape.by_block(q_KYD))
            dq_KYD = (dscore @ k_KLD).add_((dscore_b @ own_k).view_as(q_KYD))
            dq[rows] = shape.unfold(dq_KYD.mul_(dim**-0.5))
        return dq, dk, dv, dk_ctx, dv_ctx, None, None


def _exponentials(on_context: Tensor, on_block: Tensor, share: Share, shape: "_Shape") -> Tensor:
    """Both kinds of scores become exponentials in place; returns their sums [K, X * R, 1].

    The norms on queries and keys bound a score, but not below what exp can take: hence the shift.
    """
    length = on_context.shape[-1]
    rows = (*on_context.shape[:2], 1)
    best = torch.maximum(on_context.amax(-1).view(rows), on_block.amax(-1).view(rows))
    on_context.sub_(best).exp_()
    on_block.sub_(shape.by_block(best)).exp_()
    seen_XL = (torch.arange(length) < share.seen[:, None]).to(on_context.dtype)
    on_context.view(shape.num_kv, shape.num_blocks, -1, length).mul_(seen_XL[None, :, None])
    total = on_context.sum(-1).view(rows).float() + on_block.sum(-1).view(rows)
    return total.clamp_min_(1e-30)  # all seen scores so far below an unseen one: nothing, no NaN


@dataclass(frozen=True, slots=True)
class _Shape:
    """How rows of blocks fold so that one product serves all query heads of a kv head."""

    num_blocks: int
    block_size: int
    num_heads: int
    num_kv: int
    dim: int

    def fold(self, rows_NQD: Tensor) -> Tensor:
        """[K, X * R, D], a copy: block after block, query heads of a kv head within, then slots."""
        share = self.num_heads // self.num_kv
        split = rows_NQD.reshape(self.num_blocks, self.block_size, self.num_kv, share, self.dim)
        return split.permute(2, 0, 3, 1, 4).contiguous().view(self.num_kv, -1, self.dim)

    def unfold(self, rows_KYD: Tensor) -> Tensor:
        """Back to [N, Q, D]."""
        share = self.num_heads // self.num_kv
        split = rows_KYD.view(self.num_kv, self.num_blocks, share, self.block_size, self.dim)
        return split.permute(1, 3, 0, 2, 4).reshape(-1, self.num_heads, self.dim)

    def by_block(self, rows_KYD: Tensor) -> Tensor:
        """[K * X, R, D] of [K, X * R, D]."""
        return rows_KYD.view(self.num_kv * self.num_blocks, -1, rows_KYD.shape[-1])

    def own(self, rows_NKD: Tensor) -> Tensor:
        """[K * X, B, D] of a block's own keys or values [N, K, D]."""
        split = rows_NKD.reshape(self.num_blocks, self.block_size, self.num_kv, self.dim)
        return split.permute(2, 0, 1, 3).reshape(-1, self.block_size, self.dim)

    def disown(self, rows: Tensor) -> Tensor:
        """Back to [N, K, D]."""
        split = rows.view(self.num_kv, self.num_blocks, self.block_size, self.dim)
        return split.permute(1, 2, 0, 3).reshape(-1, self.num_kv, self.dim)
