"""Where a text ends is the same with any draft: every rule of the ends against plain loops.

Ends are placed by chance all over the runs that a drafter with the right text brings, so that
EOS, the caller's stop ids, max_tokens, min_tokens and the context limit meet inside one run.
"""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from protos.exchange import Plan, PlanKind
from protos.generation import FinishReason, GenerationRequest
from protos.options import LogitOptions
from tests.fakes import (
    Client,
    FakeDrafting,
    HashTarget,
    PathTarget,
    constant_source,
    future_source,
    request,
    small_settings,
)
from verifier_service.engine.loop import Engine
from verifier_service.engine.ports import SourcePlan
from verifier_service.engine.static_planner import StaticPlanner
from verifier_service.sampling.reference import choose_reference, shaped_reference

VOCAB = 13
CONTEXT = 40
TREE = Plan(PlanKind.TREE, depth=8, width=2, nodes=16)
Said = tuple[tuple[int, ...], FinishReason | None, int | None]


def by_definition(asked: GenerationRequest, eos: Sequence[int]) -> Said:
    """Token by token: shape, choose, and ask after each whether it is the end."""
    target, output = HashTarget(VOCAB), list[int]()
    params, stops = asked.params, set(asked.params.stop_token_ids)
    while True:
        path = (*asked.prompt_ids, *output)
        row = shaped_reference(
            target.path_logits(path), asked.options, asked.prompt_ids, output, {*eos, *stops}
        )
        token = choose_reference(row, params, len(path))
        assert token is not None
        output.append(token)
        if token in stops or (token in eos and not params.ignore_eos):
            return tuple(output), FinishReason.STOP, token
        if len(output) == params.max_tokens or len(path) + 1 == CONTEXT:
            return tuple(output), FinishReason.LENGTH, None


def served(
    asked: GenerationRequest, eos: tuple[int, ...], future: Sequence[int], error_rate: float
) -> Said:
    """future: a text that the drafter believes in, its own wrong tokens aside."""
    text = {"a": (*asked.prompt_ids, *future)}
    drafting = FakeDrafting(
        {
            "good": future_source(text, VOCAB, error_rate),
            "eos": constant_source(min(eos, default=0)),
        }
    )
    engine = Engine(
        HashTarget(VOCAB, max_context=CONTEXT, eos_token_ids=eos),
        drafting,
        StaticPlanner([SourcePlan("good", TREE), SourcePlan("eos", Plan(PlanKind.CHAIN, depth=2))]),
        small_settings(),
    )
    client = Client(engine)
    client.submit(asked)
    client.finish()
    engine.check_idle()
    last = client.last("a")
    assert sum(run.finish_reason is not None for run in client.runs["a"]) == 1
    assert last.counts is not None
    assert last.counts.num_output == len(client.ids("a"))
    return client.ids("a"), last.finish_reason, last.stop_token_id


def longest(asked: GenerationRequest) -> tuple[int, ...]:
    """The text with every end lifted: what a drafter that knows of no end goes on to guess."""
    params = replace(asked.params, stop_token_ids=(), max_tokens=CONTEXT)
    return by_definition(replace(asked, params=params), ())[0]


IDS = st.sets(st.integers(0, VOCAB - 1), max_size=3).map(lambda ids: tuple(sorted(ids)))


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    prompt=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=CONTEXT - 1),
    max_tokens=st.integers(1, 24),
    eos=IDS,
    stops=IDS,
    ignore_eos=st.booleans(),
    minimum=st.integers(0, 24),
    temperature=st.sampled_from([0.0, 0.9]),
    error_rate=st.sampled_from([0.0, 0.0, 0.4]),
)
def test_texts_end_as_plain_loops_end_them(
    prompt, max_tokens, eos, stops, ignore_eos, minimum, temperature, error_rate
):
    sampling = {"temperature": temperature, "seed": len(prompt)}
    asked = replace(
        request("a", prompt, max_tokens, ignore_eos=ignore_eos, stop_token_ids=stops, **sampling),
        options=LogitOptions(min_tokens=min(minimum, max_tokens)),
    )
    assert served(asked, eos, longest(asked), error_rate) == by_definition(asked, eos)


@pytest.mark.parametrize("minimum", range(12))
def test_an_end_comes_at_min_tokens_and_not_before(minimum: int):
    """C10: EOS is impossible before min_tokens, and possible with the next token."""
    eos = tuple(range(5))
    asked = replace(request("a", [1, 2], 12), options=LogitOptions(min_tokens=minimum))
    said = served(asked, eos, longest(asked), 0.0)
    assert said == by_definition(asked, eos)
    assert not set(said[0][:minimum]) & set(eos)
    free = by_definition(replace(asked, options=LogitOptions()), eos)[0]
    assert len(said[0]) > minimum or minimum >= len(free)


def test_end_ids_that_no_token_has_are_never_met():
    """A tokenizer may know more ids than the model has: C10 and C11 with such a one."""
    asked = replace(request("a", [1, 2], 12), options=LogitOptions(min_tokens=3))
    assert served(asked, (4, VOCAB, 10**6), (), 0.0) == by_definition(asked, (4,))


class BreaksBehind(PathTarget):
    """No finite score once `end` was said, where plain decoding never looks."""

    def __init__(self, end: int, eos: tuple[int, ...]) -> None:
        super().__init__(VOCAB, eos_token_ids=eos)
        self._whole, self._end = HashTarget(VOCAB), end

    def path_logits(self, path: tuple[int, ...]) -> torch.Tensor:
        logits = self._whole.path_logits(path)
        return torch.full_like(logits, torch.nan) if self._end in path[2:] else logits


@pytest.mark.parametrize("place", range(8))
@pytest.mark.parametrize("with_drafts", [False, True])
def test_a_text_that_breaks_keeps_what_plain_decoding_said_before(place: int, with_drafts: bool):
    text = longest(request("a", [1, 2], 20))
    end = text[place]
    drafting = FakeDrafting({"good": future_source({"a": (1, 2, *text)}, VOCAB)})
    plans = [SourcePlan("good", Plan(PlanKind.CHAIN, depth=8))] if with_drafts else []
    engine = Engine(BreaksBehind(end, ()), drafting, StaticPlanner(plans), small_settings())
    client = Client(engine)
    client.submit(request("a", [1, 2], 20))
    assert client.finish()["a"] == text[: text.index(end) + 1]
    assert client.last("a").finish_reason is FinishReason.ERROR
    assert client.last("a").error == "the target returned no finite score"
    engine.check_idle()
    assert engine.stats().num_cached_pages == 0


@pytest.mark.parametrize("place", range(8))
@pytest.mark.parametrize("by_length", [False, True])
def test_what_a_draft_finds_behind_the_end_does_not_touch_the_text(place: int, by_length: bool):
    asked = request("a", [1, 2], 20)
    text = longest(asked)
    end = text[place]
    upto = text.index(end) + 1
    target = BreaksBehind(end, () if by_length else (end,))
    drafting = FakeDrafting({"good": future_source({"a": (1, 2, *text)}, VOCAB)})
    planner = StaticPlanner([SourcePlan("good", Plan(PlanKind.CHAIN, depth=8))])
    client = Client(Engine(target, drafting, planner, small_settings()))
    client.submit(request("a", [1, 2], upto if by_length else 20))
    assert client.finish()["a"] == text[:upto]
    assert client.last("a").finish_reason is (
        FinishReason.LENGTH if by_length else FinishReason.STOP
    )
    client.engine.check_idle()
