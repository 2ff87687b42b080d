"""Many blocks of a text in one pass: anchors drawn among its answer rows, each with its context.

    row m of a record    feature of token t, ids[m] = token t + 1
    anchor at row m      token t + 1; sees the features of tokens <= t, and its own block
    slot k               position t + 1 + k; in-place it fills that position, anchor-first the next

`mask_by_definition` says in plain loops who sees what; `block_attention` is the fast form, record
by record. Context keys and values are computed once a layer for all blocks of a record. Knows no
loss. Invariant: the layers themselves are `BlockNet`'s.

Shapes: M answer rows of a batch, X anchors, B slots of a block, T context rows of all records, L of
one, C hidden size, Q query heads, K key-value heads, D head_dim.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from drafter_service.dflash.net import BlockNet
from drafter_service.training.batches import Batch
from drafter_service.training.block_attention import Share, attend_shares
from drafter_service.training.draws import uniform

ANCHORS_PER_SHARE = 32
"""Anchors whose scores are computed together: each pays for the longest context among them."""

_ANCHOR_DRAW = 1


@dataclass(frozen=True, slots=True)
class Context:
    """Rows that any anchor of a batch sees, record after record, and who sees which of them."""

    features: Tensor  # [T, A]
    positions: Tensor  # [T]
    shares: tuple[Share, ...]


def mask_by_definition(anchors: Sequence[int], num_context: int, block_size: int) -> Tensor:
    """[X * B, L + X * B] bool: what each slot of blocks anchored at positions `anchors` sees."""
    num = len(anchors)
    mask = torch.zeros(num * block_size, num_context + num * block_size, dtype=torch.bool)
    for block, anchor in enumerate(anchors):
        for slot in range(block_size):
            query = block * block_size + slot
            for key in range(num_context):
                mask[query, key] = key < anchor
            for other in range(block_size):
                mask[query, num_context + block * block_size + other] = True
    return mask


def draw_anchors(batch: Batch, share: float, number: int) -> Tensor:
    """[X] answer rows, ascending, each with probability `share`; never an end of text."""
    drawn_M = uniform(number, _ANCHOR_DRAW, batch.keys) < share
    return (drawn_M & (batch.choices >= 0)).nonzero().flatten()


def context_of(batch: Batch, anchors_X: Tensor) -> Context:
    """Rows up to each record's last anchor; records without one are left out."""
    features: list[Tensor] = []
    positions: list[Tensor] = []
    shares: list[Share] = []
    bounds = torch.tensor([rows.answer.stop for rows in batch.records])
    stops = torch.searchsorted(anchors_X, bounds).tolist()
    first = start = 0
    for rows, stop in zip(batch.records, stops, strict=True):
        if stop == first:
            continue
        own_X = anchors_X[first:stop]
        last = int(own_X[-1]) + 1
        num_prompt = rows.prompt.stop - rows.prompt.start
        seen_X = own_X - rows.answer.start + num_prompt + 1
        features += [batch.prompt_features[rows.prompt], batch.features[rows.answer.start : last]]
        positions += [
            batch.prompt_positions[rows.prompt],
            batch.positions[rows.answer.start : last],
        ]
        for place in range(0, stop - first, ANCHORS_PER_SHARE):
            part_X = seen_X[place : place + ANCHORS_PER_SHARE]
            blocks = slice(first + place, first + place + len(part_X))
            shares.append(Share(slice(start, start + int(part_X[-1])), blocks, part_X))
        start += int(seen_X[-1])
        first = stop
    return Context(torch.cat(features), torch.cat(positions), tuple(shares))


def run_blocks(net: BlockNet, batch: Batch, anchors_X: Tensor) -> Tensor:
    """[X, B, C] residual stream after the last layer, before `norm`; X is at least 1."""
    config = net.config
    context = context_of(batch, anchors_X)
    fused_TC = net.fuse(context.features)
    keys_values = net.context_keys_values(fused_TC, context.positions)
    block_size = config.block_size
    ids_XB = torch.full((len(anchors_X), block_size), config.mask_id)
    ids_XB[:, 0] = batch.ids[anchors_X]
    positions_XB = (batch.positions[anchors_X] + 1)[:, None] + torch.arange(block_size)

    def attend(layer: int, q_NQD: Tensor, k_NKD: Tensor, v_NKD: Tensor) -> Tensor:
        k_TKD, v_TKD = keys_values[layer]
        return attend_shares(q_NQD, (k_NKD, v_NKD), (k_TKD, v_TKD), context.shares, block_size)

    states = net.states(ids_XB.flatten(), positions_XB.flatten(), attend, block_size)
    return states[-1].view(len(anchors_X), block_size, -1)
