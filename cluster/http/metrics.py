"""Counters of one ingress process as Prometheus text, under our names and vLLM's.

Knows no HTTP. Counts and sums only; means are the reader's business. Everything here covers this
ingress process alone: add up replicas in the query.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from cluster.http.answers import Tally

LATENCY_BOUNDS_S: Final = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 120.0)
GAP_BOUNDS_S: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)


@dataclass(frozen=True, slots=True)
class Sample:
    """One line of Prometheus text."""

    name: str
    value: float
    labels: tuple[tuple[str, str], ...] = ()


class Histogram:
    """A Prometheus histogram with fixed upper bounds in seconds."""

    def __init__(self, name: str, bounds: tuple[float, ...]) -> None:
        self._name = name
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        """Count one value."""
        index = next((i for i, b in enumerate(self._bounds) if value <= b), len(self._bounds))
        self._counts[index] += 1
        self._sum += value

    def samples(self, labels: tuple[tuple[str, str], ...]) -> Iterable[Sample]:
        """Cumulative buckets, sum and count."""
        total = 0
        for bound, count in zip((*self._bounds, float("inf")), self._counts, strict=True):
            total += count
            edge = "+Inf" if bound == float("inf") else repr(bound)
            yield Sample(f"{self._name}_bucket", total, (*labels, ("le", edge)))
        yield Sample(f"{self._name}_sum", self._sum, labels)
        yield Sample(f"{self._name}_count", total, labels)


class ServedCounters:
    """What this ingress has delivered."""

    def __init__(self, model: str) -> None:
        self._labels = (("model_name", model),)
        self._total = Tally()
        self._finished: Counter[str] = Counter()
        self._statuses: Counter[int] = Counter()
        self.num_running = 0
        self.ttft = Histogram("vllm:time_to_first_token_seconds", LATENCY_BOUNDS_S)
        self.latency = Histogram("vllm:e2e_request_latency_seconds", LATENCY_BOUNDS_S)
        self.gap = Histogram("vllm:inter_token_latency_seconds", GAP_BOUNDS_S)

    def count_status(self, status: int) -> None:
        """One reply with this HTTP status."""
        self._statuses[status] += 1

    def count_answer(self, tally: Tally, finish: str) -> None:
        """One answer that ended; `finish` is its reason, or `abort`."""
        self._total.add(tally)
        self._finished[finish] += 1
        if tally.num_output:
            self.ttft.observe(tally.first_token_s)
            self.latency.observe(tally.total_s)
        if tally.num_output > 1:
            self.gap.observe((tally.total_s - tally.first_token_s) / (tally.num_output - 1))

    def samples(self) -> Iterable[Sample]:
        """All samples of this process."""
        tally, labels = self._total, self._labels
        yield Sample("vllm:num_requests_running", self.num_running, labels)
        yield Sample("vllm:prompt_tokens_total", tally.num_prompt, labels)
        yield Sample("vllm:prefix_cache_queries_total", tally.num_prompt, labels)
        yield Sample("vllm:prefix_cache_hits_total", tally.num_cached, labels)
        yield Sample("vllm:generation_tokens_total", tally.num_output, labels)
        for reason, count in sorted(self._finished.items()):
            yield Sample(
                "vllm:request_success_total", count, (*labels, ("finished_reason", reason))
            )
        yield from self._speculative(tally)
        for status, count in sorted(self._statuses.items()):
            yield Sample("outrider_http_replies_total", count, (("status", str(status)),))
        for histogram in (self.ttft, self.latency, self.gap):
            yield from histogram.samples(labels)

    def _speculative(self, tally: Tally) -> Iterable[Sample]:
        labels = self._labels
        prefix = "vllm:spec_decode_num"
        yield Sample("outrider_rounds_total", tally.num_rounds, labels)
        yield Sample("outrider_draft_wait_seconds_total", tally.draft_wait_s, labels)
        yield Sample("outrider_verify_seconds_total", tally.verify_s, labels)
        yield Sample(f"{prefix}_drafts_total", tally.num_draft_rounds, labels)
        yield Sample(f"{prefix}_draft_tokens_total", tally.num_drafted, labels)
        yield Sample(f"{prefix}_accepted_tokens_total", tally.num_accepted, labels)
        for position, count in enumerate(tally.accepted_by_depth):
            name = f"{prefix}_accepted_tokens_per_pos_total"
            yield Sample(name, count, (*labels, ("position", str(position))))
        for source, count in sorted(tally.accepted_by_source.items()):
            name = "outrider_accepted_tokens_by_drafter_total"
            yield Sample(name, count, (*labels, ("drafter", source)))


def flatten(prefix: str, values: Mapping[str, object]) -> Iterable[Sample]:
    """Numbers of a nested mapping as samples, keys joined by underscores; the rest is left out.

    A mapping under a key `x_by_y` becomes samples of `x` with the label y.
    """
    for key, value in values.items():
        name, _, label = f"{prefix}_{key}".partition("_by_")
        if isinstance(value, Mapping) and label:
            for item, number in value.items():
                if isinstance(number, int | float):
                    yield Sample(name, number, ((label, str(item)),))
        elif isinstance(value, Mapping):
            yield from flatten(name, value)
        elif isinstance(value, int | float):
            yield Sample(name, value)


def render(samples: Iterable[Sample]) -> str:
    """Prometheus text exposition, version 0.0.4."""
    lines: list[str] = []
    typed: set[str] = set()
    for sample in samples:
        base, kind = _family(sample.name)
        if base not in typed:
            typed.add(base)
            lines.append(f"# TYPE {base} {kind}")
        labels = ",".join(f'{key}="{_escape(value)}"' for key, value in sample.labels)
        name = f"{sample.name}{{{labels}}}" if labels else sample.name
        lines.append(f"{name} {_number(sample.value)}")
    return "\n".join(lines) + "\n"


def _number(value: float) -> str:
    """Every digit: a counter of millions must still show that it grew by one."""
    return str(int(value)) if float(value).is_integer() else repr(float(value))


def _family(name: str) -> tuple[str, str]:
    if name.startswith("vllm:") and name.endswith(("_bucket", "_sum", "_count")):
        return name.rsplit("_", 1)[0], "histogram"
    return name, "counter" if name.endswith("_total") else "gauge"


def _escape(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
