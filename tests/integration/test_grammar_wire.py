"""Grammars over gRPC: the verifier says that it takes them, keeps them, and refuses bad ones."""

import asyncio
import sys
from dataclasses import replace

import pytest

from protos import generation_pb2 as pb
from protos import generation_pb2_grpc as rpc
from protos.channel import Security, call_metadata, make_aio_channel
from protos.errors import InvalidRequest
from protos.generation_codec import decode_target
from protos.options import LogitOptions
from tests.fakes import Client, FakeDrafting, HashTarget, request, small_settings
from tests.integration.test_generation_server import call, ids
from tests.tiny import EOS_ID
from tests.unit.grammar.grammar_cases import PERSON, VOCAB, regex, schema, vocabulary
from verifier_service.engine.loop import Engine
from verifier_service.engine.service import EngineService
from verifier_service.engine.static_planner import StaticPlanner
from verifier_service.grammar.compiling import Grammars
from verifier_service.server import GenerationServer

SECURITY = Security(token="secret")


def engine_of(grammars: Grammars | None) -> Engine:
    target = HashTarget(VOCAB, eos_token_ids=(EOS_ID,))
    settings = small_settings(num_slots=2048)
    return Engine(target, FakeDrafting(), StaticPlanner(), settings, grammars=grammars)


@pytest.mark.parametrize("takes", [True, False])
def test_a_verifier_says_whether_it_takes_grammars_and_means_it(takes: bool):
    asked = request("a", [5, 6], 30, temperature=0.9, seed=2)
    asked = replace(asked, options=LogitOptions(grammar=schema(PERSON)))
    bad = replace(asked, options=LogitOptions(grammar=regex("(")))
    grammars = Grammars(vocabulary)
    client = Client(engine_of(grammars))
    client.submit(asked)
    expected = client.finish()["a"]

    async def go() -> None:
        interval = sys.getswitchinterval()
        service = EngineService(engine_of(grammars if takes else None))
        service.start()
        server = GenerationServer(service, SECURITY)
        port = await server.start()
        async with make_aio_channel(f"127.0.0.1:{port}", SECURITY) as channel:
            stub = rpc.GenerationStub(channel)
            described = await stub.DescribeTarget(
                pb.DescribeTargetRequest(), metadata=call_metadata(SECURITY)
            )
            assert decode_target(described).takes_grammar is takes
            for refused in [bad] if takes else [bad, asked]:
                with pytest.raises(InvalidRequest) as caught:
                    await call(stub, refused, SECURITY)
                assert caught.value.param == "grammar"
            if takes:
                assert ids(await call(stub, asked, SECURITY)) == expected
        await server.stop()
        await asyncio.to_thread(service.stop)
        sys.setswitchinterval(interval)

    asyncio.run(go())
