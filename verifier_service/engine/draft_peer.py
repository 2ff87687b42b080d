"""One drafter replica as the engine's thread sees it: is it up, does it answer, how full is it.

Knows no request. A replica that lets a deadline pass in silence is left alone for a growing pause
(so it costs at most one deadline), and comes back by answering late, or a description.
"""

from collections import deque
from collections.abc import Sequence
from typing import Final, Protocol

from protos.exchange import Capabilities, ContextRows, DrafterLoad, DraftWork
from verifier_service.engine.draft_form import RowForm

FIRST_PAUSE_S: Final = 0.05
LONGEST_PAUSE_S: Final = 2.0
STUCK_AFTER: Final = 2
"""Silences in a row after which sessions move to another replica where there is one."""

MAX_WORKS: Final = 64
MAX_MESSAGE_BYTES: Final = 4 * 1024 * 1024
"""Entries and bytes of one message; more go into further messages of the same step."""

MAX_BULK_BYTES: Final = 8 * 1024 * 1024
"""Rows on their way to one replica that it has not acknowledged."""


class Transport(Protocol):
    """Carries messages to one replica; none of this waits for it."""

    def send(self, step: int, remaining_s: float, works: Sequence[DraftWork]) -> None:
        """One step's message."""

    def send_rows(self, piece: ContextRows) -> None:
        """One piece of rows."""

    def probe(self) -> None:
        """Ask for a sign of life, answered by `ProbeDone`."""

    def retire(self) -> None:
        """Do not connect again."""

    def hang_up(self) -> None:
        """End the connection without waiting."""

    def close(self) -> None:
        """End the connection and wait for its end."""


class DraftPeer:
    """State of one replica, used by the engine's thread alone but for `is_offered` and `load`."""

    def __init__(self, peer_id: int, source: str, address: str, is_local: bool) -> None:
        self.peer_id = peer_id
        self.source = source
        self.address = address
        self.is_local = is_local
        self.transport: Transport | None = None
        self.is_offered = True
        self.load = DrafterLoad()
        self.is_up = False
        self.capabilities: Capabilities | None = None
        self.form = RowForm()
        self.trouble = ""
        self.session_ids: set[int] = set()
        self._step = 0
        self._silences = 0
        self._is_suspended = False
        self._probe_at_s = 0.0
        self._is_probing = False
        self._unanswered_since_s: float | None = None
        self._pieces: deque[int] = deque()
        self._bulk_bytes = 0

    @property
    def is_usable(self) -> bool:
        """Up, compatible, offered, and answering as far as is known."""
        return self.is_up and self.is_offered and not self.trouble and not self._is_suspended

    @property
    def is_stuck(self) -> bool:
        """Silent for longer than a hiccup."""
        return self._is_suspended and self._silences >= STUCK_AFTER

    @property
    def has_room(self) -> bool:
        """Another session may be opened."""
        most = self.capabilities.max_sessions if self.capabilities else 0
        return not most or len(self.session_ids) < most

    @property
    def bulk_room(self) -> int:
        """Bytes of rows that may be sent now."""
        return MAX_BULK_BYTES - self._bulk_bytes

    @property
    def rank(self) -> tuple[int, int, str]:
        """Orders replicas for a new session, least loaded first."""
        return (
            len(self.session_ids) + self.load.num_waiting,
            self.load.num_sessions,
            self.address,
        )

    def next_step(self) -> int:
        """Number of the message that is being put together."""
        self._step += 1
        return self._step

    def send(self, step: int, remaining_s: float, works: Sequence[DraftWork], now_s: float) -> None:
        """Send one step's entries in as few messages as fit."""
        assert self.transport is not None
        if self._unanswered_since_s is None:
            self._unanswered_since_s = now_s
        batch: list[DraftWork] = []
        size = 0
        for work in works:
            work_bytes = 5 * len(work.tokens) + (len(work.rows.data) if work.rows else 0)
            if batch and (len(batch) == MAX_WORKS or size + work_bytes > MAX_MESSAGE_BYTES):
                self.transport.send(step, remaining_s, batch)
                batch, size = [], 0
            batch.append(work)
            size += work_bytes
        if batch:
            self.transport.send(step, remaining_s, batch)

    def send_close(self, work: DraftWork) -> None:
        """End one session, if it can be told; else it expires there. Nothing is answered."""
        self.session_ids.discard(work.session_id)
        if self.is_up and self.transport is not None:
            self.transport.send(self.next_step(), 0.0, [work])

    def send_rows(self, piece: ContextRows) -> None:
        """Send one piece of rows, counted until it is acknowledged."""
        assert self.transport is not None
        self._pieces.append(len(piece.rows.data))
        self._bulk_bytes += len(piece.rows.data)
        self.transport.send_rows(piece)

    def piece_taken(self) -> None:
        """The oldest piece was acknowledged."""
        if self._pieces:
            self._bulk_bytes -= self._pieces.popleft()

    def up(self, capabilities: Capabilities, load: DrafterLoad, form: RowForm) -> None:
        """Connected and compatible."""
        self.capabilities, self.load, self.form = capabilities, load, form
        self.is_up, self.trouble = True, ""
        self._silences = 0
        self._unanswered_since_s = None
        self._is_suspended = self._is_probing = False

    def down(self) -> None:
        """Not connected; nothing is under way any more."""
        self.is_up = False
        self._is_suspended = self._is_probing = False
        self._pieces.clear()
        self._bulk_bytes = 0

    def answered(self) -> None:
        """Any draft reply, however late, is a sign of life."""
        self._silences = 0
        self._is_suspended = False
        self._unanswered_since_s = None

    def fell_silent(self, now_s: float) -> None:
        """A deadline passed without any answer: leave it alone for a while."""
        self._silences += 1
        self._is_suspended = True
        pause_s = FIRST_PAUSE_S * 2 ** min(self._silences - 1, 16)
        self._probe_at_s = now_s + min(pause_s, LONGEST_PAUSE_S)

    def look_after(self, now_s: float) -> None:
        """Notice silence where nobody waited; ask for a sign of life once a pause is over."""
        since_s = self._unanswered_since_s
        if not self._is_suspended and since_s is not None and now_s - since_s > LONGEST_PAUSE_S:
            self.fell_silent(now_s)
        if self._is_suspended and not self._is_probing and now_s >= self._probe_at_s:
            assert self.transport is not None
            self._is_probing = True
            self.transport.probe()

    def probed(self, has_answered: bool, now_s: float) -> None:
        """The probe came back: worth asking again, or another and longer pause."""
        self._is_probing = False
        if not self._is_suspended:
            return
        if has_answered:
            self._is_suspended = False
            self._unanswered_since_s = None
        else:
            self.fell_silent(now_s)
