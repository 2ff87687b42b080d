"""The gate: which nodes of a step's merged trees are verified.

Knows no drafters' delays and asks nobody. Fixed requests keep what their plan names; of the others
the nodes that pay are kept. Requests that have lost what they may lose take no part in a step that
costs more than a plain one; now and then a size of step that does not pay is tried, because a
price that was measured wrong must not stay.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from protos.generation import SpeculationMode
from protos.tree import CandidateTree
from verifier_service.engine.ports import SequenceView
from verifier_service.planning.admission import StepCosts, admit_nodes, best_nodes
from verifier_service.planning.asking import fixed_node_budget
from verifier_service.planning.bank import CreditBank
from verifier_service.planning.calibration import Calibration, Names
from verifier_service.planning.costs import VerifyCosts
from verifier_service.planning.readings import WeighedTree, positions_again, weigh
from verifier_service.planning.settings import PlannerSettings

_PROBE_NODES: Final = (3, 7, 15)
_FIXED_PARTS: Final = 2
"""Parts of a fixed request's tree where the request names no plan of its own."""


@dataclass(frozen=True, slots=True)
class GateStep:
    """What is known of the step: its number, rows without drafts, positions read, wait expected.

    poor: requests that may lose nothing more.
    """

    number: int
    base_rows: int
    context: int
    wait_s: float
    poor: frozenset[int]


class Gate:
    """Admission with the prices, the bank and the calibration of one planner."""

    def __init__(
        self,
        verify: VerifyCosts,
        bank: CreditBank,
        calibration: Calibration,
        settings: PlannerSettings,
    ) -> None:
        self._verify = verify
        self._bank = bank
        self._calibration = calibration
        self._settings = settings
        self.again_s = 0.0
        """Of the newest step: for what its trees' parts read more than once."""
        self._last_probe = 0
        self._probe_size = 0

    def admit(
        self,
        views: Sequence[SequenceView],
        trees: Sequence[CandidateTree],
        room: int,
        sources: Sequence[tuple[Names, ...]],
        step: GateStep,
    ) -> list[CandidateTree]:
        """The trees cut, at most `room` nodes in all; fixed requests are served first."""
        cut = [CandidateTree()] * len(trees)
        starts = [0] * len(trees)
        free: list[int] = []
        weighed: list[WeighedTree] = []
        for index, (view, tree) in enumerate(zip(views, trees, strict=True)):
            mode = view.speculation.mode
            if not tree.num_nodes or mode is SpeculationMode.OFF or view.remaining < 2:
                continue
            names = sources[index] if sources else ()
            survival = self._calibration.survivals(view.key, tree, names)
            one = weigh(tree, survival, view.base_len - 1, self._verify)
            starts[index] = one.start
            if mode is SpeculationMode.FIXED:
                most = min(room, fixed_node_budget(view.speculation) or room)
                nodes = best_nodes(one.survival, most)
                if view.speculation.plan is None:
                    nodes = [node for node in nodes if one.part(node) < _FIXED_PARTS]
                cut[index] = one.tree.keep(nodes)
                room -= cut[index].num_nodes
            else:
                free.append(index)
                weighed.append(one)
        keys = [views[index].key for index in free]
        kept = self._admit_free(keys, weighed, len(views), room, step)
        for index, tree in zip(free, kept, strict=True):
            cut[index] = tree
        self.again_s = self._again_s(cut, starts)
        return cut

    def _again_s(self, trees: Sequence[CandidateTree], starts: Sequence[int]) -> float:
        """Of what parts read once more. starts: of each tree, 0 where it is known to be one."""
        pairs = [(tree, start) for tree, start in zip(trees, starts, strict=True) if start]
        again = sum(positions_again(tree, start, self._verify) for tree, start in pairs)
        return again * self._verify.position_s

    def _admit_free(
        self,
        keys: Sequence[int],
        trees: Sequence[WeighedTree],
        num_requests: int,
        room: int,
        step: GateStep,
    ) -> list[CandidateTree]:
        if not trees or room < 1:
            return [CandidateTree()] * len(trees)
        plain_s = self._verify.seconds(step.base_rows, 0, step.context, 0)
        drafted = sum(one.tree.num_nodes for one in trees)
        most = min(room, drafted, self._settings.max_nodes * len(trees))
        costs = StepCosts(
            chain_s=self._verify.ladder(step.base_rows, most, False, step.context),
            tree_s=self._verify.ladder(step.base_rows, most, True, step.context),
            wait_s=step.wait_s,
            limit_s=plain_s + max(self._bank.may_spend_s(plain_s), step.wait_s),
            position_s=self._verify.position_s,
        )
        kept, _ = admit_nodes(trees, num_requests, costs)
        extra_s = costs.tree_s[sum(t.num_nodes for t in kept)] - plain_s
        extra_s += self._again_s(kept, [one.start for one in trees])
        if step.poor and extra_s > self._settings.extra_share * plain_s:
            rich = [
                WeighedTree(CandidateTree(), ()) if key in step.poor else one
                for key, one in zip(keys, trees, strict=True)
            ]
            kept, _ = admit_nodes(rich, num_requests, costs)
        probe = self._price_probe(step, sum(t.num_nodes for t in kept), most, plain_s)
        if probe:
            flat_s = np.full(probe + 1, plain_s)
            flat = StepCosts(flat_s, flat_s, 0.0, plain_s, costs.position_s)
            kept, _ = admit_nodes(trees, num_requests, flat)
        return kept

    def _price_probe(self, step: GateStep, num_kept: int, most: int, plain_s: float) -> int:
        """Nodes to verify instead, to learn what they really cost; 0: none."""
        due = step.number - self._last_probe >= self._settings.price_probe_every
        if not due or self._bank.balance_s < plain_s:
            return 0
        self._last_probe = step.number
        self._probe_size = (self._probe_size + 1) % len(_PROBE_NODES)
        count = min(_PROBE_NODES[self._probe_size], most)
        return count if count > num_kept else 0
