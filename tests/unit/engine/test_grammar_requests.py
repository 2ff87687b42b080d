"""Requests with a grammar: law 1 holds for them, every finished text matches, others do not notice.

The truth is in plain loops: new matchers asked id by id, then the options, then the choice. Drafts
of any quality, trees, pressure and replay must leave it alone.
"""

import json
from collections.abc import Sequence
from dataclasses import replace

import pytest
from jsonschema import Draft202012Validator

from protos.errors import InvalidRequest
from protos.exchange import Plan, PlanKind
from protos.generation import FinishReason, GenerationRequest
from protos.grammar import Grammar
from protos.options import LogitOptions
from tests.fakes import (
    Client,
    FakeDrafting,
    HashTarget,
    RandomPlanner,
    fixed_children_source,
    request,
    small_settings,
)
from tests.tiny import EOS_ID
from tests.unit.engine.known_texts import good_and_liar
from tests.unit.grammar.grammar_cases import (
    ONE_OF_EACH,
    PERSON,
    VOCAB,
    ids_in,
    ids_of,
    maker,
    opened,
    regex,
    schema,
    tokenizer,
    vocabulary,
)
from verifier_service.engine.loop import Engine
from verifier_service.engine.ports import Planner, SourcePlan
from verifier_service.engine.settings import EngineSettings
from verifier_service.engine.static_planner import StaticPlanner
from verifier_service.grammar.compiling import Grammars
from verifier_service.grammar.reference import allowed_reference
from verifier_service.grammar.state import GrammarState
from verifier_service.sampling.reference import choose_reference, shaped_reference

Texts = dict[str, tuple[int, ...]]
MAX_TOKENS = 60
SAMPLING = ({"temperature": 0.0}, {"temperature": 1.1, "seed": 3}, {"seed": 4, "top_p": 0.8})
TIGHT = PERSON | {"x-guidance": {"whitespace_flexible": False}}
PETS = {"type": "array", "items": PERSON, "minItems": 1, "maxItems": 2}
FEW = {"type": "array", "items": {"enum": [1, True, {"a": None}]}, "maxItems": 4}
BIASED = LogitOptions(
    logit_bias=((ids_of(" ")[0], -4.0), (ids_of('"')[0], 5.0)), presence_penalty=0.5
)
HELD_BACK = LogitOptions(min_tokens=12, repetition_penalty=1.2)
LETTERS = LogitOptions(allowed_token_ids=(EOS_ID, *ids_of("abcd/0123")))

CASES: tuple[tuple[Grammar | None, LogitOptions], ...] = (
    (schema(TIGHT), LogitOptions()),
    (schema(PETS), BIASED),
    (None, LogitOptions()),
    (regex(r"[ab]{1,40}"), HELD_BACK),
    (ONE_OF_EACH[3], LogitOptions(frequency_penalty=0.7)),
    (ONE_OF_EACH[2], LETTERS),
    (schema(TIGHT), BIASED),
    (schema(FEW), LogitOptions()),
)


def some_requests() -> list[GenerationRequest]:
    return [
        replace(
            request(
                f"r{n}",
                [3 + (31 * n + 7 * j) % 300 for j in range(1 + 4 * n)],
                MAX_TOKENS,
                **SAMPLING[n % 3],
            ),
            options=replace(options, grammar=grammar),
        )
        for n, (grammar, options) in enumerate(CASES)
    ]


def by_definition(asked: GenerationRequest) -> tuple[int, ...]:
    target = HashTarget(VOCAB)
    grammar = asked.options.grammar
    fed = None if grammar is None else maker(grammar)()
    output: list[int] = []
    while len(output) < asked.params.max_tokens and (not output or output[-1] != EOS_ID):
        path = (*asked.prompt_ids, *output)
        row = shaped_reference(
            target.path_logits(path),
            asked.options,
            asked.prompt_ids,
            output,
            (EOS_ID,),
            None if fed is None else lambda _: follows(fed),
        )
        token = choose_reference(row, asked.params, len(path))
        assert token is not None
        output.append(token)
        if fed is not None and token != EOS_ID:
            assert fed.try_consume_tokens([token])
    return tuple(output)


def follows(fed) -> frozenset[int]:
    """Ids that may come next, asked one by one of copies of a matcher that was only ever fed."""
    return allowed_reference(fed.deep_copy, range(VOCAB), {EOS_ID}, ())


@pytest.fixture(scope="module")
def truth() -> Texts:
    return {asked.request_id: by_definition(asked) for asked in some_requests()}


def engine_of(
    drafting: FakeDrafting | None = None,
    planner: Planner | None = None,
    settings: EngineSettings | None = None,
    grammars: Grammars | None = None,
) -> Engine:
    return Engine(
        HashTarget(VOCAB, eos_token_ids=(EOS_ID,)),
        drafting or FakeDrafting(),
        planner or StaticPlanner(),
        settings or small_settings(num_slots=2048),
        grammars=grammars or Grammars(vocabulary),
    )


def run(engine: Engine, requests: Sequence[GenerationRequest]) -> tuple[Texts, Client]:
    client = Client(engine)
    for one in requests:
        client.submit(one)
    texts = client.finish()
    engine.check_idle()
    return texts, client


def planned(*names: str, kind: PlanKind) -> StaticPlanner:
    plan = Plan(kind, depth=6, width=3, nodes=16)
    return StaticPlanner([SourcePlan(name, plan) for name in names])


def text_of(ids: Sequence[int]) -> str:
    return tokenizer().decode(list(ids), skip_special_tokens=True)


def test_texts_are_not_trivial_and_some_come_to_their_end(truth: Texts):
    with_grammar = [r.request_id for r in some_requests() if r.options.grammar is not None]
    ended = [name for name in with_grammar if truth[name][-1] == EOS_ID]
    assert len(ended) >= 5
    assert max(len(truth[name]) for name in ended) > 20
    free = [replace(r, options=replace(r.options, grammar=None)) for r in some_requests()]
    unbound, _ = run(engine_of(), free)
    assert {name for name in truth if unbound[name] != truth[name]} == {*with_grammar}


def test_texts_without_drafts_equal_the_plain_loops(truth: Texts):
    texts, client = run(engine_of(), some_requests())
    assert texts == truth
    for asked in some_requests():
        last = client.last(asked.request_id)
        stopped = truth[asked.request_id][-1] == EOS_ID
        assert last.finish_reason is (FinishReason.STOP if stopped else FinishReason.LENGTH)
        assert last.stop_token_id == (EOS_ID if stopped else None)


def test_a_finished_text_is_json_of_its_schema(truth: Texts):
    num_checked = 0
    for asked in some_requests():
        grammar, ids = asked.options.grammar, truth[asked.request_id]
        if grammar is not None and grammar.kind == "json_schema" and ids[-1] == EOS_ID:
            Draft202012Validator(json.loads(grammar.text)).validate(json.loads(text_of(ids)))
            num_checked += 1
    assert num_checked >= 3


@pytest.mark.parametrize("kind", [PlanKind.CHAIN, PlanKind.TREE])
@pytest.mark.parametrize("error_rate", [0.0, 0.4])
def test_drafts_leave_the_text_alone(truth: Texts, kind: PlanKind, error_rate: float):
    engine = engine_of(
        good_and_liar(some_requests(), truth, VOCAB, error_rate), planned("good", "liar", kind=kind)
    )
    texts, _ = run(engine, some_requests())
    assert texts == truth
    assert dict(engine.stats().accepted_by_source)["good"] > 60


def test_right_drafts_are_accepted_up_to_the_end_of_the_text(truth: Texts):
    engine = engine_of(
        good_and_liar(some_requests(), truth, VOCAB, 0.0), planned("good", kind=PlanKind.CHAIN)
    )
    client = Client(engine)
    asked = some_requests()[0]
    client.submit(asked)
    assert client.finish()[asked.request_id] == truth[asked.request_id]
    counts = client.last(asked.request_id).counts
    assert counts is not None
    # All but the first token and a bonus a round were drafted, and no node of the truth is dropped.
    assert counts.num_drafted == counts.num_accepted
    assert counts.num_rounds <= 2 + len(truth[asked.request_id]) // 7


def test_what_the_grammar_forbids_is_never_verified():
    asked = some_requests()[0]

    def forbidden(path: Sequence[int], width: int) -> list[int]:
        state, _ = opened(schema(TIGHT), path[len(asked.prompt_ids) :])
        allowed = ids_in(state.allowed(()))
        return [token for token in range(VOCAB) if token not in allowed][:width]

    def one_right(path: Sequence[int], width: int) -> list[int]:
        state, _ = opened(schema(TIGHT), path[len(asked.prompt_ids) :])
        return [*forbidden(path, width - 1), max(ids_in(state.allowed(())))]

    plan = StaticPlanner([SourcePlan("f", Plan(PlanKind.TREE, depth=1, width=4, nodes=4))])
    for children, per_round in ((forbidden, 0), (one_right, 1)):
        drafting = FakeDrafting({"f": fixed_children_source(children)})
        engine = engine_of(drafting, plan)
        texts, _ = run(engine, [asked])
        assert texts == run(engine_of(), [asked])[0]
        rounds = engine.stats().num_draft_rounds if per_round else 1
        assert engine.stats().num_drafted == per_round * rounds


@pytest.mark.parametrize("seed", range(3))
def test_any_plan_and_preemption_leave_the_text_alone(truth: Texts, seed: int):
    settings = small_settings(num_slots=160)
    engine = engine_of(
        good_and_liar(some_requests(), truth, VOCAB, 0.3), RandomPlanner(seed), settings
    )
    texts, _ = run(engine, some_requests())
    assert texts == truth
    assert engine.stats().num_preemptions > 0


@pytest.mark.parametrize("steps", [1, 6, 15])
def test_a_request_that_arrives_with_output_goes_on_alike(truth: Texts, steps: int):
    first = Client(engine_of())
    for one in some_requests():
        first.submit(one)
    for _ in range(steps):
        first.engine.step()
    half = first.texts()
    resumed = [replace(r, output_ids=half[r.request_id]) for r in some_requests()]
    engine = engine_of(good_and_liar(some_requests(), truth, VOCAB, 0.3), RandomPlanner(1))
    rest, _ = run(engine, resumed)
    assert {name: half[name] + ids for name, ids in rest.items()} == truth


def test_min_tokens_holds_an_end_back_until_nothing_else_is_left():
    longest = request("m", [7], 60, temperature=0.0)
    options = LogitOptions(grammar=regex("a{3,6}b?"), min_tokens=40)
    texts, client = run(engine_of(), [replace(longest, options=options)])
    assert text_of(texts["m"]) in ("aaaaaab", "aaaab", "aaab", "aaaaab")
    assert texts["m"][-1] == EOS_ID
    assert client.last("m").finish_reason is FinishReason.STOP


@pytest.mark.parametrize(
    ("options", "values", "param"),
    [
        (LogitOptions(grammar=regex("(")), {}, "grammar"),
        (LogitOptions(grammar=regex("a"), allowed_token_ids=(5, 6)), {}, "allowed_token_ids"),
        (LogitOptions(grammar=regex("a")), {"output": ids_of("b")}, "output_ids"),
    ],
    ids=["grammar", "allowed", "output"],
)
def test_what_cannot_be_kept_is_refused_by_name_and_counted_nowhere(
    options: LogitOptions, values: dict, param: str
):
    engine = engine_of()
    client = Client(engine)
    with pytest.raises(InvalidRequest) as caught:
        client.submit(replace(request("x", [1], 8, **values), options=options))
    assert caught.value.param == param
    assert engine.intake.num_active == 0
    assert not engine.step()


def test_an_engine_without_grammars_refuses_them_by_name():
    engine = Engine(HashTarget(VOCAB), FakeDrafting(), StaticPlanner(), small_settings())
    with pytest.raises(InvalidRequest) as caught:
        engine.check(replace(request("x", [1]), options=LogitOptions(grammar=regex("a"))))
    assert caught.value.param == "grammar"
    assert not engine.intake.takes_grammar


def test_a_failing_state_ends_its_own_request_only(truth: Texts, monkeypatch):
    faulty = schema(PETS)
    real = GrammarState.allowed

    def allowed(self: GrammarState, path: Sequence[int]):
        words = real(self, path)
        is_faulty = self._tokens[: self._num_prompt] == list(some_requests()[1].prompt_ids)
        if is_faulty and len(self._tokens) - self._num_prompt >= 9:
            self.fault = "the grammar cannot be followed: on purpose"
            words.zero_()
        return words

    monkeypatch.setattr(GrammarState, "allowed", allowed)
    engine = engine_of(
        good_and_liar(some_requests(), truth, VOCAB, 0.3), planned("good", kind=PlanKind.TREE)
    )
    texts, client = run(engine, some_requests())
    assert some_requests()[1].options.grammar == faulty
    last = client.last("r1")
    assert last.finish_reason is FinishReason.ERROR
    assert last.error == "the grammar cannot be followed: on purpose"
    assert texts["r1"] == truth["r1"][: len(texts["r1"])]
    assert {n: t for n, t in texts.items() if n != "r1"} == {
        n: t for n, t in truth.items() if n != "r1"
    }


def test_ids_that_the_options_leave_but_the_grammar_forbids_end_that_request():
    digits = LogitOptions(grammar=regex("[a-z]+"), allowed_token_ids=(EOS_ID, *ids_of("012")))
    other = request("o", [5, 6], 12)
    texts, client = run(engine_of(), [replace(request("x", [1], 8), options=digits), other])
    assert client.last("x").finish_reason is FinishReason.ERROR
    assert "options" in client.last("x").error
    assert texts["o"] == run(engine_of(), [other])[0]["o"]
