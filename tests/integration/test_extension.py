"""The drafter printed in drafter_service/DESIGN.md, as another package would bring it along."""

import asyncio
import importlib
import re
import sys
import tomllib
from contextlib import asynccontextmanager
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path

import pytest

from drafter_service import kinds
from drafter_service.build import build_drafter
from drafter_service.config import parse_settings
from drafter_service.server import DrafterServer
from protos import drafting_pb2_grpc as rpc
from protos.channel import Security, call_metadata, make_aio_channel
from protos.codec import decode_draft_reply, encode_draft_request
from protos.conformance.suite import verdicts
from protos.exchange import DraftStatus, DraftWork, Plan, PlanKind, SessionOpen
from protos.limits import Limits
from protos.params import SamplingParams

DESIGN = Path(__file__).resolve().parents[2] / "drafter_service" / "DESIGN.md"
TOKEN = "secret"
CHAIN3 = Plan(PlanKind.CHAIN, depth=3)


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", DESIGN.read_text(), re.DOTALL)


@pytest.fixture
def drafter(tmp_path, monkeypatch):
    """Installed as the page says: its module on the path, its entry point registered."""
    group, table = next(iter(tomllib.loads(blocks("toml")[0])["project"]["entry-points"].items()))
    points = EntryPoints(EntryPoint(name, place, group) for name, place in table.items())
    (name, place) = next(iter(table.items()))
    module = place.partition(":")[0]
    (tmp_path / f"{module}.py").write_text(blocks("python")[0])
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(kinds, "entry_points", lambda **asked: points.select(**asked))
    importlib.invalidate_caches()
    yield build_drafter(parse_settings({"kind": name, "limits": {"max_sessions": 8}}))
    sys.modules.pop(module)


def test_the_printed_drafter_is_short():
    assert len(blocks("python")) == 1
    assert len([line for line in blocks("python")[0].splitlines() if line.strip()]) <= 46


@asynccontextmanager
async def serving(drafter):
    server = DrafterServer(drafter, Security(token=TOKEN))
    address = f"127.0.0.1:{await server.start()}"
    try:
        yield address
    finally:
        await server.stop(0)


def test_the_printed_drafter_drafts_over_grpc(drafter):
    number = drafter.capabilities.incarnation
    opened = SessionOpen("r", SamplingParams(temperature=0.0))
    works = [
        DraftWork(1, number, 5, 0, (4, 5, 6, 4, 5), CHAIN3, opened),
        DraftWork(1, number, 7, 5, (9, 4), CHAIN3),
        DraftWork(1, number, 8, 7, (8,), CHAIN3),
    ]

    async def run():
        async with serving(drafter) as address:
            async with make_aio_channel(address, Security(token=TOKEN)) as channel:
                metadata = call_metadata(Security(token=TOKEN), 1)
                stream = rpc.DrafterStub(channel).Draft(metadata=metadata)
                for step, work in enumerate(works):
                    await stream.write(encode_draft_request(step, 1.0, [work]))
                    answer = decode_draft_reply(await stream.read(), Limits())
                    yield answer.results[0]

    async def drafts():
        return [(result.status, result.tree.tokens) async for result in run()]

    assert asyncio.run(drafts()) == [
        (DraftStatus.OK, (6, 4, 5)),
        (DraftStatus.OK, (5, 9, 4)),
        (DraftStatus.OK, ()),
    ]


def test_the_printed_drafter_keeps_the_protocol(drafter):
    async def run():
        async with serving(drafter) as address:
            return await asyncio.to_thread(lambda: list(verdicts(address, TOKEN)))

    found = asyncio.run(run())
    assert [verdict for verdict in found if verdict.holds is False] == []
    assert sum(verdict.holds is True for verdict in found) > 30


def test_every_family_of_drafters_has_its_rows_drawn():
    chapter = DESIGN.read_text().partition("## What stands beside what")[2]
    for kind in (*kinds.BUILT_IN, "P-EAGLE"):
        assert kind in chapter or kind == "peagle", kind
