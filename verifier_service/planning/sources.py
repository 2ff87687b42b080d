"""What asking a drafter costs: its latency by depth, the wait that shows, and whether it answers.

Knows no acceptance. Seconds. All sources asked in one step work at the same time, so a step waits
for the slowest; work in this process is not overlapped and adds up.
"""

from collections.abc import Mapping
from typing import Final

from verifier_service.engine.ports import SourceInfo
from verifier_service.planning.prospects import drafts_blocks

_MEMORY: Final = 0.95
_RATE: Final = 0.1
_UNKNOWN_LATENCY_S: Final = 0.010
_UNKNOWN_DEADLINE_S: Final = 0.050
_DEPTH_SHARE: Final = 0.7
"""Share of a latency taken to grow with depth while only one depth was ever asked."""


class SourceCosts:
    """Delay and reliability of one source, forgetting exponentially."""

    def __init__(self) -> None:
        self._is_warm = False
        self._weight = 0.0
        self._depth = 0.0
        self._latency = 0.0
        self._depth_squared = 0.0
        self._product = 0.0
        self.answered = 1.0
        """Share of asked drafts that came in time."""

    def observe_reply(self, depth: int, latency_s: float) -> None:
        """A draft of `depth` levels took latency_s, wire and queue included.

        The first is left out: a drafter's first forward is slower than all that follow.
        """
        if not self._is_warm:
            self._is_warm = True
            return
        for name, value in (
            ("_weight", 1.0),
            ("_depth", float(depth)),
            ("_latency", latency_s),
            ("_depth_squared", float(depth * depth)),
            ("_product", depth * latency_s),
        ):
            setattr(self, name, getattr(self, name) * _MEMORY + value)

    def observe_answer(self, came_in_time: bool) -> None:
        """Whether a draft that was waited for arrived in time."""
        self.answered += _RATE * (came_in_time - self.answered)

    def latency_s(self, depth: int, info: SourceInfo) -> float:
        """Expected time of a draft of `depth` levels."""
        if not self._weight:
            known_s = min(info.reply_p50_s, _UNKNOWN_LATENCY_S)
            return known_s or (0.0 if info.local else _UNKNOWN_LATENCY_S)
        mean_depth = self._depth / self._weight
        mean = self._latency / self._weight
        spread = self._depth_squared / self._weight - mean_depth**2
        if spread > 0.05:
            slope = (self._product / self._weight - mean_depth * mean) / spread
        else:
            share = 0.0 if drafts_blocks(info) else _DEPTH_SHARE
            slope = share * mean / max(mean_depth, 1.0)
        slope = min(max(slope, 0.0), mean / max(mean_depth, 1.0))
        return max(mean + slope * (depth - mean_depth), 0.0)


class ExposedWait:
    """How much of the sources' latency a step really waits, learnt from measured steps."""

    def __init__(self) -> None:
        self.factor = 1.0

    def predict_s(self, latencies: Mapping[str, float], local: Mapping[str, bool]) -> float:
        """Wait of a step that asks these sources."""
        return self.factor * self.unscaled_s(latencies, local)

    @staticmethod
    def unscaled_s(latencies: Mapping[str, float], local: Mapping[str, bool]) -> float:
        """Slowest remote source, or all work of this process, whichever is longer."""
        inside = sum(s for name, s in latencies.items() if local[name])
        outside = max((s for name, s in latencies.items() if not local[name]), default=0.0)
        return max(inside, outside)

    def observe(self, unscaled_s: float, measured_s: float) -> None:
        """Correct by one step that waited for what it had asked."""
        if unscaled_s > 1e-4:
            ratio = min(measured_s / unscaled_s, 2.0)
            self.factor = max(self.factor + _RATE * (ratio - self.factor), 0.05)


def reply_deadline_s(info: SourceInfo) -> float:
    """How long replies of this source are worth waiting for: the p95 of its replies."""
    return info.reply_p95_s or max(3.0 * info.reply_p50_s, _UNKNOWN_DEADLINE_S)
