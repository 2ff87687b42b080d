"""All sessions of one drafter, and the prefix rule that keeps them right.

A work names the prefix it speaks of; a drafter that does not hold it answers *lost, I hold n*
(design, law 4). There is no other synchronisation: nothing waits, nothing is replayed, and a bad
work ends its own session alone. Knows no algorithm.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

from drafter_service.session import Session
from protos.errors import MalformedRows, ProtocolError
from protos.exchange import (
    ContextAck,
    ContextRows,
    DraftResult,
    DraftStatus,
    DraftWork,
    SessionOpen,
)
from protos.features import FeatureForm


@dataclass(frozen=True, slots=True)
class SessionRules:
    """What the table checks. row_widths: width of a row in each form that is taken.

    vocab_size 0: any id. idle_s: a session unused for so long may be dropped.
    """

    incarnation: int
    row_widths: Mapping[FeatureForm, int]
    vocab_size: int
    max_context: int
    max_sessions: int
    idle_s: float


S = TypeVar("S", bound=Session)


class SessionTable(Generic[S]):
    """All sessions of one drafter, least recently used first."""

    def __init__(
        self,
        rules: SessionRules,
        create: Callable[[int, SessionOpen], S],
        on_drop: Callable[[S], None],
    ) -> None:
        self._rules = rules
        self._create = create
        self._on_drop = on_drop
        self._sessions: OrderedDict[int, S] = OrderedDict()

    def __len__(self) -> int:
        return len(self._sessions)

    def __iter__(self) -> Iterator[S]:
        return iter(list(self._sessions.values()))

    def get(self, session_id: int) -> S | None:
        """The session, its place in the order of use unchanged."""
        return self._sessions.get(session_id)

    def drop(self, session_id: int) -> None:
        """Forget a session; unknown ones are no error."""
        session = self._sessions.pop(session_id, None)
        if session is not None:
            self._on_drop(session)

    def evict(self, busy: set[int]) -> bool:
        """Drop the least recently used session that is not in `busy`; False when there is none."""
        for session_id in self._sessions:
            if session_id not in busy:
                self.drop(session_id)
                return True
        return False

    def expire(self, now: float) -> int:
        """Drop the sessions idle at `now`."""
        stale = [
            session_id
            for session_id, session in self._sessions.items()
            if now - session.last_used_s > self._rules.idle_s
        ]
        for session_id in stale:
            self.drop(session_id)
        return len(stale)

    def admit(self, work: DraftWork, now: float, busy: set[int]) -> S | DraftResult | None:
        """Bring a session to the work's prefix, its rows included.

        Returns the session; or the answer when there is nothing more to do; or None for a close.
        Sessions in `busy` are not evicted to make room.
        """
        ours = work.incarnation == self._rules.incarnation
        if work.close:
            if ours:
                self.drop(work.session_id)
            return None
        if not ours:
            return self.answer(work, DraftStatus.LOST, detail="another incarnation")
        try:
            self._check(work)
            session = self._find(work, busy)
            if session is None or not _bring_to(session, work):
                return self.answer(work, DraftStatus.LOST)
            if work.rows is not None:
                session.add_rows(work.rows)
        except ProtocolError as error:
            self.drop(work.session_id)
            return self.answer(work, DraftStatus.REFUSED, detail=str(error))
        session.last_used_s = now
        self._sessions.move_to_end(work.session_id)
        return session

    def absorb(self, piece: ContextRows, now: float) -> tuple[S | None, str]:
        """Add bulk rows. Returns the session, or None and why it is lost."""
        if piece.incarnation != self._rules.incarnation:
            return None, "another incarnation"
        session = self._sessions.get(piece.session_id)
        if session is None:
            return None, "no such session"
        try:
            session.add_rows(piece.rows)
        except MalformedRows as error:
            self.drop(piece.session_id)
            return None, str(error)
        session.last_used_s = now
        self._sessions.move_to_end(piece.session_id)
        return session, ""

    def answer(self, work: DraftWork, status: DraftStatus, detail: str = "") -> DraftResult:
        """An answer without a tree, telling what is held."""
        session = self._sessions.get(work.session_id)
        return DraftResult(
            session_id=work.session_id,
            incarnation=self._rules.incarnation,
            base_len=work.base_len,
            status=status,
            held_tokens=session.base_len if session else 0,
            held_rows=session.num_rows if session else 0,
            detail=detail,
        )

    def acknowledge(self, piece: ContextRows, detail: str = "") -> ContextAck:
        """What is held of a piece's session after it was taken."""
        session = self._sessions.get(piece.session_id)
        return ContextAck(
            session_id=piece.session_id,
            incarnation=self._rules.incarnation,
            held_rows=session.num_rows if session and not detail else 0,
            lost=session is None or bool(detail),
            detail=detail,
        )

    def _check(self, work: DraftWork) -> None:
        rules = self._rules
        if work.token_start < 0 or work.base_len != work.token_start + len(work.tokens):
            raise ProtocolError(
                f"{len(work.tokens)} tokens from {work.token_start} on do not end at "
                f"{work.base_len}"
            )
        if not 1 <= work.base_len <= rules.max_context:
            raise ProtocolError(
                f"a session holds 1 to {rules.max_context} tokens, not {work.base_len}"
            )
        if not work.tokens:
            return
        most = max(work.tokens)
        if min(work.tokens) < 0 or (rules.vocab_size and most >= rules.vocab_size):
            raise ProtocolError(f"token ids must lie in [0, {rules.vocab_size}), not {most}")

    def _find(self, work: DraftWork, busy: set[int]) -> S | None:
        """The work's session, opened or cut back first when the work opens it."""
        session = self._sessions.get(work.session_id)
        opened = work.open
        if opened is None:
            return session
        expected = self._rules.row_widths.get(opened.form)
        if expected is None or opened.width != expected:
            taken = ", ".join(
                f"{form} of {width}" for form, width in self._rules.row_widths.items()
            )
            raise ProtocolError(f"rows taken: {taken}; not {opened.form} of {opened.width}")
        layout = (opened.form, opened.width, opened.dtype)
        if session and (session.form, session.width, session.dtype) == layout:
            session.request_id = opened.request_id
            session.params = opened.params
            if work.token_start <= session.base_len:
                session.truncate(work.token_start)
            return session
        self.drop(work.session_id)
        if work.token_start > 0:
            return None
        while len(self._sessions) >= self._rules.max_sessions:
            if not self.evict(busy):
                raise ProtocolError(f"all {self._rules.max_sessions} sessions are in use")
        session = self._create(work.session_id, opened)
        self._sessions[work.session_id] = session
        return session


def _bring_to(session: Session, work: DraftWork) -> bool:
    """Make the session hold exactly the work's prefix; False when tokens are missing for that.

    Committed tokens never change, so a token that disagrees means that this session took a wrong
    turn: it is cut back to the part both agree on.
    """
    if work.token_start > session.base_len:
        return False
    held = session.tokens[work.token_start : work.base_len]
    for offset, (ours, theirs) in enumerate(zip(held, work.tokens, strict=False)):
        if ours != theirs:
            session.truncate(work.token_start + offset)
            return False
    if work.base_len < session.base_len:
        session.truncate(work.base_len)
    session.extend(work.tokens[len(held) :])
    return True
