"""The port of every drafter: what an engine thread or the gRPC edge may ask of one.

Synchronous and for one thread. The same values come from both callers, so an in-process drafter
and a remote one draft the same trees. Knows no algorithm and no wire.
"""

from collections.abc import Sequence
from typing import Protocol

from protos.exchange import (
    Capabilities,
    ContextAck,
    ContextRows,
    DrafterLoad,
    DraftResult,
    DraftWork,
)


class Drafter(Protocol):
    """Drafts for all sessions it is handed, in one forward per depth."""

    @property
    def capabilities(self) -> Capabilities:
        """Constant while this object lives; a new object has a new incarnation."""

    def handle(self, works: Sequence[DraftWork]) -> list[DraftResult]:
        """Open, extend, draft for and close sessions, in the order given.

        One result per work that does not close, in the same order. A session that cannot be
        served is answered (`lost`, `refused`, `not_ready`); nothing a caller sends raises.
        """

    def absorb(self, pieces: Sequence[ContextRows]) -> list[ContextAck]:
        """Take bulk feature rows; one acknowledgement per piece, in order."""

    def load(self) -> DrafterLoad:
        """Counts and sums since the start."""

    def expire(self, now: float) -> int:
        """Drop sessions idle at monotonic time `now`; how many were dropped."""
