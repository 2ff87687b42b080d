"""What a step costs: a monotone table of verify times, corrected online, and drafters' delays.

Knows no acceptance. Seconds everywhere; `context` is the sum of positions read by all spans.
Invariant: more rows never cost less, and branching never costs less than a chain, whatever was
measured.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from protos.tree import CandidateTree

MAX_ROWS: Final = 1024
_DOWNWARD: Final = 0.25
_UPWARD: Final = 0.1
_MIN_RATIO: Final = 0.01
_MAX_RATIO: Final = 100.0
TreeParts = Callable[[Sequence[int], int, int], Sequence[int]]
"""As `Target.tree_parts`."""

_BUCKETS: Final = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)


def monotone(values: Sequence[float]) -> list[float]:
    """The greatest non-decreasing sequence below the values.

    Not isotonic least squares: what disturbs a measurement only adds to it, so a size that took
    longer than a larger one was disturbed, and the larger one tells the truth.
    """
    lowest: list[float] = []
    for value in reversed(values):
        lowest.append(min(value, lowest[-1]) if lowest else value)
    return lowest[::-1]


@dataclass(frozen=True, slots=True)
class VerifyTable:
    """Measured verify times: seconds by rows of one chain, extra seconds by rows of one tree.

    per_position_s: seconds per position of context read, beyond what `chain` was measured at.
    """

    chain: Mapping[int, float]
    branch_extra: Mapping[int, float]
    context: int
    per_position_s: float = 0.0

    def __post_init__(self) -> None:
        if not self.chain or min(self.chain.values()) <= 0.0:
            raise ValueError("a verify table needs at least one positive time")


def default_table() -> VerifyTable:
    """A guess for a target that was not measured; only its shape matters before correction."""
    chain = {1: 0.030, 4: 0.030, 8: 0.035, 16: 0.042, 32: 0.054, 64: 0.106}
    return VerifyTable(chain, {4: 0.001, 16: 0.004, 32: 0.008}, context=200)


class VerifyCosts:
    """t_verify(rows, branching rows, context), corrected by what steps really took.

    Plain and speculative steps are corrected apart, by bucket of base rows and of rows: spans of
    many requests cost other than one long span, and the comparison must stay honest.
    """

    def __init__(self, table: VerifyTable, tree_parts: TreeParts | None = None) -> None:
        """tree_parts: the target's; None: its trees never fall into parts."""
        self._tree_parts = tree_parts
        self._context = table.context
        self._per_position_s = table.per_position_s
        self._chain = _dense(table.chain, first=None)
        extra = _dense(table.branch_extra, first=0.0) if table.branch_extra else 0 * self._chain
        self._tree = self._chain + np.maximum(extra, 0.0)
        self._plain_ratio: dict[int, tuple[float, int]] = {}
        self._draft_ratio: dict[int, tuple[float, int]] = {}
        self._overall_ratio = 1.0
        self._dense_ratios: NDArray[np.float64] | None = None

    def parts(self, tree: CandidateTree, start: int, most: int) -> Sequence[int]:
        """`Target.tree_parts` per draft node, the anchor standing at position `start`."""
        if self._tree_parts is None or tree.is_chain:
            return [0] * tree.num_nodes
        return self._tree_parts((-1, *tree.parents), start, most)[1:]

    @property
    def position_s(self) -> float:
        """Seconds for every position that a part reads once more: what one row pays for it."""
        return self._per_position_s * self._overall_ratio

    def seconds(self, rows: int, branching: int, context: int, drafted: int) -> float:
        """Time of a step of `rows` rows, `branching` of them in trees, `drafted` draft nodes."""
        return self._raw(rows, branching, context) * self._ratio(rows, drafted)

    def ladder(
        self, base_rows: int, max_drafted: int, branching: bool, context: int
    ) -> NDArray[np.float64]:
        """Times with 0 .. max_drafted draft nodes added to base_rows, [max_drafted + 1].

        `seconds` at every point (every row in a tree if `branching`), but never more than a
        larger step and never less than the plain one.
        """
        counts = np.arange(max_drafted + 1)
        rows = np.minimum(base_rows + counts, MAX_ROWS)
        source = self._tree if branching else self._chain
        raw = source[rows]
        raw[0] = self._chain[rows[0]]
        raw = raw + self._context_s(context)
        ratios = self._draft_ratios()[rows]
        ratios[0] = self._ratio(base_rows, 0)
        times = np.minimum.accumulate((raw * ratios)[::-1])[::-1]
        ladder: NDArray[np.float64] = np.maximum(times, raw[0] * ratios[0])
        return ladder

    def observe(
        self, rows: int, branching: int, context: int, drafted: int, measured_s: float
    ) -> None:
        """Correct by one measured step."""
        ratio = measured_s / self._raw(rows, branching, context)
        ratio = min(max(ratio, _MIN_RATIO), _MAX_RATIO)
        table = self._draft_ratio if drafted else self._plain_ratio
        bucket = _bucket(rows)
        known, count = table.get(bucket, (self._overall_ratio, 0))
        # Whatever else the machine does only adds: what was cheaper than thought is believed
        # sooner than what was dearer, and one hiccup must not make a shape look dear.
        if ratio < known:
            step = max(_DOWNWARD, 1.0 / (count + 1)) * (ratio - known)
        else:
            step = max(_UPWARD, 1.0 / (count + 2)) * (min(ratio, 2.0 * known) - known)
        table[bucket] = (known + step, count + 1)
        self._overall_ratio += _UPWARD * (known + step - self._overall_ratio)
        self._dense_ratios = None

    def _draft_ratios(self) -> NDArray[np.float64]:
        """Correction of a speculative step by its rows, [MAX_ROWS + 1]; made anew when needed."""
        if self._dense_ratios is None:
            dense = np.full(MAX_ROWS + 1, self._overall_ratio)
            low = 0
            for bucket in (*_BUCKETS, MAX_ROWS):
                dense[low : bucket + 1] = self._ratio(bucket, 1)
                low = bucket + 1
            self._dense_ratios = dense
        return self._dense_ratios

    def _ratio(self, rows: int, drafted: int) -> float:
        table = self._draft_ratio if drafted else self._plain_ratio
        return table.get(_bucket(rows), (self._overall_ratio, 0))[0]

    def _raw(self, rows: int, branching: int, context: int) -> float:
        capped, trees = min(rows, MAX_ROWS), min(branching, rows, MAX_ROWS)
        chain = float(self._chain[capped])
        if rows > MAX_ROWS:
            chain *= rows / MAX_ROWS
        return chain + float(self._tree[trees] - self._chain[trees]) + self._context_s(context)

    def _context_s(self, context: int) -> float:
        return max(context - self._context, 0) * self._per_position_s


def _bucket(rows: int) -> int:
    return next((b for b in _BUCKETS if rows <= b), MAX_ROWS)


def _dense(points: Mapping[int, float], first: float | None) -> NDArray[np.float64]:
    """Every row count from 0 to MAX_ROWS: monotone, linear between and beyond the points."""
    rows = sorted(points)
    values = monotone([points[r] for r in rows])
    if first is not None and rows[0] > 1:
        rows, values = [1, *rows], [first, *values]
    dense = np.interp(np.arange(MAX_ROWS + 1), rows, values)
    if len(rows) > 1:
        slope = (values[-1] - values[-2]) / (rows[-1] - rows[-2])
        beyond = np.arange(MAX_ROWS + 1) - rows[-1]
        dense = np.where(beyond > 0, values[-1] + beyond * max(slope, 0.0), dense)
    result: NDArray[np.float64] = dense
    return result
