"""Requests with logit options: law 1 holds for them, and their neighbours do not notice.

Their history is a function of committed ids, so drafts, preemption and replay leave the text alone.
"""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from protos.errors import InvalidRequest
from protos.exchange import Plan, PlanKind
from protos.generation import FinishReason, GenerationRequest
from protos.options import LogitOptions
from tests.fakes import (
    Client,
    FakeDrafting,
    HashTarget,
    RandomPlanner,
    request,
    small_settings,
)
from tests.unit.engine.known_texts import good_and_liar
from verifier_service.engine.loop import Engine
from verifier_service.engine.ports import Planner, SourcePlan
from verifier_service.engine.settings import EngineSettings
from verifier_service.engine.static_planner import StaticPlanner
from verifier_service.sampling.reference import choose_reference, shaped_reference

VOCAB = 23
EOS = 5
Texts = dict[str, tuple[int, ...]]

OPTIONS = (
    LogitOptions(),
    LogitOptions(frequency_penalty=1.5, presence_penalty=0.5),
    LogitOptions(repetition_penalty=3.0),
    LogitOptions(logit_bias=((3, 4.0), (9, -100.0))),
    LogitOptions(min_tokens=30, repetition_penalty=0.7),
    LogitOptions(allowed_token_ids=tuple(range(12)), presence_penalty=2.0),
)
SAMPLING = ({"temperature": 0.0}, {"temperature": 1.1, "seed": 3}, {"seed": 4, "top_p": 0.8})


def some_requests() -> list[GenerationRequest]:
    return [
        replace(
            request(
                f"r{n}", [(3 * n + j) % VOCAB for j in range(1 + 5 * n)], 36, **SAMPLING[n % 3]
            ),
            options=options,
        )
        for n, options in enumerate(OPTIONS * 2)
    ]


def by_definition(asked: GenerationRequest) -> tuple[int, ...]:
    """The text in plain loops: options, then the choice, one token at a time."""
    target = HashTarget(VOCAB)
    output: list[int] = []
    while len(output) < asked.params.max_tokens and (not output or output[-1] != EOS):
        path = (*asked.prompt_ids, *output)
        logits = target.path_logits(path)
        row = shaped_reference(logits, asked.options, asked.prompt_ids, output, (EOS,))
        token = choose_reference(row, asked.params, len(path))
        assert token is not None
        output.append(token)
    return tuple(output)


@pytest.fixture(scope="module")
def truth() -> Texts:
    return {asked.request_id: by_definition(asked) for asked in some_requests()}


def texts_of(
    requests: Sequence[GenerationRequest],
    drafting: FakeDrafting | None = None,
    planner: Planner | None = None,
    settings: EngineSettings | None = None,
) -> tuple[Texts, Engine]:
    target = HashTarget(VOCAB, eos_token_ids=(EOS,))
    engine = Engine(
        target,
        drafting or FakeDrafting(),
        planner or StaticPlanner(),
        settings or small_settings(),
    )
    client = Client(engine)
    for one in requests:
        client.submit(one)
    texts = client.finish()
    engine.check_idle()
    return texts, engine


def test_every_option_changes_a_text(truth: Texts):
    plain = {
        asked.request_id: by_definition(replace(asked, options=LogitOptions()))
        for asked in some_requests()
    }
    changed = {int(name[1:]) % len(OPTIONS) for name in truth if truth[name] != plain[name]}
    assert changed == {1, 2, 3, 4, 5}
    for asked in some_requests():
        options, text = asked.options, truth[asked.request_id]
        assert len(text) >= min(options.min_tokens, 36)
        assert not options.allowed_token_ids or set(text) <= set(options.allowed_token_ids)


def test_texts_without_drafts_equal_the_plain_loops(truth: Texts):
    assert texts_of(some_requests())[0] == truth


@pytest.mark.parametrize("kind", [PlanKind.CHAIN, PlanKind.TREE])
@pytest.mark.parametrize("names", [("good",), ("liar",), ("good", "liar")])
@pytest.mark.parametrize("error_rate", [0.0, 0.4])
def test_drafts_of_any_quality_leave_the_text_alone(
    truth: Texts, kind: PlanKind, names: tuple[str, ...], error_rate: float
):
    plan = Plan(kind, depth=5, width=3, nodes=14)
    planner = StaticPlanner([SourcePlan(name, plan) for name in names])
    settings = small_settings(max_tokens_per_step=256)
    texts, engine = texts_of(
        some_requests(), good_and_liar(some_requests(), truth, VOCAB, error_rate), planner, settings
    )
    assert texts == truth
    if names == ("good",):
        assert engine.stats().num_accepted > 60


@pytest.mark.parametrize("seed", range(3))
def test_preemption_leaves_the_text_alone(truth: Texts, seed: int):
    settings = small_settings(num_slots=160)
    texts, engine = texts_of(
        some_requests(),
        good_and_liar(some_requests(), truth, VOCAB, 0.3),
        RandomPlanner(seed),
        settings,
    )
    assert texts == truth
    assert engine.stats().num_preemptions > 0


@pytest.mark.parametrize("num_before", [1, 7, 20])
def test_a_replay_with_committed_output_goes_on_alike(truth: Texts, num_before: int):
    resumed = [
        replace(asked, output_ids=truth[asked.request_id][:num_before])
        for asked in some_requests()
        if len(truth[asked.request_id]) > num_before
    ]
    rest, _ = texts_of(resumed, good_and_liar(some_requests(), truth, VOCAB, 0.3), RandomPlanner(1))
    assert rest
    for asked in resumed:
        assert asked.output_ids + rest[asked.request_id] == truth[asked.request_id]


@pytest.mark.parametrize(
    ("options", "values", "param"),
    [
        (LogitOptions(allowed_token_ids=(VOCAB,)), {}, "allowed_token_ids"),
        (LogitOptions(logit_bias=((VOCAB, 1.0),)), {}, "logit_bias"),
        (LogitOptions(min_tokens=9), {}, "min_tokens"),
        (LogitOptions(min_tokens=2, allowed_token_ids=(EOS,)), {}, "min_tokens"),
        (LogitOptions(), {"stop_token_ids": (VOCAB,)}, "stop_token_ids"),
    ],
    ids=str,
)
def test_options_that_cannot_be_kept_are_refused_by_name(
    options: LogitOptions, values: dict, param: str
):
    target = HashTarget(VOCAB, eos_token_ids=(EOS,))
    engine = Engine(target, FakeDrafting(), StaticPlanner(), small_settings())
    with pytest.raises(InvalidRequest) as caught:
        engine.check(replace(request("x", [1], 8, **values), options=options))
    assert caught.value.param == param


def test_a_stop_id_waits_for_min_tokens_and_then_ends_the_text():
    asked = request("s", [1, 2], 30, temperature=0.0, stop_token_ids=tuple(range(6, 16)))
    target = HashTarget(VOCAB)
    for minimum in (0, 12):
        engine = Engine(target, FakeDrafting(), StaticPlanner(), small_settings())
        client = Client(engine)
        client.submit(replace(asked, options=LogitOptions(min_tokens=minimum)))
        (text,) = client.finish().values()
        assert not set(text[:minimum]) & set(range(6, 16))
        assert minimum < len(text) < 30
        assert client.last("s").finish_reason is FinishReason.STOP
