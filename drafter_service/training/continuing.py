"""Whether a stopped run may go on with these settings and this data.

Knows settings as they are told (`telling`) and digests, no files. Invariant: what shapes an update
never changes within a run, so an exported head is what its settings say.
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


def check_same_data(before: object, now: object) -> None:
    """Raises ConfigError when answers or target weights have other digests than at the beginning.

    Both are the `data` of provenance; a file may have another name, and what `before` does not tell
    is not compared.
    """
    if not (isinstance(before, Mapping) and isinstance(now, Mapping)):
        return
    for name in ("answers_sha256", "target_weights_sha256"):
        old, new = before.get(name), now.get(name)
        if not (isinstance(old, Mapping) and isinstance(new, Mapping)):
            continue
        changed = [file for file, digest in new.items() if digest not in old.values()]
        if changed or len(old) != len(new):
            what = ", ".join(changed) or "more files"
            raise ConfigError(
                f"the run was begun with other data ({what} changed): give it another directory "
                "with --set run=DIR"
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
