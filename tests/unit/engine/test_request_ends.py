"""Token-level ends: EOS sets, the caller's stop ids, max_tokens and the context limit."""

from collections.abc import Sequence

import hypothesis
import pytest
from hypothesis import strategies as st

from protos.generation import FinishReason, GenerationRequest
from protos.params import SamplingParams
from tests.fakes import request
from verifier_service.engine.request import Cut, Ends, RunningRequest

ENDS = Ends(max_context=20, eos_token_ids=frozenset({7, 8}))


def running(given: GenerationRequest, ends: Ends = ENDS) -> RunningRequest:
    return RunningRequest(1, given, ends, lambda run: None, 0.0)


@pytest.mark.parametrize(
    ("choices", "expected"),
    [
        ((1, 2, 3), Cut(3)),
        ((7,), Cut(1, FinishReason.STOP, 7)),
        ((1, 8, 7, 2), Cut(2, FinishReason.STOP, 8)),
        ((1, 2, 3, 4), Cut(4, FinishReason.LENGTH)),
        ((1, 2, 3, 4, 5), Cut(4, FinishReason.LENGTH)),
        ((1, 2, 3, 7), Cut(4, FinishReason.STOP, 7)),
        ((1, 2, 3, 4, 7), Cut(4, FinishReason.LENGTH)),
    ],
)
def test_a_run_is_cut_at_the_first_end(choices: tuple[int, ...], expected: Cut):
    assert running(request("a", [1], max_tokens=4)).cut(choices) == expected


def cut_one_by_one(one: RunningRequest, stop_ids: set[int], choices: Sequence[int]) -> Cut:
    """The same rule as plain decoding has it: after every token, is this the end?"""
    known_len, committed = one.known_len, 0
    for token in choices:
        committed += 1
        if token in stop_ids:
            return Cut(committed, FinishReason.STOP, token)
        if known_len + committed == one.max_len:
            return Cut(committed, FinishReason.LENGTH)
    return Cut(committed)


@hypothesis.given(
    num_prompt=st.integers(1, 19),
    num_output=st.integers(0, 6),
    max_tokens=st.integers(1, 12),
    stops=st.sets(st.integers(0, 9), max_size=3),
    ignore_eos=st.booleans(),
    choices=st.lists(st.integers(0, 9), min_size=1, max_size=16),
)
def test_a_run_is_cut_where_plain_decoding_would_have_ended(
    num_prompt, num_output, max_tokens, stops, ignore_eos, choices
):
    output = [1] * min(num_output, max_tokens - 1, 19 - num_prompt)
    one = running(
        request(
            "a",
            [1] * num_prompt,
            max_tokens,
            output,
            ignore_eos=ignore_eos,
            stop_token_ids=tuple(stops),
        )
    )
    stop_ids = stops if ignore_eos else stops | ENDS.eos_token_ids
    assert one.cut(choices) == cut_one_by_one(one, stop_ids, choices)


def test_ignore_eos_lifts_the_models_ends_but_not_the_callers():
    given = request("a", [1], max_tokens=9, ignore_eos=True, stop_token_ids=(8, 5))
    assert running(given).cut((7, 5)) == Cut(2, FinishReason.STOP, 5)
    assert running(given).cut((7, 8)) == Cut(2, FinishReason.STOP, 8)


def test_the_context_limit_ends_a_text_like_max_tokens():
    one = running(request("a", range(17), max_tokens=100))
    assert one.remaining == 3
    assert one.cut((1, 1, 1, 1)) == Cut(3, FinishReason.LENGTH)


def test_a_request_that_arrives_finished_is_seen_as_such():
    assert running(request("a", [1], 3, output=[2, 7])).arrived_finished() == Cut(
        0, FinishReason.STOP, 7
    )
    assert running(request("a", [1], 2, output=[2, 3])).arrived_finished() == Cut(
        0, FinishReason.LENGTH
    )
    assert running(request("a", [1], 3, output=[2, 3])).arrived_finished() is None
    assert running(request("a", [7], 3)).arrived_finished() is None


def test_committed_output_counts_as_output_not_as_prompt():
    one = running(request("a", [1, 2], 10, output=[3, 4, 5]))
    assert one.num_output == 3
    assert one.remaining == 7
    assert one.extend_len == 5


def test_slots_are_one_run_while_pages_follow_each_other():
    one = running(GenerationRequest("a", (1, 2), SamplingParams()))
    one.grant([3, 4], page_size=4)
    assert one.slots(8).tolist() == list(range(12, 20))
    assert one.first_slot(8) == 12
    one.grant([9], page_size=4)
    assert one.first_slot(8) == 12
    assert one.first_slot(9) is None
    assert one.slots(9).tolist()[-1] == 36
    one.withdraw(8)
    one.grant([5], page_size=4)
    assert one.first_slot(12) == 12
