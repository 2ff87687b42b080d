"""What comes before a step: requests come in, run out of time, join, and are sent back to wait.

Takes the inbox in, drops who was cancelled or is late, and notes what the scheduler decided. Knows
nothing of drafts or logits. Used by the engine's thread alone. Invariant: whoever was let in is in
`requests` until `Committing.finish` takes it out.
"""

import logging
from collections.abc import Callable
from typing import Final

from protos.errors import OutriderError
from protos.generation import FinishReason
from verifier_service.engine.committing import Committing
from verifier_service.engine.intake import Intake
from verifier_service.engine.ports import Drafting
from verifier_service.engine.request import Cut, RunningRequest
from verifier_service.engine.rows import PagedRows
from verifier_service.engine.scheduler import Scheduler, Share
from verifier_service.engine.stats import EngineCounters
from verifier_service.trace.tracer import Tracer

_log = logging.getLogger(__name__)

_JOIN_FAULTS: Final = (OutriderError, LookupError, OSError, RuntimeError, TypeError, ValueError)
"""What ends the one request that meets it while it joins. Anything else is the engine's end, and an
answer to everybody all the same."""


class Roster:
    """Who is here, and who takes part in the next step."""

    def __init__(
        self,
        requests: dict[int, RunningRequest],
        *,
        intake: Intake,
        scheduler: Scheduler,
        committing: Committing,
        rows: PagedRows,
        drafting: Drafting,
        counters: EngineCounters,
        clock: Callable[[], float],
        tracer: Tracer | None,
    ) -> None:
        """requests: the engine's own, by key. clock: the one by which `intake` noted arrivals."""
        self._requests = requests
        self._intake = intake
        self._scheduler = scheduler
        self._committing = committing
        self._rows = rows
        self._drafting = drafting
        self._counters = counters
        self._clock = clock
        self._tracer = tracer

    def update(self) -> None:
        """Who came is here, who was cancelled or is late has left, wherever it stood."""
        entries = self._intake.drain()
        # Noted first of all: whatever happens to one of them, the others are answered.
        self._requests.update((e.key, e) for e in entries if isinstance(e, RunningRequest))
        for entry in entries:
            if isinstance(entry, RunningRequest):
                self._enter_or_fail(entry)
            elif (request := self._requests.get(entry)) is not None:
                self._committing.finish(request, Cut(0, FinishReason.CANCELLED))
        now = self._clock()
        for request in [one for one in self._requests.values() if one.is_late(now)]:
            error = f"not finished within the {request.request.timeout_s:g} s that it had"
            self._committing.finish(request, Cut(0, FinishReason.DEADLINE), error=error)

    def schedule(self) -> list[Share]:
        """Who takes part in this step, with how many rows."""
        shares = self._scheduler.share_rows()
        now = self._clock()
        for request in self._scheduler.preempted:
            _log.info("request %s preempted: no free pages", request.request.request_id)
            self._counters.num_preemptions += 1
            self._drafting.forget(request.key)
            request.tally.waiting_since_s = now
            if self._tracer is not None:
                self._tracer.preempted(request)
        for request in self._scheduler.admitted:
            request.tally.queue_s += now - request.tally.waiting_since_s
            if not request.tally.was_admitted:
                num_prompt = request.tally.num_prompt
                request.tally.was_admitted = True
                request.tally.num_cached = min(request.computed_len, num_prompt)
                self._counters.num_looked_up_tokens += num_prompt
                self._counters.num_cached_tokens += request.tally.num_cached
        return shares

    def fail_all(self, error: str) -> None:
        """Let nobody in any more, and end everybody with an error."""
        queued = self._intake.close(error)
        for request in [*self._requests.values(), *queued]:
            self._committing.finish(request, Cut(0, FinishReason.ERROR), error=error)

    def _enter_or_fail(self, request: RunningRequest) -> None:
        try:
            self._enter(request)
        except _JOIN_FAULTS as error:
            if request.key not in self._requests:
                raise  # it was on its way out: what it left behind is not known
            _log.exception("request %s cannot join", request.request.request_id)
            known = isinstance(error, OutriderError)
            why = str(error) if known else "the verifier failed on this request"
            self._committing.finish(request, Cut(0, FinishReason.ERROR), error=why)

    def _enter(self, request: RunningRequest) -> None:
        self._counters.num_requests += 1
        if self._tracer is not None:
            self._tracer.opened(request)
        ended = request.arrived_finished()
        if ended is not None:
            self._committing.finish(request, ended)
            return
        self._rows.add(request)
        self._scheduler.add(request)
