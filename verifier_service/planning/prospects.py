"""What each source may bring to each request: profiles out of evidence, cached between rounds.

Knows evidence and capabilities, no costs and no choice. A profile is re-made after a few rounds
of its request, or when the request's remaining tokens cap its depth.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from protos import plans
from protos.exchange import PlanKind
from verifier_service.engine.ports import SequenceView, SourceInfo
from verifier_service.planning.acceptance import MAX_DEPTH, RankEvidence
from verifier_service.planning.shapes import Node, Profile, chain_nodes, merge_nodes, tree_nodes

_REFRESH_ROUNDS: Final = 6


@dataclass(slots=True)
class _Cached:
    rounds: int
    remaining: int
    profiles: dict[tuple[tuple[tuple[str, int], ...], bool], Profile]


class Prospects:
    """Profiles per request for sets of sources."""

    def __init__(self, evidence: RankEvidence, max_nodes: int) -> None:
        self._evidence = evidence
        self._max_nodes = max_nodes
        self._rounds: dict[int, int] = {}
        self._cache: dict[int, _Cached] = {}

    def profile(
        self,
        view: SequenceView,
        infos: Sequence[SourceInfo],
        depths: Mapping[str, int],
        answered: Mapping[str, float],
        branching: bool,
    ) -> Profile:
        """The best nodes of these sources for this request, sources indexed as in `infos`.

        depths caps each source. Without branching one source's chain is taken, the one expected
        to commit most.
        """
        cache = self._cached(view)
        key = (tuple((i.name, depths[i.name]) for i in infos), branching)
        known = cache.profiles.get(key)
        if known is not None:
            return known
        lists = [
            self._nodes(view, info, depths[info.name], answered.get(info.name, 1.0), branching)
            for info in infos
        ]
        if not branching and lists:
            totals = [sum(node.survival for node in nodes) for nodes in lists]
            best = totals.index(max(totals))
            lists = [nodes if i == best else [] for i, nodes in enumerate(lists)]
        made = merge_nodes(lists, self._max_nodes)
        cache.profiles[key] = made
        return made

    def count_round(self, key: int) -> None:
        """A round of this request was observed."""
        self._rounds[key] = self._rounds.get(key, 0) + 1

    def num_rounds(self, key: int) -> int:
        """Rounds of this request that were observed."""
        return self._rounds.get(key, 0)

    def forget(self, key: int) -> None:
        """The request left."""
        self._rounds.pop(key, None)
        self._cache.pop(key, None)

    def _cached(self, view: SequenceView) -> _Cached:
        rounds = self._rounds.get(view.key, 0)
        capped = min(view.remaining, MAX_DEPTH + 1)
        cache = self._cache.get(view.key)
        fresh = cache is not None and rounds - cache.rounds < _REFRESH_ROUNDS
        if cache is None or not fresh or cache.remaining != capped:
            cache = self._cache[view.key] = _Cached(rounds, capped, {})
        return cache

    def _nodes(
        self, view: SequenceView, info: SourceInfo, depth: int, answered: float, branching: bool
    ) -> list[Node]:
        levels = min(depth, depth_limit(info), MAX_DEPTH, view.remaining - 1)
        if levels < 1:
            return []
        belief_DK = self._evidence.belief(view.key, info.name)
        if branching and not is_chain_only(info):
            nodes = tree_nodes(belief_DK, levels, width_limit(info), self._max_nodes)
        else:
            nodes = chain_nodes(belief_DK, levels)
        return [Node(node.survival * answered, node.depth) for node in nodes]


def is_chain_only(info: SourceInfo) -> bool:
    """Whether this source drafts nothing but chains."""
    return PlanKind.TREE not in info.capabilities.plan_kinds


def drafts_blocks(info: SourceInfo) -> bool:
    """Whether one pass of this source drafts all its levels: depth then costs it nothing."""
    return PlanKind.BLOCK in info.capabilities.plan_kinds


def depth_limit(info: SourceInfo) -> int:
    """Deepest draft this source offers."""
    return plans.depth_limit(info.capabilities)


def width_limit(info: SourceInfo) -> int:
    """Widest expansion that is asked of this source."""
    return plans.width_limit(info.capabilities)
