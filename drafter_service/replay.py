"""Replay: real drafters against recorded texts, without the target, counting as a live run counts.

By law 1 the text does not depend on drafters, so a round needs no verification: the merged draft is
followed along the recorded tokens, what it foresaw is accepted, and one more token is the bonus.
Many texts run as one batch, because drafters draft for all waiting sessions in one forward.

    round    plan (clamped as live) -> drafts of all sources -> one tree -> admitted -> followed

Knows no file, no target and no algorithm. Invariant: a drafter is shown at every round exactly the
tokens and rows that a live run would have shown it.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from drafter_service.drafter import Drafter
from drafter_service.replay_counts import ReplayCounts, ReplayTally, total
from drafter_service.replay_session import Ask, ReplaySeat
from protos.errors import ConfigError
from protos.exchange import Capabilities, Plan, PlanKind
from protos.plans import clip_plan, fit_plan, node_budget
from protos.recorded import RecordedText
from protos.tree import CandidateTree, merge

WINDOW = 64
"""Texts replayed at once, unless a drafter holds fewer sessions."""

Report = Callable[[int], None]
"""Called with the number of texts that have ended."""


@dataclass(frozen=True, slots=True)
class Source:
    """A drafter under the name that its nodes are counted by."""

    name: str
    drafter: Drafter


class Admission(Protocol):
    """Which nodes of a merged draft are verified; may learn from rounds."""

    def admit(
        self, key: int, tree: CandidateTree, sources: Sequence[tuple[str, ...]], most: int
    ) -> CandidateTree:
        """At most `most` nodes, closed under parents. sources: per node, who proposed it."""

    def observe(
        self, key: int, drafts: Sequence[tuple[str, CandidateTree]], choices: Sequence[int]
    ) -> None:
        """What each source proposed, and the target's tokens: the accepted ones and the bonus."""

    def forget(self, key: int) -> None:
        """The text has ended."""


class BestScores:
    """Admits by the drafters' own scores. Learns nothing."""

    def admit(
        self, key: int, tree: CandidateTree, sources: Sequence[tuple[str, ...]], most: int
    ) -> CandidateTree:
        """See `Admission.admit`."""
        return tree.best(most)

    def observe(
        self, key: int, drafts: Sequence[tuple[str, CandidateTree]], choices: Sequence[int]
    ) -> None:
        """Nothing is learnt."""

    def forget(self, key: int) -> None:
        """Nothing is kept."""


@dataclass(slots=True)
class _Running:
    """A text under way. base_len: committed tokens, anchor included."""

    key: int
    text: RecordedText
    base_len: int
    tally: ReplayTally = field(default_factory=ReplayTally)


@dataclass(frozen=True, slots=True)
class _Draft:
    """What one text's sources proposed: each alone, and merged with its proposers."""

    trees: tuple[tuple[str, CandidateTree], ...] = ()
    merged: CandidateTree = field(default_factory=CandidateTree)
    names: tuple[tuple[str, ...], ...] = ()


def replay_drafter(drafter: Drafter, texts: Iterable[RecordedText], plan: Plan) -> ReplayCounts:
    """The sum over all texts of one drafter under one plan. Raises as `replay` does."""
    name = drafter.capabilities.name or drafter.capabilities.kind
    return total(replay(texts, [Source(name, drafter)], plan))


def replay(
    texts: Iterable[RecordedText],
    sources: Sequence[Source],
    plan: Plan,
    admission: Admission | None = None,
    window: int = WINDOW,
    report: Report | None = None,
) -> list[ReplayCounts]:
    """Counts per text, in order. `sources` in the order in which a verifier was given them.

    Texts are taken as sessions become free. admission: None admits by scores. Raises ConfigError
    when no source drafts this plan, IncompatiblePair for texts of another target, OutriderError
    when a drafter refuses.
    """
    seats = [ReplaySeat(source.name, source.drafter) for source in sources]
    _check_plan(plan, seats)
    if window < 1:
        raise ConfigError(f"at least one text is replayed at once, not {window}")
    most = [seat.capabilities.max_sessions for seat in seats if seat.capabilities.max_sessions]
    rounds = _Rounds(seats, plan, admission or BestScores())
    counts: dict[int, ReplayCounts] = {}
    running: list[_Running] = []
    waiting = enumerate(texts)
    try:
        while True:
            running += _more(waiting, min([window, *most]) - len(running))
            if not running:
                return [counts[key] for key in sorted(counts)]
            for ended in [one for one in running if one.base_len >= one.text.end]:
                running.remove(ended)
                rounds.end(ended.key)
                counts[ended.key] = ended.tally.snapshot()
                if report is not None:
                    report(len(counts))
            if running:
                rounds.run(running)
    finally:
        for seat in seats:
            seat.close_all()


class _Rounds:
    """Drafts, merges, admits and follows, one round of all running texts at a time."""

    def __init__(self, seats: Sequence[ReplaySeat], plan: Plan, admission: Admission) -> None:
        self._seats = seats
        self._plan = plan
        self._budget = node_budget(plan)
        self._admission = admission

    def run(self, running: Sequence[_Running]) -> None:
        """One round; every text commits at least one token."""
        drafts = self._drafts(running)
        admitted = [self._admit(one, draft) for one, draft in zip(running, drafts, strict=True)]
        for one, draft, tree in zip(running, drafts, admitted, strict=True):
            ahead = one.text.tokens[one.base_len : one.base_len + tree.num_nodes + 1]
            accepted = ahead[: len(tree.follow(ahead))]
            proposers = [draft.names[node - 1] for node in draft.merged.follow(accepted)]
            num_committed = min(len(accepted) + 1, one.text.end - one.base_len)
            one.tally.count_round(tree.num_nodes, proposers, num_committed)
            self._admission.observe(one.key, draft.trees, ahead[: len(accepted) + 1])
            one.base_len += num_committed

    def end(self, key: int) -> None:
        """A text has ended."""
        self._admission.forget(key)
        for seat in self._seats:
            seat.close([key])

    def _drafts(self, running: Sequence[_Running]) -> list[_Draft]:
        by_key: dict[int, list[tuple[str, CandidateTree]]] = {one.key: [] for one in running}
        for seat in self._seats:
            asks = [
                Ask(one.key, one.text, one.base_len, plan)
                for one in running
                if (plan := _fitted(self._plan, seat.capabilities, one)).kind is not PlanKind.NONE
            ]
            if asks:
                for key, tree in seat.draft(asks).items():
                    by_key[key].append((seat.name, tree))
        return [_merged(by_key[one.key]) for one in running]

    def _admit(self, one: _Running, draft: _Draft) -> CandidateTree:
        if self._budget is None or not draft.merged.num_nodes:
            return draft.merged
        return self._admission.admit(one.key, draft.merged, draft.names, self._budget)


def _more(waiting: Iterator[tuple[int, RecordedText]], count: int) -> list[_Running]:
    found: list[_Running] = []
    while len(found) < count and (following := next(waiting, None)) is not None:
        found.append(_begin(*following))
    return found


def _begin(key: int, text: RecordedText) -> _Running:
    """As after the prompt's own step: its first token is the anchor."""
    if text.params.uses_rejection:
        raise ConfigError("a text that was made with acceptance: rejection cannot be replayed")
    return _Running(key, text, text.prompt_len + 1)


def _fitted(plan: Plan, offered: Capabilities, one: _Running) -> Plan:
    """The plan as it would have been sent in this round."""
    fitted = fit_plan(plan, offered, one.text.max_len - one.base_len, is_local=True)
    return clip_plan(fitted, offered, one.base_len)


def _merged(drafts: Sequence[tuple[str, CandidateTree]]) -> _Draft:
    tree, proposers = merge([tree for _, tree in drafts])
    names = tuple(tuple(dict.fromkeys(drafts[i][0] for i in owners)) for owners in proposers)
    return _Draft(tuple(drafts), tree, names)


def _check_plan(plan: Plan, seats: Sequence[ReplaySeat]) -> None:
    """Some source drafts something for it."""
    lengths = 1 << 20
    for seat in seats:
        if fit_plan(plan, seat.capabilities, lengths, is_local=True).kind is not PlanKind.NONE:
            return
    raise ConfigError(f"{', '.join(s.name for s in seats) or 'nobody'} drafts no {plan.kind}")
