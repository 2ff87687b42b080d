"""A closed loop of streaming requests, and what it measures.

Knows a way to stream ids, not what is behind it (HTTP or an engine in this process). Times are the
caller's own clock: from sending to each arrival. TPOT leaves the first token out; ITL is the gap
between two arrivals, each of which may bring several tokens, so speculation makes it bursty.
"""

import asyncio
import statistics
import time
from collections.abc import AsyncIterator, Callable, Container, Sequence
from dataclasses import dataclass, replace

Stream = Callable[[int], AsyncIterator[tuple[int, ...]]]
"""Streams the answer to question i, as runs of token ids."""


@dataclass(frozen=True, slots=True)
class Served:
    """One answered request. arrivals: (seconds after sending, tokens) of each run."""

    question: int
    ids: tuple[int, ...]
    arrivals: tuple[tuple[float, int], ...]

    @property
    def ttft_s(self) -> float:
        """Until the first token."""
        return self.arrivals[0][0] if self.arrivals else 0.0

    @property
    def decode(self) -> tuple[float, int]:
        """Seconds and tokens after the first arrival."""
        if len(self.arrivals) < 2:
            return 0.0, 0
        return self.arrivals[-1][0] - self.arrivals[0][0], len(self.ids) - self.arrivals[0][1]


@dataclass(frozen=True, slots=True)
class Load:
    """One pass over all questions."""

    served: tuple[Served, ...]
    wall_s: float

    @property
    def tpot_s(self) -> float:
        """Seconds per output token after the first, over all requests together."""
        seconds = sum(s.decode[0] for s in self.served)
        tokens = sum(s.decode[1] for s in self.served)
        return seconds / tokens if tokens else 0.0

    def of(self, questions: Container[int]) -> "Load":
        """What these questions took of the pass; its wall time is the whole pass's."""
        return replace(self, served=tuple(s for s in self.served if s.question in questions))

    @property
    def tokens_per_s(self) -> float:
        """Output tokens per second of wall time, prompts included."""
        return sum(len(s.ids) for s in self.served) / self.wall_s

    def texts(self) -> dict[int, tuple[int, ...]]:
        """The answers, by question."""
        return {s.question: s.ids for s in self.served}

    def summary(self) -> dict[str, float]:
        """Medians and tails, milliseconds."""
        gaps = [
            later - sooner
            for s in self.served
            for (sooner, _), (later, _) in zip(s.arrivals, s.arrivals[1:], strict=False)
        ]
        return {
            "ttft_ms": 1e3 * statistics.median(s.ttft_s for s in self.served),
            "tpot_ms": 1e3 * self.tpot_s,
            "p99_itl_ms": 1e3 * _percentile(gaps, 0.99),
            "tokens_per_s": self.tokens_per_s,
        }


async def run_load(stream: Stream, num_questions: int, concurrency: int) -> Load:
    """Answer every question once; a worker sends its next as soon as the last is answered."""
    waiting = iter(range(num_questions))
    served: list[Served] = []

    async def work() -> None:
        for question in waiting:
            began = time.perf_counter()
            ids: list[int] = []
            arrivals: list[tuple[float, int]] = []
            async for run in stream(question):
                if run:
                    ids.extend(run)
                    arrivals.append((time.perf_counter() - began, len(run)))
            served.append(Served(question, tuple(ids), tuple(arrivals)))

    began = time.perf_counter()
    await asyncio.gather(*(work() for _ in range(concurrency)))
    return Load(tuple(served), time.perf_counter() - began)


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, least and greatest of repeats."""
    return {
        "median": round(statistics.median(values), 4),
        "min": round(min(values), 4),
        "max": round(max(values), 4),
    }


def _percentile(values: Sequence[float], share: float) -> float:
    ranked = sorted(values)
    return ranked[min(int(share * len(ranked)), len(ranked) - 1)] if ranked else 0.0
