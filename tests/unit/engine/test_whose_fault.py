"""Who breaks a text: the request by what it allows, or the target by scores that are not finite.

The first is told to the user and harms nobody's pages; the second sends the request elsewhere and
its pages with it.
"""

from dataclasses import replace

import pytest
import torch

from protos.generation import FinishReason, GenerationRequest
from protos.options import LogitOptions
from tests.fakes import Client, FakeDrafting, HashTarget, request, small_settings
from tests.tiny import EOS_ID
from tests.unit.grammar.grammar_cases import VOCAB, ids_of, regex, vocabulary
from verifier_service.engine.loop import Engine
from verifier_service.engine.static_planner import StaticPlanner
from verifier_service.grammar.compiling import Grammars
from verifier_service.grammar.state import GrammarState

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
