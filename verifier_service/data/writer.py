"""Runs many generations at once and hands the results back in the order they were asked for.

Drives an engine on the calling thread: continuous batching keeps the batch full, however long one
job takes that the others are handed back after. Knows no files. Because the text of a request does
not depend on its neighbours, results are the same however they were batched.
"""

from collections import deque
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field
from typing import TypeVar

from protos.errors import OutriderError
from protos.generation import FinishReason, GenerationRequest, TokenRun
from protos.params import SamplingParams
from verifier_service.engine.loop import Engine

Result = TypeVar("Result")

_AHEAD = 16
"""Windows of finished results that may wait for one that takes long."""


@dataclass(frozen=True, slots=True)
class Ask:
    """One generation."""

    prompt_ids: tuple[int, ...]
    params: SamplingParams


Job = Generator[Ask, tuple[int, ...], Result]
"""Yields what to generate, is sent the ids (end token included), returns its result."""


@dataclass
class _Running:
    job: Job[object]
    ids: list[int] = field(default_factory=list)
    is_done: bool = False
    result: object = None


def run_in_order(engine: Engine, jobs: Iterator[Job[Result]], window: int) -> Iterator[Result]:
    """Results of `jobs` in their order, at most `window` of them under way at once.

    Raises OutriderError when the engine gives a request up.
    """
    queue: deque[_Running] = deque()
    failures: list[str] = []
    counter = num_live = 0

    def submit(running: _Running, ask: Ask) -> None:
        nonlocal counter
        counter += 1
        request = GenerationRequest(f"data-{counter}", ask.prompt_ids, ask.params)
        running.ids = []
        engine.submit(request, lambda run: receive(running, run))

    def receive(running: _Running, run: TokenRun) -> None:
        running.ids.extend(run.ids)
        if run.finish_reason in (FinishReason.ERROR, FinishReason.CANCELLED):
            failures.append(run.error or "a generation was cancelled")
        elif run.finish_reason is not None:
            advance(running, tuple(running.ids))

    def advance(running: _Running, ids: tuple[int, ...] | None) -> None:
        nonlocal num_live
        try:
            ask = next(running.job) if ids is None else running.job.send(ids)
        except StopIteration as stop:
            running.is_done, running.result = True, stop.value
            num_live -= 1
            return
        submit(running, ask)

    exhausted = False
    while not exhausted or queue:
        while not exhausted and num_live < window and len(queue) < _AHEAD * window:
            job = next(jobs, None)
            if job is None:
                exhausted = True
                break
            queue.append(_Running(job))
            num_live += 1
            advance(queue[-1], None)
        while queue and queue[0].is_done:
            yield queue.popleft().result  # type: ignore[misc]  # the job's own return value
        if queue and not queue[0].is_done:
            engine.step()
        if failures:
            raise OutriderError(failures[0])
