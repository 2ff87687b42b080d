"""A verifier's counters as flat names and numbers, for logs and exporters.

Pure. Counts and sums since the start, never means; what is counted by something carries it in
braces, as Prometheus writes labels. Knows no exporter.
"""

from collections.abc import Iterable, Mapping
from dataclasses import asdict

from verifier_service.engine.draft_counts import DraftCounts
from verifier_service.engine.stats import EngineStats


def snapshot(stats: EngineStats, exchange: Mapping[str, DraftCounts]) -> dict[str, float]:
    """All values of one verifier: the engine's, and the draft exchange's by source."""
    values: dict[str, float] = {}
    for name, value in asdict(stats).items():
        if name == "last_step_s":
            continue
        if isinstance(value, int | float):
            values[name] = float(value)
        else:
            base, _, label = name.partition("_by_")
            for key, number in _pairs(value):
                values[f'{base}{{{label or "reason"}="{key}"}}'] = float(number)
    for source, counts in exchange.items():
        for name, number in asdict(counts).items():
            values[f'exchange_{name}{{source="{source}"}}'] = float(number)
    return values


def _pairs(value: Iterable[object]) -> Iterable[tuple[str, float]]:
    for index, item in enumerate(value, 1):
        if isinstance(item, tuple):
            yield str(item[0]), item[1]
        elif isinstance(item, int | float):
            yield str(index), item
