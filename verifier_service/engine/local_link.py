"""A drafter in this process behind the same transport: no wire, no copy of the checks.

`send` drafts at once on the calling thread and puts the answer into the same queue that remote
answers arrive in, so both forms take one path and draft the same trees.
"""

import time
from collections.abc import Sequence
from typing import Protocol

from protos.codec import DraftAnswer
from protos.exchange import Capabilities, ContextAck, ContextRows, DraftResult, DraftWork
from verifier_service.engine.draft_events import AckIn, AnswerIn, EventQueue, ProbeDone


class LocalDrafter(Protocol):
    """The part of a drafter's port that is used in-process."""

    @property
    def capabilities(self) -> Capabilities:
        """Constant while the object lives."""

    def handle(self, works: Sequence[DraftWork]) -> list[DraftResult]:
        """One result per work that does not close."""

    def absorb(self, pieces: Sequence[ContextRows]) -> list[ContextAck]:
        """One acknowledgement per piece."""


def ask_local(drafter: LocalDrafter, work: DraftWork) -> DraftResult | None:
    """One work and its answer; None for one that closes."""
    results = drafter.handle([work])
    return results[0] if results else None


class LocalLink:
    """Transport to a drafter of this process."""

    def __init__(self, peer_id: int, drafter: LocalDrafter, events: EventQueue) -> None:
        self._peer_id = peer_id
        self._drafter = drafter
        self._events = events

    def send(self, step: int, remaining_s: float, works: Sequence[DraftWork]) -> None:
        """Draft now."""
        began_s = time.monotonic()
        results = self._drafter.handle(works)
        ended_s = time.monotonic()
        answer = DraftAnswer(step, tuple(results), draft_s=ended_s - began_s)
        self._events.put(AnswerIn(self._peer_id, answer, ended_s))

    def send_rows(self, piece: ContextRows) -> None:
        """Absorb now."""
        for ack in self._drafter.absorb([piece]):
            self._events.put(AckIn(self._peer_id, ack))

    def probe(self) -> None:
        """It lives as long as this process does."""
        self._events.put(ProbeDone(self._peer_id, has_answered=True))

    def retire(self) -> None:
        """Nothing is connected."""

    def hang_up(self) -> None:
        """Nothing is connected."""

    def close(self) -> None:
        """Nothing is connected."""
