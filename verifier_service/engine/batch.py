"""One step as values: spans for the target, trees to walk, and what the walk means for the KV.

Knows how rows are laid out, nothing of the queue or of advisers. A decoding request contributes
its anchor and draft nodes (row n is node n); a prompt chunk contributes rows only. Invariant: what
reaches the target is well-formed: ids inside the vocabulary, parents before children, slots owned.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from protos.sparse import SparseQ
from protos.tree import CandidateTree, merge
from verifier_service.engine.ports import Draft
from verifier_service.engine.request import RunningRequest
from verifier_service.engine.scheduler import Share
from verifier_service.sampling.walk import WalkEnd, WalkStart
from verifier_service.step import Span


@dataclass(frozen=True, slots=True)
class MergedDraft:
    """What several sources proposed for one request, as one tree.

    sources: per draft node, the names that proposed it. drafts: as they came. q: see `WalkStart`.
    """

    tree: CandidateTree = field(default_factory=CandidateTree)
    sources: tuple[tuple[str, ...], ...] = ()
    drafts: tuple[Draft, ...] = ()
    q: tuple[SparseQ, ...] = ()

    def cut_to(self, tree: CandidateTree) -> "MergedDraft":
        """The same draft after admission left `tree`, a subtree of the merged one."""
        if tree == self.tree:
            return self
        number = [0]
        names: list[tuple[str, ...]] = []
        children = self.tree.children()
        for token, parent in zip(tree.tokens, tree.parents, strict=True):
            node = children[number[parent]][token]
            number.append(node)
            names.append(self.sources[node - 1])
        return MergedDraft(tree, tuple(names), self.drafts, self.q[: tree.num_nodes])


@dataclass(frozen=True, slots=True)
class Batch:
    """The spans of a step, and a walk for every share that commits, in the order of shares."""

    shares: tuple[Share, ...]
    merged: tuple[MergedDraft, ...]
    spans: tuple[Span, ...]
    walks: tuple[WalkStart | None, ...]

    @property
    def num_rows(self) -> int:
        """Rows of the whole step."""
        return sum(span.num_rows for span in self.spans)

    @property
    def num_branching(self) -> int:
        """Rows of spans that are no chain."""
        return sum(span.num_rows for span in self.spans if span.parents is not None)

    @property
    def context(self) -> int:
        """Positions read by all spans together."""
        return sum(span.start for span in self.spans)


def is_draft_usable(draft: Draft, base_len: int, vocab_size: int) -> bool:
    """A draft for this very prefix, every id in the vocabulary (structure: CandidateTree)."""
    return draft.base_len == base_len and all(0 <= t < vocab_size for t in draft.tree.tokens)


def merge_drafts(drafts: Sequence[Draft], max_depth: int) -> MergedDraft:
    """Drafts of one request as one tree of at most max_depth levels."""
    tree, proposers = merge([draft.tree for draft in drafts])
    names = tuple(tuple(dict.fromkeys(drafts[i].source for i in indices)) for indices in proposers)
    merged = MergedDraft(tree, names, tuple(drafts))
    nodes = [node for node, depth in enumerate(tree.depths(), 1) if depth <= max_depth]
    return merged.cut_to(tree.keep(nodes)) if len(nodes) < tree.num_nodes else merged


def build_batch(shares: Sequence[Share], merged: dict[int, MergedDraft]) -> Batch:
    """Lay out a step. merged: by request key, for decoding requests with seated draft nodes."""
    spans: list[Span] = []
    walks: list[WalkStart | None] = []
    drafts: list[MergedDraft] = []
    num_logits = 0
    for share in shares:
        request = share.request
        draft = merged.get(request.key, MergedDraft()) if share.commits else MergedDraft()
        assert share.num_rows == 1 or not draft.tree.num_nodes, "drafts need an anchor-only share"
        span = _span(share, draft.tree)
        walk = None
        if share.commits:
            walk = WalkStart(
                draft.tree,
                num_logits + span.num_logits - 1 - draft.tree.num_nodes,
                request.request.params,
                request.known_len,
                draft.q,
                request.history,
            )
        spans.append(span)
        walks.append(walk)
        drafts.append(draft)
        num_logits += span.num_logits
    return Batch(tuple(shares), tuple(drafts), tuple(spans), tuple(walks))


def _span(share: Share, tree: CandidateTree) -> Span:
    request, start = share.request, share.request.computed_len
    ids = (*request.tokens[start : start + share.num_rows], *tree.tokens)
    end = start + len(ids)
    num_logits = 1 + tree.num_nodes if share.commits else 0
    if request.wants_prompt_logits:
        num_logits = len(ids)
    return Span(
        key=request.key,
        token_ids=ids,
        start=start,
        slots=request.slots(end),
        parents=None if tree.is_chain else (-1, *tree.parents),
        num_logits=num_logits,
        first_slot=request.first_slot(end),
    )


def read_logprobs(logits: torch.Tensor, batch: Batch, ends: Sequence[WalkEnd | None]) -> None:
    """Requests that report log probabilities read their rows of the step's logits."""
    first_row = 0
    parts = zip(batch.shares, batch.spans, batch.walks, ends, strict=True)
    for share, span, start, end in parts:
        report = share.request.report
        if report is not None:
            if report.wants_prompt:
                report.read_prompt(logits, first_row, span.start, span.num_rows)
            if start is not None and end is not None:
                report.read_path(logits, start, end)
        first_row += span.num_logits


def moves(request: RunningRequest, end: WalkEnd) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Source and destination slots that make an accepted path contiguous; None when it is.

    Call before the new tokens join the text: the anchor still stands at computed_len.
    """
    start = request.computed_len
    misplaced = [(n, depth) for depth, n in enumerate(end.nodes, 1) if n != depth]
    if not misplaced:
        return None
    slots = request.slots(request.num_slots)
    source = torch.tensor([start + node for node, _ in misplaced])
    target = torch.tensor([start + depth for _, depth in misplaced])
    return slots[source], slots[target]
