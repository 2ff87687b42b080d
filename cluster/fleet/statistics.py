"""A verifier's counters as nested numbers, named as Prometheus wants them.

Pure. Counts and sums end in `_total`, gauges do not; a key `x_by_y` holds one number per y.
"""

from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from verifier_service.engine.draft_counts import DraftCounts
    from verifier_service.engine.stats import EngineStats

_GAUGES: Final = frozenset({"num_running", "num_waiting", "num_pages", "num_free_pages"})
_CLOCKS: Final = frozenset({"last_step_s"})


def statistics_of(
    engine: "EngineStats", drafting: Mapping[str, "DraftCounts"]
) -> dict[str, object]:
    """All numbers of one verifier replica: the engine's, and the draft exchange's by source."""
    found: dict[str, object] = {}
    for name, value in asdict(engine).items():
        if name in _CLOCKS:
            continue
        if isinstance(value, tuple | list):
            base, _, label = name.partition("_by_")
            pairs = value if value and isinstance(value[0], tuple | list) else enumerate(value)
            key = f"{base}_total_by_{label or 'reason'}"
            found[key] = {str(item): number for item, number in pairs}
        else:
            found[name if name in _GAUGES else f"{name}_total"] = value
    exchange: dict[str, dict[str, float]] = {}
    for source, counts in drafting.items():
        for name, number in asdict(counts).items():
            exchange.setdefault(f"{name}_total_by_source", {})[source] = number
    return found | {"exchange": exchange}
