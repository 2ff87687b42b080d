"""What the engine tells of its steps, as trace records; the engine's thread alone uses it.

Only looks: it takes values that the step made anyway, and hands whole steps to a sink. Knows no
file. Invariants: nothing it does changes a request or a step; requests that are not traced cost a
look into a set; a request is traced from its opening to its closing or not at all.
"""

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import Protocol, runtime_checkable

from protos.generation import GenerationRequest, TokenRun
from protos.grammar import Grammar
from verifier_service.engine.asking import Answers
from verifier_service.engine.batch import Batch, MergedDraft
from verifier_service.engine.ports import Planner, SourcePlan, StepReason
from verifier_service.engine.request import RunningRequest
from verifier_service.sampling.walk import WalkEnd
from verifier_service.trace.records import (
    Asked,
    Chunk,
    Closed,
    Drafted,
    Opened,
    Preempted,
    Record,
    Round,
    StepFacts,
)

_Plans = dict[int, tuple[SourcePlan, ...]]


@runtime_checkable
class Reasoning(Protocol):
    """A planner that says why a step drafted as it did."""

    def reason(self) -> StepReason:
        """Of the newest step."""


class Sink(Protocol):
    """Where records go: `TraceWriter`, or a test's list."""

    def put(self, records: Sequence[Record]) -> None:
        """Take the records of one step; must neither block nor raise."""

    def close(self) -> None:
        """Nothing more will come."""


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Measured times of one step, in seconds; `end_s` on the clock of `time.perf_counter`."""

    end_s: float
    step_s: float
    forward_s: float
    choose_s: float


class Tracer:
    """Turns an engine's steps into records."""

    def __init__(self, sink: Sink, clock: Callable[[], float], share: float = 1.0) -> None:
        """share: of the requests, 0 to 1, chosen by their ids: replicas choose alike."""
        self._sink = sink
        self._clock = clock
        self._least = round(share * 2**32)
        self._traced: set[int] = set()
        self._before: list[Record] = []
        self._after: list[Record] = []
        self._num_steps = 0
        self._planner: Planner | None = None
        self._reason: Callable[[], StepReason] = StepReason

    def opened(self, request: RunningRequest) -> None:
        """A request came in; from now on its last run is watched for."""
        asked = request.request
        if zlib.crc32(asked.request_id.encode(errors="replace")) >= self._least:
            return
        self._traced.add(request.key)
        self._before.append(
            Opened(
                asked.request_id,
                request.key,
                request.tally.waiting_since_s,
                len(asked.prompt_ids),
                len(asked.output_ids),
                settings_of(asked),
                asked.speculation.mode.value,
            )
        )
        request.emit = partial(self._pass_on, request, request.emit)

    def preempted(self, request: RunningRequest) -> None:
        """The request lost its pages."""
        if request.key in self._traced:
            whose = request.request.request_id, request.key
            self._before.append(Preempted(*whose, self._clock(), request.known_len))

    def stepped(
        self,
        batch: Batch,
        ends: Sequence[WalkEnd | None],
        answers: Answers,
        times: StepTimes,
        planner: Planner,
    ) -> None:
        """A step is over, its tokens committed. ends: per share, as in `Committing.commit`."""
        self._num_steps += 1
        if self._traced or self._after:
            facts = self._facts(batch, answers, times, planner)
            plans = {ask.view.key: ask.plans for ask in answers.asks}
            for place, share in enumerate(batch.shares):
                request = share.request
                if request.key in self._traced or self._has_closed(request):
                    end = ends[place]
                    self._before.append(
                        _chunk(batch, place, facts)
                        if end is None
                        else _round(batch, place, end, facts, plans)
                    )
        self.flush()

    def flush(self) -> None:
        """Hand over what is held; between steps."""
        held = [*self._before, *self._after]
        if held:
            self._sink.put(held)
            self._before, self._after = [], []

    def close(self) -> None:
        """No more steps."""
        self.flush()
        self._sink.close()

    def _pass_on(
        self, request: RunningRequest, emit: Callable[[TokenRun], None], run: TokenRun
    ) -> None:
        if run.finish_reason is not None and run.counts is not None:
            self._traced.discard(request.key)
            closed = run.finish_reason.value, run.error, run.counts
            self._after.append(Closed(run.request_id, request.key, self._clock(), *closed))
        emit(run)

    def _has_closed(self, request: RunningRequest) -> bool:
        """True when this very step was its last."""
        return any(record.key == request.key for record in self._after)

    def _facts(
        self, batch: Batch, answers: Answers, times: StepTimes, planner: Planner
    ) -> StepFacts:
        if planner is not self._planner:  # asking whether it says why takes a while
            self._planner = planner
            self._reason = planner.reason if isinstance(planner, Reasoning) else StepReason
        reason = self._reason()
        return StepFacts(
            number=self._num_steps,
            at_s=times.end_s,
            step_s=times.step_s,
            wait_s=answers.wait_s,
            forward_s=times.forward_s,
            choose_s=times.choose_s,
            num_requests=len(batch.shares),
            num_rows=batch.num_rows,
            why=reason.why,
            plain_s=reason.plain_s,
            predicted_s=reason.predicted_s,
            expected=reason.expected,
        )


def settings_of(request: GenerationRequest) -> tuple[tuple[str, str], ...]:
    """What a request asks for where that is not the default, for people; long lists as counts, and
    nothing of the texts that came with it."""
    found: list[tuple[str, str]] = []
    for part in (request.params, request.options):
        plain = type(part)()
        for field in fields(part):
            value = getattr(part, field.name)
            is_told = field.name in ("temperature", "max_tokens", "seed")
            if is_told or value != getattr(plain, field.name):
                found.append((field.name, _said(value)))
    if request.speculation.drafters:
        found.append(("drafters", "+".join(request.speculation.drafters)))
    return tuple(found)


def _said(value: object) -> str:
    if isinstance(value, Grammar):  # its text is the user's
        return f"{value.kind.value} of {len(value.text)} characters"
    if isinstance(value, tuple) and len(value) > 8:
        return f"{len(value)} entries"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _chunk(batch: Batch, place: int, facts: StepFacts) -> Chunk:
    request = batch.shares[place].request
    return Chunk(
        request.request.request_id,
        request.key,
        facts,
        start=batch.spans[place].start,
        num_rows=batch.shares[place].num_rows,
        num_cached=request.tally.num_cached,
        queue_s=request.tally.queue_s,
    )


def _round(batch: Batch, place: int, end: WalkEnd, facts: StepFacts, plans: _Plans) -> Round:
    share, start, draft = batch.shares[place], batch.walks[place], batch.merged[place]
    request = share.request
    base_len = start.base_len if start is not None else request.known_len
    return Round(
        request.request.request_id,
        request.key,
        facts,
        number=request.tally.num_rounds,
        start=batch.spans[place].start,
        num_rows=share.num_rows,
        base_len=base_len,
        is_prompt=share.num_rows > 1 or base_len == len(request.request.prompt_ids),
        asked=tuple(Asked(p.source, p.plan) for p in plans.get(request.key, ())),
        drafted=_drafted(draft),
        tree=draft.tree,
        sources=draft.sources,
        nodes=end.nodes,
        choices=end.choices,
        num_committed=request.known_len - base_len,
        num_cached=request.tally.num_cached,
        queue_s=request.tally.queue_s,
    )


def _drafted(draft: MergedDraft) -> tuple[Drafted, ...]:
    return tuple(
        Drafted(d.source, d.tree.num_nodes, d.latency_s, d.drafter_s, d.was_late)
        for d in draft.drafts
    )
