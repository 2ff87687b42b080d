"""One session's draft under way, and what becomes of it. Shared by the ways of drafting.

Shapes: C hidden size of the head, W draft vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from drafter_service.attention import Part
from drafter_service.feature_head import HeadSession
from drafter_service.service import Outcome
from drafter_service.tree_builder import Grower
from protos.exchange import DraftStatus
from protos.sparse import SparseQ


@dataclass(slots=True)
class HeadDraft:
    """`place`: of its job; `first`: of its rows in the newest y. q: what each level was sampled
    from, for requests that use rejection."""

    place: int
    session: HeadSession
    start: int
    grower: Grower
    first: int = 0
    q: list[SparseQ] = field(default_factory=list)

    @property
    def base_len(self) -> int:
        """Committed tokens."""
        return self.session.base_len

    @property
    def num_missing(self) -> int:
        """Rows before the anchor's that are still under way."""
        return num_missing(self.session)

    def part(self, cached_len: int, num_rows: int, tail: Tensor | None = None) -> Part:
        """New rows behind the newest true one."""
        return Part(self.start, cached_len, num_rows, tail, self.session.computed_len - 1)


def num_missing(session: HeadSession) -> int:
    """Rows before the anchor's that are still under way."""
    return session.base_len - 1 - session.computed_len


def finish(drafts: Sequence[HeadDraft], outcomes: dict[int, Outcome]) -> None:
    """The outcomes of all drafts that were not refused."""
    for draft in drafts:
        if draft.place not in outcomes:
            tree, ranked_ids = draft.grower.finish()
            q = tuple(draft.q[: tree.num_nodes])
            outcomes[draft.place] = Outcome(tree=tree, ranked_ids=ranked_ids, q=q)


def refused(detail: str) -> Outcome:
    """Ends the session."""
    return Outcome(DraftStatus.REFUSED, detail=detail)
