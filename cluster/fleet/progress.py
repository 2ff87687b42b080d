"""How far a request has come, so that another verifier can go on with it.

Pure. Invariant: runs taken from several verifiers join to what one would have given, counts
included; the rest is a function of the request and its committed ids alone.
"""

import time
from collections.abc import Callable
from dataclasses import fields, replace

from protos.generation import GenerationRequest, RunCounts, TokenRun


class Progress:
    """One request's committed ids and the counts of verifiers that were lost."""

    def __init__(
        self, request: GenerationRequest, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """clock: seconds; the time that the request has runs from now on."""
        self._request = request
        self._clock = clock
        self._began_s = clock()
        self._ids: list[int] = list(request.output_ids)
        self._before = RunCounts()
        self._newest = RunCounts()

    def rest(self) -> GenerationRequest:
        """What is left to do, in the time that is left, for the next verifier.

        Raises: DeadlineExceeded when no time is left.
        """
        self._before, self._newest = add_counts(self._before, self._newest), RunCounts()
        left = self._request.after(self._clock() - self._began_s)
        return replace(left, output_ids=tuple(self._ids))

    def take(self, run: TokenRun) -> TokenRun:
        """A run as the request's owner should see it."""
        self._ids.extend(run.ids)
        if run.counts is None:
            return run
        self._newest = run.counts
        return replace(run, counts=add_counts(self._before, run.counts))


def add_counts(before: RunCounts, now: RunCounts) -> RunCounts:
    """Sums of two verifiers' counts; prompt and output are already whole in the later one, and of
    the prompt each found its own part in its cache: the larger one counts."""
    if before == RunCounts():
        return now
    values: dict[str, object] = {}
    for field in fields(RunCounts):
        first, second = getattr(before, field.name), getattr(now, field.name)
        if field.name in ("num_prompt", "num_output", "num_cached"):
            values[field.name] = max(first, second)
        elif field.name == "accepted_by_source":
            names = dict.fromkeys(name for name, _ in (*first, *second))
            old, new = dict(first), dict(second)
            values[field.name] = tuple((n, old.get(n, 0) + new.get(n, 0)) for n in names)
        elif field.name == "accepted_by_depth":
            depth = max(len(first), len(second))
            padded = [(*part, *(0,) * (depth - len(part))) for part in (first, second)]
            values[field.name] = tuple(a + b for a, b in zip(*padded, strict=True))
        else:
            values[field.name] = first + second
    return replace(now, **values)  # type: ignore[arg-type]  # one value per field, of its type
