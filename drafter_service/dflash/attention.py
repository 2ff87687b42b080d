"""Attention of many sessions' blocks, each over its own context rows and nothing else.

    slots of a session   [ context rows 0 .. num_context ) [ block: B rows, gone after the pass ]

Linear layers see one flat batch of blocks; here it falls apart into sessions again. A block's keys
and values are written behind the session's context rows, so that both are read as one view. Rows
of other sessions are never read, not even masked: a NaN of one session cannot reach another.

Shapes: B block rows, Q query heads, K key-value heads, G = Q / K, D head_dim, L rows read.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from drafter_service.cache import KvSlab
from drafter_service.dflash.config import LayerMask
from drafter_service.dflash.masks import Sight, sight
from drafter_service.dflash.net import LayerAttend


@dataclass(frozen=True, slots=True)
class BlockShare:
    """One session's block in a pass. start: first slot of its segment; anchor: its position."""

    start: int
    num_context: int
    anchor: int


def attend_blocks(
    slab: KvSlab, shares: Sequence[BlockShare], masks: Sequence[LayerMask], block_size: int
) -> LayerAttend:
    """The callback a net's layers call with the flat rows of all blocks."""
    sights = {
        mask: [sight(mask, share.num_context, share.anchor, block_size) for share in shares]
        for mask in set(masks)
    }

    def attend(layer: int, q_NQD: Tensor, k_NKD: Tensor, v_NKD: Tensor) -> Tensor:
        mixed: list[Tensor] = []
        first = 0
        for share, seen in zip(shares, sights[masks[layer]], strict=True):
            rows = slice(first, first + block_size)
            first = rows.stop
            slab.write(share.start + share.num_context, k_NKD[rows], v_NKD[rows], layer)
            length = share.num_context - seen.first + block_size
            k_KLD, v_KLD = slab.read(share.start + seen.first, length, layer)
            mixed.append(_attend(q_NQD[rows], k_KLD, v_KLD, seen))
        return mixed[0] if len(mixed) == 1 else torch.cat(mixed)

    return attend


def _attend(q_BQD: Tensor, k_KLD: Tensor, v_KLD: Tensor, seen: Sight) -> Tensor:
    """[B, Q * D]. Query heads of one kv head are folded into rows: several times faster on CPU
    in bf16 than asking SDPA for grouped heads."""
    num_rows, num_heads, head_dim = q_BQD.shape
    num_kv = len(k_KLD)
    group = num_heads // num_kv
    folded = q_BQD.view(num_rows, num_kv, group, head_dim).permute(1, 2, 0, 3)
    q_KRD = folded.reshape(num_kv, group * num_rows, head_dim)
    bias: Tensor | None = None
    if seen.hidden is not None:
        bias_BL = q_BQD.new_zeros(seen.hidden.shape)
        bias = bias_BL.masked_fill_(seen.hidden.to(q_BQD.device), float("-inf")).repeat(group, 1)
    mixed_KRD = scaled_dot_product_attention(q_KRD[None], k_KLD[None], v_KLD[None], attn_mask=bias)
    mixed = mixed_KRD.view(num_kv, group, num_rows, head_dim).permute(2, 0, 1, 3)
    return mixed.reshape(num_rows, num_heads * head_dim)
