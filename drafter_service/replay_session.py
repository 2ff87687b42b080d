"""One drafter's end of a replay: sessions over recorded texts, asked as a verifier would ask.

Sends what a live run would have sent: all committed tokens, the anchor last, and the rows of those
before it. Knows nothing of merging or walking. Rows go raw, and the drafter's own projection makes
the rest of them. Invariant: an answer that a live session would not take raises here.
"""

import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from drafter_service.drafter import Drafter
from drafter_service.session import slice_rows
from protos.errors import ConfigError, IncompatiblePair, OutriderError
from protos.exchange import DraftResult, DraftStatus, DraftWork, Plan, SessionOpen
from protos.features import FeatureForm, FeatureRows
from protos.plans import check_answer
from protos.recorded import RecordedText
from protos.tree import CandidateTree


@dataclass(frozen=True, slots=True)
class Ask:
    """A draft wanted for the first `base_len` tokens of a text. key: the caller's number for it."""

    key: int
    text: RecordedText
    base_len: int
    plan: Plan


@dataclass(slots=True)
class _Session:
    session_id: int
    rows: FeatureRows | None
    tokens_sent: int = 0


class ReplaySeat:
    """Sessions of one drafter."""

    def __init__(self, name: str, drafter: Drafter) -> None:
        """Raises ConfigError for a drafter that takes projected rows only."""
        self.name = name
        self.capabilities = drafter.capabilities
        self._drafter = drafter
        self._sessions: dict[int, _Session] = {}
        self._next_id = secrets.randbits(62) | 1
        if self.capabilities.fused_width and not self.capabilities.raw_width:
            raise ConfigError(f"{name} takes projected rows only, and replayed rows are raw")

    def draft(self, asks: Sequence[Ask]) -> dict[int, CandidateTree]:
        """A tree by key, all sessions drafted for together.

        Raises OutriderError when the drafter refuses or twice loses a session, or answers with
        more than was asked.
        """
        trees: dict[int, CandidateTree] = {}
        waiting = list(asks)
        for attempt in range(2):
            results = self._drafter.handle([self._work(ask) for ask in waiting])
            lost: list[Ask] = []
            for ask, result in zip(waiting, results, strict=True):
                if result.status is DraftStatus.LOST and not attempt:
                    self._sessions[ask.key].tokens_sent = 0
                    lost.append(ask)
                else:
                    trees[ask.key] = self._tree(ask, result)
            waiting = lost
            if not waiting:
                break
        return trees

    def close(self, keys: Iterable[int]) -> None:
        """End the sessions of these texts; unknown ones are no error."""
        works = []
        for key in keys:
            session = self._sessions.pop(key, None)
            if session is not None:
                held, incarnation = session.tokens_sent, self.capabilities.incarnation
                works.append(DraftWork(session.session_id, incarnation, held, held, (), close=True))
        if works:
            self._drafter.handle(works)

    def close_all(self) -> None:
        """End every session."""
        self.close(list(self._sessions))

    def _work(self, ask: Ask) -> DraftWork:
        text, base_len = ask.text, ask.base_len
        session = self._sessions.get(ask.key)
        if session is None:
            session = self._sessions[ask.key] = _Session(self._next_id, self._rows_of(text))
            self._next_id += 1
        start, rows = session.tokens_sent, session.rows
        opened = None if start else _opening(ask, rows)
        session.tokens_sent = base_len
        return DraftWork(
            session_id=session.session_id,
            incarnation=self.capabilities.incarnation,
            base_len=base_len,
            token_start=start,
            tokens=text.tokens[start:base_len],
            plan=ask.plan,
            open=opened,
            # The anchor has not been through the target: rows trail tokens by one.
            rows=rows and slice_rows(rows, max(start - 1, 0), base_len - 1),
        )

    def _rows_of(self, text: RecordedText) -> FeatureRows | None:
        wanted = self.capabilities
        if wanted.target_digest and text.target_digest not in ("", wanted.target_digest):
            raise IncompatiblePair(
                f"{self.name} belongs to target {wanted.target_digest}, "
                f"the text is one of {text.target_digest}"
            )
        if not wanted.raw_width:
            return None
        rows = text.rows(wanted.aux_layers)
        if rows.width != wanted.raw_width:
            raise IncompatiblePair(
                f"{self.name} takes rows of {wanted.raw_width} elements, not {rows.width}"
            )
        if rows.start != 0 or rows.end < text.end - 2:
            raise ConfigError(
                f"rows [{rows.start}, {rows.end}) are not those of a text of {text.end} tokens"
            )
        return rows

    def _tree(self, ask: Ask, result: DraftResult) -> CandidateTree:
        if result.status is not DraftStatus.OK:
            raise OutriderError(
                f"{self.name} answered {result.status} at token {ask.base_len}"
                f"{': ' if result.detail else ''}{result.detail}; {len(self._sessions)} texts were "
                "replayed at once"
            )
        check_answer(result.tree, ask.plan)
        return result.tree.believing(result.confidences)


def _opening(ask: Ask, rows: FeatureRows | None) -> SessionOpen:
    name, params = f"replay-{ask.key}", ask.text.params
    if rows is None:
        return SessionOpen(name, params)
    return SessionOpen(name, params, FeatureForm.RAW, rows.width, rows.dtype)
