"""What every claim works with: a verifier, a text, rows, and sessions of its own.

Rows are made up: the suite asks what a drafter holds and answers, never whether it guesses well.
"""

import itertools
import random
import struct
from collections.abc import Sequence
from dataclasses import replace

from protos.conformance.link import Broken, Link, Verifier
from protos.exchange import (
    CONTEXT_PIECE_BYTES,
    INLINE_ROWS_BYTES,
    ContextAck,
    ContextRows,
    DraftResult,
    DraftStatus,
    DraftWork,
    Plan,
    PlanKind,
    SessionOpen,
)
from protos.features import DType, FeatureForm, FeatureRows
from protos.params import SamplingParams

GREEDY = SamplingParams(temperature=0.0)
_PATTERN = 64  # values that a row repeats


class Skipped(Exception):
    """A claim that does not concern this drafter."""


class Bench:
    """One verifier of one drafter."""

    def __init__(self, link: Link, verifier_id: int | None = None) -> None:
        self.link = link
        self.capabilities, _ = link.describe()
        rng = random.SystemRandom()
        self.verifier_id = verifier_id or rng.getrandbits(64) | 1
        self.verifier: Verifier = link.verifier(self.verifier_id)
        self._session_ids = itertools.count(rng.getrandbits(62) | 1)
        self._used: list[int] = []

    @property
    def row_form(self) -> tuple[FeatureForm, int]:
        """The rows this drafter takes, raw where it has the choice."""
        record = self.capabilities
        if record.raw_width:
            return FeatureForm.RAW, record.raw_width
        if record.fused_width:
            return FeatureForm.FUSED, record.fused_width
        return FeatureForm.NONE, 0

    @property
    def eats_rows(self) -> bool:
        """Whether it takes feature rows at all."""
        return self.row_form[0] is not FeatureForm.NONE

    @property
    def longest(self) -> int:
        """Tokens that a session of the suite may have."""
        return min(self.capabilities.max_context or 64, 64)

    def plan(self) -> Plan:
        """A plan that this drafter offers."""
        record = self.capabilities
        depth = min(2, record.max_depth or 2)
        for kind in (PlanKind.CHAIN, PlanKind.BLOCK, PlanKind.TREE, PlanKind.STATIC):
            if kind in record.plan_kinds:
                nodes = depth if kind in (PlanKind.TREE, PlanKind.STATIC) else 0
                return Plan(kind, depth, 1, nodes)
        raise Broken("the record offers no plan kind")

    def new_session(self) -> int:
        """An id that no session has."""
        self._used.append(next(self._session_ids))
        return self._used[-1]

    def text(self, length: int, seed: int = 0) -> tuple[int, ...]:
        """Token ids, the same for the same arguments, a prefix of every longer one."""
        vocab = self.capabilities.vocab_size or 1000
        return tuple((7 + 13 * seed + 5 * place * place) % vocab for place in range(length))

    def rows(self, start: int, end: int, seed: int = 0) -> FeatureRows | None:
        """Made-up rows [start, end); None where none are taken or the range is empty."""
        form, width = self.row_form
        if form is FeatureForm.NONE or start >= end:
            return None
        data = b"".join(_row(width, 1000 * seed + place) for place in range(start, end))
        return FeatureRows(start, end - start, width, DType.BF16, data)

    def opening(self, params: SamplingParams = GREEDY) -> SessionOpen:
        """An open for the rows that this drafter takes."""
        form, width = self.row_form
        return SessionOpen("conformance", params, form, width, DType.BF16)

    def work(
        self,
        session_id: int,
        start: int,
        end: int,
        *,
        plan: Plan | None = None,
        opened: SessionOpen | None = None,
        with_rows: bool = True,
        seed: int = 0,
    ) -> DraftWork:
        """Tokens [start, end) of the text with the rows that become usable; rows ride inline."""
        return DraftWork(
            session_id=session_id,
            incarnation=self.capabilities.incarnation,
            base_len=end,
            token_start=start,
            tokens=self.text(end, seed)[start:],
            plan=self.plan() if plan is None else plan,
            open=opened,
            rows=self.rows(max(start - 1, 0), end - 1, seed) if with_rows else None,
        )

    def open(self, session_id: int, length: int = 6, params: SamplingParams = GREEDY) -> DraftWork:
        """A work that opens a session with the first tokens of the text, small enough inline."""
        work = self.work(session_id, 0, length, opened=self.opening(params))
        if work.rows is not None and len(work.rows.data) > max(
            INLINE_ROWS_BYTES, len(work.rows.data) // work.rows.count
        ):
            return replace(work, rows=None)
        return work

    def ask(self, *works: DraftWork) -> list[DraftResult]:
        """Send one message and wait for a result per entry that does not close, in their order.

        Raises Broken for an answer to nothing, two answers to one entry, or another step.
        """
        step = self.verifier.send(works)
        return self.collect(step, [work.session_id for work in works if not work.close])

    def collect(self, step: int, expected: Sequence[int]) -> list[DraftResult]:
        """Replies to one step until every expected session was answered once."""
        found: dict[int, DraftResult] = {}
        while len(found) < len(expected):
            answer = self.verifier.receive()
            if answer.step != step:
                raise Broken(f"a reply to step {answer.step}, asked was step {step}")
            for result in answer.results:
                if result.session_id in found or result.session_id not in expected:
                    raise Broken("a result that nobody asked for, or a second one")
                found[result.session_id] = result
        return [found[session_id] for session_id in expected]

    def close(self, *session_ids: int) -> None:
        """End sessions; the empty reply that some drafters send is read away."""
        works = [self.closing(session_id) for session_id in session_ids]
        self.verifier.send(works)
        while not self.verifier.is_silent(0.2):
            if self.verifier.receive().results:
                raise Broken("a close was answered")

    def closing(self, session_id: int) -> DraftWork:
        """The entry that ends a session."""
        return DraftWork(session_id, self.capabilities.incarnation, 1, 1, (), close=True)

    def give(
        self, session_id: int, rows: FeatureRows, incarnation: int | None = None
    ) -> ContextAck:
        """Send one piece of rows and wait for its acknowledgement."""
        number = self.capabilities.incarnation if incarnation is None else incarnation
        self.verifier.send_rows(ContextRows(session_id, number, rows))
        ack = self.verifier.receive_ack()
        if ack.session_id != session_id:
            raise Broken("an acknowledgement of another session")
        return ack

    def pieces(self, session_id: int, end: int) -> list[ContextRows]:
        """Rows [0, end) in pieces of at most 256 KiB."""
        most = max(CONTEXT_PIECE_BYTES // (2 * self.row_form[1]), 1)
        cuts = [*range(0, end, most), end]
        found = [self.rows(start, stop) for start, stop in itertools.pairwise(cuts)]
        number = self.capabilities.incarnation
        return [ContextRows(session_id, number, rows) for rows in found if rows is not None]

    def reconnect(self) -> None:
        """The same verifier after its connection broke."""
        self.verifier.end()
        self.verifier = self.link.verifier(self.verifier_id)

    def leave(self) -> None:
        """Close what was opened and go."""
        number = self.capabilities.incarnation
        works = [DraftWork(name, number, 1, 1, (), close=True) for name in self._used]
        for start in range(0, len(works), 64):
            self.verifier.send(works[start : start + 64])
        self.verifier.is_silent(0.1)
        self.verifier.end()


def expect(result: DraftResult, *statuses: DraftStatus) -> DraftResult:
    """The result itself. Raises Broken when its status is another."""
    if result.status not in statuses:
        wanted = " or ".join(statuses)
        raise Broken(f"expected {wanted}, got {result.status} {result.detail}".rstrip())
    return result


def require(is_so: bool, otherwise: str) -> None:
    """Raises Broken."""
    if not is_so:
        raise Broken(otherwise)


def answered(result: DraftResult) -> DraftResult:
    """OK, or rows still under way: the prefix is held. Raises Broken."""
    return expect(result, DraftStatus.OK, DraftStatus.NOT_READY)


def _row(width: int, seed: int) -> bytes:
    """`width` bf16 values around 0."""
    rng = random.Random(seed)
    floats = struct.pack(f"<{_PATTERN}f", *(rng.gauss(0.0, 1.0) for _ in range(_PATTERN)))
    values = b"".join(floats[at + 2 : at + 4] for at in range(0, len(floats), 4))
    return (values * (width // _PATTERN + 1))[: 2 * width]
