"""The yardstick: an EAGLE draft recomputed from nothing, without cache, in plain loops.

Every verb starts from all committed rows. Slow on purpose; serving and training are tested
against it. Invariant: this file keeps no state between calls.

Shapes: T committed rows, A raw feature width, C head hidden size, W draft vocabulary, Q query
heads, K key-value heads, D head_dim.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from drafter_service.attention import Attend
from drafter_service.eagle3.head import Eagle3Head
from drafter_service.feature_head import FeatureHead


@dataclass(frozen=True, slots=True)
class ReferenceRows:
    """Every row so far: committed ones first, then the fed drafts."""

    fused: Tensor  # [T, C]
    y: Tensor  # [T, C]
    logits: Tensor  # [T, W]
    feedback: Tensor  # [T, C]


def causal(num_committed: int, windows: Sequence[int | None] = (None,)) -> Attend:
    """Row t sees rows 0..t; through a window only the last ones, counted for drafts from the
    last committed row on."""

    def attend(layer: int, q_TQD: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> Tensor:
        num_rows, num_heads, dim = q_TQD.shape
        share = num_heads // k_TKD.shape[1]
        window = windows[layer] or num_rows
        out = torch.zeros_like(q_TQD)
        for row in range(num_rows):
            first = max(0, min(row, num_committed - 1) - window + 1)
            for head in range(num_heads):
                keys = k_TKD[first : row + 1, head // share]
                values = v_TKD[first : row + 1, head // share]
                weights = (keys @ q_TQD[row, head] * dim**-0.5).softmax(-1)
                out[row, head] = weights @ values
        return out.reshape(num_rows, num_heads * dim)

    return attend


def draft_rows(
    head: FeatureHead,
    features_TA: Tensor,
    next_ids_T: Tensor,
    drafts: Sequence[int] = (),
    windows: Sequence[int | None] = (None,),
) -> ReferenceRows:
    """Rows of the committed tokens on true features, then one row per token of `drafts`.

    Row t pairs feature t with token t+1 (`next_ids_T[t]`). A draft's row pairs the feedback of
    the row before it with the draft. The last row's logits predict the next token.
    """
    g_TC = head.fuse(features_TA)
    ids = next_ids_T.tolist()
    attend = causal(len(ids), windows)
    rows = _forward(head, g_TC, ids, attend)
    for token in drafts:
        g_TC = torch.cat([g_TC, rows.feedback[-1:]])
        ids.append(int(token))
        rows = _forward(head, g_TC, ids, attend)
    return rows


def draft_chain(
    head: Eagle3Head, features_TA: Tensor, next_ids_T: Tensor, num_drafts: int
) -> list[int]:
    """Greedy chain of target ids."""
    if head.config.mask_token_id is not None:
        logits_KW = masked_rows(head, features_TA, next_ids_T, num_drafts).logits[-num_drafts:]
        return [int(token) for token in head.target_ids[logits_KW.argmax(-1)]]
    drafts: list[int] = []
    windows = head.config.windows
    for _ in range(num_drafts):
        logits_TW = draft_rows(head, features_TA, next_ids_T, drafts, windows).logits
        drafts.append(int(head.target_ids[logits_TW[-1].argmax()]))
    return drafts


def masked_rows(
    head: Eagle3Head, features_TA: Tensor, next_ids_T: Tensor, num_drafts: int
) -> ReferenceRows:
    """P-EAGLE: the committed rows and behind them `num_drafts` - 1 masked ones, in one pass.

    The last `num_drafts` rows' logits predict the next tokens in order.
    """
    assert head.config.mask_token_id is not None
    masks = num_drafts - 1
    g_TC = torch.cat([head.fuse(features_TA), head.masked().expand(masks, -1)])
    ids = [*next_ids_T.tolist(), *[head.config.mask_token_id] * masks]
    return _forward(head, g_TC, ids, causal(len(features_TA), head.config.windows))


def _forward(head: FeatureHead, g_TC: Tensor, ids: list[int], attend: Attend) -> ReferenceRows:
    ids_T, positions_T = torch.tensor(ids), torch.arange(len(ids))
    y_TC = head.step(ids_T, g_TC, positions_T, attend)
    return ReferenceRows(g_TC, y_TC, head.logits(y_TC), head.feedback(y_TC))
