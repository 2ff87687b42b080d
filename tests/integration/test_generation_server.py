"""outrider.v1.Generation on loopback: the in-process text, errors by name, cancellation, token."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
import yaml

from protos import generation_pb2 as pb
from protos import generation_pb2_grpc as rpc
from protos.channel import Security, call_metadata, make_aio_channel
from protos.channel_errors import error_from_rpc
from protos.errors import ConfigError, ContextTooLong, InvalidRequest, Unauthenticated
from protos.exchange import Plan, PlanKind
from protos.generation import (
    FinishReason,
    GenerationRequest,
    Speculation,
    SpeculationMode,
    TokenRun,
)
from protos.generation_codec import decode_target, decode_token_run, encode_generation_request
from protos.limits import Limits
from tests.fakes import Client, FakeDrafting, HashTarget, request, small_settings
from tests.integration.drafter_process import DrafterProcess, write_tiny_head
from tests.tiny import tiny_llama_dir
from verifier_service.engine.loop import Engine
from verifier_service.engine.service import EngineService
from verifier_service.engine.static_planner import StaticPlanner
from verifier_service.server import GenerationServer

VOCAB = 97
SECURITY = Security(token="open sesame")
FACTS = {"max_context": 3000, "eos_token_ids": (5, 9)}
LIMIT_S = 120.0


class Slow(HashTarget):
    """Its long requests outlast any stall of a test."""

    def forward(self, spans):
        time.sleep(0.003)
        return super().forward(spans)


def make_engine(target: HashTarget | None = None, **settings: int) -> Engine:
    target = target or HashTarget(VOCAB, **FACTS)
    sizes = small_settings(num_slots=8192, **settings)
    return Engine(target, FakeDrafting(), StaticPlanner(), sizes)


@contextlib.asynccontextmanager
async def serving(
    target: HashTarget | None = None, **settings: int
) -> AsyncIterator[tuple[EngineService, str, rpc.GenerationStub]]:
    interval = sys.getswitchinterval()
    service = EngineService(make_engine(target, **settings))
    service.start()
    server = GenerationServer(service, SECURITY)
    port = await server.start()
    address = f"127.0.0.1:{port}"
    async with make_aio_channel(address, SECURITY) as channel:
        yield service, address, rpc.GenerationStub(channel)
    await server.stop()
    await asyncio.to_thread(service.stop)
    sys.setswitchinterval(interval)


async def call(
    stub: rpc.GenerationStub, given: GenerationRequest, security: Security = SECURITY
) -> list[TokenRun]:
    message = encode_generation_request(given)
    stream = stub.Generate(message, metadata=call_metadata(security))
    try:
        return [decode_token_run(part, given.request_id, Limits()) async for part in stream]
    except grpc.aio.AioRpcError as error:
        raise error_from_rpc(error) from error


def ids(runs: list[TokenRun]) -> tuple[int, ...]:
    return tuple(token for run in runs for token in run.ids)


async def until(claim) -> None:
    async with asyncio.timeout(LIMIT_S):
        while not claim():
            await asyncio.sleep(0.005)


async def assert_drafted_alike(
    stub: rpc.GenerationStub,
    asked: GenerationRequest,
    expected: list[TokenRun],
    num_drafted: int,
    security: Security = SECURITY,
) -> None:
    """The same text whenever it is asked for, and once the drafter keeps up with so many drafts."""
    async with asyncio.timeout(LIMIT_S):
        while True:
            runs = await call(stub, asked, security)
            assert ids(runs) == ids(expected)
            assert runs[-1].counts is not None
            if runs[-1].counts.num_drafted > num_drafted:
                return


def test_texts_over_the_wire_equal_those_in_process():
    requests = [
        request(str(n), [n, 2 * n + 1], 40, temperature=0.9, seed=n - 3, top_p=0.95, top_k=30)
        for n in range(8)
    ]
    client = Client(make_engine())
    for one in requests:
        client.submit(one)
    expected = client.finish()

    async def scenario() -> None:
        async with serving() as (_, _, stub):
            answers = await asyncio.gather(*(call(stub, one) for one in requests))
        for one, runs in zip(requests, answers, strict=True):
            assert ids(runs) == expected[one.request_id]
            last, local = runs[-1], client.last(one.request_id)
            assert last.finish_reason is local.finish_reason
            assert last.stop_token_id == local.stop_token_id
            assert last.counts is not None
            assert local.counts is not None
            assert last.counts.num_output == local.counts.num_output

    asyncio.run(scenario())


def test_a_request_goes_on_after_output_committed_elsewhere():
    whole = request("a", [3], 40, temperature=0.9, seed=8, ignore_eos=True)
    client = Client(make_engine())
    client.submit(whole)
    text = client.finish()["a"]

    async def scenario() -> None:
        async with serving() as (_, _, stub):
            rest = GenerationRequest("a", whole.prompt_ids, whole.params, text[:13])
            assert ids(await call(stub, rest)) == text[13:]

    asyncio.run(scenario())


def test_describe_tells_what_is_served():
    async def scenario() -> None:
        async with serving() as (_, _, stub):
            message = await stub.DescribeTarget(
                pb.DescribeTargetRequest(), metadata=call_metadata(SECURITY)
            )
        target = decode_target(message)
        assert target.vocab_size == VOCAB
        assert target.max_context == 3000
        assert target.eos_token_ids == (5, 9)
        assert target.invariant

    asyncio.run(scenario())


def test_bad_requests_are_refused_by_name_and_the_service_lives_on():
    good = request("good", [1], 5, ignore_eos=True)
    plain = encode_generation_request(good)

    def changed(**fields: object) -> pb.GenerateRequest:
        message = pb.GenerateRequest()
        message.CopyFrom(plain)
        for name, value in fields.items():
            holder, _, leaf = name.rpartition("__")
            place = getattr(message, holder) if holder else message
            if isinstance(value, list):
                del getattr(place, leaf)[:]
                getattr(place, leaf).extend(value)
            else:
                setattr(place, leaf, value)
        return message

    cases = [
        (changed(prompt_ids=[]), InvalidRequest),
        (changed(prompt_ids=[VOCAB]), InvalidRequest),
        (changed(prompt_ids=[2**32 - 1]), InvalidRequest),
        (changed(output_ids=[VOCAB + 7]), InvalidRequest),
        (changed(prompt_ids=[1] * 3000), ContextTooLong),
        (changed(prompt_ids=[1] * 3001), InvalidRequest),
        (changed(sampling__temperature=-1.0), InvalidRequest),
        (changed(sampling__temperature=float("nan")), InvalidRequest),
        (changed(sampling__top_p=1.5), InvalidRequest),
        (changed(sampling__min_p=-0.1), InvalidRequest),
        (changed(sampling__max_tokens=0), InvalidRequest),
        (changed(sampling__stop_token_ids=[1] * 65), InvalidRequest),
        (changed(speculation__mode=17), InvalidRequest),
        (changed(speculation__drafters=["x" * 5000]), InvalidRequest),
        (changed(request_id="r" * 5000), InvalidRequest),
        (changed(timeout_s=-1.0), InvalidRequest),
    ]

    async def scenario() -> None:
        async with serving() as (service, _, stub):
            for message, kind in cases:
                stream = stub.Generate(message, metadata=call_metadata(SECURITY))
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    async for _ in stream:
                        pass
                assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
                error = error_from_rpc(caught.value)
                assert isinstance(error, kind), error
                assert isinstance(error, InvalidRequest)
                assert error.param, error
            assert service.stats().num_requests == 0
            assert len(ids(await call(stub, good))) == 5

    asyncio.run(scenario())


@pytest.mark.parametrize("token", ["", "open sesam", "open sesame "])
def test_calls_without_the_token_are_refused(token: str):
    async def scenario() -> None:
        async with serving() as (service, _, stub):
            with pytest.raises(Unauthenticated):
                await call(stub, request("a", [1]), Security(token=token))
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.DescribeTarget(pb.DescribeTargetRequest())
            assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
            assert service.stats().num_requests == 0

    asyncio.run(scenario())


def test_cancelling_a_call_frees_its_pages_and_nobody_elses():
    async def scenario() -> None:
        async with serving(Slow(VOCAB, **FACTS)) as (service, _, stub):
            message = encode_generation_request(request("a", [1], 2900, ignore_eos=True))
            stream = stub.Generate(message, metadata=call_metadata(SECURITY))
            for _ in range(3):
                await stream.read()
            neighbour = asyncio.create_task(call(stub, request("b", [2], 50, ignore_eos=True)))
            stream.cancel()
            assert len(ids(await neighbour)) == 50
            await until(lambda: service.stats().num_running == 0)
            stats = service.stats()
            assert dict(stats.finished) == {"cancelled": 1, "length": 1}
            assert stats.num_free_pages == stats.num_pages

    asyncio.run(scenario())


def test_a_client_whose_connection_breaks_is_cancelled():
    async def scenario() -> None:
        async with serving(Slow(VOCAB, **FACTS)) as (service, address, _):
            channel = make_aio_channel(address, SECURITY)
            message = encode_generation_request(request("a", [1], 2900, ignore_eos=True))
            stream = rpc.GenerationStub(channel).Generate(message, metadata=call_metadata(SECURITY))
            await stream.read()
            await channel.close()
            await until(lambda: dict(service.stats().finished) == {"cancelled": 1})

    asyncio.run(scenario())


class VerifierProcess:
    """`python -m verifier_service` with a configuration file; ends with the context."""

    def __init__(self, folder: Path, **settings: object) -> None:
        folder.mkdir(parents=True)
        self._ready = folder / "ready"
        config = folder / "verifier.yaml"
        config.write_text(yaml.safe_dump({"dtype": "fp32", "num_threads": 1, **settings}))
        command = [sys.executable, "-m", "verifier_service", "--config", str(config)]
        self._process = subprocess.Popen(
            [*command, "--ready-file", str(self._ready)],
            env=os.environ | {"OUTRIDER_TOKEN": SECURITY.token},
            stderr=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> "VerifierProcess":
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.poll() is None:
            self._process.kill()
            self._process.communicate()

    async def address(self) -> str:
        """Once it is ready."""
        await until(lambda: self._ready.exists() or self._process.poll() is not None)
        assert self._process.poll() is None, self._process.communicate()[1]
        return self._ready.read_text().strip()

    def stop(self) -> str:
        """SIGTERM; its log, after a clean end."""
        self.signal()
        return self.ended()

    def signal(self) -> None:
        """SIGTERM, whether or not it is still there."""
        self._process.send_signal(signal.SIGTERM)

    def ended(self) -> str:
        """Its log, once it ended by itself and cleanly."""
        _, log = self._process.communicate(timeout=60)
        assert self._process.returncode == 0, log
        return log


def test_the_command_serves_a_real_model_drafted_by_a_real_drafter(tmp_path: Path):
    """Two processes, fused rows over gRPC, no Ray: with drafts and without, the same text."""
    model, head = tiny_llama_dir(tmp_path / "tiny"), write_tiny_head(tmp_path / "head")
    drafter = DrafterProcess(
        tmp_path / "drafter", SECURITY.token, kind="eagle3", checkpoint=str(head), target=str(model)
    )
    entry = {"name": "eagle3", "address": drafter.address, "checkpoint": str(head)}
    tree = Plan(PlanKind.TREE, depth=3, width=3, nodes=8)
    off = Speculation(SpeculationMode.OFF)
    fixed = Speculation(SpeculationMode.FIXED, ("eagle3",), tree)

    async def scenario(verifier: VerifierProcess) -> None:
        async with make_aio_channel(await verifier.address(), SECURITY) as channel:
            stub = rpc.GenerationStub(channel)
            for values in ({}, {"temperature": 0.9, "seed": 7}):
                made = [
                    request(name, range(5, 45), 40, speculation=mode, ignore_eos=True, **values)
                    for name, mode in (("off", off), ("fixed", fixed))
                ]
                plain = await call(stub, made[0])
                assert len(ids(plain)) == 40
                assert plain[-1].finish_reason is FinishReason.LENGTH
                assert plain[-1].counts is not None
                assert plain[-1].counts.num_drafted == 0
                await assert_drafted_alike(stub, made[1], plain, 100)

    try:
        with VerifierProcess(
            tmp_path / "verifier",
            target=str(model),
            planner="override_only",
            drafters=[entry],
            engine={"min_agreement": 0},  # a random head guesses nothing
        ) as verifier:
            asyncio.run(scenario(verifier))
            assert "Traceback" not in verifier.stop()
    finally:
        drafter.kill()


@pytest.mark.parametrize(
    "arguments", [["--listen", "here"], ["--dtype", "fp8"], ["--drafter", "x"]]
)
def test_the_command_refuses_bad_options_in_one_line(arguments: list[str]):
    command = [sys.executable, "-m", "verifier_service", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_listening_beyond_loopback_without_trust_is_refused():
    async def scenario() -> None:
        async with serving() as (service, _, _):
            with pytest.raises(ConfigError):
                await GenerationServer(service, Security(), "0.0.0.0").start()

    asyncio.run(scenario())
