"""Mutual TLS from client to verifier to drafter: both processes serve their own and nobody else.

Everybody knows the bearer token here, so it is the certificates alone that keep strangers out.
"""

import asyncio
import importlib.util
import shutil
import subprocess
from pathlib import Path

import grpc
import pytest

from protos import drafting_pb2_grpc as drafting_rpc
from protos import generation_pb2_grpc as rpc
from protos.channel import Security, TlsFiles, call_metadata, make_aio_channel, make_channel
from protos.channel_errors import error_from_rpc
from protos.describe_codec import decode_description, encode_describe_request
from protos.errors import PeerUnavailable
from protos.exchange import Plan, PlanKind
from protos.generation import Speculation, SpeculationMode
from tests.certificates import Authority
from tests.fakes import request
from tests.integration.drafter_process import DrafterProcess, write_tiny_head
from tests.integration.test_generation_server import (
    SECURITY,
    VerifierProcess,
    assert_drafted_alike,
    call,
    ids,
)
from tests.tiny import tiny_llama_dir

TOKEN = SECURITY.token


def as_settings(files: TlsFiles) -> dict[str, str]:
    return {
        "authority": str(files.authority),
        "certificate": str(files.certificate),
        "key": str(files.key),
    }


@pytest.fixture(scope="module")
def house(tmp_path_factory):
    """(authority, model, head)."""
    folder = tmp_path_factory.mktemp("house")
    model, head = tiny_llama_dir(folder / "tiny"), write_tiny_head(folder / "head")
    return Authority(folder / "tls"), model, head


@pytest.fixture(scope="module")
def drafter(house, tmp_path_factory):
    authority, model, head = house
    process = DrafterProcess(
        tmp_path_factory.mktemp("drafter"),
        TOKEN,
        kind="eagle3",
        checkpoint=str(head),
        target=str(model),
        tls=as_settings(authority.peer("drafter")),
    )
    yield process
    process.kill()


def describe(address: str, security: Security) -> str:
    """The kind that the drafter at `address` says it is. Raises what the call raises."""
    with make_channel(address, security) as channel:
        try:
            response = drafting_rpc.DrafterStub(channel).Describe(
                encode_describe_request(), metadata=call_metadata(security), timeout=10
            )
        except grpc.RpcError as error:
            raise error_from_rpc(error) from error
    return decode_description(response)[0].kind


def test_drafts_cross_between_a_verifier_and_a_drafter_of_one_authority(house, drafter, tmp_path):
    authority, model, head = house
    tls = authority.peer("verifier")
    tree = Plan(PlanKind.TREE, depth=3, width=3, nodes=8)
    fixed = Speculation(SpeculationMode.FIXED, ("eagle3",), tree)
    client = Security(TOKEN, authority.peer("client"))
    strangers = (
        Security(TOKEN),
        Security(TOKEN, Authority(tmp_path / "elsewhere").peer("client")),
    )

    async def scenario(address: str) -> None:
        off = Speculation(SpeculationMode.OFF)
        made = [
            request(name, range(5, 45), 30, speculation=mode, ignore_eos=True)
            for name, mode in (("off", off), ("fixed", fixed))
        ]
        async with make_aio_channel(address, client) as channel:
            stub = rpc.GenerationStub(channel)
            plain = await call(stub, made[0], client)
            assert len(ids(plain)) == 30
            await assert_drafted_alike(stub, made[1], plain, 50, client)
        for stranger in strangers:
            async with make_aio_channel(address, stranger) as channel:
                with pytest.raises(PeerUnavailable):
                    await call(rpc.GenerationStub(channel), made[0], stranger)

    with VerifierProcess(
        tmp_path / "verifier",
        target=str(model),
        planner="override_only",
        drafters=[{"name": "eagle3", "address": drafter.address, "checkpoint": str(head)}],
        engine={"min_agreement": 0},  # a random head guesses nothing
        tls=as_settings(tls),
    ) as verifier:

        async def all_of_it() -> None:
            await scenario(await verifier.address())

        asyncio.run(all_of_it())
        assert "Traceback" not in verifier.stop()


def test_a_drafter_refuses_a_verifier_of_another_authority_and_plain_text(house, drafter, tmp_path):
    authority, _, _ = house
    assert describe(drafter.address, Security(TOKEN, authority.peer("other"))) == "eagle3"
    foreign = Authority(tmp_path / "elsewhere").peer("verifier")
    # Trusts our authority, so that only its own certificate can be at fault.
    mixed = TlsFiles(authority.certificate, foreign.certificate, foreign.key)
    for security in (Security(TOKEN), Security(TOKEN, foreign), Security(TOKEN, mixed)):
        with pytest.raises(PeerUnavailable):
            describe(drafter.address, security)


def test_an_address_that_no_certificate_names_needs_the_name_said(house, drafter):
    authority, _, _ = house
    files = authority.peer("caller")
    named = TlsFiles(files.authority, files.certificate, files.key, "localhost")
    astray = TlsFiles(files.authority, files.certificate, files.key, "elsewhere.example")
    assert describe(drafter.address, Security(TOKEN, named)) == "eagle3"
    with pytest.raises(PeerUnavailable):
        describe(drafter.address, Security(TOKEN, astray))


def test_openssl_makes_certificates_where_cryptography_is_missing(monkeypatch, tmp_path: Path):
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    authority = Authority(tmp_path / "tls")
    for name in ("one", "two"):
        files = authority.peer(name)
        for path in (files.authority, files.certificate, files.key):
            assert path.read_text().startswith("-----BEGIN")
        command = ["openssl", "verify", "-CAfile", files.authority, files.certificate]
        assert subprocess.run(command, capture_output=True, check=False).returncode == 0
