"""What the planner verifies of a fixed request's merged draft, without an engine around it.

The same calibration and the same choice as `Gate` makes for requests with a fixed plan, for whoever
replays recorded texts. Knows no sources, costs or prices. Used by one thread.
"""

from collections.abc import Sequence

from protos.tree import CandidateTree
from verifier_service.planning.admission import best_nodes
from verifier_service.planning.calibration import Calibration, Names


class FixedAdmission:
    """Learns what scores are worth, and keeps the nodes that survive most often."""

    def __init__(self) -> None:
        self._calibration = Calibration()

    def admit(
        self, key: int, tree: CandidateTree, sources: Sequence[Names], most: int
    ) -> CandidateTree:
        """The `most` nodes that survive most often. sources: per node, who proposed it."""
        survival = self._calibration.survivals(key, tree, sources)
        return tree.keep(best_nodes(survival, most))

    def observe(
        self, key: int, drafts: Sequence[tuple[str, CandidateTree]], choices: Sequence[int]
    ) -> None:
        """Learn from a round: what each source proposed, and the target's tokens from there on."""
        self._calibration.observe_drafts(key, drafts, choices)

    def forget(self, key: int) -> None:
        """The text has ended."""
        self._calibration.forget(key)
