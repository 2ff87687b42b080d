"""Detokenisation and stop strings against naive references that look at the whole text."""

from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.http.text import REPLACEMENT, Detokenizer, TextStream


def decode(ids: Sequence[int], /) -> str:
    """A toy byte-level tokenizer: ids below 256 are bytes, 256 is special, the rest words."""
    words = {257: "the ", 258: "é", 259: "世", 260: ""}
    data = b"".join(bytes([i]) if i < 256 else words.get(i, "").encode() for i in ids)
    return data.decode("utf-8", "replace")


VALID_IDS = st.lists(
    st.one_of(
        st.sampled_from(["a", "b", "ab", "é", "世", "🌍", " "]).map(lambda t: list(t.encode())),
        st.sampled_from([[256], [257], [258], [259], [260]]),
    ),
    max_size=12,
).map(lambda parts: [i for part in parts for i in part])
CUTS = st.lists(st.integers(1, 6), min_size=1, max_size=40)


def runs(ids: Sequence[int], cuts: Sequence[int]) -> list[list[int]]:
    """ids in runs of the lengths in `cuts`, repeated as needed."""
    found: list[list[int]] = []
    at = number = 0
    while at < len(ids):
        found.append(list(ids[at : at + cuts[number % len(cuts)]]))
        at += len(found[-1])
        number += 1
    return found


def naive_end(text: str, stops: Sequence[str], include: bool) -> tuple[str, str | None]:
    """The first character at which any stop is complete, the longest stop there."""
    for end in range(1, len(text) + 1):
        hits = [stop for stop in stops if text[:end].endswith(stop)]
        if hits:
            stop = max(hits, key=len)
            return (text[:end] if include else text[: end - len(stop)]), stop
    return text, None


def naive_num_tokens(ids: Sequence[int], stops: Sequence[str]) -> int:
    """Ids up to the first whose text completes a stop; half characters are no text."""
    for number in range(1, len(ids) + 1):
        text = decode(ids[:number]).rstrip(REPLACEMENT)
        if any(stop in text for stop in stops):
            return number
    return len(ids)


@settings(deadline=None)
@given(VALID_IDS, st.integers(0, 3))
def test_pieces_join_to_the_text_of_the_whole(ids: list[int], cut: int) -> None:
    ids = ids[: len(ids) - cut]
    detokenizer = Detokenizer(decode)
    pieces = [detokenizer.push(token_id) for token_id in ids]
    assert all(REPLACEMENT not in piece for piece in pieces)
    assert "".join(pieces) + detokenizer.flush() == decode(ids)
    assert detokenizer.flush() == ""


@settings(deadline=None)
@given(st.lists(st.integers(0, 255), max_size=60))
def test_bytes_that_are_no_text_are_shown_in_the_end(ids: list[int]) -> None:
    detokenizer = Detokenizer(decode)
    joined = "".join(detokenizer.push(token_id) for token_id in ids) + detokenizer.flush()
    assert joined.replace(REPLACEMENT, "") == decode(ids).replace(REPLACEMENT, "")


@settings(max_examples=400, deadline=None)
@given(
    VALID_IDS,
    st.lists(st.text("abé世 ", min_size=1, max_size=4), max_size=3),
    CUTS,
    st.booleans(),
)
def test_first_completed_stop_wins_whatever_the_runs(
    ids: list[int], stops: list[str], cuts: list[int], include: bool
) -> None:
    stream = TextStream(decode, stops, include_stop=include)
    shown, num_tokens, stop = "", 0, None
    for run in runs(ids, cuts):
        piece = stream.push(run)
        shown += piece.text
        num_tokens += piece.num_tokens
        stop = piece.stop
        if stop is not None:
            break
    else:
        tail = stream.finish()
        shown, stop = shown + tail.text, tail.stop
    assert (shown, stop) == naive_end(decode(ids), stops, include)
    assert num_tokens == naive_num_tokens(ids, stops)


@settings(deadline=None)
@given(VALID_IDS, CUTS)
def test_without_stops_nothing_waits_for_the_end(ids: list[int], cuts: list[int]) -> None:
    stream = TextStream(decode)
    pushed = 0
    shown = ""
    for run in runs(ids, cuts):
        shown += stream.push(run).text
        pushed += len(run)
        assert shown == decode(ids[:pushed]).rstrip(REPLACEMENT)
