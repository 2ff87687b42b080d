"""What the tests of traces share: an engine that is traced, and a small story made by hand."""

import time
from collections.abc import Sequence
from pathlib import Path

from protos.exchange import Plan, PlanKind
from protos.generation import GenerationRequest, RunCounts
from protos.tree import CandidateTree
from tests.fakes import Client, FakeDrafting, HashTarget, small_settings
from verifier_service.engine.loop import Engine
from verifier_service.engine.ports import Planner
from verifier_service.engine.settings import EngineSettings
from verifier_service.engine.static_planner import StaticPlanner
from verifier_service.trace.records import (
    Asked,
    Chunk,
    Closed,
    Drafted,
    Header,
    Opened,
    Preempted,
    Record,
    Round,
    StepFacts,
)
from verifier_service.trace.tracer import Tracer
from verifier_service.trace.writer import TraceWriter

VOCAB = 97
MEGABYTE = 2**20


class ListSink:
    """Keeps records; each put is one step's."""

    def __init__(self) -> None:
        self.steps: list[tuple[Record, ...]] = []
        self.is_closed = False

    @property
    def records(self) -> list[Record]:
        return [record for step in self.steps for record in step]

    def put(self, records: Sequence[Record]) -> None:
        self.steps.append(tuple(records))

    def close(self) -> None:
        self.is_closed = True


def header(writer: str = "aaaa0001", target: str = "tiny") -> Header:
    return Header(writer, target, "digest", "fingerprint-of-it", 1.8e9, 100.0)


def file_tracer(folder: Path, writer: str = "aaaa0001", share: float = 1.0) -> Tracer:
    """A tracer that writes files, as a verifier's does."""
    told = Header(writer, "tiny", "digest", "print", time.time(), time.perf_counter())
    return Tracer(TraceWriter(folder, told, 64 * MEGABYTE), time.perf_counter, share)


def run_traced(
    tracer: Tracer | None,
    requests: Sequence[GenerationRequest],
    drafting: FakeDrafting | None = None,
    planner: Planner | None = None,
    settings: EngineSettings | None = None,
) -> Client:
    """Run requests to their ends and close the engine."""
    engine = Engine(
        HashTarget(VOCAB, eos_token_ids=(11,)),
        drafting or FakeDrafting(),
        planner or StaticPlanner(),
        settings or small_settings(),
        tracer=tracer,
    )
    client = Client(engine)
    for one in requests:
        client.submit(one)
    client.finish()
    engine.close()
    return client


STEP = StepFacts(
    number=7,
    at_s=100.100,
    step_s=0.050,
    wait_s=0.0075,
    forward_s=0.040,
    choose_s=0.0015,
    num_requests=2,
    num_rows=9,
    why="eagle3/depth4/tree",
    plain_s=0.030,
    predicted_s=0.041,
    expected=2.5,
)


def made_records(request_id: str = "cmpl-feed-0", key: int = 3) -> list[Record]:
    """A whole request by hand: a chunk, the prompt's end, a tree, a preemption, a plain round."""
    whose = request_id, key
    early = StepFacts(5, 100.010, 0.005, 0.0, 0.004, 0.0005, 1, 16)
    first = StepFacts(6, 100.040, 0.020, 0.0, 0.019, 0.0005, 1, 5)
    later = StepFacts(9, 100.150, 0.040, 0.0, 0.038, 0.001, 1, 1, plain_s=0.032)
    tree = CandidateTree((40, 41, 42, 43), (0, 1, 1, 0), (-0.1, -0.5, -0.9, -2.0))
    nothing = CandidateTree()
    settings = (("temperature", "0.7"), ("seed", "5"), ("max_tokens", "9"))
    return [
        Opened(*whose, 100.0, num_prompt=21, num_output=0, settings=settings, mode="auto"),
        Chunk(*whose, early, start=0, num_rows=16, num_cached=0, queue_s=0.003),
        Round(*whose, first, 1, 16, 5, 21, True, (), (), nothing, (), (), (39,), 1, 0, 0.003),
        Round(
            *whose,
            STEP,
            number=2,
            start=21,
            num_rows=1,
            base_len=22,
            is_prompt=False,
            asked=(
                Asked("eagle3", Plan(PlanKind.TREE, depth=4, width=2, nodes=6)),
                Asked("ngram", Plan(PlanKind.CHAIN, depth=8)),
                Asked("slow", Plan(PlanKind.CHAIN, depth=2)),
            ),
            drafted=(
                Drafted("eagle3", 3, 0.0061, 0.0048, was_late=False),
                Drafted("ngram", 2, 0.0001, 0.0, was_late=True),
            ),
            tree=tree,
            sources=(("eagle3", "ngram"), ("eagle3",), ("ngram",), ("eagle3",)),
            nodes=(1, 3),
            choices=(40, 42, 50),
            num_committed=3,
            num_cached=0,
            queue_s=0.003,
        ),
        Preempted(*whose, at_s=100.105, base_len=25),
        Round(*whose, later, 3, 24, 1, 25, False, (), (), nothing, (), (), (2,), 1, 0, 0.006),
        Closed(
            *whose,
            at_s=100.149,
            reason="stop",
            error="",
            counts=RunCounts(num_prompt=21, num_output=5, num_rounds=3, num_draft_rounds=1,
                             num_drafted=4, num_accepted=2, accepted_by_depth=(1, 1),
                             accepted_by_source=(("eagle3", 1), ("ngram", 2)), queue_s=0.006),
        ),
    ]  # fmt: skip


def write_file(
    folder: Path, records: Sequence[Record], writer: str = "aaaa0001", target: str = "tiny"
) -> Path:
    """One finished trace file of these records; the file."""
    before = set(folder.glob("*")) if folder.exists() else set()
    sink = TraceWriter(folder, header(writer, target), 64 * MEGABYTE)
    sink.put(records)
    sink.close()
    (path,) = set(folder.glob("*")) - before
    return path
