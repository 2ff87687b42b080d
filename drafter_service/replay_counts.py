"""What a replay counted: the numbers that a live run would have counted, as values.

Counts and sums; means are formed by who reads. The prompt's own step, which no draft can shorten,
is no round here.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class ReplayCounts:
    """accepted_by_depth[i]: rounds that accepted at least i + 1 draft tokens.

    num_accepted: as the walk agreed, tokens past an end of text included; num_committed: tokens
    that joined the text, bonus included. accepted_by_source: accepted nodes by who proposed them.
    """

    num_rounds: int = 0
    num_draft_rounds: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    num_committed: int = 0
    accepted_by_depth: tuple[int, ...] = ()
    accepted_by_source: tuple[tuple[str, int], ...] = ()

    @property
    def tau(self) -> float:
        """Tokens committed per round; 1 where there was none."""
        return self.num_committed / self.num_rounds if self.num_rounds else 1.0

    @property
    def acceptance_by_depth(self) -> tuple[float, ...]:
        """Share of rounds that accepted at least 1, 2, .. draft tokens."""
        return tuple(count / max(self.num_rounds, 1) for count in self.accepted_by_depth)


@dataclass(slots=True)
class ReplayTally:
    """The mutable side, kept while a text is replayed."""

    rounds: list[int] = field(default_factory=list)
    num_draft_rounds: int = 0
    num_drafted: int = 0
    num_committed: int = 0
    accepted_by_source: Counter[str] = field(default_factory=Counter)

    def count_round(
        self, num_drafted: int, accepted_sources: Sequence[Sequence[str]], num_committed: int
    ) -> None:
        """One round. accepted_sources: per accepted node, who proposed it."""
        self.rounds.append(len(accepted_sources))
        self.num_draft_rounds += num_drafted > 0
        self.num_drafted += num_drafted
        self.num_committed += num_committed
        for names in accepted_sources:
            self.accepted_by_source.update(names)

    def snapshot(self) -> ReplayCounts:
        """These counts as a value."""
        deepest = max(self.rounds, default=0)
        return ReplayCounts(
            num_rounds=len(self.rounds),
            num_draft_rounds=self.num_draft_rounds,
            num_drafted=self.num_drafted,
            num_accepted=sum(self.rounds),
            num_committed=self.num_committed,
            accepted_by_depth=tuple(
                sum(accepted >= depth for accepted in self.rounds)
                for depth in range(1, deepest + 1)
            ),
            accepted_by_source=tuple(sorted(self.accepted_by_source.items())),
        )


def total(counts: Iterable[ReplayCounts]) -> ReplayCounts:
    """The sum over texts."""
    every = list(counts)
    deepest = max((len(c.accepted_by_depth) for c in every), default=0)
    sources: Counter[str] = Counter()
    for one in every:
        sources.update(dict(one.accepted_by_source))
    return ReplayCounts(
        num_rounds=sum(c.num_rounds for c in every),
        num_draft_rounds=sum(c.num_draft_rounds for c in every),
        num_drafted=sum(c.num_drafted for c in every),
        num_accepted=sum(c.num_accepted for c in every),
        num_committed=sum(c.num_committed for c in every),
        accepted_by_depth=tuple(
            sum(c.accepted_by_depth[i] for c in every if i < len(c.accepted_by_depth))
            for i in range(deepest)
        ),
        accepted_by_source=tuple(sorted(sources.items())),
    )
