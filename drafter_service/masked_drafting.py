"""Drafting out of one pass: masked rows behind the newest true one, one per further token.

    rows          ... T-3  T-2 | m1  m2  m3       m: (placeholder, mask token), positions from T-1
    children of        level 1 | 2   3   4        whatever the path: a tree multiplies the levels

Knows no files and nothing of what the head computes (P-EAGLE, 2602.01469).

Shapes: N flat rows, C hidden size of the head, W draft vocabulary.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from drafter_service.attention import Part, causal_tail
from drafter_service.feature_head import Mask
from drafter_service.head_draft import HeadDraft, finish, refused
from drafter_service.head_runner import HeadRunner
from drafter_service.ranking import NodeRows, rank_children
from drafter_service.service import Outcome


class MaskedDrafting:
    """Fills masked rows and reads every level off them."""

    def __init__(self, runner: HeadRunner, mask: Mask, target_ids_W: Tensor) -> None:
        self._runner = runner
        self._mask = mask
        self._target_ids_W = target_ids_W

    def draft(
        self,
        drafts: Sequence[HeadDraft],
        filled: Mapping[int, Tensor],
        outcomes: dict[int, Outcome],
    ) -> None:
        """`filled`: y [levels, C] by place, where the rows went with those absorbed."""
        y_NC = self._fill(drafts, filled)
        groups = [
            NodeRows(1, draft.session.params, draft.base_len + level)
            for draft in drafts
            for level in range(draft.grower.depth)
        ]
        most = max(draft.grower.num_children for draft in drafts)
        logits_NW = self._runner.head.logits(y_NC)
        ranked = rank_children(logits_NW, groups, self._target_ids_W, most)
        first = 0
        for draft in drafts:
            rows = range(first, first + draft.grower.depth)
            first = rows.stop
            if not ranked.finite[rows.start : rows.stop].all():
                outcomes[draft.place] = refused("the head's logits are not finite")
                continue
            num_nodes = 1
            for row in rows:
                if draft.grower.is_done:
                    break
                ids, scores = ranked.ids[[row] * num_nodes], ranked.scores[[row] * num_nodes]
                draft.grower.grow(ids, scores)
                num_nodes = len(draft.grower.frontier_tokens)
            draft.q.extend(q for q in ranked.q[rows.start : rows.stop] if q is not None)
        finish(drafts, outcomes)

    def _fill(self, drafts: Sequence[HeadDraft], filled: Mapping[int, Tensor]) -> Tensor:
        """y of `depth` rows per draft: row base_len - 2 and the masked ones behind it. True rows
        still under way are masked too, but for their tokens, which are known."""
        ids: list[int] = []
        positions: list[int] = []
        parts: list[Part] = []
        counts: list[int] = []
        for draft in drafts:
            session = draft.session
            known = session.tokens[session.computed_len + 1 :]
            count = 0 if draft.place in filled else len(known) + draft.grower.depth - 1
            counts.append(count)
            if count:
                ids.extend(known + [self._mask.token_id] * (draft.grower.depth - 1))
                positions.extend(range(session.computed_len, session.computed_len + count))
                parts.append(draft.part(session.computed_len, count, causal_tail(count)))
        y_NC = self._mask.g_C.new_zeros(0, len(self._mask.g_C))
        if parts:
            g_NC = self._mask.g_C.expand(len(ids), -1)
            y_NC = self._runner.step(ids, g_NC, positions, parts)
        wanted: list[Tensor] = []
        first = 0
        for draft, count in zip(drafts, counts, strict=True):
            rows = y_NC[first : first + count]
            first += count
            if draft.place in filled:
                wanted.append(filled[draft.place])
            elif draft.num_missing:
                wanted.append(rows[draft.num_missing - 1 :])
            else:
                assert draft.session.newest_y_C is not None  # else it were not drafting
                wanted += [draft.session.newest_y_C[None], rows]
        return torch.cat(wanted)
