"""The options of one step: sets of sources worth waiting for, with costs and profiles.

Knows no state of its own. Sources in this process that answer in no time (look-ups) belong to
every option and are asked always; the others cost a wait, so they are chosen.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Final

from verifier_service.engine.ports import SequenceView, SourceInfo
from verifier_service.planning.asking import allowed
from verifier_service.planning.choice import Option
from verifier_service.planning.costs import VerifyCosts
from verifier_service.planning.prospects import Prospects, depth_limit
from verifier_service.planning.settings import PlannerSettings
from verifier_service.planning.sources import ExposedWait, SourceCosts, reply_deadline_s

_FREE_SHARE: Final = 0.15
"""A look-up in this process (no checkpoint) is not chosen but asked, unless it takes more of a
plain step than this."""

MAX_WAITED: Final = 2
"""More drafters in one round than this are not considered: options grow with the power set."""


Label = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Market:
    """What one step has to offer. base_rows: rows without drafts; plain_s: time of such a step."""

    free: tuple[SourceInfo, ...]
    priced: tuple[SourceInfo, ...]
    base_rows: int
    context: int
    plain_s: float
    may_spend_s: float
    sunk_wait_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Offer:
    """An option and what it means: sources to wait for, their depth, whether trees branch.

    infos: all its sources, the free ones first.
    """

    option: Option
    infos: tuple[SourceInfo, ...]
    waited: tuple[SourceInfo, ...]
    depth: int
    branching: bool


class Delays:
    """Latency, wait and reliability of all sources."""

    def __init__(self) -> None:
        self.by_source: dict[str, SourceCosts] = {}
        self.exposed = ExposedWait()

    def of(self, name: str) -> SourceCosts:
        """Costs of one source, made when first needed."""
        return self.by_source.setdefault(name, SourceCosts())

    def unscaled_s(self, infos: Sequence[SourceInfo], depth: int) -> float:
        """Latency of a step that waits for these sources, before exposure is learnt."""
        latencies = {}
        for info in infos:
            costs = self.of(info.name)
            share = costs.answered
            latency = costs.latency_s(min(depth, depth_limit(info)), info)
            missed = 0.0 if info.local else reply_deadline_s(info)
            latencies[info.name] = share * latency + (1.0 - share) * max(missed, latency)
        return ExposedWait.unscaled_s(latencies, {i.name: i.local for i in infos})

    def wait_s(self, infos: Sequence[SourceInfo], depth: int) -> float:
        """Expected wait of a step that asks these sources for this depth."""
        return self.exposed.factor * self.unscaled_s(infos, depth)


def offers(
    views: Sequence[SequenceView],
    market: Market,
    prospects: Prospects,
    delays: Delays,
    verify: VerifyCosts,
    settings: PlannerSettings,
    only: Label | None = None,
) -> list[Offer]:
    """Every option of a step for the requests in `views`, which may all speculate.

    only: make just the option of this label, if it still exists.
    """
    answered = {name: costs.answered for name, costs in delays.by_source.items()}
    room = settings.max_nodes * len(views)
    ladders = {
        branching: verify.ladder(market.base_rows, room, branching, market.context)
        for branching in (False, True)
    }
    made = []
    for waited, depth in _waits(market.priced, settings.depths):
        wait_s = max(delays.wait_s(waited, depth) if waited else 0.0, market.sunk_wait_s)
        infos = (*market.free, *waited)
        depths = {i.name: depth_limit(i) for i in market.free} | {i.name: depth for i in waited}
        for branching in (False, True):
            shape = "tree" if branching else "chain"
            label = (*(i.name for i in waited), f"depth{depth}", shape)
            if only is not None and label != only:
                continue
            profiles = tuple(
                prospects.profile(
                    view, allowed(view.speculation, infos), depths, answered, branching
                )
                for view in views
            )
            option = Option(
                label=(
                    *(i.name for i in waited),
                    f"depth{depth}",
                    "tree" if branching else "chain",
                ),
                profiles=profiles,
                cost_s=ladders[branching],
                wait_s=wait_s,
                plain_s=market.plain_s,
                may_spend_s=market.may_spend_s + market.sunk_wait_s,
            )
            made.append(Offer(option, infos, waited, depth, branching))
    return made


def split(
    infos: Sequence[SourceInfo], delays: Delays, plain_s: float
) -> tuple[tuple[SourceInfo, ...], tuple[SourceInfo, ...]]:
    """Sources that cost no time worth counting, and the others."""
    free: list[SourceInfo] = []
    priced: list[SourceInfo] = []
    for info in infos:
        latency_s = delays.of(info.name).latency_s(depth_limit(info), info)
        quick = latency_s < _FREE_SHARE * plain_s
        is_lookup = info.local and not info.capabilities.digest
        (free if is_lookup and quick else priced).append(info)
    return tuple(free), tuple(priced)


def _waits(
    priced: Sequence[SourceInfo], depths: Sequence[int]
) -> Iterator[tuple[tuple[SourceInfo, ...], int]]:
    yield (), 0
    for size in range(1, MAX_WAITED + 1):
        for waited in combinations(priced, size):
            deepest = max(depth_limit(info) for info in waited)
            for depth in sorted({min(depth, deepest) for depth in depths}):
                yield waited, depth


def by_name(infos: Sequence[SourceInfo]) -> Mapping[str, SourceInfo]:
    """Sources by their name."""
    return {info.name: info for info in infos}
