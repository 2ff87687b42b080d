"""Requests that use rejection, through the real engine: the target's distribution, token by token.

The text of such a request depends on its drafts; over many seeds it must not show. Thresholds and
seeds are fixed, so a run either always passes or always fails.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product
from types import SimpleNamespace

import pytest
import torch

from protos.exchange import Capabilities, Plan, PlanKind
from protos.generation import Speculation, SpeculationMode
from protos.noise import Purpose, draw
from protos.params import Acceptance, SamplingParams
from protos.sparse import SparseQ, sparse_q
from protos.tree import CandidateTree, chain
from tests.fakes import Client, FakeDrafting, TableTarget, request, small_settings
from verifier_service.engine.loop import Engine
from verifier_service.engine.ports import Draft, DraftAsk, SequenceView, SourceInfo
from verifier_service.engine.static_planner import StaticPlanner

LEAST_P = 1e-4
V = 4
TABLE = {t: torch.randn(V, generator=torch.Generator().manual_seed(t)).tolist() for t in range(V)}
TEMPERATURE = 0.9

QOf = Callable[[Sequence[int]], SparseQ]


def near(path: Sequence[int]) -> SparseQ:
    probs = torch.softmax(torch.tensor(TABLE[path[-1]]) / 1.4, -1)
    return sparse_q(range(V), probs.tolist())


def far(path: Sequence[int]) -> SparseQ:
    """Almost all weight on what the target likes least, and nothing on one token."""
    order = torch.tensor(TABLE[path[-1]]).argsort().tolist()
    return sparse_q(order[:3], (0.7, 0.2, 0.1))


def certain(path: Sequence[int]) -> SparseQ:
    return sparse_q(((path[-1] + 1) % V,), (1.0,))


class QDrafting(FakeDrafting):
    """Chains sampled from `q_of`, with their q. is_late: every third comes a step late."""

    def __init__(self, q_of: QOf, purpose: Purpose = Purpose.DRAFT, is_late: bool = False) -> None:
        super().__init__({"sampler": lambda view, plan: CandidateTree()})
        self._q_of = q_of
        self._purpose = purpose
        self._is_late = is_late
        self._held: dict[int, tuple[int, CandidateTree, tuple[SparseQ, ...]]] = {}
        self._count = 0

    def sources(self) -> Sequence[SourceInfo]:
        kinds = (PlanKind.CHAIN,)
        record = Capabilities("fake", "sampler", 1, kinds, max_depth=8, gives_q=True)
        look_up = Capabilities("fake", "look-up", 1, kinds, max_depth=8)
        return [SourceInfo("look-up", look_up, True), SourceInfo("sampler", record, True)]

    def exchange(self, asks: Sequence[DraftAsk], deadline_s: float) -> dict[int, list[Draft]]:
        self.asked.append(tuple(asks))
        found: dict[int, list[Draft]] = {}
        for ask in asks:
            for wanted in ask.plans:
                assert wanted.source == "sampler"
                if wanted.plan.kind is PlanKind.NONE:
                    continue
                tree, q = self._sample(ask.view, wanted.plan)
                draft = self._hand_over(ask.view, tree, q)
                if draft is not None:
                    found[ask.view.key] = [draft]
        return found

    def _sample(self, view: SequenceView, plan: Plan) -> tuple[CandidateTree, tuple[SparseQ, ...]]:
        path, q = list(view.tokens), []
        for depth in range(plan.depth):
            q.append(self._q_of(path))
            ids, weights = q[-1].ids, q[-1].weights
            position = view.base_len + depth
            path.append(ids[draw(view.params.seed, self._purpose, position, ids, weights)])
        return chain(path[view.base_len :]), tuple(q)

    def _hand_over(
        self, view: SequenceView, tree: CandidateTree, q: tuple[SparseQ, ...]
    ) -> Draft | None:
        held = self._held.pop(view.key, None)
        if held is not None:
            base_len, old, old_q = held
            committed = tuple(view.tokens[base_len:])
            left = old.reroot(committed)
            if left.num_nodes:
                rest = old_q[len(committed) :]
                return Draft("sampler", view.base_len, left, was_late=True, q=rest)
        self._count += 1
        if self._is_late and self._count % 3 == 0:
            self._held[view.key] = (view.base_len, tree, q)
            return None
        return Draft("sampler", view.base_len, tree, q=q)


def rejected(name: str, seed: int, num_tokens: int = 3, **values) -> object:
    return request(
        name,
        [1, 0],
        num_tokens,
        temperature=TEMPERATURE,
        seed=seed,
        acceptance=Acceptance.REJECTION,
        **values,
    )


def run(drafting: FakeDrafting, count: int, num_tokens: int = 3, **settings):
    engine = Engine(TableTarget(TABLE), drafting, StaticPlanner(), small_settings(**settings))
    client = Client(engine)
    for first in range(0, count, 64):
        for seed in range(first, min(first + 64, count)):
            client.submit(rejected(str(seed), seed, num_tokens))
        client.finish()
    engine.check_idle()
    return client


def truth(num_tokens: int) -> dict[tuple[int, ...], float]:
    probs = {t: torch.softmax(torch.tensor(TABLE[t]) / TEMPERATURE, -1).tolist() for t in TABLE}
    found = {}
    for text in product(range(V), repeat=num_tokens):
        value = 1.0
        for before, token in zip((0, *text), text, strict=False):
            value *= probs[before][token]
        found[text] = value
    return found


def p_value(texts: Sequence[tuple[int, ...]], expected: dict[tuple[int, ...], float]) -> float:
    counts, count = Counter(texts), len(texts)
    value = sum((counts[t] - count * p) ** 2 / (count * p) for t, p in expected.items())
    freedom = torch.tensor((len(expected) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom, torch.tensor(value / 2)))


@pytest.mark.parametrize("is_late", [False, True])
@pytest.mark.parametrize("q_of", [near, far, certain])
def test_texts_are_distributed_as_the_target_samples_them(q_of, is_late):
    client = run(QDrafting(q_of, is_late=is_late), 2000)
    assert p_value(list(client.texts().values()), truth(3)) > LEAST_P


def test_little_room_and_preemption_do_not_show():
    """Chains cut by room, requests that begin again: pages for three of eight requests."""
    client = run(QDrafting(near), 1500, 3, num_slots=16, page_size=2, max_tokens_per_step=9)
    assert p_value(list(client.texts().values()), truth(3)) > LEAST_P


def test_good_chains_are_accepted_and_counted():
    client = run(QDrafting(near), 200, 20)
    counts = [client.last(name).counts for name in client.runs]
    accepted = sum(c.num_accepted for c in counts)
    drafted = sum(c.num_drafted for c in counts)
    assert accepted > 0.6 * drafted
    assert {source for c in counts for source, _ in c.accepted_by_source} == {"sampler"}


def test_the_same_drafts_give_the_same_text_and_others_another():
    first, again = (run(QDrafting(near), 60, 12).texts() for _ in range(2))
    assert first == again
    assert run(QDrafting(far), 60, 12).texts() != first


def test_tokens_that_were_not_drawn_from_their_q_do_not_show():
    """A drafter with a fault draws with other noise: its q is used, its word is not."""
    client = run(QDrafting(near, purpose=Purpose.CHOICE), 2000)
    assert client.engine.stats().num_dropped_drafts > 0
    assert p_value(list(client.texts().values()), truth(3)) > LEAST_P


def test_shared_noise_would_show(monkeypatch):
    """The control: a coin out of the draft's own noise is found by the same test."""
    purposes = dict(Purpose.__members__) | {"COIN": Purpose.DRAFT}
    monkeypatch.setattr("verifier_service.sampling.rejection.Purpose", SimpleNamespace(**purposes))
    client = run(QDrafting(near), 2000)
    assert p_value(list(client.texts().values()), truth(3)) < LEAST_P


def test_neighbours_keep_their_exact_texts():
    exact = [request(f"e{n}", [1, 0], 12, temperature=1.0, seed=n) for n in range(4)]
    alone = Client(Engine(TableTarget(TABLE), FakeDrafting(), StaticPlanner(), small_settings()))
    for one in exact:
        alone.submit(one)
    expected = alone.finish()
    mixed = Client(Engine(TableTarget(TABLE), QDrafting(near), StaticPlanner(), small_settings()))
    for n, one in enumerate(exact):
        mixed.submit(one)
        mixed.submit(rejected(f"r{n}", n, 12))
    texts = mixed.finish()
    assert {name: texts[name] for name in expected} == expected


def test_the_planner_never_sees_these_requests():
    seen: list[SamplingParams] = []

    class Watching(StaticPlanner):
        def plan(self, views, sources):
            seen.extend(view.params for view in views)
            return super().plan(views, sources)

        def admit(self, views, trees, room, sources=()):
            seen.extend(view.params for view in views)
            return super().admit(views, trees, room, sources)

        def observe_round(self, outcome):
            raise AssertionError("there is nothing to learn")

    client = Client(Engine(TableTarget(TABLE), QDrafting(near), Watching(), small_settings()))
    client.submit(rejected("r", 3, 8))
    client.finish()
    assert seen == []


@pytest.mark.parametrize(
    ("speculation", "depth"),
    [
        (Speculation(), 4),
        (Speculation(SpeculationMode.FIXED, ("sampler",), Plan(PlanKind.CHAIN, 2)), 2),
        (Speculation(SpeculationMode.FIXED, ("look-up",)), 0),
        (Speculation(SpeculationMode.OFF), 0),
    ],
)
def test_what_is_asked_is_a_chain_of_one_length_from_a_source_that_gives_q(speculation, depth):
    drafting = QDrafting(near)
    client = Client(Engine(TableTarget(TABLE), drafting, StaticPlanner(), small_settings()))
    client.submit(replace(rejected("r", 3, 30), speculation=speculation))
    client.finish()
    plans = {plan.plan for asks in drafting.asked for ask in asks for plan in ask.plans}
    depths = {plan.depth for plan in plans}
    assert {plan.kind for plan in plans} <= {PlanKind.CHAIN, PlanKind.NONE}
    # Shorter ones are asked at the very end only, where no more tokens may come.
    assert max(depths, default=0) == depth
    assert len(client.ids("r")) == 30


def test_greedy_requests_are_exact_whatever_they_ask():
    texts = []
    for acceptance in Acceptance:
        drafting = QDrafting(near)
        client = Client(Engine(TableTarget(TABLE), drafting, StaticPlanner(), small_settings()))
        client.submit(request("g", [1, 0], 10, acceptance=acceptance))
        texts.append(client.finish())
    assert texts[0] == texts[1]
