"""What the step loop needs from the draft exchange and from the planner.

Both are advisers: whatever they do, they change how many tokens a step reveals, never which. The
loop hands out views, gets values back, and alone commits.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from protos.exchange import Capabilities, DraftResult, DraftWork, Plan
from protos.features import FeatureRows
from protos.generation import Speculation
from protos.params import SamplingParams
from protos.sparse import SparseQ
from protos.tree import CandidateTree


@dataclass(frozen=True, slots=True)
class SequenceView:
    """What advisers may know of a running request.

    tokens: the live list of committed ids, prompt first, anchor last: read, never kept or
    changed. num_rows: feature rows available, one per computed position (len(tokens) - 1 while
    decoding). remaining: tokens that may still be committed.
    """

    key: int
    request_id: str
    tokens: Sequence[int]
    num_rows: int
    params: SamplingParams
    speculation: Speculation
    remaining: int
    decoding: bool

    @property
    def base_len(self) -> int:
        """Committed tokens, anchor included."""
        return len(self.tokens)


class RowReader(Protocol):
    """Reads feature rows that lie beside the KV."""

    def __call__(self, key: int, tap: str, start: int, end: int) -> FeatureRows | None:
        """Rows [start, end) of request `key` under `tap`; None when they do not exist."""


class PairExam(Protocol):
    """Says whether a drafter belongs to this target; called when one is met, off the steps."""

    def trouble(
        self, capabilities: Capabilities, ask: Callable[[DraftWork], DraftResult | None]
    ) -> str:
        """Why this drafter is not used; empty when it is.

        ask: hands the drafter one work and waits; None when none is due or it was malformed.
        """


@dataclass(frozen=True, slots=True)
class SourcePlan:
    """One source asked for one draft; a plan of kind none feeds it tokens and rows, no more."""

    source: str
    plan: Plan


@dataclass(frozen=True, slots=True)
class DraftAsk:
    """A request's part of an exchange. Sources without a plan are left alone, and lag behind."""

    view: SequenceView
    plans: tuple[SourcePlan, ...] = ()


@dataclass(frozen=True, slots=True)
class Draft:
    """What one source answered for one request, already re-rooted to the current base_len.

    latency_s: from the question to the answer; drafter_s: of it in the drafter's queue and its
    passes.
    """

    source: str
    base_len: int
    tree: CandidateTree
    ranked_ids: tuple[tuple[int, ...], ...] = ()
    latency_s: float = 0.0
    was_late: bool = False
    q: tuple[SparseQ, ...] = ()
    drafter_s: float = 0.0


@dataclass(frozen=True, slots=True)
class SourceInfo:
    """A source of drafts that can be asked now. local: in this process, no wire."""

    name: str
    capabilities: Capabilities
    local: bool
    reply_p50_s: float = 0.0
    reply_p95_s: float = 0.0
    num_replicas: int = 1


class Drafting(Protocol):
    """The draft exchange: sources, sessions, the prefix rule. Used by the engine's thread."""

    @property
    def num_sessions(self) -> int:
        """Sessions that are open now, over all sources. Asked by any thread."""

    def sources(self) -> Sequence[SourceInfo]:
        """Sources that can be asked now."""

    def exchange(self, asks: Sequence[DraftAsk], deadline_s: float) -> dict[int, list[Draft]]:
        """Send all asks, wait until all planned drafts are in or deadline_s has passed.

        Asks without plans cost no wait. Returns drafts by request key; late ones of earlier
        steps are included when they could be re-rooted.
        """

    def forget(self, key: int) -> None:
        """The request left (finished, cancelled or preempted): close its sessions."""

    def close(self) -> None:
        """Close all sessions and streams."""


@dataclass(frozen=True, slots=True)
class RoundOutcome:
    """What one round showed, for the planner.

    tree: what was verified; sources: per draft node, the names that proposed it. drafts: what
    each source had proposed before admission. choices: the target's own tokens from the anchor
    on: the accepted ones and the bonus.
    """

    key: int
    base_len: int
    tree: CandidateTree
    sources: tuple[tuple[str, ...], ...]
    drafts: tuple[Draft, ...]
    choices: tuple[int, ...]
    num_accepted: int
    num_committed: int


@dataclass(frozen=True, slots=True)
class StepReason:
    """What a planner says of the newest step, for traces; empty and 0 where it says nothing.

    why: what it chose, or why it drafted nothing. plain_s: verification without drafts, and
    predicted_s: with those admitted, by its cost model. expected: tokens that all requests
    together were thought to commit.
    """

    why: str = ""
    plain_s: float = 0.0
    predicted_s: float = 0.0
    expected: float = 0.0


class Planner(Protocol):
    """Chooses what to draft and what to verify."""

    def plan(
        self, views: Sequence[SequenceView], sources: Sequence[SourceInfo]
    ) -> tuple[list[tuple[SourcePlan, ...]], float]:
        """Plans per view, and the deadline in seconds that this step may wait.

        Views that are not decoding yet only feed the sources they are planned for.
        """

    def admit(
        self,
        views: Sequence[SequenceView],
        trees: Sequence[CandidateTree],
        room: int,
        sources: Sequence[tuple[tuple[str, ...], ...]] = (),
    ) -> list[CandidateTree]:
        """Cut merged trees to what pays, at most `room` draft nodes in all.

        sources: per tree and draft node, the names that proposed it (as in RoundOutcome); empty
        when unknown, which makes the survival of nodes a coarser guess.
        """

    def observe_round(self, outcome: RoundOutcome) -> None:
        """Learn from one request's round."""

    def observe_step(
        self,
        num_rows: int,
        num_branching: int,
        context: int,
        verify_s: float,
        wait_s: float,
        other_s: float = 0.0,
    ) -> None:
        """Learn a step's cost. context: sum of positions read by all spans.

        other_s: of the step, neither verification nor wait: planning, merging, committing.
        """

    def forget(self, key: int) -> None:
        """The request left."""
