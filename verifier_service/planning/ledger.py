"""The books of every step: what it cost, what a plain one would have cost, what was gained.

Knows no drafters. A step is settled when the next one is planned, because rounds and the step's
time are reported in any order. Verify time enters through the cost model (corrected by every
measurement), so that a hiccup of the machine is charged to nobody; waits enter as measured.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from protos.generation import SpeculationMode
from verifier_service.engine.ports import RoundOutcome, SequenceView, StepReason
from verifier_service.planning.bank import CreditBank
from verifier_service.planning.costs import VerifyCosts
from verifier_service.planning.worth import Worth


@dataclass(slots=True)
class PlannerCounts:
    """Counts and sums since the start. draft rounds: rounds with at least one draft node."""

    num_steps: int = 0
    num_plain_steps: int = 0
    num_probes: int = 0
    num_rounds: int = 0
    num_draft_rounds: int = 0
    num_committed: int = 0
    num_draft_committed: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    verify_s: float = 0.0
    wait_s: float = 0.0
    predicted_s: float = 0.0
    plain_equivalent_s: float = 0.0
    chosen: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Step:
    """plain_s: verification of a plain step without prompts. elapsed_s: what it became, by the
    cost model, waits as measured.

    took_s: as measured, other_s of it neither verification nor wait.
    """

    plain_s: float
    elapsed_s: float
    took_s: float
    other_s: float


class Ledger:
    """Books steps into the cost model, the bank and the counts."""

    def __init__(self, verify: VerifyCosts, bank: CreditBank) -> None:
        self.counts = PlannerCounts()
        self._verify = verify
        self._bank = bank
        self._worth = Worth()
        self._has_asked = False
        self._has_prompts = False
        self._speculating: set[int] = set()
        self._committed: dict[int, int] = {}
        self._gone: set[int] = set()
        self._drafted = 0
        self._again_s = 0.0
        self._step: _Step | None = None
        self._num_decoding = 1
        self._reason = StepReason()

    def open_step(self, views: Sequence[SequenceView]) -> bool:
        """Settle the step before and begin the next; False when speculating does not pay now."""
        if self._step is not None and self._committed:
            self._settle(self._step, self._committed)
        for key in self._gone:
            self._bank.forget(key)
        self._gone = set()
        self._committed = {}
        self._step = None
        self._drafted = 0
        self._again_s = 0.0
        self._has_asked = False
        self._reason = StepReason()
        self._has_prompts = any(not v.decoding for v in views)
        self._num_decoding = sum(v.decoding for v in views)
        self._speculating = {
            v.key for v in views if v.decoding and v.speculation.mode is SpeculationMode.AUTO
        }
        pays = self._worth.open_step(frozenset(self._speculating))
        if not pays:
            self._reason = StepReason("paused: drafting has not paid")
        return pays

    def _settle(self, step: _Step, committed: dict[int, int]) -> None:
        self._bank.settle(committed, step.plain_s, step.elapsed_s)
        if self._has_prompts:
            return
        if self._has_asked:
            tokens = sum(committed.values()) / len(committed)
            self._worth.note(len(committed), tokens, step.plain_s, step.took_s)
        else:
            self._worth.note_plain(step.other_s)

    def note_asked(self, has_asked: bool) -> None:
        """Whether anybody is asked for a draft in the coming step."""
        self._has_asked = has_asked

    def base_rows(self, views: Sequence[SequenceView]) -> int:
        """Rows of the coming step without drafts and without prompts.

        What prompts take is owed whatever is drafted; counted in, it would make a step so dear
        that drafts of any worth seemed cheap in it.
        """
        return max(sum(view.decoding for view in views), 1)

    def note_label(self, label: tuple[str, ...], expected: float = 0.0) -> None:
        """Which option was chosen, and the tokens it promises for this step, if that is known."""
        name = "/".join(label)
        self._reason = StepReason(name, expected=expected)
        self.counts.chosen[name] = self.counts.chosen.get(name, 0) + 1

    def note_admitted(self, num_nodes: int, again_s: float = 0.0) -> None:
        """Draft nodes that the coming step verifies; again_s: for what their parts read twice."""
        self._drafted = num_nodes
        self._again_s = again_s

    def note_round(self, outcome: RoundOutcome) -> None:
        """One request's tokens."""
        counts = self.counts
        drafted = outcome.tree.num_nodes
        counts.num_rounds += 1
        counts.num_committed += outcome.num_committed
        counts.num_drafted += drafted
        counts.num_accepted += outcome.num_accepted
        if drafted:
            counts.num_draft_rounds += 1
            counts.num_draft_committed += outcome.num_committed
        if outcome.key in self._speculating:
            self._committed[outcome.key] = outcome.num_committed

    def note_step(
        self,
        num_rows: int,
        num_branching: int,
        context: int,
        verify_s: float,
        wait_s: float,
        other_s: float = 0.0,
    ) -> None:
        """One step's measured times."""
        drafted = min(self._drafted, num_rows - 1)
        base = num_rows - drafted
        own = min(self._num_decoding, base)
        again_s = min(self._again_s, 0.9 * verify_s)
        predicted_s = self._verify.seconds(num_rows, num_branching, context, drafted) + again_s
        self._verify.observe(num_rows, num_branching, context, drafted, verify_s - again_s)
        plain_s = self._verify.seconds(base, 0, context, 0)
        modelled_s = self._verify.seconds(num_rows, num_branching, context, drafted)
        own_s = plain_s if own == base else self._verify.seconds(max(own, 1), 0, context, 0)
        elapsed_s = own_s + max(modelled_s + again_s - plain_s, 0.0) + wait_s
        self._step = _Step(own_s, elapsed_s, verify_s + wait_s + other_s, other_s)
        counts = self.counts
        counts.num_steps += 1
        counts.num_plain_steps += not drafted
        counts.verify_s += verify_s
        counts.wait_s += wait_s
        counts.predicted_s += predicted_s
        counts.plain_equivalent_s += plain_s
        self._reason = replace(self._reason, plain_s=plain_s, predicted_s=predicted_s)

    def reason(self) -> StepReason:
        """What is known of why the newest step was as it was."""
        return self._reason

    def forget(self, key: int) -> None:
        """The request left; its last step is still settled into the whole."""
        self._gone.add(key)
