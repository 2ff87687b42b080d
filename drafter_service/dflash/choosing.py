"""Drafts out of a block's hidden states: chains and trees, with or without a head over paths.

A plain block knows every depth at once: one ranking for all slots of all sessions, then a chain of
the best ids or the best-first tree. With a serial head or a path selector a slot depends on the
token before: levels are ranked one after the other, all sessions' paths together, and grow as any
other drafter's trees do. Knows no cache and no context. Temperatures, filters, shared noise and
sampling from q are `ranking`'s.

Shapes: N rows, X drafted slots of all drafts, F paths, C hidden size, W draft vocabulary, R rank.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from drafter_service.dflash.block_tree import best_first
from drafter_service.dflash.net import BlockNet
from drafter_service.dflash.session import BlockDraft
from drafter_service.ranking import NodeRows, Ranked, rank_children
from drafter_service.service import Outcome
from drafter_service.tree_builder import NUM_RANKED, TreeGrower, round_scores
from protos.exchange import DraftStatus, Plan, PlanKind
from protos.sparse import SparseQ
from protos.tree import chain

_NOT_FINITE = Outcome(DraftStatus.REFUSED, detail="the block's logits are not finite")


def choose(net: BlockNet, drafts: Sequence[BlockDraft], hidden_NC: Tensor) -> list[Outcome]:
    """One outcome per draft; hidden_NC: rows of their whole blocks, in order."""
    config = net.config
    rows = [
        index * config.block_size + config.first_draft_slot + slot
        for index, draft in enumerate(drafts)
        for slot in range(draft.depth)
    ]
    hidden_XC = hidden_NC[rows]
    logits_XW = net.logits(hidden_XC)
    if net.markov_head is None and net.candidate_selector is None:
        outcomes = _from_marginals(net, drafts, logits_XW)
    else:
        outcomes = _Paths(net, drafts, hidden_XC, logits_XW).outcomes()
    if net.confidence_head is None:
        return outcomes
    return _with_confidences(net, drafts, hidden_XC, outcomes)


def _from_marginals(
    net: BlockNet, drafts: Sequence[BlockDraft], logits_XW: Tensor
) -> list[Outcome]:
    groups = [
        NodeRows(1, draft.session.params, draft.session.base_len + slot)
        for draft in drafts
        for slot in range(draft.depth)
    ]
    most = max(min(draft.width, draft.num_nodes) for draft in drafts)
    ranked = rank_children(logits_XW, groups, net.target_ids, max(most, NUM_RANKED))
    outcomes: list[Outcome] = []
    first = 0
    for draft in drafts:
        own = slice(first, first + draft.depth)
        first = own.stop
        outcomes.append(_from_ranks(draft, ranked, own))
    return outcomes


def _from_ranks(draft: BlockDraft, ranked: Ranked, rows: slice) -> Outcome:
    if not ranked.finite[rows].all():
        return _NOT_FINITE
    ids_DM, scores_DM = ranked.ids[rows], ranked.scores[rows]
    if draft.num_nodes:
        tree = best_first(ids_DM[:, : draft.width], scores_DM[:, : draft.width], draft.num_nodes)
    else:
        tree = chain(ids_DM[:, 0].tolist(), round_scores(np.cumsum(scores_DM[:, 0])))
    lists = [
        tuple(ids[np.isfinite(scores)].tolist())
        for ids, scores in zip(
            ids_DM[: tree.depth, :NUM_RANKED], scores_DM[: tree.depth, :NUM_RANKED], strict=True
        )
    ]
    q = tuple(q for q in ranked.q[rows] if q is not None)
    return Outcome(tree=tree, ranked_ids=tuple(lists), q=q)


@dataclass(slots=True)
class _Path:
    """One draft while it grows. first: of its slots in the flat rows; tokens: of its frontier;
    state: the serial head's, [F, R]."""

    index: int
    draft: BlockDraft
    first: int
    grower: TreeGrower
    tokens: list[int]
    state: Tensor
    q: list[SparseQ] = field(default_factory=list)

    @property
    def row(self) -> int:
        """The slot of the newest level among the flat rows."""
        return self.first + self.grower.level


class _Paths:
    """All drafts of a batch, grown level by level over the head that sees paths."""

    def __init__(
        self, net: BlockNet, drafts: Sequence[BlockDraft], hidden_XC: Tensor, logits_XW: Tensor
    ) -> None:
        self._net = net
        self._hidden_XC = hidden_XC
        self._logits_XW = logits_XW
        self._outcomes: dict[int, Outcome] = {}
        self._paths: list[_Path] = []
        first = 0
        for index, draft in enumerate(drafts):
            session = draft.session
            state_FR = net.markov_head.start(1) if net.markov_head else hidden_XC.new_zeros(1, 0)
            grower = TreeGrower(_grown(draft))
            self._paths.append(_Path(index, draft, first, grower, [session.tokens[-1]], state_FR))
            first += draft.depth

    def outcomes(self) -> list[Outcome]:
        """Grow until every draft is done."""
        growing = list(self._paths)
        while growing:
            if self._net.markov_head is not None:
                self._grow_by_bias(growing)
            else:
                for path in growing:
                    self._grow_by_selector(path)
            growing = [
                path
                for path in growing
                if path.index not in self._outcomes and not path.grower.is_done
            ]
        for path in self._paths:
            if path.index not in self._outcomes:
                tree, ranked_ids = path.grower.finish()
                outcome = Outcome(tree=tree, ranked_ids=ranked_ids, q=tuple(path.q))
                self._outcomes[path.index] = outcome
        return [self._outcomes[path.index] for path in self._paths]

    def _grow_by_bias(self, paths: Sequence[_Path]) -> None:
        """One level of all drafts: the serial head's bias of every path in one product."""
        head = self._net.markov_head
        assert head is not None  # the caller has looked
        device = self._hidden_XC.device
        counts = [len(path.tokens) for path in paths]
        rows = [path.row for path, count in zip(paths, counts, strict=True) for _ in range(count)]
        tokens_F = torch.tensor([t for path in paths for t in path.tokens], device=device)
        state_FR = torch.cat([path.state for path in paths])
        bias_FW, state_FR = head.step(tokens_F, self._hidden_XC[rows], state_FR)
        groups = [_group(path, count) for path, count in zip(paths, counts, strict=True)]
        most = max(path.grower.num_children for path in paths)
        values_FW = self._logits_XW[rows] + bias_FW
        ranked = rank_children(values_FW, groups, self._net.target_ids, most)
        first = 0
        for path, count in zip(paths, counts, strict=True):
            own = slice(first, first + count)
            first = own.stop
            path.state = state_FR[own]
            self._take(path, ranked, own)

    def _grow_by_selector(self, path: _Path) -> None:
        """One level of one draft: only the slot's candidates are ranked."""
        selector = self._net.candidate_selector
        assert selector is not None  # the caller has looked
        logits_W = self._logits_XW[path.row]
        # In order of their ids, because ties go to the lower index.
        candidates_M = logits_W.topk(selector.num_candidates).indices.sort().values
        tokens_F = torch.tensor(path.tokens, device=logits_W.device)
        hidden_C = self._hidden_XC[path.row]
        values_FM = selector.scores(logits_W[candidates_M], candidates_M, tokens_F, hidden_C)
        count = len(path.tokens)
        group = _group(path, count)
        ranked = rank_children(values_FM, [group], candidates_M, path.grower.num_children)
        self._take(path, ranked, slice(0, count))

    def _take(self, path: _Path, ranked: Ranked, rows: slice) -> None:
        if not ranked.finite[rows].all():
            self._outcomes[path.index] = _NOT_FINITE
            return
        path.q.extend(q for q in ranked.q[rows] if q is not None)
        path.grower.grow(ranked.ids[rows], ranked.scores[rows])
        path.tokens = path.grower.frontier_tokens.tolist()
        path.state = path.state[torch.from_numpy(path.grower.frontier_parents)]


def _group(path: _Path, count: int) -> NodeRows:
    session = path.draft.session
    return NodeRows(count, session.params, session.base_len + path.grower.level)


def _grown(draft: BlockDraft) -> Plan:
    """The plan in a grower's words. A block's tree is bounded by its nodes alone, which makes it
    the best tree of that size; a tree plan keeps its width."""
    if not draft.num_nodes:
        return Plan(PlanKind.CHAIN, depth=draft.depth)
    return Plan(PlanKind.TREE, draft.depth, min(draft.width, draft.num_nodes), draft.num_nodes)


def _with_confidences(
    net: BlockNet, drafts: Sequence[BlockDraft], hidden_XC: Tensor, outcomes: Sequence[Outcome]
) -> list[Outcome]:
    """Per depth of the best path, the head's probability that its node is accepted."""
    head = net.confidence_head
    assert head is not None  # the caller has looked
    before: list[int] = []
    rows: list[int] = []
    lengths: list[int] = []
    first = 0
    for draft, outcome in zip(drafts, outcomes, strict=True):
        # What depends on the drawn tokens must not cut a draft that was sampled from q.
        path = () if draft.session.params.uses_rejection else outcome.tree.best_path()
        lengths.append(len(path))
        tokens = [draft.session.tokens[-1], *(outcome.tree.tokens[node - 1] for node in path)]
        before.extend(tokens[: len(path)])
        rows.extend(range(first, first + len(path)))
        first += draft.depth
    if not rows:
        return list(outcomes)
    token_rows_FR: Tensor | None = None
    if net.markov_head is not None:
        token_rows_FR = net.markov_head.token_rows(torch.tensor(before, device=hidden_XC.device))
    logits_F = head.logits(hidden_XC[rows], token_rows_FR)
    # As they survive the wire (float16), and none that is no number.
    rounded = logits_F.sigmoid().to(torch.float16).to(torch.float64).nan_to_num(0.0).tolist()
    given: list[Outcome] = []
    for outcome, length in zip(outcomes, lengths, strict=True):
        given.append(replace(outcome, confidences=tuple(rounded[:length])))
        del rounded[:length]
    return given
