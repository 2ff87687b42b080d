"""Which sources hold which requests: a drafter is fed only where its drafts are about to be used.

Feature rows lie beside the KV, so a source that was left alone can be brought up to date at any
time, in one piece; what it absorbs meanwhile for nobody costs its time, and where it shares the
verifier's cores the verifier's. Knows no costs and no choice. A plan of kind none feeds. A request
is held by a source once its rows had time to arrive; then it may be asked.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from protos.exchange import Plan
from verifier_service.engine.ports import SequenceView, SourceInfo, SourcePlan

_FEW_ROWS: Final = 16
"""Rows that may be owed when a draft is asked for: they travel with the question."""
_ROWS_PER_STEP: Final = 128
"""Rows that a drafter is trusted to absorb while one step is verified."""
_STEPS_PER_ROW: Final = 0.5
"""Steps between two requests fed for the sake of probes alone, by the rows that it takes: a row
costs about a hundredth of a plain step, and probes may cost two."""
_ROOM_FOR_PROBES: Final = 24
"""Tokens to come of a request that is worth feeding for probes."""


@dataclass(slots=True)
class _Fed:
    num_rows: int
    ready_at: int


class Feeding:
    """What was sent of which request to which source, counted in steps."""

    def __init__(self) -> None:
        self._fed: dict[tuple[int, str], _Fed] = {}
        self._next_subject_at: dict[str, float] = {}
        self._step = 0

    def open_step(self, step: int) -> None:
        """A new step begins."""
        self._step = step

    def feed(self, view: SequenceView, info: SourceInfo) -> SourcePlan:
        """The plan that brings a source up to date; it is booked as sent."""
        fed = self._fed.setdefault((view.key, info.name), _Fed(0, self._step + 1))
        new = view.num_rows - fed.num_rows
        if needs_feeding(info) and new > _FEW_ROWS:
            fed.ready_at = self._step + 1 + -(-new // _ROWS_PER_STEP)
        fed.num_rows = view.num_rows
        return SourcePlan(info.name, Plan())

    def holds(self, view: SequenceView, info: SourceInfo) -> bool:
        """Whether the source can be asked about this request now."""
        if not needs_feeding(info):
            return True
        fed = self._fed.get((view.key, info.name))
        if fed is None or self._step < fed.ready_at:
            return False
        return view.num_rows - fed.num_rows <= _FEW_ROWS

    def subject(self, info: SourceInfo, views: Sequence[SequenceView]) -> SequenceView | None:
        """The request to probe this source with: one it is fed with, else, seldom, a new one."""
        held = [v for v in views if (v.key, info.name) in self._fed or not needs_feeding(info)]
        if held:
            return max(held, key=lambda v: (self.holds(v, info), v.base_len))
        worth = [v for v in views if v.remaining >= _ROOM_FOR_PROBES]
        if not worth or self._step < self._next_subject_at.get(info.name, 0.0):
            return None
        shortest = min(worth, key=lambda v: v.base_len)
        self._next_subject_at[info.name] = self._step + _STEPS_PER_ROW * shortest.num_rows
        return shortest

    def forget(self, key: int) -> None:
        """The request left."""
        for name in [name for known, name in self._fed if known == key]:
            del self._fed[key, name]


def needs_feeding(info: SourceInfo) -> bool:
    """Look-ups in this process hold a request at once; whatever computes needs time for it."""
    return not info.local or bool(info.capabilities.digest)
