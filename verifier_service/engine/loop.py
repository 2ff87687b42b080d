"""The engine: one thread that steps. `Engine.step` is the architecture, top to bottom.

Owns every running request and is alone in committing tokens (law 6). Knows no wire, no event loop
and no text: requests come in through `submit`, token runs go out through each request's `emit`.
`submit`, `cancel` and `stats` may be called from any thread; everything else belongs to the thread
that steps. Invariants: every scheduled request that reaches its last known token commits at least
one more (law 3); what advisers say changes how many, never which (law 1).
"""

import logging
import time

import torch

from protos.generation import FinishReason, GenerationRequest
from verifier_service.engine.asking import Answers, Asking
from verifier_service.engine.batch import Batch, MergedDraft, build_batch, read_logprobs
from verifier_service.engine.committing import Committing
from verifier_service.engine.intake import Intake
from verifier_service.engine.page_pool import PagePool
from verifier_service.engine.ports import Drafting, Planner
from verifier_service.engine.prefix_cache import PrefixCache
from verifier_service.engine.request import Cut, Emit, Ends, RunningRequest
from verifier_service.engine.rows import PagedRows
from verifier_service.engine.scheduler import Scheduler, Share
from verifier_service.engine.settings import EngineSettings
from verifier_service.engine.stats import EngineCounters, EngineStats, Gauges
from verifier_service.sampling.chooser import chooser_of
from verifier_service.sampling.walk import WalkEnd, walk
from verifier_service.step import Target
from verifier_service.trace.tracer import StepTimes, Tracer

_log = logging.getLogger(__name__)


class Engine:
    """Continuous batching with verified drafts over one target."""

    def __init__(
        self,
        target: Target,
        drafting: Drafting,
        planner: Planner,
        settings: EngineSettings,
        rows: PagedRows | None = None,
        tracer: Tracer | None = None,
    ) -> None:
        """Allocates the target's pool. rows: the reader that `drafting` was made with, if any.

        tracer: is told of every step, and closed with the engine.
        """
        facts = target.facts
        num_pages = settings.num_slots // settings.page_size
        self._target = target
        self._drafting = drafting
        self._planner = planner
        self._tracer = tracer
        self._rows = rows or PagedRows(target)
        self._pool = PagePool(num_pages, settings.page_size)
        # The pool is this target's alone, and what rows are kept was fixed when it was loaded.
        identity = f"{facts.digest} {facts.fingerprint}"
        self._cache = PrefixCache(self._pool, identity, settings.prefix_cache)
        self._scheduler = Scheduler(self._pool, self._cache, settings)
        self._asking = Asking(drafting, planner, facts.vocab_size, settings.max_draft_wait_s)
        limits = [facts.max_context, num_pages * settings.page_size]
        if settings.max_context is not None:
            limits.append(settings.max_context)
        self.max_context = min(limits)
        ends = Ends(self.max_context, frozenset(facts.eos_token_ids))
        self._intake = Intake(facts.vocab_size, ends, settings.max_running + settings.max_queued)
        self._requests: dict[int, RunningRequest] = {}
        self._counters = EngineCounters(last_step_s=time.monotonic())
        self._committing = Committing(
            self._requests,
            target=target,
            scheduler=self._scheduler,
            rows=self._rows,
            drafting=drafting,
            planner=planner,
            intake=self._intake,
            counters=self._counters,
        )
        target.allocate(self._pool.num_slots)

    @property
    def rows(self) -> PagedRows:
        """Reader of feature rows, for the draft exchange."""
        return self._rows

    @property
    def target(self) -> Target:
        """The target that is served."""
        return self._target

    # What any thread may call.

    def submit(self, request: GenerationRequest, emit: Emit) -> int:
        """Queue a request; returns the key that `cancel` takes.

        emit: called by the engine's thread with every run; must not block. Raises InvalidRequest,
        ContextTooLong or Overloaded, and then emits nothing.
        """
        return self._intake.submit(request, emit)

    def cancel(self, key: int) -> None:
        """End a request within a step. Late, double and unknown cancels do nothing."""
        self._intake.cancel(key)

    def check(self, request: GenerationRequest) -> None:
        """Raise InvalidRequest or ContextTooLong unless this target can serve the request."""
        self._intake.check(request)

    def wait_for_work(self, timeout_s: float) -> None:
        """Block until something was submitted or cancelled, or the time is over."""
        self._intake.wait(timeout_s)

    def stats(self) -> EngineStats:
        """Counts and sums so far, and gauges."""
        num_running = len(self._scheduler.running)
        num_waiting = max(self._intake.num_active - num_running, 0)
        gauges = Gauges(
            num_running,
            num_waiting,
            self._pool.num_pages,
            self._pool.num_free + self._pool.num_idle,
            self._pool.num_idle,
        )
        return self._counters.snapshot(gauges, self._cache.num_evicted)

    # What the stepping thread calls.

    def step(self) -> bool:
        """One step of all running requests; False when there was nothing to do."""
        began = time.perf_counter()
        self._apply_inbox()
        shares = self._schedule()
        if not shares:
            self._counters.last_step_s = time.monotonic()
            if self._tracer is not None:
                self._tracer.flush()
            return False
        answers = self._asking.ask(self._scheduler.running)
        batch = build_batch(shares, self._admit(shares, answers))
        ends, forward_s, choose_s = self._verify(batch)
        verify_s = forward_s + choose_s
        self._committing.commit(batch, ends, answers.wait_s, verify_s)
        step_s = time.perf_counter() - began
        self._count_step(batch, answers, verify_s, step_s)
        if self._tracer is not None:
            times = StepTimes(began + step_s, step_s, forward_s, choose_s)
            self._tracer.stepped(batch, ends, answers, times, self._planner)
        return True

    def fail_all(self, error: str) -> None:
        """End every request with an error that a router may answer by a replay elsewhere."""
        queued = self._intake.close(error)
        for request in [*self._requests.values(), *queued]:
            self._committing.finish(request, Cut(0, FinishReason.ERROR), error=error)

    def close(self) -> None:
        """Close the draft exchange; call once, after the last step."""
        self.fail_all("the verifier is shutting down")
        self._drafting.close()
        if self._tracer is not None:
            self._tracer.close()

    def check_idle(self) -> None:
        """With nothing running every page is free or cached; an AssertionError means a bug."""
        assert not self._requests, "requests are still running"
        self.check_balance()

    def check_balance(self) -> None:
        """Between steps every page is free, cached, or held by a request that is here."""
        self._pool.check(owners=set(self._requests))
        self._cache.check()

    def _apply_inbox(self) -> None:
        for entry in self._intake.drain():
            if isinstance(entry, RunningRequest):
                self._enter(entry)
            elif (request := self._requests.get(entry)) is not None:
                self._committing.finish(request, Cut(0, FinishReason.CANCELLED))

    def _enter(self, request: RunningRequest) -> None:
        self._counters.num_requests += 1
        self._requests[request.key] = request
        if self._tracer is not None:
            self._tracer.opened(request)
        ended = request.arrived_finished()
        if ended is not None:
            self._committing.finish(request, ended)
            return
        self._rows.add(request)
        self._scheduler.add(request)

    def _schedule(self) -> list[Share]:
        shares = self._scheduler.share_rows()
        now = time.perf_counter()
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

    def _admit(self, shares: list[Share], answers: Answers) -> dict[int, MergedDraft]:
        decoding = [share.request for share in shares if share.request.is_decoding]
        room = self._scheduler.room_for_nodes(shares)
        admitted = self._asking.admit(decoding, answers, room)
        for request in decoding:
            draft = admitted.get(request.key)
            if draft is not None:
                seats = self._scheduler.seat_nodes(request, draft.tree.num_nodes)
                admitted[request.key] = draft.cut_to(draft.tree.best(seats))
        return admitted

    def _verify(self, batch: Batch) -> tuple[list[WalkEnd | None], float, float]:
        """One forward of the target, then its own choices along every tree; seconds of each."""
        began = time.perf_counter()
        with torch.inference_mode():
            logits = self._target.forward(batch.spans)
            chosen_from = time.perf_counter()
            starts = [start for start in batch.walks if start is not None]
            walked = iter(walk(starts, chooser_of(logits, starts)))
            ends = [None if start is None else next(walked) for start in batch.walks]
            read_logprobs(logits, batch, ends)
        return ends, chosen_from - began, time.perf_counter() - chosen_from

    def _count_step(self, batch: Batch, answers: Answers, verify_s: float, step_s: float) -> None:
        self._planner.observe_step(
            batch.num_rows,
            batch.num_branching,
            batch.context,
            verify_s,
            answers.wait_s,
            max(step_s - verify_s - answers.wait_s, 0.0),
        )
        self._counters.count_step(
            batch.num_rows,
            num_dropped=answers.num_dropped,
            has_failed=answers.has_failed,
            wait_s=answers.wait_s,
            verify_s=verify_s,
            step_s=step_s,
        )
