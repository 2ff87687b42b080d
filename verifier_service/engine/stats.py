"""What an engine has done: counts and sums since it started, and what it holds right now.

Holds no means (design 2): whoever reads forms them. Invariant: counts never go down; only the
fields named gauges do.
"""

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A snapshot. Gauges: num_running, num_waiting, num_pages, num_free_pages, num_cached_pages,
    num_draft_sessions.

    num_free_pages: pages to be had at once; num_cached_pages: those of them that still hold the KV
    of a prefix. num_draft_sessions: one per request and source that it is shown to.
    num_looked_up_tokens: prompt tokens of admitted requests; num_cached_tokens: those found in the
    prefix cache; num_prompt_tokens: those computed. Seconds.
    last_step_s: monotonic clock at the end of the newest step; with work present and this long
    ago, the engine is stuck. step_s: wall time of all steps, its parts draft_wait_s and verify_s.
    """

    num_running: int = 0
    num_waiting: int = 0
    num_pages: int = 0
    num_free_pages: int = 0
    num_cached_pages: int = 0
    num_draft_sessions: int = 0
    num_requests: int = 0
    finished: tuple[tuple[str, int], ...] = ()
    num_steps: int = 0
    num_rows: int = 0
    num_prompt_tokens: int = 0
    num_looked_up_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    num_rounds: int = 0
    num_draft_rounds: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    accepted_by_depth: tuple[int, ...] = ()
    drafted_by_source: tuple[tuple[str, int], ...] = ()
    accepted_by_source: tuple[tuple[str, int], ...] = ()
    num_preemptions: int = 0
    num_evicted_pages: int = 0
    num_dropped_drafts: int = 0
    num_failed_exchanges: int = 0
    step_s: float = 0.0
    draft_wait_s: float = 0.0
    verify_s: float = 0.0
    last_step_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Gauges:
    """What an engine holds right now; see `EngineStats`."""

    num_running: int
    num_waiting: int
    num_pages: int
    num_free_pages: int
    num_cached_pages: int
    num_draft_sessions: int


@dataclass(slots=True)
class EngineCounters:
    """The mutable side of `EngineStats`, kept by the engine's thread."""

    num_requests: int = 0
    finished: Counter[str] = field(default_factory=Counter)
    num_steps: int = 0
    num_rows: int = 0
    num_prompt_tokens: int = 0
    num_looked_up_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    num_rounds: int = 0
    num_draft_rounds: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    accepted_by_depth: list[int] = field(default_factory=list)
    drafted_by_source: Counter[str] = field(default_factory=Counter)
    accepted_by_source: Counter[str] = field(default_factory=Counter)
    num_preemptions: int = 0
    num_dropped_drafts: int = 0
    num_failed_exchanges: int = 0
    step_s: float = 0.0
    draft_wait_s: float = 0.0
    verify_s: float = 0.0
    last_step_s: float = 0.0

    def count_round(
        self, sources: Sequence[Sequence[str]], nodes: Sequence[int], num_committed: int
    ) -> None:
        """One request's round. sources: per verified node; nodes: those accepted."""
        self.num_rounds += 1
        self.num_draft_rounds += bool(sources)
        self.num_drafted += len(sources)
        self.num_accepted += len(nodes)
        self.num_output_tokens += num_committed
        while len(self.accepted_by_depth) < len(nodes):
            self.accepted_by_depth.append(0)
        for depth in range(len(nodes)):
            self.accepted_by_depth[depth] += 1
        for names in sources:
            self.drafted_by_source.update(names)
        for node in nodes:
            self.accepted_by_source.update(sources[node - 1])

    def count_step(
        self,
        num_rows: int,
        *,
        num_dropped: int,
        has_failed: bool,
        wait_s: float,
        verify_s: float,
        step_s: float,
    ) -> None:
        """One step of the engine. num_dropped: drafts that could not be used."""
        self.num_steps += 1
        self.num_rows += num_rows
        self.num_dropped_drafts += num_dropped
        self.num_failed_exchanges += has_failed
        self.draft_wait_s += wait_s
        self.verify_s += verify_s
        self.step_s += step_s
        self.last_step_s = time.monotonic()

    def snapshot(self, gauges: Gauges, num_evicted_pages: int) -> EngineStats:
        """These counters and the gauges as a value."""
        return EngineStats(
            num_running=gauges.num_running,
            num_waiting=gauges.num_waiting,
            num_pages=gauges.num_pages,
            num_free_pages=gauges.num_free_pages,
            num_cached_pages=gauges.num_cached_pages,
            num_draft_sessions=gauges.num_draft_sessions,
            num_evicted_pages=num_evicted_pages,
            num_requests=self.num_requests,
            finished=tuple(sorted(self.finished.items())),
            num_steps=self.num_steps,
            num_rows=self.num_rows,
            num_prompt_tokens=self.num_prompt_tokens,
            num_looked_up_tokens=self.num_looked_up_tokens,
            num_cached_tokens=self.num_cached_tokens,
            num_output_tokens=self.num_output_tokens,
            num_rounds=self.num_rounds,
            num_draft_rounds=self.num_draft_rounds,
            num_drafted=self.num_drafted,
            num_accepted=self.num_accepted,
            accepted_by_depth=tuple(self.accepted_by_depth),
            drafted_by_source=tuple(sorted(self.drafted_by_source.items())),
            accepted_by_source=tuple(sorted(self.accepted_by_source.items())),
            num_preemptions=self.num_preemptions,
            num_dropped_drafts=self.num_dropped_drafts,
            num_failed_exchanges=self.num_failed_exchanges,
            step_s=self.step_s,
            draft_wait_s=self.draft_wait_s,
            verify_s=self.verify_s,
            last_step_s=self.last_step_s,
        )
