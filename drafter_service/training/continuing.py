"""Whether a stopped run may go on with these settings.

Knows settings as they are told (`telling`), no files. Invariant: what shapes an update never
changes within a run, so an exported head is what its settings say.
"""

from collections.abc import Iterator, Mapping

from protos.errors import ConfigError

FREE = frozenset(
    {
        *("target", "features", "run", "threads", "checkpoint_every_s", "evaluate_every_s"),
        *("rows_per_pass", "minutes", "epochs"),
    }
)
"""Settings that may change: where things lie, when to save, how to group, how long to go on."""


def check_continues(before: Mapping[str, object], now: Mapping[str, object]) -> None:
    """Raises ConfigError naming what differs. A setting that one side lacks is not compared."""
    faults = [text for text in _differences(before, now, "") if text.split(":")[0] not in FREE]
    if faults:
        raise ConfigError(
            f"the run was begun with other settings ({'; '.join(faults)}); give it another "
            "directory with --set run=DIR, or start there from this one's state with --warm-from"
        )


def _differences(
    before: Mapping[str, object], now: Mapping[str, object], prefix: str
) -> Iterator[str]:
    for name in sorted(before.keys() & now.keys()):
        old, new = before[name], now[name]
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            yield from _differences(old, new, f"{prefix}{name}.")
        elif old != new:
            yield f"{prefix}{name}: {old}, now {new}"
