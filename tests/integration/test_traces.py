"""Traces where drafts come over a wire, and all the way from a settings file to `explain`."""

import asyncio
import sys
import time
from collections.abc import Sequence

from cluster.tools.cli import main
from tests.fakes import request
from tests.integration.exchange_house import TREE, ask, featured, plain_texts
from tests.tiny import tiny_llama_dir
from verifier_service.build import build_verifier
from verifier_service.config import load_settings
from verifier_service.engine.ports import SourcePlan
from verifier_service.trace.reading import TraceFolder
from verifier_service.trace.records import Record, Round
from verifier_service.trace.story import sources, spent
from verifier_service.trace.tracer import Tracer

REQUESTS = [ask("a", 5), ask("b", 70, temperature=0.8, seed=7)]


class Kept:
    """A sink that keeps everything."""

    def __init__(self) -> None:
        self.records: list[Record] = []

    def put(self, records: Sequence[Record]) -> None:
        self.records.extend(records)

    def close(self) -> None:
        """Nothing to write."""


def test_the_drafters_time_is_told_apart_from_the_wires(start, build):
    drafter, kept = start(capabilities=featured()), Kept()
    tracer = Tracer(kept, time.perf_counter)
    house = build([SourcePlan("fake", TREE)], tracer=tracer)
    house.offer("fake", drafter.address)
    for one in REQUESTS:
        house.client.submit(one)
    assert house.client.finish() == plain_texts(REQUESTS)
    rounds = [r for r in kept.records if isinstance(r, Round) and not r.is_prompt]
    replies = [reply for part in rounds for reply in part.drafted]
    assert len(replies) > 10
    assert all(0.0 < reply.drafter_s < reply.latency_s for reply in replies)
    counts = house.exchange.counts()["fake"]
    # Every reply that was used carries the times that the exchange counted.
    assert sum(reply.drafter_s for reply in replies) <= counts.drafter_s + 1e-9
    waited = {r.step.number: r.step.wait_s for r in rounds}
    assert sum(waited.values()) > 0.0


def test_a_settings_file_asks_for_traces_and_explain_reads_them(tmp_path, capsys):
    target, folder = tiny_llama_dir(tmp_path / "target"), tmp_path / "traces"
    file = tmp_path / "verifier.yaml"
    file.write_text(
        f"target: {target}\n"
        "dtype: fp32\n"
        "num_threads: 1\n"
        "engine: {min_agreement: 0, num_slots: 512, page_size: 16}\n"
        f"traces: {{dir: {folder}, max_mb: 1}}\n"
    )
    interval = sys.getswitchinterval()
    service = build_verifier(load_settings(file)).service
    service.start()

    async def run(name: str) -> tuple[int, ...]:
        asked = request(name, range(3, 40), 12, ignore_eos=True)
        return tuple([token async for r in service.generate(asked) for token in r.ids])

    async def both() -> list[tuple[int, ...]]:
        return list(await asyncio.gather(run("cmpl-one"), run("cmpl-two")))

    texts = asyncio.run(both())
    service.stop()
    sys.setswitchinterval(interval)
    found = TraceFolder(folder)
    assert found.ids == ("cmpl-one", "cmpl-two")
    for name, text in zip(found.ids, texts, strict=True):
        (story,) = found.stories(name)
        assert story.ids == text
        assert story.closed is not None
        where = spent(story)
        assert 0.0 < where.forward_s < where.total_s
        assert sources(story) == []
        assert story.header.fingerprint == service.facts.fingerprint
    words = ["explain", "cmpl-one", "--traces", str(folder), "--tokenizer", str(target)]
    assert main(words) == 0
    shown = capsys.readouterr().out
    assert "37 prompt tokens; temperature 0, seed 0, max_tokens 12, ignore_eos True" in shown
    assert "12 tokens in 12 rounds, ended: length" in shown
    assert shown.count("    + '") == 12
