"""One request's committed prefix in a drafter: its tokens and its feature rows.

    tokens   0 ...................... T-2   T-1 (anchor)
    rows     [ computed_len | pending ......... )        at most T-1 of them can be used

Row t belongs to token t and is used together with token t + 1. Rows may come twice, out of order
or before their tokens; what is held never has a gap. Knows no algorithm: a drafter subclasses
`Session` for what it keeps beside tokens and rows.
"""

from protos.errors import MalformedRows
from protos.exchange import SessionOpen
from protos.features import DType, FeatureForm, FeatureRows
from protos.params import SamplingParams

MAX_ROWS_AHEAD = 256
"""Rows that may arrive before their tokens: more than one round can commit."""


class Session:
    """One request's committed prefix in this drafter."""

    def __init__(self, session_id: int, opened: SessionOpen) -> None:
        self.session_id = session_id
        self.request_id = opened.request_id
        self.params: SamplingParams = opened.params
        self.form: FeatureForm = opened.form
        self.width = opened.width
        self.dtype: DType = opened.dtype
        self.tokens: list[int] = []
        self.computed_len = 0
        self.pending: list[FeatureRows] = []
        self.last_used_s = 0.0

    @property
    def base_len(self) -> int:
        """Committed tokens held, anchor included."""
        return len(self.tokens)

    @property
    def num_rows(self) -> int:
        """Feature rows held without a gap, used ones included."""
        return self.pending[-1].end if self.pending else self.computed_len

    @property
    def num_usable_rows(self) -> int:
        """Rows whose following token is held too."""
        return max(0, min(self.num_rows, self.base_len - 1))

    def extend(self, tokens: tuple[int, ...]) -> None:
        """Append committed tokens."""
        self.tokens.extend(tokens)

    def truncate(self, base_len: int) -> None:
        """Forget everything that depends on tokens from `base_len` on."""
        del self.tokens[base_len:]
        if self.computed_len > max(0, base_len - 1):
            self.rewind(max(0, base_len - 1))
        self._cut_pending(base_len)

    def rewind(self, computed_len: int) -> None:
        """Take back computed rows from `computed_len` on: they are gone and must come again."""
        self.computed_len = computed_len
        self.pending.clear()

    def add_rows(self, rows: FeatureRows) -> None:
        """Keep what is new of `rows`. Those behind a gap, and those held already, are passed over.

        Raises MalformedRows when they are not what the session was opened for.
        """
        if rows.width != self.width or rows.dtype is not self.dtype:
            raise MalformedRows(
                f"session takes {self.width} {self.dtype} elements a row, "
                f"not {rows.width} {rows.dtype}"
            )
        held = self.num_rows
        end = min(rows.end, self.base_len + MAX_ROWS_AHEAD)
        if rows.start <= held < end:
            self.pending.append(slice_rows(rows, held, end))

    def take_rows(self, limit: int) -> list[FeatureRows]:
        """Hand out at most `limit` usable pending rows; they count as computed from now on."""
        end = min(self.num_usable_rows, self.computed_len + limit)
        taken: list[FeatureRows] = []
        while self.computed_len < end:
            first = self.pending.pop(0)
            stop = min(first.end, end)
            taken.append(slice_rows(first, self.computed_len, stop))
            if stop < first.end:
                self.pending.insert(0, slice_rows(first, stop, first.end))
            self.computed_len = stop
        return taken

    def _cut_pending(self, end: int) -> None:
        while self.pending and self.pending[-1].end > end:
            last = self.pending.pop()
            if last.start < end:
                self.pending.append(slice_rows(last, last.start, end))


def slice_rows(rows: FeatureRows, start: int, end: int) -> FeatureRows:
    """Rows [start, end) of `rows`, in the session's numbering."""
    if start == rows.start and end == rows.end:
        return rows
    row_bytes = rows.width * rows.dtype.num_bytes
    data = rows.data[(start - rows.start) * row_bytes : (end - rows.start) * row_bytes]
    return FeatureRows(start, end - start, rows.width, rows.dtype, data)
