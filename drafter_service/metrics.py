"""What a drafter counts while it serves: counts and sums, never means.

Written by the worker's thread, read by any: every value is a plain number. Knows no exporter.
"""

from collections import Counter
from collections.abc import Iterable

from protos.exchange import DraftResult


class DrafterMetrics:
    """Sums since the start. Seconds for times."""

    def __init__(self) -> None:
        self.num_batches = 0
        self.num_works = 0
        self.num_malformed = 0
        self.num_superseded = 0
        self.num_nodes = 0
        self.num_rows = 0
        self.num_expired = 0
        self.queue_s = 0.0
        self.draft_s = 0.0
        self.absorb_s = 0.0
        self._by_status: Counter[str] = Counter()

    def count_results(self, results: Iterable[DraftResult]) -> None:
        """Count answers by status, and the nodes they carry."""
        for result in results:
            self._by_status[result.status.value] += 1
            self.num_nodes += result.tree.num_nodes

    def snapshot(self) -> dict[str, float]:
        """All values by name; answers as `num_<status>`."""
        values = {
            name: float(value) for name, value in vars(self).items() if not name.startswith("_")
        }
        values |= {f"num_{status}": float(count) for status, count in self._by_status.items()}
        return values
