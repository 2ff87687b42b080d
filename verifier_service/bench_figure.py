"""One measured quantity: times of a variant and of its baseline, interleaved, as ratios."""

import statistics
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Figure:
    """One quantity over the repeats: times of the variant and of its baseline, in milliseconds.

    ratios: baseline over variant when `is_speed`, else variant over baseline.
    """

    variant_ms: tuple[float, ...]
    baseline_ms: tuple[float, ...]
    is_speed: bool = False

    @property
    def ratios(self) -> list[float]:
        """One per repeat."""
        pairs = zip(self.variant_ms, self.baseline_ms, strict=True)
        return [b / v if self.is_speed else v / b for v, b in pairs]

    @property
    def ratio(self) -> float:
        """The median."""
        return round(statistics.median(self.ratios), 3)

    def as_json(self) -> dict[str, object]:
        """Medians, and the ratio's spread."""
        return {
            "ratio": self.ratio,
            "min": round(min(self.ratios), 3),
            "max": round(max(self.ratios), 3),
            "variant_ms": round(statistics.median(self.variant_ms), 2),
            "baseline_ms": round(statistics.median(self.baseline_ms), 2),
        }
