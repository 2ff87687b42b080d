"""What does it cost to record rounds? `PYTHONPATH=. python tests/benchmarks/trace_cost.py`

Question: how much longer does a step take while every request is traced, at 1 and 8 requests, with
trees of look-ups and of the shipped EAGLE-3 head on the embedded target? Both drafters run in this
process, the plan is fixed, and the text is the same. Passes with and without traces alternate, on
one engine after another over one loaded target; the ratio of their median step times is printed,
and beside it the CPU time of the stepping thread in the tracer, and that of the writing thread.

Confounders: a ratio below the spread of the passes says nothing; the writing thread competes for
the cores and for the interpreter, which the ratio sees and the first time beside it does not. The
disk is that of the temporary folder.
"""

import argparse
import json
import statistics
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from cluster.http.text import load_text
from cluster.tools.evaluate_heads import build_head, build_ngram, find_heads
from protos.exchange import Plan, PlanKind
from protos.generation import GenerationRequest
from protos.params import SamplingParams
from tests.fakes import Client
from verifier_service.device import resolve_device
from verifier_service.engine.draft_form import TargetEnd
from verifier_service.engine.drafting import DraftExchange
from verifier_service.engine.loop import Engine
from verifier_service.engine.ports import SourcePlan
from verifier_service.engine.rows import PagedRows
from verifier_service.engine.settings import EngineSettings
from verifier_service.engine.static_planner import StaticPlanner
from verifier_service.model.embedded import ensure_embedded_target
from verifier_service.model.load import load_target
from verifier_service.pairing import row_form, tap_for
from verifier_service.trace.records import Header, Record
from verifier_service.trace.tracer import Tracer
from verifier_service.trace.writer import TraceWriter

TREE = Plan(PlanKind.TREE, depth=6, width=10, nodes=31)
NUM_TOKENS = 96
SIZES = EngineSettings(num_slots=8192, prefix_cache=False)
QUESTIONS = (
    "Write a short story about a lighthouse keeper.",
    "Name ten rivers and repeat their names.",
    "Explain how bread is made.",
    "List the planets and say one thing about each.",
)


class Watched(Tracer):
    """A tracer that adds up the stepping thread's CPU time in it."""

    spent_s = 0.0

    def stepped(self, *args: object) -> None:
        """As `Tracer.stepped`."""
        began = time.thread_time()
        super().stepped(*args)  # type: ignore[arg-type]
        self.spent_s += time.thread_time() - began


class WatchedWriter(TraceWriter):
    """A writer that notes its thread's CPU time."""

    cpu_s = 0.0

    def _write(self, records: Sequence[Record]) -> None:
        super()._write(records)
        self.cpu_s = time.thread_time()


class World:
    """One target, and an engine for every pass."""

    def __init__(self, num_threads: int) -> None:
        directory = ensure_embedded_target()
        (head,) = find_heads(["smollm2-135m-eagle3"], directory)
        self.drafters = [
            build_ngram(8, 1024),
            build_head(head, "", directory, "bf16", 8, 1024),
        ]
        taps = [tap for d in self.drafters if (tap := tap_for(d.capabilities, None)) is not None]
        self.target = load_target(
            directory, torch.bfloat16, taps, num_threads=num_threads, device=resolve_device("cpu")
        )
        facts = self.target.facts
        forms = {t.key: row_form(t, self.target.row_width(t.key), facts.dtype) for t in taps}
        self.end = TargetEnd(facts.vocab_size, facts.max_context, facts.digest, forms)
        text = load_text(directory)
        self.prompts = [text.encode_chat([{"role": "user", "content": q}]) for q in QUESTIONS]

    def run(self, num_requests: int, tracer: Tracer | None) -> tuple[float, int, object]:
        """Seconds a step, steps, texts of one pass."""
        rows = PagedRows(self.target)
        exchange = DraftExchange(self.end, rows)
        for drafter in self.drafters:
            exchange.add_local(drafter)
        names = [d.capabilities.name for d in self.drafters]
        planner = StaticPlanner([SourcePlan(name, TREE) for name in names], deadline_s=1.0)
        engine = Engine(self.target, exchange, planner, SIZES, rows, tracer)
        client = Client(engine)
        params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
        for n in range(num_requests):
            prompt = self.prompts[n % len(self.prompts)]
            client.submit(GenerationRequest(f"bench-{n}", prompt, params))
        engine.step()
        before = engine.stats().num_steps
        began = time.perf_counter()
        texts = client.finish()
        took_s = time.perf_counter() - began
        num_steps = engine.stats().num_steps - before
        engine.close()
        return took_s / num_steps, num_steps, texts


def measure(world: World, num_requests: int, passes: int, folder: Path) -> dict[str, float]:
    """Alternating passes; medians in milliseconds a step."""
    plain: list[float] = []
    traced: list[float] = []
    inside: list[float] = []
    writing: list[float] = []
    texts = world.run(num_requests, None)[2]
    for number in range(passes):
        for is_traced in (bool(number % 2), not number % 2):
            if not is_traced:
                plain.append(world.run(num_requests, None)[0])
                continue
            header = Header(f"{number:08x}", "bench", "", "", time.time(), time.perf_counter())
            writer = WatchedWriter(folder, header, 2**30)
            tracer = Watched(writer, time.perf_counter)
            step_s, num_steps, said = world.run(num_requests, tracer)
            assert said == texts, "the text changed"
            assert writer.num_lost == 0
            traced.append(step_s)
            inside.append(tracer.spent_s / num_steps)
            writing.append(writer.cpu_s / num_steps)
    ratios = [t / p for t, p in zip(traced, plain, strict=True)]
    return {
        "requests": num_requests,
        "plain_ms": 1e3 * statistics.median(plain),
        "traced_ms": 1e3 * statistics.median(traced),
        "ratio": statistics.median(ratios),
        "ratio_low": min(ratios),
        "ratio_high": max(ratios),
        "tracer_us": 1e6 * statistics.median(inside),
        "writer_us": 1e6 * statistics.median(writing),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Print a table; write JSON on request."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--passes", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(argv)
    world = World(args.threads)
    rows = []
    print("requests  ms a step: plain  traced   ratio (least to most)   us a step: tracer  writer")
    with tempfile.TemporaryDirectory() as folder:
        for num_requests in (1, 8):
            row = measure(world, num_requests, args.passes, Path(folder))
            rows.append(row)
            print(
                f"{num_requests:8}{row['plain_ms']:18.2f}{row['traced_ms']:8.2f}"
                f"{row['ratio']:8.3f} ({row['ratio_low']:.3f} to {row['ratio_high']:.3f})"
                f"{row['tracer_us']:20.0f}{row['writer_us']:8.0f}"
            )
        size = sum(path.stat().st_size for path in Path(folder).iterdir())
        print(f"{size} bytes of traces; {threading.active_count()} threads at the end")
    if args.json is not None:
        args.json.write_text(json.dumps(rows, indent=1))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
