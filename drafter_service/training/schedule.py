"""Learning rates. A schedule is a function of the update's number and, if it likes, of the clock.

`StepSchedule` is reproducible. `DeadlineSchedule` decays to its floor at a moment of wall-clock
time, however many updates fit before it: on a shared machine nobody knows that number. The rates
used are in the log, so a run under a deadline can be repeated exactly from its log.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol


class Schedule(Protocol):
    """What the trainer asks before every update."""

    def rate(self, update: int) -> float:
        """Learning rate of update number `update`, from 0."""

    def is_over(self, update: int) -> bool:
        """Whether no further update should be made."""

    def left_s(self, update: int, seconds_per_update: float) -> float:
        """Estimated time until then."""


def cosine(progress: float, peak: float, floor_share: float) -> float:
    """From `peak` at 0 to `peak * floor_share` at 1."""
    along = min(1.0, max(0.0, progress))
    share = floor_share + (1.0 - floor_share) * 0.5 * (1.0 + math.cos(math.pi * along))
    return peak * share


@dataclass(frozen=True, slots=True)
class StepSchedule:
    """Linear warm-up, then cosine over a fixed number of updates."""

    peak: float
    num_updates: int
    warmup_updates: int
    floor_share: float = 0.0

    def rate(self, update: int) -> float:
        warm = min(1.0, (update + 1) / max(1, self.warmup_updates))
        return warm * cosine(update / self.num_updates, self.peak, self.floor_share)

    def is_over(self, update: int) -> bool:
        return update >= self.num_updates

    def left_s(self, update: int, seconds_per_update: float) -> float:
        return max(0, self.num_updates - update) * seconds_per_update


@dataclass(frozen=True, slots=True)
class DeadlineSchedule:
    """Linear warm-up in updates, then cosine in wall-clock time from `start_s` to `end_s`."""

    peak: float
    start_s: float
    end_s: float
    warmup_updates: int
    floor_share: float = 0.0
    now: Callable[[], float] = time.time

    def rate(self, update: int) -> float:
        progress = (self.now() - self.start_s) / max(1e-9, self.end_s - self.start_s)
        warm = min(1.0, (update + 1) / max(1, self.warmup_updates))
        return warm * cosine(progress, self.peak, self.floor_share)

    def is_over(self, update: int) -> bool:
        return self.now() >= self.end_s

    def left_s(self, update: int, seconds_per_update: float) -> float:
        return max(0.0, self.end_s - self.now())
