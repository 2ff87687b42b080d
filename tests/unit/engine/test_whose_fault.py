"""Who breaks a text: the request by what it allows, or the target by scores that are not finite.

The first is told to the user and harms nobody's pages; the second sends the request elsewhere and
its pages with it.
"""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from protos.exchange import Plan, PlanKind
from protos.generation import FinishReason, GenerationRequest
from protos.grammar import Grammar
from protos.options import LogitOptions
from tests.fakes import Client, FakeDrafting, HashTarget, constant_source, request, small_settings
from tests.tiny import EOS_ID
from tests.unit.grammar.grammar_cases import VOCAB, ids_of, maker, regex, vocabulary
from verifier_service.engine.loop import Engine
from verifier_service.engine.ports import SourcePlan
from verifier_service.engine.static_planner import StaticPlanner
from verifier_service.grammar.compiling import Grammars
from verifier_service.grammar.state import GrammarState, Matcher
from verifier_service.sampling.choice_batch import choose_batch
from verifier_service.sampling.walk import Chooser, WalkStart

PROMPT = tuple(range(5, 45))
CONTRADICTION = LogitOptions(grammar=regex("[a-z]+"), allowed_token_ids=(EOS_ID, *ids_of("012")))


class Broken(HashTarget):
    """One NaN in every row behind the prompt."""

    def path_logits(self, path: tuple[int, ...]) -> torch.Tensor:
        logits = super().path_logits(path).clone()
        if len(path) >= len(PROMPT):
            logits[7] = torch.nan
        return logits


def served(target: HashTarget, asked: GenerationRequest) -> tuple[Client, int]:
    """The client after `asked` has ended, and the tokens that a second request finds cached."""
    sizes = small_settings(num_slots=2048)
    grammars = Grammars(vocabulary)
    client = Client(Engine(target, FakeDrafting(), StaticPlanner(), sizes, grammars=grammars))
    client.submit(asked)
    client.finish()
    client.submit(request("second", PROMPT, 1))
    client.finish()
    client.engine.check_idle()
    counts = client.last("second").counts
    assert counts is not None
    return client, counts.num_cached


def test_options_that_leave_no_id_are_the_requests_fault_and_its_pages_stay():
    asked = replace(request("x", PROMPT, 8), options=CONTRADICTION)
    client, num_cached = served(HashTarget(VOCAB, eos_token_ids=(EOS_ID,)), asked)
    last = client.last("x")
    assert (last.finish_reason, last.is_request_fault) == (FinishReason.ERROR, True)
    assert "the grammar and the options allow" in last.error
    assert num_cached == 32, "chunks of 16 before the one that broke"


def test_a_grammar_that_breaks_midway_is_the_requests_fault(monkeypatch):
    real = GrammarState.allowed

    def allowed(self: GrammarState, path):
        words = real(self, path)
        if len(self._tokens) - self._num_prompt >= 4:
            self.fault = "the grammar cannot be followed: on purpose"
            words.zero_()
        return words

    monkeypatch.setattr(GrammarState, "allowed", allowed)
    asked = replace(request("x", PROMPT, 9), options=LogitOptions(grammar=regex("[a-z]{20}")))
    client, num_cached = served(HashTarget(VOCAB, eos_token_ids=(EOS_ID,)), asked)
    last = client.last("x")
    assert (last.finish_reason, last.is_request_fault) == (FinishReason.ERROR, True)
    assert last.error == "the grammar cannot be followed: on purpose"
    assert len(client.ids("x")) >= 4
    assert num_cached == 36


class BreaksBehindZ:
    """A matcher that fails once it is asked what may follow a z."""

    def __init__(self, inner: Matcher) -> None:
        self._inner, self._taken, self._failed = inner, list[int](), False

    def is_error(self) -> bool:
        return self._failed

    def get_error(self) -> str:
        return "too complex behind z"

    def is_accepting(self) -> bool:
        return self._inner.is_accepting()

    def try_consume_tokens(self, tokens: list[int]) -> int:
        num_taken = self._inner.try_consume_tokens(tokens)
        self._taken += tokens[:num_taken]
        return num_taken

    def rollback(self, num_tokens: int) -> bool:
        del self._taken[len(self._taken) - num_tokens :]
        return not self._failed and self._inner.rollback(num_tokens)

    def unsafe_compute_mask_ptr(self, pointer: int, size: int) -> None:
        self._failed = self._taken[-1:] == ids_of("z")
        self._inner.unsafe_compute_mask_ptr(pointer, size)


class BreakingGrammars(Grammars):
    def open(self, grammar: Grammar, tokens: Sequence[int], num_prompt: int) -> GrammarState:
        make = maker(grammar)
        return GrammarState(lambda: BreaksBehindZ(make()), vocabulary(), tokens, num_prompt)


def drawn_at_once(logits: torch.Tensor, starts: Sequence[WalkStart]) -> Chooser:
    """The choices of every node of every tree, as behind a device."""
    depths = [(start, (0, *start.tree.depths())) for start in starts]
    rows = [start.row(node, depth) for start, ds in depths for node, depth in enumerate(ds)]
    drawn = dict(zip((row.row for row in rows), choose_batch(logits, rows), strict=True))
    return lambda asked: [drawn[row.row] for row in asked]


def test_a_grammar_that_breaks_on_a_draft_leaves_the_text_and_its_end_alone(monkeypatch):
    monkeypatch.setattr("verifier_service.engine.loop.chooser_of", drawn_at_once)
    allowed = LogitOptions(
        grammar=regex("[a-z]{5}[0-9]"), allowed_token_ids=(EOS_ID, *ids_of("abc"))
    )
    asked = replace(request("x", PROMPT, 9), options=allowed)
    texts = {}
    for grammars in (Grammars(vocabulary), BreakingGrammars(vocabulary)):
        drafting = FakeDrafting({"z": constant_source(ids_of("z")[0])})
        planner = StaticPlanner([SourcePlan("z", Plan(PlanKind.CHAIN, depth=2, nodes=2))])
        target = HashTarget(VOCAB, eos_token_ids=(EOS_ID,))
        sizes = small_settings(num_slots=2048)
        client = Client(Engine(target, drafting, planner, sizes, grammars=grammars))
        client.submit(asked)
        client.finish()
        assert client.engine.stats().num_drafted >= 4
        assert "the grammar and the options allow" in client.last("x").error
        texts[type(grammars)] = client.ids("x")
    assert len(texts[Grammars]) >= 3, "ab is one token"
    assert texts[BreakingGrammars] == texts[Grammars]


@pytest.mark.parametrize("options", [LogitOptions(), CONTRADICTION], ids=["plain", "grammar"])
def test_scores_that_are_not_finite_are_the_targets_fault_whatever_was_allowed(
    options: LogitOptions,
):
    asked = replace(request("x", PROMPT, 8), options=options)
    client, num_cached = served(Broken(VOCAB, eos_token_ids=(EOS_ID,)), asked)
    last = client.last("x")
    assert (last.finish_reason, last.is_request_fault) == (FinishReason.ERROR, False)
    assert last.error == "the target returned no finite score"
    assert num_cached == 0
