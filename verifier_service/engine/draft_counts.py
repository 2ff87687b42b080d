"""What the draft exchange counts: sums per source, and a window of reply latencies.

Sums only; a reader forms means. Written by the engine's thread, read from any.
"""

from collections import deque
from dataclasses import dataclass, fields

WINDOW: int = 128
"""Replies that the latency percentiles look back on."""


@dataclass(frozen=True, slots=True)
class DraftCounts:
    """Sums of one source since the start.

    asked: drafts planned and sent. in_time: answered before the step went on. late: answered
    after it. rerooted: late ones that still fitted; stale: those that did not. lost, not_ready,
    refused: answers without a draft. malformed: answers that broke the contract. unanswered:
    the deadline passed first. rows_missing: requests whose rows the target does not keep.
    pairs_refused: replicas left out because they do not belong to this target.
    feature_bytes: rows sent. wait_s: time steps were held. reply_s: send to answer, over `timed`
    answers, of which drafter_s inside the drafter; the rest is wire.
    """

    asked: int = 0
    in_time: int = 0
    late: int = 0
    rerooted: int = 0
    stale: int = 0
    lost: int = 0
    not_ready: int = 0
    refused: int = 0
    malformed: int = 0
    unanswered: int = 0
    rows_missing: int = 0
    pairs_refused: int = 0
    feature_bytes: int = 0
    wait_s: float = 0.0
    timed: int = 0
    reply_s: float = 0.0
    drafter_s: float = 0.0

    @property
    def wire_s(self) -> float:
        """Time between the two services, both ways, queues on the way included."""
        return max(self.reply_s - self.drafter_s, 0.0)

    def __add__(self, other: "DraftCounts") -> "DraftCounts":
        return DraftCounts(
            **{f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)}
        )


class SourceTally:
    """The living sums of one source, and the latencies of its newest replies."""

    def __init__(self, source: str) -> None:
        self.source = source
        self._sums: dict[str, float] = {f.name: f.default for f in fields(DraftCounts)}  # type: ignore[misc]  # all have number defaults
        self._latencies_s: deque[float] = deque(maxlen=WINDOW)
        self._percentiles: tuple[float, float] | None = (0.0, 0.0)

    def add(self, name: str, amount: float = 1) -> None:
        """Add to one sum of DraftCounts."""
        self._sums[name] += amount

    def time_reply(self, latency_s: float, drafter_s: float) -> None:
        """Note one answer to a plan: send to answer, and the share inside the drafter."""
        self._latencies_s.append(latency_s)
        self._percentiles = None
        self.add("timed")
        self.add("reply_s", latency_s)
        self.add("drafter_s", min(drafter_s, latency_s))

    def percentiles_s(self) -> tuple[float, float]:
        """p50 and p95 of the newest replies; zeros before the first."""
        if self._percentiles is None:
            ranked = sorted(self._latencies_s)
            last = len(ranked) - 1
            self._percentiles = (ranked[last // 2], ranked[round(0.95 * last)])
        return self._percentiles

    def snapshot(self) -> DraftCounts:
        """The sums as a value."""
        return DraftCounts(**self._sums)  # type: ignore[arg-type]  # ints stay ints
