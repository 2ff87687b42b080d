"""How well one drafter guesses the built-in text: the works to ask it, and the score.

A state machine without a wire: whoever holds a drafter asks what `works` yields. Position by
position the drafter is told one more token of the text, with its row, and guesses the next; the
guess is compared with the target's own choice there. Knows no algorithm.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

from protos.errors import OutriderError
from protos.exchange import (
    INLINE_ROWS_BYTES,
    Capabilities,
    DraftResult,
    DraftStatus,
    DraftWork,
    Plan,
    PlanKind,
    SessionOpen,
)
from protos.features import FeatureForm, FeatureRows
from protos.params import SamplingParams
from verifier_service.engine.draft_form import RowForm
from verifier_service.pairs.text import NUM_POSITIONS, ReadText

MIN_AGREEMENT: Final = 0.05
"""Below it a pair is refused: less than guessing common words gives (design 7)."""

BUDGET_S: Final = 10.0
"""A test that takes longer is cut short: starting must not wait for a slow drafter."""

FEWEST_POSITIONS: Final = 16
"""A test that was cut short before so many positions decides nothing."""

CAUSES: Final = (
    "aux layer ids read in another convention, a head trained for another target or revision, "
    "a draft vocabulary mapping that does not belong to its lm_head, or weights of another kind"
)

Ask = Callable[[DraftWork], DraftResult | None]
"""Asks a drafter for one work and waits; None when none is due, or it broke the contract."""


@dataclass(frozen=True, slots=True)
class PairScore:
    """num_agreed of num_positions first guesses were the target's choice.

    num_drafted: positions at which there was a guess at all. detail: why the test ended early.
    """

    num_agreed: int
    num_drafted: int
    num_positions: int
    detail: str = ""

    @property
    def agreement(self) -> float:
        """Share of positions at which the guess was right."""
        return self.num_agreed / max(self.num_positions, 1)

    @property
    def is_decisive(self) -> bool:
        """Enough positions were tried to say something."""
        return self.num_positions >= FEWEST_POSITIONS

    def trouble(self, min_agreement: float = MIN_AGREEMENT) -> str:
        """Why this pair is not used; empty when it is."""
        if not self.is_decisive or self.agreement >= min_agreement:
            return ""
        return (
            f"first guesses agree with the target at {self.num_agreed} of {self.num_positions} "
            f"positions of the test text ({100 * self.agreement:.1f} %, at least "
            f"{100 * min_agreement:.0f} % is wanted); likely causes: {CAUSES}"
        )


def score_pair(
    text: ReadText, form: RowForm, capabilities: Capabilities, session_id: int, ask: Ask
) -> PairScore:
    """Let a drafter guess the text. form: the rows it is sent; session_id: one nobody else uses.

    Raises whatever `ask` raises; the session is left open, `closing_work` ends it.
    """
    agreed = drafted = tried = 0
    until_s = time.monotonic() + BUDGET_S
    for work in _works(text, form, capabilities, session_id):
        result = ask(work)
        if result is None or result.status not in (DraftStatus.OK, DraftStatus.NOT_READY):
            detail = "a malformed answer" if result is None else f"{result.status} {result.detail}"
            return PairScore(agreed, drafted, tried, detail.strip())
        if work.plan.kind is not PlanKind.NONE:
            tried += 1
            guess = result.tree.tokens[0] if result.tree.num_nodes else None
            drafted += guess is not None
            agreed += guess is not None and guess == text.choices[work.base_len - 1]
        if time.monotonic() > until_s:
            return PairScore(agreed, drafted, tried, f"{BUDGET_S:.0f} s were over")
    return PairScore(agreed, drafted, tried)


def closing_work(capabilities: Capabilities, session_id: int) -> DraftWork:
    """Ends the test's session; nothing is answered."""
    return DraftWork(session_id, capabilities.incarnation, 1, 1, (), close=True)


def try_pair(
    text: ReadText, form: RowForm, capabilities: Capabilities, session_id: int, ask: Ask
) -> PairScore:
    """As `score_pair`, the session closed; a drafter that fails decides nothing.

    Nothing is asked, and nothing decided, where there is no text.
    """
    if not text.token_ids:
        return PairScore(0, 0, 0, "the target's tokenizer gives no test text")
    try:
        return score_pair(text, form, capabilities, session_id, ask)
    except OutriderError as error:
        return PairScore(0, 0, 0, f"{type(error).__name__}: {error}")
    finally:
        ask(closing_work(capabilities, session_id))


def _works(
    text: ReadText, form: RowForm, capabilities: Capabilities, session_id: int
) -> Iterator[DraftWork]:
    """Opening and context without a plan, in entries small enough to ride inline; then guesses."""
    room = capabilities.max_context - 1 if capabilities.max_context else len(text.token_ids)
    end = min(len(text.token_ids), room)
    begin = max(1, end - NUM_POSITIONS + 1)
    rows_at_once = max(INLINE_ROWS_BYTES // form.row_bytes, 1) if form.row_bytes else begin
    lengths = [*range(min(rows_at_once + 1, begin), begin, rows_at_once), *range(begin, end + 1)]
    opened: SessionOpen | None = SessionOpen(
        "pair-test", SamplingParams(temperature=0.0), form.form, form.width, form.dtype
    )
    held = 0
    for length in lengths:
        yield DraftWork(
            session_id=session_id,
            incarnation=capabilities.incarnation,
            base_len=length,
            token_start=held,
            tokens=text.token_ids[held:length],
            plan=_guess_plan(capabilities) if length >= begin else Plan(),
            open=opened,
            rows=_rows(text, form, max(held - 1, 0), length - 1),
        )
        opened, held = None, length


def _guess_plan(capabilities: Capabilities) -> Plan:
    """One token, in the simplest shape that the drafter knows."""
    for kind in (PlanKind.CHAIN, PlanKind.BLOCK, PlanKind.TREE):
        if kind in capabilities.plan_kinds:
            return Plan(kind, depth=1, width=1, nodes=1 if kind is PlanKind.TREE else 0)
    return Plan()


def _rows(text: ReadText, form: RowForm, start: int, end: int) -> FeatureRows | None:
    """Rows [start, end) of the text; rows trail tokens by one."""
    if form.form is FeatureForm.NONE or start >= end:
        return None
    whole = text.rows[form.tap]
    row_bytes = form.row_bytes
    data = whole.data[start * row_bytes : end * row_bytes]
    return FeatureRows(start, end - start, whole.width, whole.dtype, data)
