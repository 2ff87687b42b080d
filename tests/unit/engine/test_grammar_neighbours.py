"""What a grammar costs others: nothing. Compilers wait beside the engine, rows are chosen alike."""

import asyncio
import random
import sys
import threading
from dataclasses import replace

import pytest
import torch

from protos.errors import InvalidRequest
from protos.generation import GenerationRequest
from protos.grammar import Grammar
from protos.options import LogitOptions
from tests.fakes import Client, FakeDrafting, HashTarget, request, small_settings
from tests.tiny import EOS_ID
from tests.unit.grammar.grammar_cases import (
    ONE_OF_EACH,
    PERSON,
    VOCAB,
    ids_of,
    maker,
    opened,
    regex,
    schema,
    vocabulary,
)
from verifier_service.engine.loop import Engine
from verifier_service.engine.service import EngineService
from verifier_service.engine.static_planner import StaticPlanner
from verifier_service.grammar.compiling import Grammars
from verifier_service.grammar.reference import allowed_reference
from verifier_service.sampling.choice import ChoiceRow, choose
from verifier_service.sampling.choice_batch import choose_batch
from verifier_service.sampling.history import History, Past
from verifier_service.sampling.reference import shaped_reference
from verifier_service.sampling.shaping import shape_logits

LIMIT_S = 60.0


def engine_of(grammars: Grammars | None) -> Engine:
    target = HashTarget(VOCAB, eos_token_ids=(EOS_ID,))
    settings = small_settings(num_slots=2048)
    return Engine(target, FakeDrafting(), StaticPlanner(), settings, grammars=grammars)


def asking(name: str, grammar: Grammar, max_tokens: int = 20) -> GenerationRequest:
    asked = request(name, [5, 6], max_tokens, temperature=0.9, seed=2)
    return replace(asked, options=LogitOptions(grammar=grammar))


class Slow(Grammars):
    """Compiles when it is told to."""

    def __init__(self) -> None:
        super().__init__(vocabulary)
        self.has_begun, self.may_go_on = threading.Event(), threading.Event()

    def compile(self, grammar: Grammar) -> None:
        self.has_begun.set()
        assert self.may_go_on.wait(LIMIT_S)
        super().compile(grammar)


def test_a_compile_holds_up_neither_engine_nor_event_loop():
    grammars, interval = Slow(), sys.getswitchinterval()
    service = EngineService(engine_of(grammars))
    service.start()

    async def collect(asked: GenerationRequest) -> tuple[int, ...]:
        return tuple([t async for run in service.generate(asked) for t in run.ids])

    async def go() -> None:
        slow = asyncio.create_task(collect(asking("slow", schema(PERSON))))
        await asyncio.to_thread(grammars.has_begun.wait, LIMIT_S)
        neighbour = request("n", [7], 30, ignore_eos=True)
        assert len(await asyncio.wait_for(collect(neighbour), LIMIT_S)) == 30
        assert not slow.done()
        given_up = asyncio.create_task(collect(asking("left", regex("never compiled"))))
        await asyncio.sleep(0)
        given_up.cancel()
        grammars.may_go_on.set()
        client = Client(engine_of(Grammars(vocabulary)))
        client.submit(asking("slow", schema(PERSON)))
        assert await asyncio.wait_for(slow, LIMIT_S) == client.finish()["slow"]

    asyncio.run(go())
    service.stop()
    sys.setswitchinterval(interval)


def test_a_bad_grammar_is_refused_by_the_service_before_any_run():
    interval = sys.getswitchinterval()
    service = EngineService(engine_of(Grammars(vocabulary)))
    assert service.takes_grammar
    service.start()

    async def go() -> None:
        with pytest.raises(InvalidRequest) as caught:
            await anext(service.generate(asking("bad", regex("("))))
        assert caught.value.param == "grammar"

    asyncio.run(go())
    service.stop()
    sys.setswitchinterval(interval)


def test_plain_requests_never_meet_llguidance(monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    client = Client(engine_of(Grammars(vocabulary)))
    client.submit(request("p", [1], 12, temperature=1.0, seed=1, ignore_eos=True))
    options = LogitOptions(presence_penalty=1.0)
    client.submit(replace(request("q", [1], 12, ignore_eos=True), options=options))
    assert {len(ids) for ids in client.finish().values()} == {12}


def some_rows(rng: random.Random, count: int) -> tuple[list[ChoiceRow], list[tuple]]:
    """Rows at nodes of several texts, forbidden ones among them, and what each stands behind."""
    rows, behind = [], []
    for number in range(count):
        grammar = rng.choice([*ONE_OF_EACH, None])
        text = ids_of(rng.choice(['{"name":"x","kind":"cat"}', "abcc/", "((7))", "zz"]))
        at = rng.randrange(len(text) + 1)
        path = tuple(text[at : at + rng.randrange(4)])
        options = LogitOptions(
            grammar=grammar,
            min_tokens=rng.choice((0, 30)),
            logit_bias=((rng.randrange(VOCAB), 3.0),),
            presence_penalty=rng.choice((0.0, 1.0)),
        )
        said = text[:at]
        state = None
        if grammar is not None:
            fits = maker(grammar)().try_consume_tokens(list(said)) == len(said)
            said = said if fits else []
            state, _ = opened(grammar, said)
        history = History(options, [5, *said], 1, frozenset({EOS_ID}), state)
        params = request("x", [1], temperature=rng.choice((0.0, 1.0)), seed=number).params
        position = 1 + len(said) + len(path)
        rows.append(ChoiceRow(rng.randrange(8), params, position, None, Past(history, path)))
        behind.append((options, [*said, *path]))
    return rows, behind


def test_rows_with_grammars_equal_the_plain_loops_alone_and_in_a_batch():
    rng = random.Random(4)
    logits = 3.0 * torch.randn(8, VOCAB, generator=torch.Generator().manual_seed(1))
    rows, behind = some_rows(rng, 40)
    pasts = [row.past for row in rows if row.past is not None]
    shaped = shape_logits(logits, [r.row for r in rows], pasts, [r.position for r in rows])
    num_dead = 0
    for row, own, (options, output) in zip(rows, shaped, behind, strict=True):
        make = None if options.grammar is None else maker(options.grammar)
        expected = shaped_reference(
            logits[row.row],
            options,
            [5],
            output,
            (EOS_ID,),
            make and (lambda said, m=make: allowed_reference(m, range(VOCAB), {EOS_ID}, said)),
        )
        assert torch.equal(own, expected)
        num_dead += not bool(torch.isfinite(own).any())
    assert 0 < num_dead < len(rows) / 2, "some paths are forbidden"
    one_by_one = [choose(logits, [row])[0] for row in rows]
    assert choose(logits, rows) == one_by_one
    assert choose_batch(logits, rows) == one_by_one
    assert one_by_one.count(None) == num_dead
