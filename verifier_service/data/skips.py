"""What could not be used, by reason: counted, and named by a few of its places.

Knows no formats. Invariant: every skip is counted, however many places are named.
"""

from typing import Final

_PLACES_NAMED: Final = 3


class Skips:
    """Counts by reason, in the order in which reasons first appeared."""

    def __init__(self) -> None:
        self._places: dict[str, list[str]] = {}

    def add(self, reason: str, where: str) -> None:
        """Count one. where: file and line, or what else names it."""
        self._places.setdefault(reason, []).append(where)

    def __len__(self) -> int:
        return sum(map(len, self._places.values()))

    @property
    def counts(self) -> dict[str, int]:
        """How many, by reason."""
        return {reason: len(places) for reason, places in self._places.items()}

    def describe(self) -> str:
        """For people: `3 empty (a.jsonl line 2, ...), 1 roles out of order (...)`; "" for none."""
        return ", ".join(
            f"{len(places)} {reason} ({_named(places)})" for reason, places in self._places.items()
        )


def _named(places: list[str]) -> str:
    more = ", ..." if len(places) > _PLACES_NAMED else ""
    return ", ".join(places[:_PLACES_NAMED]) + more
