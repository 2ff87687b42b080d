"""One request's session with one drafter: what was sent, what is held, what is still owed.

    tokens   [ held | sent, not yet confirmed | owed: tokens_sent .. base_len )
    rows     [ held | sent, not yet confirmed | owed: rows_sent .. base_len - 1 )

Bookkeeping of the prefix rule and nothing else: no thread, no channel, no clock. Everything owed
is a function of the request and these few numbers, so a loss of any kind is one act: move the
`sent` marks back and send again.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from protos.errors import ProtocolError
from protos.exchange import (
    CONTEXT_PIECE_BYTES,
    ContextAck,
    ContextRows,
    DraftResult,
    DraftStatus,
    DraftWork,
    Plan,
    PlanKind,
    SessionOpen,
)
from protos.features import FeatureForm, FeatureRows
from protos.plans import check_answer
from verifier_service.engine.draft_form import RowForm
from verifier_service.engine.ports import RowReader, SequenceView

MAX_LOSSES = 4
"""Losses in a row after which a drafter is no longer believed to keep this session."""

_REMEMBERED = 32
"""Unanswered questions whose plans are remembered."""


class RowsMissing(Exception):
    """The target does not keep the rows this session needs."""


@dataclass(frozen=True, slots=True)
class Question:
    """A plan that was sent. sent_s: monotonic time; step: of the message."""

    plan: Plan
    step: int
    sent_s: float


@dataclass(frozen=True, slots=True)
class Reply:
    """A draft that came back, with the question it answers. drafter_s: see `Draft`."""

    result: DraftResult
    question: Question
    latency_s: float
    drafter_s: float = 0.0


class DraftSession:
    """Engine-side state of one (request, source)."""

    def __init__(self, session_id: int, incarnation: int, form: RowForm) -> None:
        self.session_id = session_id
        self.incarnation = incarnation
        self.form = form
        self.is_open = False
        self.is_confirmed = False
        self.tokens_sent = 0
        self.tokens_held = 0
        self.rows_sent = 0
        self.rows_held = 0
        self.latest: Reply | None = None
        self._pieces_under_way = 0
        self._pieces_disowned = 0
        self._num_losses = 0
        self._longest_asked = 0
        self._last_step = 0
        self._lost_step = -1
        self._questions: dict[int, Question] = {}

    def lag(self, view: SequenceView) -> int:
        """Committed tokens that the drafter has not been told."""
        return view.base_len - self.tokens_sent

    def rows_lag(self, view: SequenceView) -> int:
        """Rows that were not sent; none for a drafter that needs none."""
        return _rows_available(view) - self.rows_sent if self.form.row_bytes else 0

    def work(
        self,
        view: SequenceView,
        question: Question,
        read_rows: RowReader,
        inline_bytes: int | None,
    ) -> DraftWork:
        """Everything owed that fits in one entry, and the plan. inline_bytes None: any size.

        Raises RowsMissing.
        """
        base_len = view.base_len
        opened = None if self.is_open else self._open(view)
        start = min(self.tokens_sent, base_len)
        rows = self._inline_rows(view, read_rows, inline_bytes)
        self.is_open = True
        self.tokens_sent = base_len
        self._last_step = question.step
        self._longest_asked = base_len
        self._questions[base_len] = question
        while len(self._questions) > _REMEMBERED:
            del self._questions[next(iter(self._questions))]
        return DraftWork(
            session_id=self.session_id,
            incarnation=self.incarnation,
            base_len=base_len,
            token_start=start,
            tokens=tuple(view.tokens[start:base_len]),
            plan=question.plan,
            open=opened,
            rows=rows,
        )

    def bulk(self, view: SequenceView, read_rows: RowReader, budget: int) -> Iterator[ContextRows]:
        """Owed rows in pieces, within about `budget` bytes; none before the open is confirmed.

        Raises RowsMissing.
        """
        row_bytes = self.form.row_bytes
        end = _rows_available(view)
        if row_bytes == 0 or not self.is_confirmed:
            return
        most = max(CONTEXT_PIECE_BYTES // row_bytes, 1)
        while self.rows_sent < end and budget > 0:
            stop = min(self.rows_sent + most, end)
            rows = self._read(view, read_rows, stop)
            self.rows_sent = stop
            self._pieces_under_way += 1
            budget -= len(rows.data)
            yield ContextRows(self.session_id, self.incarnation, rows)

    def close_work(self) -> DraftWork:
        """The entry that ends the session."""
        length = self.tokens_sent
        return DraftWork(self.session_id, self.incarnation, length, length, (), close=True)

    def take(self, result: DraftResult, step: int, now_s: float) -> Reply | None:
        """Take an answer in. Returns the reply when it carries what was asked.

        Raises ProtocolError when the answer cannot be to anything that was asked.
        """
        question = self._questions.get(result.base_len)
        if result.base_len > self._longest_asked:
            raise ProtocolError(f"nothing of length {result.base_len} was asked")
        if step <= self._lost_step:
            return None  # sent before a loss that is known: it tells nothing new
        if result.status is DraftStatus.LOST:
            self._lose(result)
            return None
        if self.form.form is FeatureForm.NONE:
            self._num_losses = 0
        self._confirm(result, step)
        if question is None or result.status is not DraftStatus.OK:
            return None
        check_answer(result.tree, question.plan)
        if question.plan.kind is PlanKind.NONE:
            return None
        for length in [n for n in self._questions if n <= result.base_len]:
            del self._questions[length]
        return Reply(result, question, now_s - question.sent_s)

    def acknowledge(self, ack: ContextAck) -> None:
        """One piece arrived, or the session is not there any more.

        Raises ProtocolError when rows are lost again and again.
        """
        if self._pieces_disowned:
            self._pieces_disowned -= 1
            return
        self._pieces_under_way = max(self._pieces_under_way - 1, 0)
        if ack.lost:
            self._forget_everything()
            self._count_loss("the session")
        else:
            self._hold_rows(ack.held_rows, is_last=self._pieces_under_way == 0)

    def rewind(self) -> None:
        """The connection broke: whatever is not confirmed is owed again."""
        self.tokens_sent = self.tokens_held
        self.rows_sent = self.rows_held
        self._pieces_under_way = self._pieces_disowned = 0
        self._questions.clear()

    def reset(self, incarnation: int) -> None:
        """Another process stands at the other end: it holds nothing."""
        self.incarnation = incarnation
        self._forget_everything()
        self._pieces_disowned = 0

    def _forget_everything(self) -> None:
        self._disown()
        self.is_open = self.is_confirmed = False
        self.tokens_sent = self.tokens_held = 0
        self.rows_sent = self.rows_held = 0
        self._questions.clear()

    def _disown(self) -> None:
        """What is on its way was sent before a loss: its answers tell nothing new."""
        self._lost_step = self._last_step
        self._pieces_disowned += self._pieces_under_way
        self._pieces_under_way = 0

    def _open(self, view: SequenceView) -> SessionOpen:
        form = self.form
        return SessionOpen(view.request_id, view.params, form.form, form.width, form.dtype)

    def _inline_rows(
        self, view: SequenceView, read_rows: RowReader, inline_bytes: int | None
    ) -> FeatureRows | None:
        """All owed rows when they are few and nothing travels over Context, which is unordered
        against this stream: rows that overtake are passed over by the drafter."""
        end = _rows_available(view)
        row_bytes = self.form.row_bytes
        if row_bytes == 0 or self.rows_sent >= end or self._pieces_under_way:
            return None
        if inline_bytes is not None and (end - self.rows_sent) * row_bytes > inline_bytes:
            return None
        rows = self._read(view, read_rows, end)
        self.rows_sent = end
        return rows

    def _read(self, view: SequenceView, read_rows: RowReader, end: int) -> FeatureRows:
        rows = read_rows(view.key, self.form.tap, self.rows_sent, end)
        if rows is None:
            raise RowsMissing(f"rows [{self.rows_sent}, {end}) are not kept")
        return rows

    def _lose(self, result: DraftResult) -> None:
        """Owe everything that the drafter says it does not hold."""
        self._disown()
        self._count_loss("the prefix")
        if result.incarnation != self.incarnation or result.held_tokens == 0:
            self._forget_everything()
            self.incarnation = result.incarnation
            return
        self.tokens_sent = self.tokens_held = min(result.held_tokens, self.tokens_sent)
        self.rows_sent = self.rows_held = min(result.held_rows, self.rows_sent)

    def _confirm(self, result: DraftResult, step: int) -> None:
        self.is_confirmed = True
        self.tokens_held = min(result.held_tokens, self.tokens_sent)
        self._hold_rows(
            result.held_rows, is_last=step == self._last_step and not self._pieces_under_way
        )

    def _hold_rows(self, held: int, is_last: bool) -> None:
        """is_last: nothing else is on its way, so what is not held by now was passed over."""
        if self.form.form is FeatureForm.NONE:
            return
        held = min(held, self.rows_sent)
        self.rows_held = held if is_last else max(held, self.rows_held)
        if not is_last:
            return
        if held < self.rows_sent:
            self.rows_sent = held
            self._count_loss("feature rows")
        else:
            self._num_losses = 0

    def _count_loss(self, what: str) -> None:
        self._num_losses += 1
        if self._num_losses > MAX_LOSSES:
            raise ProtocolError(f"{what} lost {self._num_losses} times in a row")


def _rows_available(view: SequenceView) -> int:
    """Rows trail tokens by one."""
    return min(view.num_rows, view.base_len - 1)
