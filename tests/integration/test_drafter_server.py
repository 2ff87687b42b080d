"""A drafter behind real gRPC on loopback: same trees as in-process, hostile callers, draining."""

import asyncio
import os
import signal
import subprocess
import sys
from contextlib import asynccontextmanager
from dataclasses import replace

import grpc
import pytest

from drafter_service.build import build_drafter
from drafter_service.config import DrafterLimits, DrafterSettings
from drafter_service.server import DrafterServer
from protos import drafting_pb2 as pb
from protos import drafting_pb2_grpc as rpc
from protos.channel import Security, call_metadata, make_aio_channel
from protos.codec import (
    decode_ack,
    decode_draft_reply,
    encode_context,
    encode_draft_request,
)
from protos.describe_codec import decode_description, encode_describe_request
from protos.errors import ConfigError
from protos.exchange import ContextRows, DraftStatus, Plan, PlanKind
from protos.features import FeatureForm
from protos.limits import Limits
from protos.params import SamplingParams
from tests.unit.drafter_service.drafter_cases import (
    ABSORB,
    CHAIN4,
    opening,
    rows_of,
    tokens_only,
    work,
)
from tests.unit.drafter_service.eagle3_cases import (
    RAW_WIDTH,
    eagle3_drafter,
    features_of,
    tiny_head,
    tokens_of,
)

TOKEN = Security(token="secret")
TREE = Plan(kind=PlanKind.TREE, depth=4, width=3, nodes=12)
RAW = opening(FeatureForm.RAW, RAW_WIDTH)
VERIFIER = 0xA1
WAIT_S = 20.0


class Streams:
    """One verifier's two streams."""

    def __init__(self, stub, security=TOKEN, verifier=VERIFIER):
        metadata = call_metadata(security, verifier)
        self.drafts = stub.Draft(metadata=metadata)
        self.context = stub.Context(metadata=metadata)
        self._step = 0

    async def send(self, works):
        self._step += 1
        await self.drafts.write(encode_draft_request(self._step, 1.0, works))

    async def receive(self):
        message = await asyncio.wait_for(self.drafts.read(), WAIT_S)
        return decode_draft_reply(message, Limits())

    async def draft(self, works):
        await self.send(works)
        answer = await self.receive()
        assert answer.step == self._step
        assert not answer.malformed
        return list(answer.results)

    async def rows(self, piece):
        await self.context.write(encode_context(piece))
        message = await asyncio.wait_for(self.context.read(), WAIT_S)
        return decode_ack(message, Limits())


@asynccontextmanager
async def serving(drafter, **kwargs):
    server = DrafterServer(drafter, TOKEN, **kwargs)
    port = await server.start()
    channel = make_aio_channel(f"127.0.0.1:{port}", TOKEN)
    try:
        yield server, rpc.DrafterStub(channel)
    finally:
        await channel.close()
        await server.stop(0)


def ngram(**limits):
    return build_drafter(DrafterSettings(kind="ngram", limits=DrafterLimits(**limits)))


def conversation(incarnation):
    """Rounds of several sessions of mixed kinds, rows in the works."""
    params = [SamplingParams(temperature=0.0), SamplingParams(temperature=0.9, seed=3)]
    lengths = [5, 9, 14]
    yield [
        work(
            incarnation,
            tokens_of(length, seed),
            session_id=seed + 1,
            plan=TREE if seed % 2 else CHAIN4,
            open=replace(RAW, params=params[seed % 2]),
            rows=rows_of(features_of(length - 1, seed)),
        )
        for seed, length in enumerate(lengths)
    ]
    for extra in (1, 3, 2):
        works = []
        for seed, length in enumerate(lengths):
            lengths[seed] = end = length + extra
            works.append(
                work(
                    incarnation,
                    tokens_of(end, seed)[length:],
                    session_id=seed + 1,
                    token_start=length,
                    plan=TREE,
                    rows=rows_of(features_of(end - 1, seed)[length - 1 :], length - 1),
                )
            )
        yield works


def test_the_same_trees_in_process_and_over_grpc():
    head = tiny_head()
    local = eagle3_drafter(head)
    expected = [local.handle(works) for works in conversation(local.capabilities.incarnation)]

    async def run():
        async with serving(eagle3_drafter(head)) as (_, stub):
            streams = Streams(stub)
            return [
                await streams.draft(works) for works in conversation(local.capabilities.incarnation)
            ]

    assert asyncio.run(run()) == expected


def test_bulk_rows_are_acknowledged_and_draft_like_inline_rows():
    head = tiny_head()
    local = eagle3_drafter(head)
    incarnation = local.capabilities.incarnation
    tokens, features = tokens_of(200), features_of(199)
    expected = local.handle(
        [work(incarnation, tokens, plan=TREE, open=RAW, rows=rows_of(features))]
    )

    async def run():
        async with serving(eagle3_drafter(head)) as (_, stub):
            streams = Streams(stub)
            first = work(incarnation, tokens, plan=ABSORB, open=RAW)
            assert (await streams.draft([first]))[0].status is DraftStatus.OK
            for start in (0, 150):
                rows = rows_of(features[start : start + 150], start)
                ack = await streams.rows(ContextRows(1, incarnation, rows))
                assert (ack.held_rows, ack.lost) == (min(start + 150, 199), False)
            return await streams.draft([work(incarnation, [], token_start=200, plan=TREE)])

    assert asyncio.run(run()) == expected


def test_describe_tells_capabilities_and_load():
    drafter = ngram()

    async def run():
        async with serving(drafter) as (server, stub):
            streams = Streams(stub)
            opened = work(drafter.capabilities.incarnation, [1, 2, 1], open=tokens_only())
            await streams.draft([opened])
            message = await stub.Describe(encode_describe_request(), metadata=call_metadata(TOKEN))
            server.check_health()
            return decode_description(message), server.metrics()

    (capabilities, load), metrics = asyncio.run(run())
    assert capabilities == drafter.capabilities
    assert (load.num_sessions, load.num_rounds) == (1, 1)
    assert metrics["num_ok"] == 1


def test_sessions_belong_to_their_verifier():
    drafter = ngram()
    incarnation = drafter.capabilities.incarnation

    async def run():
        async with serving(drafter) as (_, stub):
            one, other = Streams(stub, verifier=1), Streams(stub, verifier=2)
            await one.draft([work(incarnation, [1, 2, 1], open=tokens_only())])
            stranger = (await other.draft([work(incarnation, [5], token_start=3)]))[0]
            close = work(incarnation, [], token_start=3, close=True)
            await other.draft([close])
            mine = (await one.draft([work(incarnation, [2], token_start=3)]))[0]
            return stranger, mine

    stranger, mine = asyncio.run(run())
    assert stranger.status is DraftStatus.LOST
    assert mine.status is DraftStatus.OK


def test_sessions_outlive_a_broken_stream():
    drafter = ngram()
    incarnation = drafter.capabilities.incarnation

    async def run():
        async with serving(drafter) as (_, stub):
            first = Streams(stub)
            await first.draft([work(incarnation, [1, 2, 1], open=tokens_only())])
            first.drafts.cancel()
            second = Streams(stub)
            return (await second.draft([work(incarnation, [2], token_start=3)]))[0]

    assert asyncio.run(run()).status is DraftStatus.OK


def test_closing_is_answered_with_an_empty_reply_and_forgets():
    drafter = ngram()
    incarnation = drafter.capabilities.incarnation

    async def run():
        async with serving(drafter) as (server, stub):
            streams = Streams(stub)
            await streams.draft([work(incarnation, [1, 2, 1], open=tokens_only())])
            results = await streams.draft([work(incarnation, [], token_start=3, close=True)])
            return results, server.load().num_sessions

    assert asyncio.run(run()) == ([], 0)


@pytest.mark.parametrize("security", [Security(), Security(token="wrong")])
def test_strangers_are_unauthenticated_on_every_call(security):
    async def run():
        async with serving(ngram()) as (_, stub):
            metadata = call_metadata(security, VERIFIER)
            codes = []
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.Describe(encode_describe_request(), metadata=metadata)
            codes.append(caught.value.code())
            for call in (stub.Draft(metadata=metadata), stub.Context(metadata=metadata)):
                codes.append(await asyncio.wait_for(call.code(), WAIT_S))
            return codes

    assert set(asyncio.run(run())) == {grpc.StatusCode.UNAUTHENTICATED}


def test_streams_without_an_owner_are_refused():
    async def run():
        async with serving(ngram()) as (_, stub):
            call = stub.Draft(metadata=call_metadata(TOKEN))
            return await asyncio.wait_for(call.code(), WAIT_S)

    assert asyncio.run(run()) is grpc.StatusCode.UNAUTHENTICATED


def test_another_protocol_version_is_refused():
    async def run():
        async with serving(ngram()) as (_, stub):
            request = pb.DescribeRequest(protocol_version=99)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.Describe(request, metadata=call_metadata(TOKEN))
            return caught.value.code()

    assert asyncio.run(run()) is grpc.StatusCode.INVALID_ARGUMENT


def spoiled(request, session_id):
    """Break one entry of an encoded request."""
    entry = next(entry for entry in request.works if entry.session_id == session_id)
    entry.base_len = 99
    return request


def test_a_malformed_entry_ends_its_session_and_nothing_else():
    head = tiny_head()
    drafter = eagle3_drafter(head)
    incarnation = drafter.capabilities.incarnation

    async def run():
        async with serving(drafter) as (server, stub):
            streams = Streams(stub)
            rounds = list(conversation(incarnation))
            await streams.draft(rounds[0])
            message = spoiled(encode_draft_request(2, 1.0, rounds[1]), 2)
            await streams.drafts.write(message)
            answer = await streams.receive()
            lost = await streams.draft([replace(rounds[2][1])])
            return answer, lost, server.load().num_sessions, server.metrics()

    answer, lost, num_sessions, metrics = asyncio.run(run())
    statuses = {result.session_id: result.status for result in answer.results}
    assert statuses == {1: DraftStatus.OK, 2: DraftStatus.REFUSED, 3: DraftStatus.OK}
    assert lost[0].status is DraftStatus.LOST
    assert num_sessions == 2
    assert metrics["num_malformed"] == 1


def test_malformed_rows_end_their_session_and_the_stream_goes_on():
    head = tiny_head()
    drafter = eagle3_drafter(head)
    incarnation = drafter.capabilities.incarnation

    async def run():
        async with serving(drafter) as (server, stub):
            streams = Streams(stub)
            works = [
                work(incarnation, tokens_of(9), session_id=i, plan=ABSORB, open=RAW) for i in (1, 2)
            ]
            await streams.draft(works)
            bad = encode_context(ContextRows(1, incarnation, rows_of(features_of(4))))
            bad.rows.count = 1000
            await streams.context.write(bad)
            first = decode_ack(await asyncio.wait_for(streams.context.read(), WAIT_S), Limits())
            good = ContextRows(2, incarnation, rows_of(features_of(8)))
            second = await streams.rows(good)
            return first, second, server.load().num_sessions

    first, second, num_sessions = asyncio.run(run())
    assert first.lost
    assert (second.lost, second.held_rows) == (False, 8)
    assert num_sessions == 1


def test_too_many_works_are_not_drafted_and_the_stream_goes_on():
    drafter = ngram()
    incarnation = drafter.capabilities.incarnation

    async def run():
        async with serving(drafter, max_works=4) as (_, stub):
            streams = Streams(stub)
            many = [
                work(incarnation, [1, 2, 1], session_id=i + 1, open=tokens_only()) for i in range(5)
            ]
            refused = await streams.draft(many)
            answered = await streams.draft(many[:4])
            return refused, answered

    refused, answered = asyncio.run(run())
    assert refused == []
    assert [result.status for result in answered] == [DraftStatus.OK] * 4


class Failing:
    """A drafter with a bug: some sessions make it raise."""

    def __init__(self, drafter):
        self._drafter = drafter
        self.capabilities = drafter.capabilities

    def handle(self, works):
        if any(13 in w.tokens and not w.close for w in works):
            raise RuntimeError("bug")
        return self._drafter.handle(works)

    def absorb(self, pieces):
        return self._drafter.absorb(pieces)

    def load(self):
        return self._drafter.load()

    def expire(self, now):
        return self._drafter.expire(now)


def test_a_bug_costs_the_sessions_of_one_batch_and_tells_nothing(caplog):
    drafter = Failing(ngram())
    incarnation = drafter.capabilities.incarnation

    async def run():
        async with serving(drafter) as (server, stub):
            streams = Streams(stub)
            bad = (await streams.draft([work(incarnation, [13], open=tokens_only())]))[0]
            good = (await streams.draft([work(incarnation, [1, 1], open=tokens_only())]))[0]
            server.check_health()
            return bad, good

    bad, good = asyncio.run(run())
    assert (bad.status, bad.detail) == (DraftStatus.REFUSED, "internal error")
    assert good.status is DraftStatus.OK
    assert "bug" in caplog.text


def test_messages_that_pile_up_are_each_answered_and_only_the_newest_drafts():
    head = tiny_head()
    incarnation = 7
    tokens, features = tokens_of(40), features_of(39)

    async def run():
        async with serving(eagle3_drafter(head)) as (_, stub):
            streams = Streams(stub)
            await streams.draft(
                [work(incarnation, tokens[:9], plan=ABSORB, open=RAW, rows=rows_of(features[:8]))]
            )
            for end in range(10, 40):
                await streams.send(
                    [
                        work(
                            incarnation,
                            tokens[end - 1 : end],
                            token_start=end - 1,
                            plan=TREE,
                            rows=rows_of(features[end - 2 : end - 1], end - 2),
                        )
                    ]
                )
            return [(await streams.receive()).results[0] for _ in range(10, 40)]

    results = asyncio.run(run())
    assert [result.base_len for result in results] == list(range(10, 40))
    assert {result.status for result in results} <= {DraftStatus.OK, DraftStatus.NOT_READY}
    full = work(incarnation, tokens[:39], plan=TREE, open=RAW, rows=rows_of(features[:38]))
    assert results[-1].tree == eagle3_drafter(head).handle([full])[0].tree


def test_draining_waits_for_sessions_and_then_ends():
    drafter = ngram()
    incarnation = drafter.capabilities.incarnation

    async def run():
        async with serving(drafter) as (server, stub):
            streams = Streams(stub)
            await streams.draft([work(incarnation, [1, 2, 1], open=tokens_only())])
            stopping = asyncio.ensure_future(server.stop(WAIT_S))
            await asyncio.sleep(0.2)
            assert not stopping.done()
            # Still served while draining.
            result = (await streams.draft([work(incarnation, [2], token_start=3)]))[0]
            await streams.send([work(incarnation, [], token_start=4, close=True)])
            await asyncio.wait_for(stopping, WAIT_S)
            return result

    assert asyncio.run(run()).status is DraftStatus.OK


def test_listening_beyond_loopback_without_a_token_is_refused():
    async def run():
        await DrafterServer(ngram(), Security(), host="0.0.0.0").start()

    with pytest.raises(ConfigError, match="token"):
        asyncio.run(run())


def test_the_process_serves_says_where_and_ends_on_a_signal(tmp_path):
    config = tmp_path / "drafter.yaml"
    config.write_text("kind: ngram\nlimits: {max_sessions: 4}\ndrain_s: 0.1\n")
    ready = tmp_path / "ready"
    command = [sys.executable, "-m", "drafter_service", "--config", config, "--ready-file", ready]
    environment = os.environ | {"OUTRIDER_TOKEN": "secret", "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    try:
        line = process.stdout.readline()
        address = ready.read_text().strip()
        assert address in line

        async def run():
            async with make_aio_channel(address, TOKEN) as channel:
                stub = rpc.DrafterStub(channel)
                message = await stub.Describe(
                    encode_describe_request(), metadata=call_metadata(TOKEN), timeout=WAIT_S
                )
                return decode_description(message)[0]

        capabilities = asyncio.run(run())
        assert (capabilities.kind, capabilities.max_sessions) == ("ngram", 4)
        process.send_signal(signal.SIGTERM)
        assert process.wait(WAIT_S) == 0
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def test_wrong_configuration_ends_the_process_with_a_message(tmp_path):
    config = tmp_path / "drafter.yaml"
    config.write_text("kind: ngram\nwidth: 3\n")
    command = [sys.executable, "-m", "drafter_service", "--config", str(config)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert "width" in done.stderr
    assert "Traceback" not in done.stderr
