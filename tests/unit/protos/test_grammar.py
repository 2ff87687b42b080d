"""Grammars as part of a request: what is refused, and what an older peer makes of them."""

import pytest

from protos import generation_pb2 as pb
from protos.errors import InvalidRequest
from protos.generation import GenerationRequest
from protos.generation_codec import (
    decode_generation_request,
    decode_target,
    encode_generation_request,
)
from protos.grammar import MAX_GRAMMAR_BYTES, Grammar, GrammarKind
from protos.options import LogitOptions
from protos.params import SamplingParams
from tests.unit.protos.strategies import LIMITS

DIGITS = Grammar(GrammarKind.REGEX, "[0-9]+")


def asking(grammar: Grammar | None, **sampling) -> GenerationRequest:
    options = LogitOptions(grammar=grammar)
    return GenerationRequest("g", (1, 2), SamplingParams(**sampling), options=options)


@pytest.mark.parametrize(
    "text", ["", "x" * (MAX_GRAMMAR_BYTES + 1), "\u00e4" * (MAX_GRAMMAR_BYTES // 2 + 1), "\ud83d"]
)
def test_a_grammar_of_a_wrong_size_or_no_text_is_refused(text: str):
    with pytest.raises(InvalidRequest) as caught:
        Grammar(GrammarKind.REGEX, text)
    assert caught.value.param == "grammar"
    assert len(str(caught.value)) < 200


def test_a_grammar_may_be_as_long_as_the_limit():
    longest = Grammar(GrammarKind.LARK, "x" * MAX_GRAMMAR_BYTES)
    sent = encode_generation_request(asking(longest))
    assert decode_generation_request(sent, LIMITS).options.grammar == longest


def test_a_grammar_alone_changes_something():
    assert not LogitOptions(grammar=DIGITS).changes_nothing


def test_a_text_with_a_grammar_ends_by_an_eos():
    with pytest.raises(InvalidRequest) as caught:
        asking(DIGITS, ignore_eos=True)
    assert caught.value.param == "ignore_eos"


@pytest.mark.parametrize("kind", [0, 99])
def test_a_kind_that_is_not_known_here_is_refused_by_name(kind: int):
    message = encode_generation_request(asking(DIGITS))
    message.options.grammar.kind = kind
    with pytest.raises(InvalidRequest) as caught:
        decode_generation_request(message, LIMITS)
    assert caught.value.param == "grammar"


@pytest.mark.parametrize("size", [0, MAX_GRAMMAR_BYTES + 1])
def test_a_text_of_a_wrong_size_is_refused_on_arrival(size: int):
    message = encode_generation_request(asking(DIGITS))
    message.options.grammar.text = "x" * size
    with pytest.raises(InvalidRequest) as caught:
        decode_generation_request(message, LIMITS)
    assert caught.value.param == "grammar"


def test_an_older_verifier_says_that_it_takes_no_grammar():
    older = pb.DescribeTargetResponse(protocol_version=1, vocab_size=8, max_context=8)
    assert not decode_target(older).takes_grammar
