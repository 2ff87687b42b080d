"""A world without models: fake drafters, a cost table and a virtual clock around the real planner.

Pure and seeded; seconds are virtual. Text is random tokens; a drafter knows the next token at a
rank drawn from its own distribution and, once wrong, only guesses. What the planner learns here
it learns only through its port, as in the engine.
"""

import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from protos.exchange import Capabilities, PlanKind
from protos.generation import Speculation
from protos.params import SamplingParams
from protos.tree import CandidateTree, merge
from verifier_service.engine.ports import (
    Draft,
    Planner,
    RoundOutcome,
    SequenceView,
    SourceInfo,
    SourcePlan,
)

VOCAB = 50_000
CPU_STEP_S = {1: 0.030, 4: 0.030, 8: 0.035, 16: 0.042, 32: 0.054, 64: 0.106}
"""Measured on two cores: seconds of one forward over so many tokens."""


@dataclass
class FakeDrafter:
    """One source. hit(step) is the chance that its best guess is right, given the path is.

    A right token that is not its best guess stands at a later rank with chance `spread` each.
    base_s + depth x per_level_s is its latency; alive(step) false: it never answers.
    """

    name: str
    hit: Callable[[int], float]
    base_s: float
    per_level_s: float = 0.0
    spread: float = 0.3
    trees: bool = True
    local: bool = False
    max_depth: int = 8
    alive: Callable[[int], bool] = lambda step: True

    def latency_s(self, depth: int) -> float:
        """Time of a draft of `depth` levels."""
        return self.base_s + depth * self.per_level_s

    def info(self) -> SourceInfo:
        """As the exchange would offer it."""
        kinds = (PlanKind.CHAIN, PlanKind.TREE) if self.trees else (PlanKind.CHAIN,)
        capabilities = Capabilities(
            self.name, self.name, 1, kinds, max_depth=self.max_depth, max_width=8, max_nodes=63
        )
        typical = self.latency_s(4)
        p50, p95 = (0.0, 0.0) if self.local else (typical, 1.5 * typical)
        return SourceInfo(self.name, capabilities, self.local, p50, p95)

    def draft(
        self,
        plan_depth: int,
        width: int,
        nodes: int,
        truth: Sequence[int],
        step: int,
        rng: random.Random,
    ) -> tuple[CandidateTree, tuple[tuple[int, ...], ...]]:
        """A chain (width 1) or a best-first tree, and the ranked lists of its best path."""
        tokens: list[int] = []
        parents: list[int] = []
        scores: list[float] = []
        ranked: list[tuple[int, ...]] = []
        level = [(0, True, 0.0)]
        best = 0
        for depth in range(min(plan_depth, len(truth))):
            following: list[tuple[int, bool, float]] = []
            best_child = 0
            for node, on_path, above in level[:width]:
                ids = rng.sample(range(VOCAB, 2 * VOCAB), 8)
                rank = self._rank(step, rng) if on_path else 8
                if rank < 8:
                    ids[rank] = truth[depth]
                if node == best:
                    ranked.append(tuple(ids))
                for j in range(width):
                    tokens.append(ids[j])
                    parents.append(node)
                    score = above - 0.5 - 1.2 * j
                    scores.append(score)
                    following.append((len(tokens), rank == j, score))
                    if node == best and j == 0:
                        best_child = len(tokens)
            best = best_child
            level = sorted(following, key=lambda n: -n[2])
        tree = CandidateTree(tuple(tokens), tuple(parents), tuple(scores))
        return tree.best(nodes), tuple(ranked)

    def _rank(self, step: int, rng: random.Random) -> int:
        if rng.random() < self.hit(step):
            return 0
        for rank in range(1, 8):
            if rng.random() < self.spread:
                return rank
        return 8


@dataclass
class Totals:
    """What a run showed. plain_s: time plain decoding would have taken for the same tokens."""

    steps: int = 0
    tokens: int = 0
    elapsed_s: float = 0.0
    plain_s: float = 0.0
    worst_overrun_s: float = 0.0
    asked: dict[str, int] = field(default_factory=dict)
    fed: dict[str, int] = field(default_factory=dict)
    verified: int = 0
    plain_step_s: float = 0.0

    @property
    def speedup(self) -> float:
        """Tokens a second over plain decoding's."""
        return self.plain_s / self.elapsed_s


class World:
    """Closed loop of `concurrency` requests of `length` tokens each."""

    def __init__(
        self,
        planner: Planner,
        drafters: Sequence[FakeDrafter],
        concurrency: int = 1,
        length: int = 200,
        seed: int = 0,
        noise: float = 0.03,
        speculation: Speculation | None = None,
    ) -> None:
        self._speculation = speculation or Speculation()
        self._planner = planner
        self._drafters = {d.name: d for d in drafters}
        self._rng = random.Random(seed)
        self._noise = noise
        self._length = length
        self._next_key = 0
        self._views: dict[int, tuple[list[int], int]] = {}
        self._concurrency = concurrency
        self.step = 0
        self.total = Totals()

    def run(self, steps: int) -> Totals:
        """Advance; returns what these steps alone showed."""
        before = self.total
        self.total = Totals(worst_overrun_s=before.worst_overrun_s)
        for _ in range(steps):
            self._one_step()
        part, self.total = self.total, _sum(before, self.total)
        return part

    def _one_step(self) -> None:
        self.step += 1
        while len(self._views) < self._concurrency:
            self._next_key += 1
            self._views[self._next_key] = ([1] * 200, self._length)
        views = [self._view(key) for key in self._views]
        infos = [d.info() for d in self._drafters.values()]
        plans, deadline_s = self._planner.plan(views, infos)
        truths = {v.key: [self._rng.randrange(VOCAB) for _ in range(20)] for v in views}
        drafts = {}
        outside_s: list[float] = [0.0]
        inside_s: dict[str, float] = {}
        for view, asked in zip(views, plans, strict=True):
            drafts[view.key] = self._draft(asked, truths[view.key], deadline_s, inside_s, outside_s)
        wait_s = max(sum(inside_s.values()), max(outside_s))
        merged = [merge([d.tree for d in drafts[v.key]]) for v in views]
        names = [
            tuple(tuple(drafts[v.key][i].source for i in owners) for owners in nodes)
            for v, (_, nodes) in zip(views, merged, strict=True)
        ]
        trees = self._planner.admit(views, [t for t, _ in merged], 256, names)
        rows = len(views) + sum(t.num_nodes for t in trees)
        branching = sum(t.num_nodes + 1 for t in trees if not t.is_chain)
        verify_s = step_s(rows, branching) * (1 + self._rng.uniform(-self._noise, self._noise))
        committed = 0
        for view, tree in zip(views, trees, strict=True):
            committed += self._commit(view, tree, truths[view.key], drafts[view.key])
        context = sum(v.base_len for v in views)
        self._planner.observe_step(rows, branching, context, verify_s, wait_s)
        total, plain = self.total, step_s(len(views), 0)
        total.steps += 1
        total.tokens += committed
        total.elapsed_s += verify_s + wait_s
        total.plain_s += committed / len(views) * plain
        total.plain_step_s = plain
        total.verified += rows - len(views)
        total.worst_overrun_s = max(total.worst_overrun_s, total.elapsed_s - 1.05 * total.plain_s)

    def _view(self, key: int) -> SequenceView:
        tokens, remaining = self._views[key]
        params = SamplingParams(temperature=0.0, max_tokens=self._length)
        return SequenceView(
            key, str(key), tokens, len(tokens) - 1, params, self._speculation, remaining, True
        )

    def _draft(
        self,
        asked: Sequence[SourcePlan],
        truth: Sequence[int],
        deadline_s: float,
        inside_s: dict[str, float],
        outside_s: list[float],
    ) -> list[Draft]:
        """Sources draft for all requests at once: those inside one after another."""
        drafts = []
        for ask in asked:
            drafter, plan = self._drafters[ask.source], ask.plan
            if plan.kind is PlanKind.NONE:
                self.total.fed[ask.source] = self.total.fed.get(ask.source, 0) + 1
                continue
            self.total.asked[ask.source] = self.total.asked.get(ask.source, 0) + 1
            width = plan.width if plan.kind is PlanKind.TREE else 1
            nodes = plan.nodes if plan.kind is PlanKind.TREE else plan.depth
            latency_s = drafter.latency_s(plan.depth)
            if drafter.local:
                inside_s[ask.source] = max(inside_s.get(ask.source, 0.0), latency_s)
            else:
                late = not drafter.alive(self.step) or latency_s > deadline_s
                outside_s.append(deadline_s if late else latency_s)
                if late:
                    continue
            tree, ranked = drafter.draft(plan.depth, width, nodes, truth, self.step, self._rng)
            drafts.append(Draft(ask.source, 0, tree, ranked, latency_s))
        return drafts

    def _commit(
        self, view: SequenceView, tree: CandidateTree, truth: Sequence[int], drafts: list[Draft]
    ) -> int:
        table, node, accepted = tree.children(), 0, 0
        while accepted < view.remaining - 1 and truth[accepted] in table[node]:
            node = table[node][truth[accepted]]
            accepted += 1
        committed = accepted + 1
        self._planner.observe_round(
            RoundOutcome(
                view.key,
                view.base_len,
                tree,
                ((),) * tree.num_nodes,
                tuple(drafts),
                tuple(truth[:committed]),
                accepted,
                committed,
            )
        )
        tokens, remaining = self._views[view.key]
        tokens.extend(truth[:committed])
        self._views[view.key] = (tokens, remaining - committed)
        if remaining - committed <= 0:
            del self._views[view.key]
            self._planner.forget(view.key)
        return committed


def step_s(rows: int, branching: int) -> float:
    """The world's own verify time, which the planner has to learn."""
    points = sorted(CPU_STEP_S)
    for low, high in itertools.pairwise(points):
        if rows <= high:
            share = (rows - low) / (high - low)
            base = CPU_STEP_S[low] + share * (CPU_STEP_S[high] - CPU_STEP_S[low])
            break
    else:
        base = CPU_STEP_S[points[-1]] * rows / points[-1]
    return base + 0.0004 * branching


def _sum(a: Totals, b: Totals) -> Totals:
    asked, fed = _sums(a.asked, b.asked), _sums(a.fed, b.fed)
    return Totals(
        a.steps + b.steps,
        a.tokens + b.tokens,
        a.elapsed_s + b.elapsed_s,
        a.plain_s + b.plain_s,
        max(a.worst_overrun_s, b.worst_overrun_s),
        asked,
        fed,
        a.verified + b.verified,
        b.plain_step_s,
    )


def _sums(a: dict[str, int], b: dict[str, int]) -> dict[str, int]:
    return {name: a.get(name, 0) + b.get(name, 0) for name in {*a, *b}}
