"""A request's prefix in a block drafter, and its draft of one round.

Context rows need no token after them: a row is used as soon as it is here, up to the anchor.
"""

from dataclasses import dataclass

from drafter_service.cache import Segment
from drafter_service.session import Session
from protos.exchange import Plan, PlanKind, SessionOpen


class BlockSession(Session):
    """A session with its place in the slab."""

    def __init__(self, session_id: int, opened: SessionOpen) -> None:
        super().__init__(session_id, opened)
        self.segment: Segment | None = None

    @property
    def anchor(self) -> int:
        """Position of the newest token, where the block begins."""
        return self.base_len - 1

    @property
    def num_missing(self) -> int:
        """Context rows still under way."""
        return self.anchor - self.computed_len


@dataclass(frozen=True, slots=True)
class BlockDraft:
    """One session's draft. place: of its job; plan: of kind chain, tree or block."""

    place: int
    session: BlockSession
    plan: Plan

    @property
    def depth(self) -> int:
        """Drafts wanted along a path: the prefix of the block that is verified."""
        return self.plan.depth

    @property
    def num_nodes(self) -> int:
        """Nodes wanted; 0 asks for the chain."""
        return 0 if self.plan.kind is PlanKind.CHAIN else self.plan.nodes

    @property
    def width(self) -> int:
        """Siblings a node of the tree may have."""
        return self.plan.width if self.plan.kind is PlanKind.TREE else max(self.plan.nodes, 1)
