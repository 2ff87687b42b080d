"""One request's stay at one verifier, put together from its records, and where its time went.

Knows no file. Times in seconds. Invariant: the parts of `Spent` add up to its total, as far as
clocks do: what no step of the request accounts for is `elsewhere_s`.

    arrived                                                     closed
    | queue | prompt steps | wait forward choose rest | ... | ... |
                            a round                  elsewhere: between steps, steps without it
"""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from verifier_service.trace.records import Chunk, Closed, Header, Opened, Preempted, Round

Part = Chunk | Round | Preempted


@dataclass(frozen=True, slots=True)
class Story:
    """opened: None when the file that held it was removed; closed: None when the request still
    runs or its verifier was killed. parts: in order."""

    header: Header
    request_id: str
    opened: Opened | None
    parts: tuple[Part, ...]
    closed: Closed | None

    @property
    def rounds(self) -> list[Round]:
        """Everything that committed tokens."""
        return [part for part in self.parts if isinstance(part, Round)]

    @property
    def ids(self) -> tuple[int, ...]:
        """The tokens that these rounds committed."""
        return tuple(token for part in self.rounds for token in part.ids)

    @property
    def num_missing(self) -> int:
        """Rounds that were not recorded, or whose file is gone."""
        # A round that broke committed nothing and was not counted.
        numbers = {part.number for part in self.rounds if part.num_committed}
        last = self.closed.counts.num_rounds if self.closed else max(numbers, default=0)
        return max(last - len(numbers), 0)

    @property
    def began_s(self) -> float:
        """The first that is known of it, on the verifier's clock."""
        if self.opened is not None:
            return self.opened.arrived_s
        return min((_end_s(part) - _took_s(part) for part in self.parts), default=self._last_s())

    @property
    def ended_s(self) -> float:
        """The last that is known of it."""
        return max([self._last_s(), *map(_end_s, self.parts)])

    def _last_s(self) -> float:
        if self.closed is not None:
            return self.closed.at_s
        return self.opened.arrived_s if self.opened is not None else 0.0


@dataclass(frozen=True, slots=True)
class Spent:
    """prompt_s: whole steps that computed the prompt, or tokens again after a preemption; the
    next four are parts of the rounds' steps."""

    queue_s: float
    prompt_s: float
    wait_s: float
    forward_s: float
    choose_s: float
    rest_s: float
    elsewhere_s: float
    total_s: float


@dataclass(frozen=True, slots=True)
class Pace:
    """Rounds of one sort after the prompt, drafted or not. step_s: their steps together."""

    num_rounds: int = 0
    num_tokens: int = 0
    step_s: float = 0.0

    @property
    def token_s(self) -> float:
        """Step time a token."""
        return self.step_s / self.num_tokens if self.num_tokens else 0.0


@dataclass(frozen=True, slots=True)
class SourceSum:
    """What one source brought. drafted, accepted: nodes verified. latency_s, drafter_s: medians
    of its replies, 0 without any."""

    source: str
    num_asked: int
    num_replies: int
    num_late: int
    drafted: int
    accepted: int
    latency_s: float
    drafter_s: float


def spent(story: Story) -> Spent:
    """Where the time of a request went."""
    rounds = [part for part in story.rounds if not part.is_prompt]
    steps = [part.step for part in rounds]
    prompt_s = sum(_took_s(part) for part in story.parts) - sum(step.step_s for step in steps)
    total_s = story.ended_s - story.began_s
    queue_s = max((p.queue_s for p in story.parts if not isinstance(p, Preempted)), default=total_s)
    known_s = queue_s + prompt_s + sum(step.step_s for step in steps)
    return Spent(
        queue_s=queue_s,
        prompt_s=prompt_s,
        wait_s=sum(step.wait_s for step in steps),
        forward_s=sum(step.forward_s for step in steps),
        choose_s=sum(step.choose_s for step in steps),
        rest_s=sum(step.rest_s for step in steps),
        elsewhere_s=max(total_s - known_s, 0.0),
        total_s=total_s,
    )


def pace(story: Story, *, drafted: bool) -> Pace:
    """Rounds with draft nodes, or those without."""
    chosen = [part for part in story.rounds if not part.is_prompt and bool(part.sources) is drafted]
    tokens = sum(part.num_committed for part in chosen)
    return Pace(len(chosen), tokens, sum(part.step.step_s for part in chosen))


def plain_s(story: Story) -> float | None:
    """What the planner's cost model says that a round without drafts verifies in, on average."""
    told = [p.step.plain_s for p in story.rounds if not p.is_prompt and p.step.plain_s > 0.0]
    return sum(told) / len(told) if told else None


def sources(story: Story) -> list[SourceSum]:
    """By source, those first that had most accepted."""
    names = dict.fromkeys(
        name
        for part in story.rounds
        for name in (
            *(asked.source for asked in part.asked),
            *(drafted.source for drafted in part.drafted),
            *(name for named in part.sources for name in named),
        )
    )
    found = [_sum_of(name, story.rounds) for name in names]
    return sorted(found, key=lambda each: (-each.accepted, each.source))


def _sum_of(name: str, rounds: Sequence[Round]) -> SourceSum:
    replies = [reply for part in rounds for reply in part.drafted if reply.source == name]
    return SourceSum(
        source=name,
        num_asked=sum(a.source == name and a.plan.depth > 0 for p in rounds for a in p.asked),
        num_replies=len(replies),
        num_late=sum(reply.was_late for reply in replies),
        drafted=sum(name in named for part in rounds for named in part.sources),
        accepted=sum(name in part.sources[node - 1] for part in rounds for node in part.nodes),
        latency_s=median(reply.latency_s for reply in replies) if replies else 0.0,
        drafter_s=median(reply.drafter_s for reply in replies) if replies else 0.0,
    )


def _end_s(part: Part) -> float:
    return part.at_s if isinstance(part, Preempted) else part.step.at_s


def _took_s(part: Part) -> float:
    return 0.0 if isinstance(part, Preempted) else part.step.step_s
