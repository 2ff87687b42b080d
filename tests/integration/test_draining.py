"""A verifier told to stop finishes what it runs (a second SIGTERM: at once); time on the wire.

Against `python -m verifier_service`, a real process with a small real model.
"""

import asyncio
import contextlib
import threading
from collections.abc import AsyncGenerator, AsyncIterable, Iterator, Sequence
from typing import Any

import grpc
import pytest
import torch

from protos import generation_pb2 as pb
from protos import generation_pb2_grpc as rpc
from protos.channel import call_metadata, make_aio_channel
from protos.channel_errors import error_from_rpc
from protos.errors import Overloaded, PeerUnavailable
from protos.generation import FinishReason, TokenRun
from protos.generation_codec import decode_token_run, encode_generation_request
from protos.limits import Limits
from tests.fakes import HashTarget, request
from tests.integration.test_generation_server import (
    FACTS,
    LIMIT_S,
    SECURITY,
    VOCAB,
    Slow,
    VerifierProcess,
    call,
    ids,
    serving,
)
from tests.tiny import tiny_llama_dir
from verifier_service.step import Span

NUM_TOKENS = {1: 300, 2: 1900}
"""What is finished is short; what is cut off must not be through before it is cut off."""


class Held(HashTarget):
    """Computes nothing until it may: its requests stay where they are."""

    def __init__(self, vocab_size: int, **facts: Any) -> None:
        super().__init__(vocab_size, **facts)
        self.may_go_on = threading.Event()

    def forward(self, spans: Sequence[Span]) -> torch.Tensor:
        assert self.may_go_on.wait(LIMIT_S)
        return super().forward(spans)


async def decoded(messages: AsyncIterable[pb.GenerateResponse]) -> AsyncGenerator[TokenRun, None]:
    async for message in messages:
        yield decode_token_run(message, "long", Limits())


async def until_it_refuses(stub: rpc.GenerationStub) -> None:
    async with asyncio.timeout(LIMIT_S):
        while True:
            asking = pb.DescribeTargetRequest()
            try:
                await stub.DescribeTarget(asking, metadata=call_metadata(SECURITY))
            except grpc.aio.AioRpcError as error:
                if isinstance(error_from_rpc(error), PeerUnavailable):
                    return
                raise


@pytest.fixture(scope="module")
def verifiers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[int, VerifierProcess]]:
    """One process for every number of signals, started side by side."""
    folder = tmp_path_factory.mktemp("draining")
    model = tiny_llama_dir(folder / "tiny")
    with contextlib.ExitStack() as stack:
        yield {
            number: stack.enter_context(
                VerifierProcess(folder / str(number), target=str(model), drain_s=LIMIT_S)
            )
            for number in NUM_TOKENS
        }


@pytest.mark.parametrize("num_signals", NUM_TOKENS)
def test_a_stopping_verifier_finishes_what_it_runs_and_refuses_the_rest(
    verifiers: dict[int, VerifierProcess], num_signals: int
):
    asked = request("long", range(5, 25), NUM_TOKENS[num_signals], ignore_eos=True)

    async def scenario(verifier: VerifierProcess) -> None:
        async with make_aio_channel(await verifier.address(), SECURITY) as channel:
            stub = rpc.GenerationStub(channel)
            message = encode_generation_request(asked)
            stream = decoded(stub.Generate(message, metadata=call_metadata(SECURITY)))
            runs = [await anext(stream)]
            verifier.signal()
            await until_it_refuses(stub)
            with pytest.raises(PeerUnavailable):
                await call(stub, request("late", [1]))
            if num_signals == 2:
                verifier.signal()
            runs += [run async for run in stream]
        if num_signals == 1:
            assert runs[-1].finish_reason is FinishReason.LENGTH
            assert len(ids(runs)) == NUM_TOKENS[1]
        else:
            assert runs[-1].finish_reason is FinishReason.ERROR
            assert "shutting down" in runs[-1].error

    asyncio.run(scenario(verifiers[num_signals]))
    log = verifiers[num_signals].ended()
    assert "Traceback" not in log
    assert "stopped:" in log


def test_a_full_verifier_refuses_with_a_time_to_come_back_and_nobody_inside_notices():
    async def scenario() -> None:
        target = Held(VOCAB, **FACTS)
        async with serving(target, max_running=1, max_queued=1) as (service, _, stub):
            inside = [
                asyncio.create_task(call(stub, request(name, [1], 20, ignore_eos=True)))
                for name in ("running", "queued")
            ]
            async with asyncio.timeout(LIMIT_S):
                while service.stats().num_running + service.stats().num_waiting < 2:
                    await asyncio.sleep(0.005)
            with pytest.raises(Overloaded) as caught:
                await call(stub, request("late", [1], 5))
            target.may_go_on.set()
            assert caught.value.retry_after_s > 0
            assert [len(ids(runs)) for runs in await asyncio.gather(*inside)] == [20, 20]
            assert len(ids(await call(stub, request("again", [1], 5, ignore_eos=True)))) == 5

    asyncio.run(scenario())


def test_a_request_whose_time_is_over_ends_with_a_last_message_that_says_so():
    async def scenario() -> None:
        async with serving(Slow(VOCAB, **FACTS)) as (service, _, stub):
            asked = request("a", [1], 2900, ignore_eos=True)
            neighbour = asyncio.create_task(call(stub, request("b", [2], 50, ignore_eos=True)))
            message = encode_generation_request(asked)
            message.timeout_s = 0.1
            stream = stub.Generate(message, metadata=call_metadata(SECURITY))
            runs = [run async for run in decoded(stream)]
            assert runs[-1].finish_reason is FinishReason.DEADLINE
            assert not any(run.finish_reason for run in runs[:-1])
            assert len(ids(await neighbour)) == 50
            stats = service.stats()
            assert dict(stats.finished) == {"deadline": 1, "length": 1}
            assert stats.num_free_pages == stats.num_pages

    asyncio.run(scenario())
