"""Log probabilities come with runs: the raw distribution's, one per id, whatever was drafted."""

from dataclasses import replace

import pytest

from protos.exchange import Plan, PlanKind
from protos.generation import GenerationRequest, TokenLogprobs
from protos.options import LogitOptions
from tests.fakes import (
    Client,
    FakeDrafting,
    HashTarget,
    RandomPlanner,
    future_source,
    request,
    small_settings,
)
from tests.unit.engine.known_texts import wholes
from verifier_service.engine.loop import Engine
from verifier_service.engine.ports import Planner, SourcePlan
from verifier_service.engine.settings import EngineSettings
from verifier_service.engine.static_planner import StaticPlanner
from verifier_service.sampling.reference import logprobs_reference

VOCAB = 31
TARGET = HashTarget(VOCAB)


def some_requests() -> list[GenerationRequest]:
    asked = [(3, 2), (0, None), (None, 0), (20, 20), (None, None), (1, 5)]
    return [
        replace(
            request(f"r{n}", [(5 * n + j) % VOCAB for j in range(1 + 9 * n)], 20, seed=n),
            options=LogitOptions(frequency_penalty=0.5 * (n % 2)),
            num_logprobs=num,
            num_prompt_logprobs=num_prompt,
        )
        for n, (num, num_prompt) in enumerate(asked)
    ]


def expected(path: tuple[int, ...], first: int, num_top: int | None) -> list[TokenLogprobs]:
    """Of path[first:], token by token."""
    if num_top is None:
        return []
    found = [
        logprobs_reference(TARGET.path_logits(path[:index]), path[index], num_top)
        for index in range(first, len(path))
    ]
    return [TokenLogprobs(value, tuple(top)) for value, top in found]


def check(
    drafting: FakeDrafting, planner: Planner, settings: EngineSettings
) -> tuple[dict[str, tuple[int, ...]], Engine]:
    """Run all requests and compare what came with what the paths say."""
    engine = Engine(HashTarget(VOCAB), drafting, planner, settings)
    client = Client(engine)
    for one in some_requests():
        client.submit(one)
    texts = client.finish()
    engine.check_idle()
    for one in some_requests():
        runs = client.runs[one.request_id]
        said = [each for run in runs for each in run.logprobs]
        path = one.prompt_ids + texts[one.request_id]
        assert said == expected(path, len(one.prompt_ids), one.num_logprobs)
        assert all(len(run.logprobs) in (0, len(run.ids)) for run in runs)
        assert list(runs[0].prompt_logprobs) == expected(one.prompt_ids, 1, one.num_prompt_logprobs)
        assert not any(run.prompt_logprobs for run in runs[1:])
    return texts, engine


@pytest.mark.parametrize("chunk", [4, 64])
def test_values_are_those_of_the_path_without_drafts(chunk: int):
    check(FakeDrafting(), StaticPlanner(), small_settings(max_prefill_chunk=chunk))


@pytest.mark.parametrize("kind", [PlanKind.CHAIN, PlanKind.TREE])
def test_values_are_those_of_the_path_with_drafts(kind: PlanKind):
    texts, _ = check(FakeDrafting(), StaticPlanner(), small_settings())
    futures = wholes(some_requests(), texts)
    drafting = FakeDrafting({"good": future_source(futures, VOCAB, 0.3)})
    planner = StaticPlanner([SourcePlan("good", Plan(kind, depth=5, width=3, nodes=14))])
    settings = small_settings(max_tokens_per_step=256)
    drafted, engine = check(drafting, planner, settings)
    assert drafted == texts
    assert engine.stats().num_accepted > 40


def test_preemption_loses_no_value_and_gives_none_twice():
    texts, _ = check(FakeDrafting(), StaticPlanner(), small_settings())
    futures = wholes(some_requests(), texts)
    drafting = FakeDrafting({"good": future_source(futures, VOCAB, 0.3)})
    _, engine = check(drafting, RandomPlanner(2), small_settings(num_slots=128))
    assert engine.stats().num_preemptions > 0


def test_a_replay_gives_values_for_new_tokens_only():
    texts, _ = check(FakeDrafting(), StaticPlanner(), small_settings())
    one = some_requests()[3]
    text = texts[one.request_id]
    client = Client(Engine(HashTarget(VOCAB), FakeDrafting(), StaticPlanner(), small_settings()))
    client.submit(replace(one, output_ids=text[:7]))
    client.finish()
    runs = client.runs[one.request_id]
    said = [each for run in runs for each in run.logprobs]
    path = one.prompt_ids + text
    assert said == expected(path, len(one.prompt_ids) + 7, one.num_logprobs)
    assert not any(run.prompt_logprobs for run in runs)
