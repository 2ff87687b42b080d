"""The yardstick: one block recomputed from nothing, without cache, in plain loops.

Takes all feature rows of the prefix and the anchor, gives every state of one pass and the drafts.
Slow on purpose; serving and training are tested against it. Keeps no state between calls.

Shapes: T context rows, B block rows, C hidden size, W draft vocabulary, V vocabulary, Q query
heads, K key-value heads, D head_dim.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from drafter_service.dflash.config import LayerMask
from drafter_service.dflash.masks import is_visible
from drafter_service.dflash.net import BlockNet


@dataclass(frozen=True, slots=True)
class ReferenceBlock:
    """Everything one pass computes."""

    context: list[tuple[Tensor, Tensor]]  # per layer: keys and values [T, K, D]
    states: list[Tensor]  # per layer [B, C]
    hidden: Tensor  # [B, C] after the final norm
    logits: Tensor  # [B, W]


@dataclass(frozen=True, slots=True)
class ReferenceChain:
    """Greedy drafts of a block, and what the heads said on that path.

    scores: per draft the values it was chosen from. confidences: logits, empty without a head.
    """

    target_ids: list[int]
    scores: list[Tensor]
    candidates: list[Tensor]
    confidences: list[float]


def run_block(
    net: BlockNet, fused_TC: Tensor, anchor_id: int, anchor: int | None = None
) -> ReferenceBlock:
    """One full block behind the context rows `fused_TC`; anchor: its position, T by default."""
    config = net.config
    start = len(fused_TC) if anchor is None else anchor
    ids_B = torch.tensor([anchor_id] + [config.mask_id] * (config.block_size - 1))
    positions_B = start + torch.arange(config.block_size)
    context = net.context_keys_values(fused_TC, torch.arange(len(fused_TC)))

    def attend(layer: int, q_BQD: Tensor, k_BKD: Tensor, v_BKD: Tensor) -> Tensor:
        k_TKD, v_TKD = context[layer]
        return _attend(q_BQD, (k_TKD, v_TKD), (k_BKD, v_BKD), config.masks[layer], start)

    states = net.states(ids_B, positions_B, attend, config.block_size)
    hidden_BC = net.norm(states[-1])
    return ReferenceBlock(context, states, hidden_BC, net.logits(hidden_BC))


def greedy_chain(net: BlockNet, block: ReferenceBlock, anchor_id: int) -> ReferenceChain:
    """The drafts of a block at temperature 0, one slot after the other."""
    config = net.config
    chain = ReferenceChain([], [], [], [])
    before = anchor_id
    state_1R = net.markov_head.start(1) if net.markov_head is not None else None
    for slot in range(config.first_draft_slot, config.block_size):
        values_W, ids_W = block.logits[slot], net.target_ids
        hidden_1C, before_1 = block.hidden[slot : slot + 1], torch.tensor([before])
        if net.candidate_selector is not None:
            selector = net.candidate_selector
            values_W, ids_W = values_W.topk(selector.num_candidates)
            values_W = selector.scores(values_W, ids_W, before_1, hidden_1C[0])[0]
        token_row_1R = None
        if net.markov_head is not None and state_1R is not None:
            bias_1W, state_1R = net.markov_head.step(before_1, hidden_1C, state_1R)
            values_W = values_W + bias_1W[0]
            token_row_1R = net.markov_head.token_rows(before_1)
        if net.confidence_head is not None:
            chain.confidences.append(float(net.confidence_head.logits(hidden_1C, token_row_1R)[0]))
        before = int(ids_W[values_W.argmax()])
        chain.target_ids.append(before)
        chain.scores.append(values_W)
        chain.candidates.append(ids_W)
    return chain


def confident_prefix(confidences: Sequence[float], threshold: float) -> int:
    """Drafts before the first whose probability (of its logit) is below `threshold`."""
    probabilities = torch.tensor(list(confidences), dtype=torch.float64).sigmoid().tolist()
    below = [index for index, p in enumerate(probabilities) if p < threshold]
    return below[0] if below else len(probabilities)


def _attend(
    q_BQD: Tensor,
    context: tuple[Tensor, Tensor],
    block: tuple[Tensor, Tensor],
    mask: LayerMask,
    anchor: int,
) -> Tensor:
    """[B, Q * D], row by row and head by head."""
    num_rows, num_heads, dim = q_BQD.shape
    share = num_heads // block[0].shape[1]
    num_context = len(context[0])
    keys, values = torch.cat([context[0], block[0]]), torch.cat([context[1], block[1]])
    out = torch.zeros_like(q_BQD)
    for row in range(num_rows):
        seen = [
            index
            for index in range(len(keys))
            if is_visible(mask, anchor, anchor + row, *_place(index, num_context, anchor))
        ]
        for head in range(num_heads):
            scores = keys[seen, head // share] @ q_BQD[row, head] * dim**-0.5
            out[row, head] = scores.softmax(-1) @ values[seen, head // share]
    return out.reshape(num_rows, num_heads * dim)


def _place(index: int, num_context: int, anchor: int) -> tuple[int, bool]:
    """(position, whether it is a block row) of the key at `index`."""
    if index < num_context:
        return index, False
    return anchor + index - num_context, True
