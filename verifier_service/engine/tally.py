"""Counts and sums of one request while it runs; a snapshot of them is `RunCounts`.

Knows nothing of how the numbers come about. Invariant: no number ever goes down.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from protos.generation import RunCounts


@dataclass(slots=True)
class Tally:
    """Mutable counts; times in seconds. waiting_since_s: when it last entered the queue.

    num_cached: tokens of the prompt that the prefix cache held when the request first joined.
    """

    num_prompt: int
    waiting_since_s: float
    was_admitted: bool = False
    num_cached: int = 0
    num_rounds: int = 0
    num_draft_rounds: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    accepted_by_depth: list[int] = field(default_factory=list)
    accepted_by_source: Counter[str] = field(default_factory=Counter)
    draft_wait_s: float = 0.0
    verify_s: float = 0.0
    queue_s: float = 0.0
    prefill_s: float = 0.0

    def count_round(
        self, num_drafted: int, num_accepted: int, accepted_sources: Sequence[Sequence[str]]
    ) -> None:
        """One step that committed tokens. accepted_sources: per accepted node, who proposed it."""
        self.num_rounds += 1
        self.num_draft_rounds += num_drafted > 0
        self.num_drafted += num_drafted
        self.num_accepted += num_accepted
        while len(self.accepted_by_depth) < num_accepted:
            self.accepted_by_depth.append(0)
        for depth in range(num_accepted):
            self.accepted_by_depth[depth] += 1
        for names in accepted_sources:
            self.accepted_by_source.update(names)

    def snapshot(self, num_output: int) -> RunCounts:
        """These counts as a value."""
        return RunCounts(
            num_prompt=self.num_prompt,
            num_cached=self.num_cached,
            num_output=num_output,
            num_rounds=self.num_rounds,
            num_draft_rounds=self.num_draft_rounds,
            num_drafted=self.num_drafted,
            num_accepted=self.num_accepted,
            accepted_by_depth=tuple(self.accepted_by_depth),
            accepted_by_source=tuple(sorted(self.accepted_by_source.items())),
            draft_wait_s=self.draft_wait_s,
            verify_s=self.verify_s,
            queue_s=self.queue_s,
            prefill_s=self.prefill_s,
        )
