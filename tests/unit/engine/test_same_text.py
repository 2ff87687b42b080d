"""Law 1 on a target that answers from its own slots: same seed, same text, whatever advisers do.

The truth is one request at a time without drafts. Everything else must equal it: batches, any
drafts and plans, page sizes, chunk and page boundaries, preemption, replay from the middle.
"""

from collections.abc import Sequence

import pytest

from protos.exchange import Plan, PlanKind
from protos.generation import GenerationRequest, Speculation, SpeculationMode
from protos.tree import CandidateTree, chain
from tests.fakes import (
    Client,
    FakeDrafting,
    HashTarget,
    RandomPlanner,
    constant_source,
    future_source,
    random_source,
    request,
    small_settings,
)
from tests.unit.engine.known_texts import wholes
from verifier_service.engine.loop import Engine
from verifier_service.engine.ports import Planner, SequenceView, SourcePlan
from verifier_service.engine.settings import EngineSettings
from verifier_service.engine.static_planner import StaticPlanner
from verifier_service.planning.costs import VerifyCosts, default_table
from verifier_service.planning.planner import AdaptivePlanner
from verifier_service.sampling.choice import ChoiceRow, choose

VOCAB = 97
Texts = dict[str, tuple[int, ...]]

SAMPLING = (
    {},
    {"temperature": 0.8, "seed": 1},
    {"temperature": 1.2, "seed": -5, "top_p": 0.9},
    {"temperature": 1.0, "seed": 2**63 - 1, "top_k": 5},
    {"temperature": 1.5, "seed": 3, "min_p": 0.05},
    {"temperature": 0.7, "seed": 4, "top_k": 20, "top_p": 0.7, "min_p": 0.01},
    {},
    {"temperature": 2.0, "seed": 1},
)


def some_requests(max_tokens: int = 40) -> list[GenerationRequest]:
    lengths = (1, 2, 15, 16, 17, 33, 63, 65)
    return [
        request(
            f"r{n}", [(7 * n + j * j) % VOCAB for j in range(length)], max_tokens, **SAMPLING[n]
        )
        for n, length in enumerate(lengths)
    ]


def engine_of(
    drafting: FakeDrafting | None = None,
    planner: Planner | None = None,
    settings: EngineSettings | None = None,
    grain: float = 0.0,
) -> Engine:
    return Engine(
        HashTarget(VOCAB, grain=grain),
        drafting or FakeDrafting(),
        planner or StaticPlanner(),
        settings or small_settings(),
    )


def alone(requests: Sequence[GenerationRequest], grain: float = 0.0) -> Texts:
    client = Client(engine_of(grain=grain))
    for one in requests:
        client.submit(one)
        client.finish()
    return client.texts()


def together(engine: Engine, requests: Sequence[GenerationRequest]) -> Texts:
    client = Client(engine)
    for one in requests:
        client.submit(one)
    texts = client.finish()
    engine.check_idle()
    return texts


@pytest.fixture(scope="module")
def truth() -> Texts:
    return alone(some_requests())


@pytest.fixture(scope="module")
def futures(truth: Texts) -> Texts:
    return wholes(some_requests(), truth)


def planned(*names: str, kind: PlanKind = PlanKind.CHAIN) -> StaticPlanner:
    plan = Plan(kind, depth=5, width=3, nodes=14)
    return StaticPlanner([SourcePlan(name, plan) for name in names])


def test_texts_are_not_trivial(truth: Texts):
    assert all(len(set(ids)) >= 20 for ids in truth.values())
    assert all(len(ids) == 40 for ids in truth.values())


@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("chunk", [5, 16, 64])
def test_a_batch_equals_its_requests_alone(truth: Texts, page_size: int, chunk: int):
    settings = small_settings(page_size=page_size, max_prefill_chunk=chunk)
    assert together(engine_of(settings=settings), some_requests()) == truth


@pytest.mark.parametrize("kind", [PlanKind.CHAIN, PlanKind.TREE])
@pytest.mark.parametrize("error_rate", [0.0, 0.4])
@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_drafts_of_any_quality_leave_the_text_alone(
    truth: Texts, futures: Texts, kind: PlanKind, error_rate: float, page_size: int
):
    drafting = FakeDrafting({"future": future_source(futures, VOCAB, error_rate)})
    settings = small_settings(page_size=page_size, max_tokens_per_step=256)
    engine = engine_of(drafting, planned("future", kind=kind), settings)
    assert together(engine, some_requests()) == truth
    assert engine.stats().num_accepted > 100
    assert engine.stats().num_steps < 30, "accepted drafts must save steps"


@pytest.mark.parametrize("kind", [PlanKind.CHAIN, PlanKind.TREE])
def test_a_lying_drafter_leaves_the_text_alone(truth: Texts, kind: PlanKind):
    drafting = FakeDrafting({"liar": random_source(VOCAB)})
    engine = engine_of(drafting, planned("liar", kind=kind))
    assert together(engine, some_requests()) == truth
    assert engine.stats().num_drafted > 500


def test_merged_sources_leave_the_text_alone_and_are_counted_apart(truth: Texts, futures: Texts):
    drafting = FakeDrafting(
        {"good": future_source(futures, VOCAB, 0.2), "liar": random_source(VOCAB, 1)}
    )
    settings = small_settings(max_tokens_per_step=256)
    engine = engine_of(drafting, planned("good", "liar", kind=PlanKind.TREE), settings)
    assert together(engine, some_requests()) == truth
    accepted = dict(engine.stats().accepted_by_source)
    assert accepted["good"] > 100
    assert accepted.get("liar", 0) < accepted["good"] / 4


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("num_slots", [1024, 160])
def test_any_plan_and_any_admission_leave_the_text_alone(
    truth: Texts, futures: Texts, seed: int, num_slots: int
):
    drafting = FakeDrafting(
        {"good": future_source(futures, VOCAB, 0.3, seed), "liar": random_source(VOCAB, seed)},
        lag=seed % 2 == 1,
        fail_every=5 if seed % 3 == 2 else 0,
    )
    engine = engine_of(drafting, RandomPlanner(seed), small_settings(num_slots=num_slots))
    assert together(engine, some_requests()) == truth
    assert drafting.sessions == set(), "every session must have been forgotten"
    if num_slots == 160:
        assert engine.stats().num_preemptions > 0


@pytest.mark.parametrize("steps_before", [0, 1, 3, 8, 20])
def test_a_request_replayed_with_its_committed_output_goes_on_alike(
    truth: Texts, futures: Texts, steps_before: int
):
    first = Client(engine_of())
    for one in some_requests():
        first.submit(one)
    for _ in range(steps_before):
        first.engine.step()
    half = first.texts()
    resumed = [
        GenerationRequest(r.request_id, r.prompt_ids, r.params, half[r.request_id])
        for r in some_requests()
    ]
    drafting = FakeDrafting({"future": future_source(futures, VOCAB, 0.3)})
    rest = together(engine_of(drafting, planned("future")), resumed)
    assert {name: half[name] + ids for name, ids in rest.items()} == truth


def test_ties_of_the_scores_do_not_depend_on_drafts():
    requests = some_requests()
    truth = alone(requests, grain=3.0)
    futures = wholes(requests, truth)
    drafting = FakeDrafting({"future": future_source(futures, VOCAB, 0.3)})
    engine = engine_of(drafting, planned("future", kind=PlanKind.TREE), grain=3.0)
    assert together(engine, requests) == truth


def test_fixed_and_off_requests_share_a_batch_with_planned_ones(truth: Texts, futures: Texts):
    drafting = FakeDrafting(
        {"future": future_source(futures, VOCAB, 0.2), "liar": random_source(VOCAB)}
    )
    off = Speculation(SpeculationMode.OFF)
    fixed = Speculation(
        SpeculationMode.FIXED, ("future",), Plan(PlanKind.TREE, depth=4, width=2, nodes=6)
    )
    requests = [
        GenerationRequest(
            r.request_id,
            r.prompt_ids,
            r.params,
            speculation=(off, fixed, Speculation())[n % 3],
        )
        for n, r in enumerate(some_requests())
    ]
    client = Client(engine_of(drafting, planned("liar")))
    for one in requests:
        client.submit(one)
    assert client.finish() == truth
    for n, one in enumerate(requests):
        counts = client.last(one.request_id).counts
        assert counts is not None
        by_source = dict(counts.accepted_by_source)
        if n % 3 == 0:
            assert counts.num_drafted == 0
        if n % 3 == 1:
            assert by_source["future"] >= 10
            assert counts.num_drafted <= 6 * counts.num_draft_rounds
        if n % 3 == 2:
            assert counts.num_drafted > 0
            assert "future" not in by_source
    shown = {ask.view.request_id for asks in drafting.asked for ask in asks}
    assert shown == {r.request_id for n, r in enumerate(requests) if n % 3 != 0}


def test_a_drafter_that_always_proposes_eos_ends_nothing():
    requests = [
        request(f"e{n}", [n, 3], 60, ignore_eos=bool(n % 2), **SAMPLING[n]) for n in range(8)
    ]

    def run(drafting: FakeDrafting, planner: Planner) -> Texts:
        target = HashTarget(VOCAB, eos_token_ids=(11, 12))
        return together(Engine(target, drafting, planner, small_settings()), requests)

    truth = run(FakeDrafting(), StaticPlanner())
    assert any(len(ids) < 60 for ids in truth.values())
    assert all(len(truth[f"e{n}"]) == 60 for n in range(8) if n % 2)
    drafting = FakeDrafting({"eos": constant_source(11)})
    assert run(drafting, planned("eos")) == truth


@pytest.mark.parametrize("error_rate", [0.0, 0.5, 1.0])
def test_the_adaptive_planner_leaves_the_text_alone(
    truth: Texts, futures: Texts, error_rate: float
):
    drafting = FakeDrafting(
        {"good": future_source(futures, VOCAB, error_rate), "liar": random_source(VOCAB)},
        fail_every=11,
    )
    planner = AdaptivePlanner(VerifyCosts(default_table()))
    engine = engine_of(drafting, planner, small_settings(num_slots=320, max_tokens_per_step=128))
    assert together(engine, some_requests()) == truth
    assert drafting.sessions == set()
    assert planner.counts.num_steps == engine.stats().num_steps
    assert planner.counts.num_drafted == engine.stats().num_drafted


def test_a_drafter_with_the_targets_scores_and_its_noise_is_always_right(truth: Texts):
    """Gumbel coupling at its best, and the convention of positions: base_len for a child of the
    anchor."""
    target = HashTarget(VOCAB)

    def draft(view: SequenceView, plan: Plan) -> CandidateTree:
        path = list(view.tokens)
        for _ in range(plan.depth):
            row = ChoiceRow(0, view.params, position=len(path))
            (token,) = choose(target.path_logits(tuple(path)).unsqueeze(0), [row])
            assert token is not None
            path.append(token)
        return chain(path[view.base_len :])

    engine = engine_of(FakeDrafting({"twin": draft}), planned("twin"))
    assert together(engine, some_requests()) == truth
    stats = engine.stats()
    assert stats.num_accepted > 150
    # What is left over was drafted past the end of a text.
    assert stats.num_drafted - stats.num_accepted <= 5 * len(truth)
