"""Whether speculating pays at a given load, by what its steps really took; where not, it pauses.

Choice and admission compare drafts with each other by a model. This compares all of it, look-ups,
waits and the planner's own time included, with plain steps, so that the sum of what each decision
leaves out cannot make a loaded verifier slower than plain decoding. Knows no drafters. Never a
one-way switch: a pause ends by itself in a new trial, and pauses grow only to a limit.
"""

from dataclasses import dataclass
from typing import Final

_LEVELS: Final = (1, 2, 4, 8, 16, 32)
_TRIAL_STEPS: Final = 24
_MEMORY: Final = 0.97
_LOSS: Final = 0.98
"""Tokens' plain time over the time they took, below which speculation pauses."""
_FIRST_PAUSE: Final = 16
_LONGEST_PAUSE: Final = 128
_FEW: Final = 2
"""Requests at once up to which a new request is reason enough for a new trial."""


@dataclass(slots=True)
class _Level:
    worth_s: float = 0.0
    took_s: float = 0.0
    num_steps: int = 0
    paused_until: int = 0
    pause: int = _FIRST_PAUSE


class Worth:
    """Gains by the number of requests that decode together, counted in steps."""

    def __init__(self) -> None:
        self._levels: dict[int, _Level] = {}
        self._plain_other_s = 0.0
        self._known: frozenset[int] = frozenset()
        self._step = 0

    def open_step(self, keys: frozenset[int]) -> bool:
        """A new step begins, in which requests `keys` may speculate; False: it should be plain."""
        self._step += 1
        level = self._level(len(keys))
        has_new = not keys <= self._known
        self._known = keys
        if has_new and len(keys) <= _FEW:
            level.paused_until, level.pause = 0, _FIRST_PAUSE
        return self._step >= level.paused_until

    def note_plain(self, other_s: float) -> None:
        """A step without drafts took other_s beside its verification."""
        self._plain_other_s += (1.0 - _MEMORY) * (other_s - self._plain_other_s)

    def note(self, count: int, tokens: float, plain_s: float, took_s: float) -> None:
        """A speculative step of `count` requests: tokens committed by each, on average.

        plain_s: verification of a plain step. took_s: all that the step really took.
        """
        level = self._level(count)
        level.worth_s = _MEMORY * level.worth_s + tokens * (plain_s + self._plain_other_s)
        level.took_s = _MEMORY * level.took_s + took_s
        level.num_steps += 1
        if level.num_steps < _TRIAL_STEPS:
            return
        if level.worth_s >= _LOSS * level.took_s:
            level.pause = _FIRST_PAUSE
            return
        level.paused_until = self._step + level.pause
        level.pause = min(2 * level.pause, _LONGEST_PAUSE)
        level.worth_s = level.took_s = 0.0
        level.num_steps = 0

    def _level(self, count: int) -> _Level:
        bucket = next((b for b in _LEVELS if count <= b), count)
        return self._levels.setdefault(bucket, _Level())
