"""When to ask a source that is switched off: seldom, cheaply, and again soon when it surprises.

Knows neither costs nor shapes. Never a one-way switch: the interval between probes doubles up to
a limit. A source that is new, or that brought nothing and begins to bring something, gets a burst
of probes, so that the evidence has a quick look at it.
"""

from dataclasses import dataclass
from typing import Final

_FIRST: Final = 8
_LONGEST: Final = 128
_LONGEST_WHEN_RICH: Final = 32
_FIRST_BURST: Final = 24
_BURST: Final = 12
_BURST_INTERVAL: Final = 2
_MEMORY: Final = 0.7
_GOOD: Final = 0.8
_POOR: Final = 0.4


@dataclass(slots=True)
class _Schedule:
    last_asked: int = 0
    interval: int = _FIRST
    recent: float = 0.0
    was_poor: bool = False
    burst: int = _FIRST_BURST


class Probing:
    """Probe schedule per source, counted in steps."""

    def __init__(self) -> None:
        self._schedules: dict[str, _Schedule] = {}

    def is_due(self, source: str, step: int, is_rich: bool) -> bool:
        """Whether a source that the choice leaves out should be asked once.

        is_rich: speculation has gained enough for probes not to matter; then they come more often.
        """
        schedule = self._schedules.get(source)
        if schedule is None:
            return True
        interval = _BURST_INTERVAL if schedule.burst else schedule.interval
        if is_rich:
            interval = min(interval, _LONGEST_WHEN_RICH)
        return step - schedule.last_asked >= interval

    def asked(self, source: str, step: int, by_choice: bool) -> int:
        """Note that it was asked; returns the steps since it was asked before."""
        schedule = self._schedules.setdefault(source, _Schedule(last_asked=step))
        elapsed = step - schedule.last_asked
        schedule.last_asked = step
        if by_choice:
            schedule.interval = _FIRST
            schedule.burst = 0
        else:
            schedule.burst = max(schedule.burst - 1, 0)
            schedule.interval = min(2 * schedule.interval, _LONGEST)
        return elapsed

    def observe(self, source: str, num_right: int) -> None:
        """How many leading tokens of a draft were right."""
        schedule = self._schedules.setdefault(source, _Schedule())
        schedule.recent = _MEMORY * schedule.recent + (1.0 - _MEMORY) * num_right
        if schedule.recent < _POOR:
            schedule.was_poor = True
        elif schedule.recent >= _GOOD and schedule.was_poor:
            schedule.was_poor = False
            schedule.burst = _BURST
