"""The one thread that computes: drafts first, bulk rows in between.

Messages of all streams that wait are drafted together in one `handle`. Rows are absorbed a slice at
a time when no draft waits, and one slice after every batch once they have waited for long: a draft
never waits for more than a slice, and rows never starve. A work overtaken by a newer one of the
same session only brings its tokens and rows. Knows no stream and no event loop: callers leave a
callback, which is called on this thread.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from drafter_service.drafter import Drafter
from drafter_service.metrics import DrafterMetrics
from drafter_service.session import slice_rows
from protos.exchange import (
    ContextAck,
    ContextRows,
    DrafterLoad,
    DraftResult,
    DraftStatus,
    DraftWork,
    Plan,
    PlanKind,
)

logger = logging.getLogger(__name__)

ROWS_PER_SLICE = 64
MAX_ROWS_WAIT_S = 0.05
"""Rows that have waited for so long are absorbed although drafts go on arriving."""

EXPIRE_EVERY_S = 1.0


@dataclass(frozen=True, slots=True)
class Drafted:
    """Answer to one call: results of its works that do not close, and where the time went."""

    results: list[DraftResult]
    queue_s: float
    draft_s: float


@dataclass(frozen=True, slots=True)
class _Call:
    works: Sequence[DraftWork]
    done: Callable[[Drafted], None]
    queued_s: float


@dataclass(frozen=True, slots=True)
class _Bulk:
    piece: ContextRows
    done: Callable[[ContextAck], None]
    queued_s: float


class DraftWorker:
    """Owns a drafter between `start` and `stop`."""

    def __init__(self, drafter: Drafter) -> None:
        self.metrics = DrafterMetrics()
        self._drafter = drafter
        self._calls: deque[_Call] = deque()
        self._bulk: deque[_Bulk] = deque()
        self._stopping = False
        self._wake = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="drafter", daemon=True)
        self._expire_at_s = 0.0

    def start(self) -> None:
        """Begin to compute."""
        self._thread.start()

    def stop(self) -> None:
        """Finish the batch under way and end; what still waits is dropped."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        if self._thread.is_alive():
            self._thread.join()

    @property
    def is_alive(self) -> bool:
        """False once the thread has ended, whatever ended it."""
        return self._thread.is_alive()

    def draft(self, works: Sequence[DraftWork], done: Callable[[Drafted], None]) -> None:
        """Queue one message's works."""
        with self._wake:
            self._calls.append(_Call(works, done, time.monotonic()))
            self._wake.notify()

    def absorb(self, piece: ContextRows, done: Callable[[ContextAck], None]) -> None:
        """Queue one piece of rows."""
        with self._wake:
            self._bulk.append(_Bulk(piece, done, time.monotonic()))
            self._wake.notify()

    def load(self) -> DrafterLoad:
        """The drafter's load, with what waits here."""
        waiting = sum(len(call.works) for call in list(self._calls))
        return replace(self._drafter.load(), num_waiting=waiting)

    def _run(self) -> None:
        while True:
            with self._wake:
                if not (self._calls or self._bulk or self._stopping):
                    self._wake.wait(EXPIRE_EVERY_S)
                if self._stopping:
                    return
                calls = list(self._calls)
                self._calls.clear()
                bulk = self._next_bulk(has_calls=bool(calls))
            if calls:
                self._draft(calls)
            if bulk is not None:
                self._absorb(bulk)
            self._expire()

    def _next_bulk(self, has_calls: bool) -> _Bulk | None:
        if not self._bulk:
            return None
        if has_calls and time.monotonic() - self._bulk[0].queued_s < MAX_ROWS_WAIT_S:
            return None
        return self._bulk.popleft()

    def _draft(self, calls: Sequence[_Call]) -> None:
        metrics = self.metrics
        started_s = time.monotonic()
        works = [work for call in calls for work in call.works]
        superseded = _superseded(works)
        asked = [
            replace(work, plan=Plan()) if place in superseded else work
            for place, work in enumerate(works)
        ]
        answers = iter(self._drafter.handle(asked))
        draft_s = time.monotonic() - started_s
        metrics.num_batches += 1
        metrics.num_works += len(works)
        metrics.num_superseded += len(superseded)
        metrics.draft_s += draft_s
        place = 0
        for call in calls:
            results: list[DraftResult] = []
            for work in call.works:
                if not work.close:
                    result = next(answers)
                    if place in superseded and result.status is DraftStatus.OK:
                        result = replace(result, status=DraftStatus.NOT_READY, detail="superseded")
                    results.append(result)
                place += 1
            queue_s = started_s - call.queued_s
            metrics.queue_s += queue_s
            metrics.count_results(results)
            call.done(Drafted(results, queue_s, draft_s))

    def _absorb(self, bulk: _Bulk) -> None:
        """Absorb one slice; the rest of the piece goes back to the head of the queue."""
        started_s = time.monotonic()
        rows = bulk.piece.rows
        end = min(rows.end, rows.start + ROWS_PER_SLICE)
        piece = replace(bulk.piece, rows=slice_rows(rows, rows.start, end))
        ack = self._drafter.absorb([piece])[0]
        self.metrics.num_rows += end - rows.start
        self.metrics.absorb_s += time.monotonic() - started_s
        if end == rows.end or ack.lost:
            bulk.done(ack)
            return
        rest = replace(bulk.piece, rows=slice_rows(rows, end, rows.end))
        with self._wake:
            self._bulk.appendleft(_Bulk(rest, bulk.done, time.monotonic()))

    def _expire(self) -> None:
        now = time.monotonic()
        if now >= self._expire_at_s:
            self._expire_at_s = now + EXPIRE_EVERY_S
            num_expired = self._drafter.expire(now)
            self.metrics.num_expired += num_expired
            if num_expired:
                logger.info("dropped %d idle sessions", num_expired)


def _superseded(works: Sequence[DraftWork]) -> set[int]:
    """Places of drafting works that a later one of the same session, not a close, overtakes."""
    newest: set[int] = set()
    overtaken: set[int] = set()
    for place in range(len(works) - 1, -1, -1):
        work = works[place]
        if work.session_id in newest and work.plan.kind is not PlanKind.NONE:
            overtaken.add(place)
        newest.add(work.session_id)
    return overtaken
