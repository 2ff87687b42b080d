"""The ingress-side choice: which drafters a request may be drafted by.

Pure: published statistics in, a request with fewer drafters out. The slow half of two time scales
(design 8): verifiers re-plan every round from the request's own evidence; this only keeps a
drafter that nobody's target agrees with from being fed every new prompt. Which verifier takes a
request is chosen in `verifier_router` (power of two by queue length); which replica of a drafter,
by the verifier (least load). Invariants: the text and the user's override are never touched;
evidence fades, so that nothing is left out for good.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from cluster.fleet.messages import VerifierReport
from protos.generation import GenerationRequest, SpeculationMode

MIN_DRAFTED: Final = 256.0
"""Draft tokens, faded, below which a drafter is not judged."""
HOPELESS_RATE: Final = 0.02
"""Accepted over drafted below which feeding a drafter is a waste."""
MEMORY: Final = 0.9
"""Share of the evidence kept from one look to the next."""

_DRAFTED: Final = "drafted_total_by_source"
_ACCEPTED: Final = "accepted_total_by_source"


@dataclass(slots=True)
class _Evidence:
    """Faded sums of one drafter, and the totals they were taken from."""

    drafted: float = 0.0
    accepted: float = 0.0
    seen_drafted: float = 0.0
    seen_accepted: float = 0.0

    def learn(self, drafted: float, accepted: float) -> None:
        # Totals fall when a verifier restarts: then everything it counts is new.
        new = drafted - self.seen_drafted if drafted >= self.seen_drafted else drafted
        agreed = accepted - self.seen_accepted if accepted >= self.seen_accepted else accepted
        self.drafted = self.drafted * MEMORY + new
        self.accepted = self.accepted * MEMORY + agreed
        self.seen_drafted, self.seen_accepted = drafted, accepted

    @property
    def is_hopeless(self) -> bool:
        return self.drafted >= MIN_DRAFTED and self.accepted < HOPELESS_RATE * self.drafted


class Router:
    """Learns from reports; routes requests."""

    def __init__(self) -> None:
        self._evidence: dict[str, _Evidence] = {}

    def learn(self, reports: Sequence[VerifierReport]) -> None:
        """Take the newest reports of all verifiers."""
        for name in dict.fromkeys(s.name for report in reports for s in report.sources):
            drafted = sum(_count(report.statistics, _DRAFTED, name) for report in reports)
            accepted = sum(_count(report.statistics, _ACCEPTED, name) for report in reports)
            self._evidence.setdefault(name, _Evidence()).learn(drafted, accepted)

    def route(self, request: GenerationRequest) -> GenerationRequest:
        """The request without hopeless drafters, where the user left the choice open."""
        speculation = request.speculation
        if request.params.uses_rejection:
            return request
        if speculation.mode is not SpeculationMode.AUTO or speculation.drafters:
            return request
        usable = tuple(n for n, evidence in self._evidence.items() if not evidence.is_hopeless)
        if not usable or len(usable) == len(self._evidence):
            return request
        return replace(request, speculation=replace(speculation, drafters=usable))


def _count(statistics: Mapping[str, object], key: str, name: str) -> float:
    by_source = statistics.get(key)
    count = by_source.get(name, 0) if isinstance(by_source, Mapping) else 0
    return float(count)
