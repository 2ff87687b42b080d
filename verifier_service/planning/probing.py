"""When to ask a source that is switched off: seldom, cheaply, and again soon when it surprises.

Knows neither costs nor shapes. Never a one-way switch: the interval between probes doubles up to
a limit while they bring nothing, and falls as soon as they bring something.
"""

from dataclasses import dataclass
from typing import Final

_FIRST: Final = 8
_LONGEST: Final = 128
_MEMORY: Final = 0.7


@dataclass(slots=True)
class _Schedule:
    last_asked: int = 0
    interval: int = _FIRST
    recent: float = 0.0


class Probing:
    """Probe schedule per source, counted in steps."""

    def __init__(self) -> None:
        self._schedules: dict[str, _Schedule] = {}

    def is_due(self, source: str, step: int) -> bool:
        """Whether a source that the choice leaves out should be asked once."""
        schedule = self._schedules.get(source)
        return schedule is None or step - schedule.last_asked >= schedule.interval

    def asked(self, source: str, step: int, by_choice: bool) -> int:
        """Note that it was asked; returns the steps since it was asked before."""
        schedule = self._schedules.setdefault(source, _Schedule(last_asked=step))
        elapsed = step - schedule.last_asked
        schedule.last_asked = step
        if by_choice:
            schedule.interval = _FIRST
        return elapsed

    def observe(self, source: str, num_right: int) -> None:
        """How many leading tokens of a draft were right."""
        schedule = self._schedules.setdefault(source, _Schedule())
        schedule.recent = _MEMORY * schedule.recent + (1.0 - _MEMORY) * num_right
        if schedule.recent >= 0.9:
            schedule.interval = 2
        elif schedule.recent >= 0.5:
            schedule.interval = min(schedule.interval, _FIRST)
        else:
            schedule.interval = min(2 * schedule.interval, _LONGEST)
