"""A drafter over sessions: the port's behaviour that no algorithm should have to repeat.

Admits works by the prefix rule, checks plans, hands what is left to the algorithm in one batch and
turns its outcomes into answers. Knows no algorithm and no wire. Two works of one session in one
call are run in two batches, so that each is drafted for its own prefix.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Generic, Protocol, TypeVar

from drafter_service.session import Session
from drafter_service.session_table import SessionRules, SessionTable
from protos.exchange import (
    Capabilities,
    ContextAck,
    ContextRows,
    DrafterLoad,
    DraftResult,
    DraftStatus,
    DraftWork,
    Plan,
    PlanKind,
    SessionOpen,
)
from protos.features import FeatureForm
from protos.params import SamplingParams
from protos.sparse import SparseQ
from protos.tree import CandidateTree

S = TypeVar("S", bound=Session)

MakeRoom = Callable[[], bool]


@dataclass(frozen=True, slots=True)
class Job(Generic[S]):
    """A session at the prefix it was asked for, and the draft wanted (plan none: absorb only)."""

    session: S
    plan: Plan


@dataclass(frozen=True, slots=True)
class Outcome:
    """What an algorithm made of a job. `refused` ends the session. The rest: see `DraftResult`."""

    status: DraftStatus = DraftStatus.OK
    tree: CandidateTree = field(default_factory=CandidateTree)
    ranked_ids: tuple[tuple[int, ...], ...] = ()
    detail: str = ""
    q: tuple[SparseQ, ...] = ()
    confidences: tuple[float, ...] = ()


class Algorithm(Protocol[S]):
    """What a kind of drafter must offer. One thread; sessions are its own subclass."""

    def create(self, session_id: int, opened: SessionOpen) -> S:
        """An empty session."""

    def release(self, session: S) -> None:
        """Free what is held for a session that was dropped."""

    def run(self, jobs: Sequence[Job[S]], make_room: MakeRoom) -> list[Outcome]:
        """Absorb the jobs' rows and draft, all jobs together; one outcome per job.

        `make_room` drops the session that was idle longest, never one of the jobs'; False when
        there is none.
        """


class SessionDrafter(Generic[S]):
    """The port `Drafter` over an algorithm."""

    def __init__(
        self,
        capabilities: Capabilities,
        algorithm: Algorithm[S],
        idle_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._capabilities = capabilities
        self._algorithm = algorithm
        self._clock = clock
        self._started_s = clock()
        self._busy_s = 0.0
        self._num_rounds = 0
        rules = SessionRules(
            incarnation=capabilities.incarnation,
            row_widths=_row_widths(capabilities),
            vocab_size=capabilities.vocab_size,
            max_context=capabilities.max_context,
            max_sessions=capabilities.max_sessions,
            idle_s=idle_s,
        )
        self.sessions: SessionTable[S] = SessionTable(rules, algorithm.create, algorithm.release)

    @property
    def capabilities(self) -> Capabilities:
        """Constant while this object lives."""
        return self._capabilities

    def handle(self, works: Sequence[DraftWork]) -> list[DraftResult]:
        """See `Drafter.handle`."""
        started_s = self._clock()
        results: list[DraftResult] = []
        batch: list[DraftWork] = []
        ids: set[int] = set()
        for work in works:
            if work.session_id in ids:
                results.extend(self._run(batch))
                batch, ids = [], set()
            batch.append(work)
            ids.add(work.session_id)
        results.extend(self._run(batch))
        self._busy_s += self._clock() - started_s
        return results

    def absorb(self, pieces: Sequence[ContextRows]) -> list[ContextAck]:
        """See `Drafter.absorb`. The rows are computed now, not when a draft waits for them."""
        started_s = self._clock()
        details: list[str] = []
        jobs: dict[int, Job[S]] = {}
        for piece in pieces:
            session, detail = self.sessions.absorb(piece, started_s)
            details.append(detail)
            if session is not None:
                jobs[piece.session_id] = Job(session, Plan())
        for outcome, job in zip(self._compute(list(jobs.values())), jobs.values(), strict=True):
            if outcome.status is DraftStatus.REFUSED:
                self.sessions.drop(job.session.session_id)
        self._busy_s += self._clock() - started_s
        return [
            self.sessions.acknowledge(piece, detail)
            for piece, detail in zip(pieces, details, strict=True)
        ]

    def load(self) -> DrafterLoad:
        """See `Drafter.load`."""
        return DrafterLoad(
            num_sessions=len(self.sessions),
            busy_s=self._busy_s,
            up_s=self._clock() - self._started_s,
            num_rounds=self._num_rounds,
        )

    def expire(self, now: float) -> int:
        """See `Drafter.expire`."""
        return self.sessions.expire(now)

    def _run(self, works: Sequence[DraftWork]) -> list[DraftResult]:
        """One batch in which no session stands twice."""
        now = self._clock()
        busy = {work.session_id for work in works}
        results: list[DraftResult | None] = []
        jobs: list[tuple[int, DraftWork, Job[S]]] = []
        for work in works:
            admitted = self.sessions.admit(work, now, busy)
            if admitted is None:
                continue
            if isinstance(admitted, DraftResult):
                results.append(admitted)
            elif problem := plan_problem(work.plan, self._capabilities, admitted.params):
                results.append(self.sessions.answer(work, DraftStatus.REFUSED, problem))
            else:
                jobs.append((len(results), work, Job(admitted, work.plan)))
                results.append(None)
        outcomes = self._compute([job for _, _, job in jobs])
        for (place, work, _), outcome in zip(jobs, outcomes, strict=True):
            results[place] = self._result(work, outcome)
        return [result for result in results if result is not None]

    def _compute(self, jobs: Sequence[Job[S]]) -> list[Outcome]:
        if not jobs:
            return []
        self._num_rounds += sum(job.plan.kind is not PlanKind.NONE for job in jobs)
        busy = {job.session.session_id for job in jobs}
        return self._algorithm.run(jobs, lambda: self.sessions.evict(busy))

    def _result(self, work: DraftWork, outcome: Outcome) -> DraftResult:
        if outcome.status is DraftStatus.REFUSED:
            self.sessions.drop(work.session_id)
        answer = self.sessions.answer(work, outcome.status, outcome.detail)
        return replace(
            answer,
            tree=outcome.tree,
            ranked_ids=outcome.ranked_ids,
            q=outcome.q,
            confidences=outcome.confidences,
        )


def plan_problem(plan: Plan, capabilities: Capabilities, params: SamplingParams) -> str:
    """Why this plan cannot be drafted for this request; empty when it can."""
    if plan.kind is PlanKind.NONE:
        return ""
    if params.uses_rejection and not capabilities.gives_q:
        return "acceptance: rejection needs a drafter that gives q"
    is_tree = plan.kind is PlanKind.TREE or (plan.kind is PlanKind.BLOCK and plan.nodes > 0)
    if params.uses_rejection and (is_tree or plan.kind is PlanKind.STATIC):
        return "acceptance: rejection is drafted for by chains, not trees"
    if plan.kind not in capabilities.plan_kinds:
        return f"plans drafted here: {', '.join(capabilities.plan_kinds)}; not {plan.kind}"
    bounds = [("depth", plan.depth, capabilities.max_depth)]
    if plan.kind is PlanKind.TREE:
        bounds.append(("width", plan.width, capabilities.max_width))
    if is_tree or plan.kind is PlanKind.STATIC:
        bounds.append(("nodes", plan.nodes, capabilities.max_nodes))
    for name, value, most in bounds:
        if not 1 <= value <= most:
            return f"{name} must lie in [1, {most}], not {value}"
    return ""


def _row_widths(capabilities: Capabilities) -> dict[FeatureForm, int]:
    widths = {
        FeatureForm.RAW: capabilities.raw_width,
        FeatureForm.FUSED: capabilities.fused_width,
    }
    taken = {form: width for form, width in widths.items() if width > 0}
    return taken or {FeatureForm.NONE: 0}
