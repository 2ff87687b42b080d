"""The engine: one thread that steps. `Engine.step` is the architecture, top to bottom.

Owns every running request and is alone in committing tokens (law 6). Knows no wire, no event loop
and no text: requests come in through `submit`, token runs go out through each request's `emit`.
`submit`, `cancel` and `stats` may be called from any thread; everything else belongs to the thread
that steps. Invariants: every scheduled request that reaches its last known token commits at least
one more (law 3); what advisers say changes how many, never which (law 1).
"""

import time
from collections.abc import Callable

import torch

from protos.generation import GenerationRequest
from verifier_service.engine.asking import Answers, Asking
from verifier_service.engine.batch import Batch, MergedDraft, build_batch, read_logprobs
from verifier_service.engine.committing import Committing
from verifier_service.engine.intake import Intake
from verifier_service.engine.page_pool import PagePool
from verifier_service.engine.ports import Drafting, Planner
from verifier_service.engine.prefix_cache import PrefixCache
from verifier_service.engine.request import Emit, Ends, RunningRequest
from verifier_service.engine.roster import Roster
from verifier_service.engine.rows import PagedRows
from verifier_service.engine.scheduler import Scheduler, Share
from verifier_service.engine.settings import EngineSettings
from verifier_service.engine.stats import EngineCounters, EngineStats, Gauges
from verifier_service.grammar.compiling import Grammars
from verifier_service.sampling.chooser import chooser_of
from verifier_service.sampling.walk import WalkEnd, blamed, walk
from verifier_service.step import Target
from verifier_service.trace.tracer import StepTimes, Tracer


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
        clock: Callable[[], float] = time.perf_counter,
        grammars: Grammars | None = None,
    ) -> None:
        """Allocates the target's pool. rows: the reader that `drafting` was made with, if any.

        tracer: is told of every step, and closed with the engine. clock: seconds, by which requests
        wait and run out of time. grammars: the target's; without, requests may carry none.
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
        # A tokenizer may name an end that is no id of the model.
        eos_token_ids = (token for token in facts.eos_token_ids if token < facts.vocab_size)
        ends = Ends(self.max_context, frozenset(eos_token_ids))
        max_active = settings.max_running + settings.max_queued
        self._intake = Intake(facts.vocab_size, ends, max_active, clock, grammars)
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
        self._roster = Roster(
            self._requests,
            intake=self._intake,
            scheduler=self._scheduler,
            committing=self._committing,
            rows=self._rows,
            drafting=drafting,
            counters=self._counters,
            clock=clock,
            tracer=tracer,
        )
        target.allocate(self._pool.num_slots)

    @property
    def intake(self) -> Intake:
        """The door: what other threads may do to it."""
        return self._intake

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
        ContextTooLong, Overloaded or PeerUnavailable, and then emits nothing.
        """
        return self._intake.submit(request, emit)

    def cancel(self, key: int) -> None:
        """End a request within a step. Late, double and unknown cancels do nothing."""
        self._intake.cancel(key)

    def check(self, request: GenerationRequest) -> None:
        """Raise InvalidRequest or ContextTooLong unless this target can serve the request."""
        self._intake.check(request)

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
            self._drafting.num_sessions,
        )
        return self._counters.snapshot(gauges, self._cache.num_evicted)

    # What the stepping thread calls.

    def step(self) -> bool:
        """One step of all running requests; False when there was nothing to do."""
        began = time.perf_counter()
        self._roster.update()
        shares = self._roster.schedule()
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
        self._roster.fail_all(error)

    def close(self) -> None:
        """Close the draft exchange; call once, after the last step."""
        self.fail_all("the verifier is shutting down")
        self._drafting.close()
        if self._tracer is not None:
            self._tracer.close()

    def check_idle(self) -> None:
        """With nothing running every page is free or cached, and no draft session is open; an
        AssertionError means a bug."""
        assert not self._requests, "requests are still running"
        assert not self._drafting.num_sessions, "draft sessions are still open"
        self.check_balance()

    def check_balance(self) -> None:
        """Between steps every page is free, cached, or held by a request that is here."""
        self._pool.check(owners=set(self._requests))
        self._cache.check()

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
            walked = (blamed(end, logits) for end in walk(starts, chooser_of(logits, starts)))
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
