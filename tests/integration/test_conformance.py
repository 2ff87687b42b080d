"""The conformance suite: our own drafters keep every claim, a fake that breaks one is caught."""

import asyncio
import threading
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest

from cluster.tools.cli import main
from drafter_service import server as edge
from drafter_service.build import build_drafter
from drafter_service.config import DrafterLimits, DrafterSettings
from drafter_service.server import DrafterServer
from protos import drafting_pb2 as pb
from protos import drafting_pb2_grpc as rpc
from protos.channel import Security
from protos.conformance import claims_limits, link
from protos.conformance.bad_codec import ROW_SPOILS, SPOILS
from protos.conformance.suite import CLAIMS, judge, verdicts
from protos.errors import ProtocolError
from protos.exchange import DraftStatus, PlanKind
from protos.tree import chain
from tests.unit.drafter_service.eagle3_cases import eagle3_drafter, tiny_head

TOKEN = "secret"
BY_NAME = {claim.__name__: claim for claim in CLAIMS}


class Serving:
    """A drafter server on a thread of its own."""

    def __init__(self, drafter, token=TOKEN):
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        self._server = self._do(self._make(drafter, token))
        self.address = f"127.0.0.1:{self._do(self._server.start())}"

    async def _make(self, drafter, token):
        return DrafterServer(drafter, Security(token=token))

    def _do(self, work):
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(60)

    def stop(self):
        self._do(self._server.stop(0))
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(60)
        self._loop.close()


@pytest.fixture
def serve():
    servers = []

    def start(drafter, token=TOKEN):
        servers.append(Serving(drafter, token))
        return servers[-1].address

    yield start
    for server in servers:
        server.stop()


def ngram():
    limits = DrafterLimits(max_sessions=6, max_context=200)
    return build_drafter(DrafterSettings(kind="ngram", limits=limits))


def heads():
    return eagle3_drafter(tiny_head())


@pytest.mark.parametrize("make", [ngram, heads])
def test_our_own_drafters_keep_every_claim(serve, make):
    found = list(verdicts(serve(make()), TOKEN))
    assert len(found) == len(CLAIMS)
    assert [v for v in found if v.holds is False] == []
    skipped = {v.name for v in found if v.holds is None}
    assert len(skipped) < 3 or make is ngram


def test_the_command_prints_a_line_per_claim_and_counts(serve, capsys):
    assert main(["conformance", serve(ngram()), "--token", TOKEN]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(CLAIMS) + 1
    assert "0 FAIL" in lines[-1]


def test_the_command_ends_with_one_when_a_claim_fails(serve, capsys, monkeypatch):
    change_replies(monkeypatch, lambda r: replace(r, held_tokens=r.held_tokens + 1))
    assert main(["conformance", serve(ngram()), "--token", TOKEN]) == 1
    assert "FAIL  a session opened from token 0" in capsys.readouterr().out


def test_the_command_ends_with_two_when_nobody_answers(capsys):
    assert main(["conformance", "127.0.0.1:1", "--token", TOKEN]) == 2
    assert "PeerUnavailable" in capsys.readouterr().err


# One way to break each claim. A breaker changes what leaves the server, or what enters it.


def change_replies(monkeypatch, rule):
    real = edge.encode_draft_reply
    monkeypatch.setattr(
        edge, "encode_draft_reply", lambda s, results, *t: real(s, [rule(r) for r in results], *t)
    )


def change_acks(monkeypatch, rule):
    real = edge.encode_ack
    monkeypatch.setattr(edge, "encode_ack", lambda ack: real(rule(ack)))


class Changed:
    """A drafter whose works, or whose results for a work, are changed."""

    def __init__(self, works=lambda w: w, result=lambda w, r: r, record=None, wait_s=0.0):
        self._inner = heads()
        self._works, self._result, self._wait_s = works, result, wait_s
        self.capabilities = replace(self._inner.capabilities, **(record or {}))

    def handle(self, works):
        time.sleep(self._wait_s)
        kept = [changed for w in works if (changed := self._works(w)) is not None]
        asked = [w for w in kept if not w.close]
        results = self._inner.handle(kept)
        return [self._result(w, r) for w, r in zip(asked, results, strict=True)]

    def absorb(self, pieces):
        return self._inner.absorb(pieces)

    def load(self):
        return self._inner.load()

    def expire(self, now):
        return self._inner.expire(now)


def reply(**fields):
    return lambda monkeypatch: change_replies(monkeypatch, lambda r: replace(r, **fields))


def ack(**fields):
    return lambda monkeypatch: change_acks(monkeypatch, lambda a: replace(a, **fields))


def status(before, after):
    def breaker(monkeypatch):
        rule = {before: after}
        empty = {"tree": chain([]), "ranked_ids": ()}
        change_replies(
            monkeypatch,
            lambda r: replace(r, status=rule[r.status], **empty) if r.status in rule else r,
        )

    return breaker


def drafter(**changes):
    return lambda monkeypatch: Changed(**changes)


def refuse_when(is_so):
    empty = {"tree": chain([]), "ranked_ids": ()}
    return drafter(
        result=lambda w, r: replace(r, status=DraftStatus.REFUSED, **empty) if is_so(w) else r
    )


def too_large(work, result):
    return replace(result, tree=chain(range(work.plan.depth + 1)), ranked_ids=())


def owners(make):
    """What the server takes for the owner of a stream."""

    def breaker(monkeypatch):
        async def owner(context):
            return make()

        monkeypatch.setattr(edge, "_owner", owner)

    return breaker


def counting():
    numbers = iter(range(1, 1000))
    return lambda: next(numbers)


def twice(monkeypatch):
    real = edge.encode_draft_reply
    monkeypatch.setattr(edge, "encode_draft_reply", lambda s, r, *t: real(s, [*r, *r], *t))


def other_step(monkeypatch):
    real = edge.encode_draft_reply
    monkeypatch.setattr(edge, "encode_draft_reply", lambda s, r, *t: real(s + 1, r, *t))


def any_version(monkeypatch):
    monkeypatch.setattr(edge, "check_describe_request", lambda message: None)


def whole_message_falls(monkeypatch):
    """One malformed entry costs all entries beside it."""
    real = edge.decode_draft_request

    def decode(message, limits):
        call = real(message, limits)
        if call.malformed:
            raise ProtocolError("all or nothing")
        return call

    monkeypatch.setattr(edge, "decode_draft_request", decode)


def crash_on_many(monkeypatch):
    real = edge.decode_draft_request

    def decode(message, limits):
        assert len(message.works) < 1000
        return real(message, limits)

    monkeypatch.setattr(edge, "decode_draft_request", decode)


def lenient_parser(monkeypatch):
    """Takes any bytes for a message."""
    lenient = SimpleNamespace(
        FromString=lambda data: pb.DraftRequest(),
        SerializeToString=pb.DraftRequest.SerializeToString,
    )

    class Lenient:
        def __getattr__(self, name):
            return lenient if name == "DraftRequest" else getattr(pb, name)

    name = next(name for name in vars(rpc) if name.endswith("drafting__pb2"))
    monkeypatch.setattr(rpc, name, Lenient())


def starved(monkeypatch):
    monkeypatch.setattr(claims_limits, "FAIR_S", 0.2)
    return Changed(wait_s=0.5)


def no_token(monkeypatch):
    return heads(), ""


OK, LOST, REFUSED = DraftStatus.OK, DraftStatus.LOST, DraftStatus.REFUSED
UNREFUSED = status(REFUSED, LOST)
BREAKERS = {
    "opened_and_drafted": reply(held_tokens=5),
    "no_larger_than_planned": drafter(result=too_large),
    "temperature_is_taken": refuse_when(lambda w: w.open and w.open.params.temperature > 0),
    "extended": reply(held_tokens=6),
    "known_tokens_are_compared": refuse_when(lambda w: w.token_start == 3),
    "plan_alone": refuse_when(lambda w: not w.tokens),
    "absorbs_without_a_plan": drafter(
        result=lambda w, r: replace(r, tree=chain([1])) if w.plan.kind is PlanKind.NONE else r
    ),
    "unknown_session_is_lost": status(LOST, OK),
    "gap_is_lost_and_mended": reply(held_tokens=9),
    "disagreement_is_lost": status(LOST, OK),
    "shorter_prefix_cuts_back": reply(held_tokens=6),
    "opened_again": reply(held_tokens=8),
    "another_incarnation_is_lost": status(LOST, OK),
    "close_ends_without_an_answer": drafter(works=lambda w: None if w.close else w),
    "sessions_belong_to_their_verifier": owners(lambda: 1),
    "broken_stream_is_resumed": owners(counting()),
    "bulk_rows_are_acknowledged": ack(held_rows=4),
    "held_rows_are_told": reply(held_rows=0),
    "rows_twice_are_passed_over": ack(held_rows=7),
    "rows_behind_a_gap_are_passed_over": ack(held_rows=5),
    "rows_before_their_tokens": ack(lost=True),
    "rows_of_an_unknown_session_are_lost": ack(lost=False),
    "rows_of_another_incarnation_are_lost": ack(lost=False),
    "rows_of_another_width_end_the_session": ack(lost=False),
    "missing_rows_are_no_loss": status(DraftStatus.NOT_READY, LOST),
    "record_is_whole": drafter(record={"max_depth": 0}),
    "another_version_is_refused": any_version,
    "token_is_asked": no_token,
    "streams_name_their_verifier": owners(lambda: 1),
    "plan_beyond_the_record_is_refused": UNREFUSED,
    "text_beyond_the_context_is_refused": UNREFUSED,
    "id_outside_the_vocabulary_is_refused": UNREFUSED,
    "full_drafter_makes_room": status(LOST, OK),
    "every_entry_is_answered_once": twice,
    **{f"malformed_{name.replace(' ', '_')}": UNREFUSED for name in (*SPOILS, *ROW_SPOILS)},
    "nameless_entry": whole_message_falls,
    "same_session_twice": UNREFUSED,
    "huge_message_leaves_the_stream": crash_on_many,
    "bytes_that_are_no_message": lenient_parser,
    "rejection_comes_with_q": status(REFUSED, OK),
    "drafts_go_before_rows": starved,
}


def test_every_claim_has_a_fake_that_breaks_it():
    assert set(BREAKERS) == set(BY_NAME)


@pytest.mark.parametrize("name", BREAKERS)
def test_a_fake_that_breaks_a_claim_is_caught(serve, monkeypatch, name):
    monkeypatch.setattr(link, "WAIT_S", 3.0)
    made = BREAKERS[name](monkeypatch) or heads()
    broken, token = made if isinstance(made, tuple) else (made, TOKEN)
    asked = link.Link(serve(broken, token), TOKEN)
    verdict = judge(BY_NAME[name], asked)
    asked.close()
    assert verdict.holds is False, verdict
    assert verdict.reason


def test_a_reply_under_another_step_is_caught(serve, monkeypatch):
    other_step(monkeypatch)
    asked = link.Link(serve(heads()), TOKEN)
    verdict = judge(BY_NAME["extended"], asked)
    asked.close()
    assert verdict.holds is False
    assert "step" in verdict.reason
