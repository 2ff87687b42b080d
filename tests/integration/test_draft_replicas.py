"""Replicas of one source: choice, departure, restart, strangers, and pairs that do not fit."""

from dataclasses import replace

import grpc
import pytest

from protos import drafting_pb2 as pb
from protos import drafting_pb2_grpc as rpc
from protos.channel import Security, call_metadata, make_channel
from protos.channel_errors import error_from_rpc
from protos.describe_codec import encode_describe_request
from protos.errors import Unauthenticated
from protos.exchange import DrafterReplica
from tests.integration.exchange_house import (
    CHAIN,
    TOKEN,
    ask,
    featured,
    plain_texts,
    until,
)
from tests.integration.fake_drafter import Mode
from verifier_service.engine.ports import SourcePlan

REQUESTS = [ask("a", 5), ask("b", 70), ask("c", 130, temperature=0.8, seed=7), ask("d", 33)]


@pytest.fixture(scope="module")
def truth():
    return plain_texts(REQUESTS)


def test_sessions_spread_over_replicas_and_leave_one_that_is_not_offered(start, build, truth):
    first, second = start(), start(incarnation=2)
    house = build([SourcePlan("fake", CHAIN)])
    house.offer("fake", first.address, second.address)
    until(lambda: house.exchange.sources()[0].num_replicas == 2)
    for request in REQUESTS:
        house.client.submit(request)
    for _ in range(6):
        house.engine.step()
    assert len(first.sessions) == len(second.sessions) == 2
    house.offer("fake", second.address)
    house.engine.step()
    until(lambda: not first.sessions)
    assert len(second.sessions) == 4
    assert house.client.finish() == truth


@pytest.mark.parametrize("how", ["dead", "silent"])
def test_sessions_move_from_a_replica_that_fails_to_one_that_does_not(start, build, truth, how):
    first, second = start(), start(incarnation=2)
    house = build([SourcePlan("fake", CHAIN)], deadline_s=0.2)
    house.offer("fake", first.address, second.address)
    until(lambda: house.exchange.sources()[0].num_replicas == 2)
    requests = [replace(r, params=replace(r.params, max_tokens=400)) for r in REQUESTS]
    for request in requests:
        house.client.submit(request)
    for _ in range(4):
        house.engine.step()
    assert len(first.sessions) == len(second.sessions) == 2
    if how == "dead":
        first.stop()
    else:
        first.mode = Mode.SILENT
    while len(second.sessions) < 4:
        assert house.engine.step(), "everything finished before the sessions moved"
    texts = house.client.finish()
    assert {name: ids[:40] for name, ids in texts.items()} == truth


def test_load_told_by_the_directory_decides_between_replicas(start, build):
    busy, idle = start(), start(incarnation=2)
    house = build([SourcePlan("fake", CHAIN)])
    house.offer("fake", busy.address, idle.address)
    until(lambda: house.exchange.sources()[0].num_replicas == 2)
    load = type(DrafterReplica("").load)(num_sessions=9, num_waiting=9)
    house.exchange.set_replicas(
        "fake", [DrafterReplica(busy.address, load=load), DrafterReplica(idle.address)]
    )
    for request in REQUESTS:
        house.client.submit(request)
    house.engine.step()
    until(lambda: len(idle.sessions) == len(REQUESTS))
    assert not busy.sessions


@pytest.mark.parametrize("same_port", [True, False])
def test_drafting_resumes_with_a_new_incarnation(start, build, same_port):
    house = build([SourcePlan("fake", CHAIN)])
    drafter = start(capabilities=featured())
    house.offer("fake", drafter.address)
    request = ask("a", max_tokens=400)
    house.client.submit(request)
    while not house.client.runs["a"] or house.client.last("a").counts.num_accepted == 0:
        house.engine.step()
    drafter.stop()
    until(lambda: not house.exchange.sources())
    for _ in range(5):
        house.engine.step()
    before = house.client.last("a").counts.num_accepted
    again = start(incarnation=2, capabilities=featured(), port=drafter.port if same_port else 0)
    house.offer("fake", again.address)
    house.client.finish()
    assert house.client.last("a").counts.num_accepted > before
    assert again.num_opens == 1
    assert house.client.texts() == plain_texts([request])


def test_a_drafter_whose_rows_are_not_kept_is_never_asked(start, build, caplog):
    drafter = start(capabilities={"raw_width": 2, "digest": "another"})
    house = build([SourcePlan("fake", CHAIN)])
    house.offer("fake", drafter.address, wait=False)
    until(lambda: house.exchange.sources() == [] and "is not used" in caplog.text)
    house.client.submit(ask("a"))
    house.client.finish()
    assert drafter.num_works == 0


def test_another_protocol_version_is_not_spoken_to(start, build, caplog):
    drafter = start(capabilities={"protocol_version": 2})
    house = build([SourcePlan("fake", CHAIN)])
    house.offer("fake", drafter.address, wait=False)
    until(lambda: "VersionMismatch" in caplog.text)
    assert house.exchange.sources() == []


def call_all(stub, metadata):
    yield lambda: stub.Describe(encode_describe_request(), metadata=metadata, timeout=10)
    yield lambda: next(stub.Draft(iter([pb.DraftRequest()]), metadata=metadata, timeout=10))
    yield lambda: next(stub.Context(iter([pb.ContextPiece()]), metadata=metadata, timeout=10))


@pytest.mark.parametrize("token", ["", "wrong", TOKEN + "x"])
def test_no_call_is_served_without_the_token(start, token):
    drafter = start()
    with make_channel(drafter.address, Security()) as channel:
        stub = rpc.DrafterStub(channel)
        for call in call_all(stub, call_metadata(Security(token=token), 5)):
            with pytest.raises(grpc.RpcError) as failed:
                call()
            assert failed.value.code() is grpc.StatusCode.UNAUTHENTICATED
            assert isinstance(error_from_rpc(failed.value), Unauthenticated)
    assert drafter.num_streams == 0


def test_a_verifier_with_a_wrong_token_steps_without_drafts(start, build, truth, caplog):
    drafter = start(security=Security(token="another"))
    house = build([SourcePlan("fake", CHAIN)])
    house.offer("fake", drafter.address, wait=False)
    until(lambda: "Unauthenticated" in caplog.text)
    assert TOKEN not in caplog.text
    house.client.submit(REQUESTS[0])
    assert house.client.finish()["a"] == truth["a"]
