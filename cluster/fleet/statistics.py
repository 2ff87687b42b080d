"""A verifier's counters as nested numbers, named as Prometheus wants them.

Pure. Counts and sums end in `_total`, gauges do not; a key `x_by_y` holds one number per y.
"""

from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from verifier_service.engine.draft_counts import DraftCounts
    from verifier_service.engine.stats import EngineStats
    from verifier_service.planning.ledger import PlannerCounts

_GAUGES: Final = frozenset(
    {"num_running", "num_waiting", "num_pages", "num_free_pages", "num_cached_pages"}
    | {"num_draft_sessions"}
)
_CLOCKS: Final = frozenset({"last_step_s"})


def statistics_of(
    engine: "EngineStats",
    drafting: Mapping[str, "DraftCounts"],
    planner: "PlannerCounts | None" = None,
) -> dict[str, object]:
    """All numbers of one verifier replica: the engine's, the draft exchange's by source, and what
    the planner chose and expected."""
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
    return found | {"exchange": exchange} | _planner(planner)


def _planner(counts: "PlannerCounts | None") -> dict[str, object]:
    """The planner's sums, and how often it chose each kind of draft."""
    if counts is None:
        return {}
    # The engine's thread adds choices meanwhile: a copy first.
    chosen: dict[str, object] = {"chosen_total_by_plan": dict(counts.chosen)}
    names = (part.name for part in fields(counts) if part.name != "chosen")
    return {"planner": {f"{name}_total": getattr(counts, name) for name in names} | chosen}
