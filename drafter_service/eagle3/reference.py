"""The yardstick: an EAGLE-3 draft recomputed from nothing, without cache, in plain loops.

Every verb starts from all committed rows. Slow on purpose; serving and training are tested
against it. Invariant: this file keeps no state between calls.

Shapes: T committed rows, A raw feature width, C head hidden size, W draft vocabulary, Q query
heads, K key-value heads, D head_dim.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from drafter_service.eagle3.head import Eagle3Head


@dataclass(frozen=True, slots=True)
class ReferenceRows:
    """Every row so far: committed ones first, then the fed drafts."""

    fused: Tensor  # [T, C]
    y: Tensor  # [T, C]
    logits: Tensor  # [T, W]
    feedback: Tensor  # [T, C]


def attend_causally(q_TQD: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> Tensor:
    """[T, Q * D]: row t sees rows 0..t."""
    num_rows, num_heads, dim = q_TQD.shape
    share = num_heads // k_TKD.shape[1]
    out = torch.zeros_like(q_TQD)
    for row in range(num_rows):
        for head in range(num_heads):
            keys, values = k_TKD[: row + 1, head // share], v_TKD[: row + 1, head // share]
            weights = (keys @ q_TQD[row, head] * dim**-0.5).softmax(-1)
            out[row, head] = weights @ values
    return out.reshape(num_rows, num_heads * dim)


def draft_rows(
    head: Eagle3Head, features_TA: Tensor, next_ids_T: Tensor, drafts: Sequence[int] = ()
) -> ReferenceRows:
    """Rows of the committed tokens on true features, then one row per token of `drafts`.

    Row t pairs feature t with token t+1 (`next_ids_T[t]`). A draft's row pairs the feedback of
    the row before it with the draft. The last row's logits predict the next token.
    """
    g_TC = head.fuse(features_TA)
    ids = next_ids_T.tolist()
    rows = _forward(head, g_TC, ids)
    for token in drafts:
        g_TC = torch.cat([g_TC, rows.feedback[-1:]])
        ids.append(int(token))
        rows = _forward(head, g_TC, ids)
    return rows


def draft_chain(
    head: Eagle3Head, features_TA: Tensor, next_ids_T: Tensor, num_drafts: int
) -> list[int]:
    """Greedy chain of target ids."""
    drafts: list[int] = []
    for _ in range(num_drafts):
        logits_TW = draft_rows(head, features_TA, next_ids_T, drafts).logits
        drafts.append(int(head.target_ids[logits_TW[-1].argmax()]))
    return drafts


def _forward(head: Eagle3Head, g_TC: Tensor, ids: list[int]) -> ReferenceRows:
    ids_T, positions_T = torch.tensor(ids), torch.arange(len(ids))
    y_TC = head.step(ids_T, g_TC, positions_T, attend_causally)
    return ReferenceRows(g_TC, y_TC, head.logits(y_TC), head.feedback(y_TC))
