"""Text, ids, log probabilities, usage and metrics of an answer agree on one prefix of its tokens.

A random answer is cut into random runs, as steps commit them, and compared with a plain loop that
looks at the whole answer at once.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.http import replies
from cluster.http.answers import Answer, Delta
from cluster.http.logprobs import TokenWriter
from cluster.http.metrics import ServedCounters
from cluster.http.text import REPLACEMENT, TextStream
from protos.generation import FinishReason, RunCounts, TokenLogprobs, TokenRun
from protos.token_bytes import TokenBytes
from tests.unit.cluster.test_text_ends import CUTS, VALID_IDS, decode, naive_end, runs

STOPS = st.lists(st.text("abé世 ", min_size=1, max_size=4), max_size=3)
DRAFTED = 6
"""Nodes verified in a round that drafted."""


def bytes_of(token_id: int) -> TokenBytes:
    words = {256: "<s>", 257: "the ", 258: "é", 259: "世", 260: ""}
    data = bytes([token_id]) if token_id < 256 else words[token_id].encode()
    return TokenBytes(data, is_text=token_id != 256)


@dataclass(frozen=True)
class Ending:
    """What an answer must come to. reason: the stop string, or the caller's id that ended it."""

    text: str
    num_tokens: int
    finish: str
    reason: str | int | None


def ending(
    ids: Sequence[int], stops: Sequence[str], include: bool, stop_id: int | None, is_named: bool
) -> Ending:
    """The plain loop: one more token at a time, the whole text looked at each time."""
    shown = ids[:-1] if stop_id is not None and not include else ids
    for number in range(1, len(shown) + 1):
        text, stop = naive_end(decode(shown[:number]).rstrip(REPLACEMENT), stops, include)
        if stop is not None:
            return Ending(text, number, "stop", stop)
    finish = "length" if stop_id is None else "stop"
    return Ending(decode(shown), len(ids), finish, stop_id if is_named else None)


def committed(ids: Sequence[int], cuts: Sequence[int], stop_id: int | None) -> list[TokenRun]:
    """The answer in runs of one step each: all but the last id of a run were drafted."""
    parts = runs(ids, cuts)
    made: list[TokenRun] = []
    at = num_drafts = 0
    for number, part in enumerate(parts):
        num_drafts += len(part) > 1
        values = [TokenLogprobs(-(at + i) / 8.0, ((0, -1.0),)) for i in range(len(part))]
        at += len(part)
        is_last = number == len(parts) - 1
        reason = FinishReason.LENGTH if stop_id is None else FinishReason.STOP
        counts = RunCounts(num_draft_rounds=num_drafts, num_drafted=num_drafts * DRAFTED)
        made.append(
            TokenRun(
                "r",
                tuple(part),
                len(part) - 1,
                reason if is_last else None,
                stop_id if is_last else None,
                counts,
                logprobs=tuple(values),
            )
        )
    return made


@settings(max_examples=300, deadline=None)
@given(
    VALID_IDS.filter(bool),
    st.integers(0, 3),
    STOPS,
    CUTS,
    st.booleans(),
    st.booleans(),
    st.booleans(),
)
def test_all_five_agree_on_one_prefix(
    ids: list[int],
    half: int,
    stops: list[str],
    cuts: list[int],
    include: bool,
    at_stop_id: bool,
    is_named: bool,
) -> None:
    ids = ids[: max(len(ids) - half, 1)]
    stop_id = ids[-1] if at_stop_id else None
    expected = ending(ids, stops, include, stop_id, is_named)
    answer = Answer(
        0,
        5,
        TextStream(decode, stops, include_stop=include),
        TokenWriter(bytes_of),
        shows_stop_token=include,
        named_ids=[stop_id] if is_named and stop_id is not None else (),
    )
    deltas: list[Delta] = []
    accepted = 0
    for run in committed(ids, cuts, stop_id):
        delta = answer.feed(run)
        deltas.append(delta)
        accepted += min(run.num_accepted, len(delta.ids))
        so_far = "".join(delta.text for delta in deltas)
        assert expected.text.startswith(so_far), "held-back text has leaked"
        if answer.done:
            break
    used = ids[: expected.num_tokens]
    assert "".join(delta.text for delta in deltas) == expected.text
    assert [token for delta in deltas for token in delta.ids] == used
    assert (deltas[-1].finish, deltas[-1].stop_reason) == (expected.finish, expected.reason)
    shown = [token for delta in deltas for token in delta.tokens]
    assert [token.logprob for token in shown] == [-i / 8.0 for i in range(len(used))]
    assert [token.token for token in shown] == [bytes_of(i) for i in used]
    usage = replies.usage(answer.tally)
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (5, len(used))
    block = replies.metrics(answer.tally)["speculative_decoding"]
    assert isinstance(block, dict)
    assert block["num_accepted_draft_tokens"] == accepted
    histogram = block["acceptance_histogram"]
    assert sum(histogram) == block["num_spec_steps"]
    assert sum(depth * count for depth, count in enumerate(histogram)) == accepted
    counters = ServedCounters("m")
    counters.count_answer(answer.tally, answer.finish or "abort")
    samples = {sample.name: sample.value for sample in counters.samples()}
    assert samples["vllm:generation_tokens_total"] == len(used)
    assert samples["vllm:spec_decode_num_accepted_tokens_total"] == accepted
