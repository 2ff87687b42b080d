"""The ingress-side choice: which drafters a request may start with, and its first plan.

Pure: statistics in, a hint out. The slow half of two time scales (design 8): the verifier's
planner re-plans every round from the request's own evidence; this only spares it a cold start.
Which verifier takes the request is Serve's choice (power of two by queue length). Invariant: the
request's text and the user's override are never touched.
"""

from collections.abc import Sequence
from dataclasses import replace

from cluster.fleet.messages import VerifierReport
from protos.generation import GenerationRequest, SpeculationMode


class Router:
    """Learns from reports; routes requests."""

    def __init__(self) -> None:
        self._usable: tuple[str, ...] = ()

    def learn(self, reports: Sequence[VerifierReport]) -> None:
        """Take the newest reports: a drafter is usable where some verifier reaches a replica."""
        names = [s.name for r in reports for s in r.sources if s.local or s.num_replicas > 0]
        self._usable = tuple(dict.fromkeys(names))

    def route(self, request: GenerationRequest) -> GenerationRequest:
        """The request with the drafters it may start with, where the user left them open."""
        speculation = request.speculation
        if speculation.mode is not SpeculationMode.AUTO or speculation.drafters:
            return request
        return replace(request, speculation=replace(speculation, drafters=self._usable))
