"""Claims about limits, malformed input, fairness, and what a caller must show."""

import time
from collections.abc import Callable
from dataclasses import replace

from protos.conformance.bad_codec import ROW_SPOILS, SPOILS, nameless, repeated, spoiled
from protos.conformance.bench import GREEDY, Bench, Skipped, answered, expect, require
from protos.errors import OutriderError
from protos.exchange import PROTOCOL_VERSION, DraftStatus, DraftWork, PlanKind
from protos.params import Acceptance, SamplingParams

FAIR_S = 5.0
"""A draft that waits longer than this while another session's rows are absorbed is starved."""

_MANY = 300


def record_is_whole(bench: Bench) -> None:
    """the capability record names kind, incarnation, plan kinds and limits, and stays the same"""
    record = bench.capabilities
    require(bool(record.kind), "no kind")
    require(record.incarnation != 0, "no incarnation")
    require(bool(record.plan_kinds), "no plan kinds")
    require(PlanKind.NONE not in record.plan_kinds, "none is no kind to offer")
    require(record.max_depth > 0, "no max_depth")
    require(bench.link.describe()[0] == record, "a second Describe tells something else")


def another_version_is_refused(bench: Bench) -> None:
    """Describe in a version that is not spoken is refused"""
    try:
        bench.link.describe_in_version(PROTOCOL_VERSION + 1000)
    except OutriderError as error:
        name = type(error).__name__
        require(name in ("VersionMismatch", "ProtocolError"), f"it ends with {name}")
        return
    require(False, "it was answered")


def token_is_asked(bench: Bench) -> None:
    """a call without the token, or with another, is UNAUTHENTICATED"""
    if not bench.link.has_token:
        raise Skipped("no --token was given")
    for token in ("", "another"):
        found = [bench.link.outcome_of_describe(token)]
        found += bench.link.outcome_of_streams(token, bench.verifier_id)
        require(set(found) == {"Unauthenticated"}, f"Describe, Draft and Context end with {found}")


def streams_name_their_verifier(bench: Bench) -> None:
    """streams that do not say whose they are end with an error"""
    found = bench.link.outcome_of_streams(None, None)
    require(all(found), f"Draft and Context end with {found}")


def plan_beyond_the_record_is_refused(bench: Bench) -> None:
    """a plan beyond the record's limits, or of a kind not offered, is refused"""
    record = bench.capabilities
    plans = [replace(bench.plan(), depth=record.max_depth + 1)]
    missing = set(PlanKind) - set(record.plan_kinds) - {PlanKind.NONE}
    plans += [replace(bench.plan(), kind=kind, nodes=1) for kind in sorted(missing)[:1]]
    for plan in plans:
        work = replace(bench.open(bench.new_session()), plan=plan)
        expect(bench.ask(work)[0], DraftStatus.REFUSED)


def text_beyond_the_context_is_refused(bench: Bench) -> None:
    """tokens beyond max_context are refused"""
    most = bench.capabilities.max_context
    if not most:
        raise Skipped("the record names no max_context")
    work = bench.work(bench.new_session(), 0, most + 1, opened=bench.opening(), with_rows=False)
    expect(bench.ask(work)[0], DraftStatus.REFUSED)


def id_outside_the_vocabulary_is_refused(bench: Bench) -> None:
    """a token id outside the vocabulary is refused"""
    vocab = bench.capabilities.vocab_size
    if not vocab:
        raise Skipped("the record names no vocabulary")
    work = bench.open(bench.new_session())
    expect(bench.ask(replace(work, tokens=(*work.tokens[:-1], vocab)))[0], DraftStatus.REFUSED)


def full_drafter_makes_room(bench: Bench) -> None:
    """one session more than max_sessions is served, and the one idle longest is lost"""
    most = bench.capabilities.max_sessions
    if not 0 < most <= _MANY:
        raise Skipped(f"max_sessions is {most or 'not named'}")
    names = [bench.new_session() for _ in range(most + 1)]
    for name in names:
        answered(bench.ask(bench.open(name, 2))[0])
    expect(bench.ask(bench.work(names[0], 2, 3))[0], DraftStatus.LOST)
    answered(bench.ask(bench.work(names[-1], 2, 3))[0])


def every_entry_is_answered_once(bench: Bench) -> None:
    """a message of many sessions is answered with one result for each"""
    names = [bench.new_session() for _ in range(min(8, bench.capabilities.max_sessions or 8))]
    for result in bench.ask(*(bench.open(name) for name in names)):
        answered(result)
    while not bench.verifier.is_silent(0.3):
        require(not bench.verifier.receive().results, "a result came twice")


def huge_message_leaves_the_stream(bench: Bench) -> None:
    """a message of 5,000 entries is refused whole or answered, and the stream goes on"""
    number = bench.capabilities.incarnation
    names = range(2**62, 2**62 + 5000)
    bench.verifier.send([DraftWork(name, number, 1, 0, (1,), bench.plan()) for name in names])
    bench.verifier.receive()
    while not bench.verifier.is_silent(1.0):
        bench.verifier.receive()
    answered(bench.ask(bench.open(bench.new_session()))[0])


def bytes_that_are_no_message(bench: Bench) -> None:
    """bytes that are no message end their stream, and the drafter goes on"""
    require(bool(bench.link.outcome_of_garbage(bench.verifier_id)), "the stream went on")
    answered(bench.ask(bench.open(bench.new_session()))[0])


def rejection_comes_with_q(bench: Bench) -> None:
    """with acceptance: rejection a chain comes with its q, or the work is refused"""
    params = SamplingParams(temperature=0.8, acceptance=Acceptance.REJECTION)
    work = bench.open(bench.new_session(), params=params)
    if not bench.capabilities.gives_q:
        expect(bench.ask(work)[0], DraftStatus.REFUSED)
        return
    result = answered(bench.ask(work)[0])
    require(len(result.q) == result.tree.num_nodes, f"{len(result.q)} q of {result.tree.num_nodes}")


def drafts_go_before_rows(bench: Bench) -> None:
    """a draft does not wait until another session's bulk rows are absorbed"""
    if not bench.eats_rows:
        raise Skipped("it eats tokens only")
    length = min(bench.capabilities.max_context or 1024, 1024)
    slow, quick = bench.new_session(), bench.new_session()
    opened = bench.work(slow, 0, length, opened=bench.opening(), with_rows=False)
    answered(bench.ask(replace(opened, plan=replace(opened.plan, kind=PlanKind.NONE)))[0])
    answered(bench.ask(bench.open(quick))[0])
    for piece in bench.pieces(slow, length - 1):
        bench.verifier.send_rows(piece)
    began_s = time.monotonic()
    answered(bench.ask(bench.work(quick, 6, 7))[0])
    took_s = time.monotonic() - began_s
    require(took_s < FAIR_S, f"the draft took {took_s:.1f} s")


def _malformed_ends_its_session(name: str, is_rows: bool) -> Callable[[Bench], None]:
    def claim(bench: Bench) -> None:
        if is_rows and not bench.eats_rows:
            raise Skipped("it eats tokens only")
        bad, good = bench.new_session(), bench.new_session()
        answered(bench.ask(bench.open(bad))[0])
        spoil = (ROW_SPOILS if is_rows else SPOILS)[name]
        message = spoiled(spoil, bench.open(bad), bench.open(good))
        bench.verifier.send_message(message)
        refused, served = bench.collect(message.step, [bad, good])
        expect(refused, DraftStatus.REFUSED)
        require(bool(refused.detail), "the refusal gives no reason")
        answered(served)
        expect(bench.ask(bench.work(bad, 6, 8))[0], DraftStatus.LOST)

    claim.__name__ = f"malformed_{name.replace(' ', '_')}"
    claim.__doc__ = f"{name}: the entry is refused, its session forgotten, its neighbour served"
    return claim


def nameless_entry(bench: Bench) -> None:
    """a session id of 0 costs that entry only"""
    good = bench.new_session()
    message = nameless(bench.open(bench.new_session()), bench.open(good))
    bench.verifier.send_message(message)
    while True:
        found = [r for r in bench.verifier.receive_loosely() if r.session_id == good]
        if found:
            answered(found[0])
            return


def same_session_twice(bench: Bench) -> None:
    """the same session twice in one message: the second entry is malformed"""
    name = bench.new_session()
    message = repeated(bench.open(name))
    bench.verifier.send_message(message)
    statuses = [r.status for r in bench.verifier.receive_loosely() if r.session_id == name]
    require(DraftStatus.REFUSED in statuses, f"answered with {', '.join(statuses) or 'nothing'}")
    answered(bench.ask(bench.open(bench.new_session(), params=GREEDY))[0])


CLAIMS = (
    record_is_whole,
    another_version_is_refused,
    token_is_asked,
    streams_name_their_verifier,
    plan_beyond_the_record_is_refused,
    text_beyond_the_context_is_refused,
    id_outside_the_vocabulary_is_refused,
    full_drafter_makes_room,
    every_entry_is_answered_once,
    *(_malformed_ends_its_session(name, False) for name in SPOILS),
    *(_malformed_ends_its_session(name, True) for name in ROW_SPOILS),
    nameless_entry,
    same_session_twice,
    huge_message_leaves_the_stream,
    bytes_that_are_no_message,
    rejection_comes_with_q,
    drafts_go_before_rows,
)
