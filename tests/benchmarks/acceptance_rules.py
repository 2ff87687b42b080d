"""How many drafted tokens are accepted: argmax drafting, same-noise drafting, rejection?

Question: at temperatures 0.6 and 1.0, what do the three ways to draft a chain for a sampled
request give with the same target, the same head and the same questions?

    argmax      the drafter ignores the sampling values and drafts its best token
    same noise  the drafter adds the noise that will choose the target's token (the default)
    rejection   the drafter samples, the verifier tests with min(1, p/q)

The first two keep the text (law 1); their texts must be equal, and that is checked. The drafter
runs in this process, so nothing is late. Confounders: the questions; what was sampled (rejection's
texts are others; the spread over questions is printed); not the machine, for no time is measured.

`python -m tests.benchmarks.acceptance_rules [--per-task N] [--max-new N] [--json FILE]`.
`--draft-model DIR` drafts with a causal model instead of the shipped head.
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from cluster.http.text import load_text
from cluster.tools.bench_prompts import per_subtask, read_questions
from drafter_service.build import build_drafter
from drafter_service.config import DrafterLimits, DrafterSettings
from drafter_service.drafter import Drafter
from drafter_service.head_loading import HEADS_DIR
from protos.exchange import (
    Capabilities,
    ContextAck,
    ContextRows,
    DraftResult,
    DraftWork,
    Plan,
    PlanKind,
)
from protos.generation import GenerationRequest, RunCounts, TokenRun
from protos.params import Acceptance, SamplingParams
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

RULES = ("argmax", "same noise", "rejection")
TEMPERATURES = (0.6, 1.0)
HEAD = "smollm2-135m-eagle3"
SOURCE = "drafter"
DEPTH = 4


class ArgmaxDrafter:
    """A drafter that is told of greedy sessions only."""

    def __init__(self, drafter: Drafter) -> None:
        self._drafter = drafter

    @property
    def capabilities(self) -> Capabilities:
        """The same."""
        return self._drafter.capabilities

    def handle(self, works: Sequence[DraftWork]) -> list[DraftResult]:
        """The same works, opened greedy."""
        return self._drafter.handle([_greedy(work) for work in works])

    def absorb(self, pieces: Sequence[ContextRows]) -> list[ContextAck]:
        """The same."""
        return self._drafter.absorb(pieces)


def _greedy(work: DraftWork) -> DraftWork:
    if work.open is None:
        return work
    params = replace(work.open.params, temperature=0.0)
    return replace(work, open=replace(work.open, params=params))


@dataclass(frozen=True, slots=True)
class Answer:
    """What one question brought. The prompt's own step is no round."""

    ids: tuple[int, ...]
    counts: RunCounts

    @property
    def tau(self) -> float:
        """Tokens a round."""
        return (self.counts.num_output - 1) / max(self.counts.num_rounds - 1, 1)


class Bench:
    """Target and drafter, loaded once; a new engine for every variant."""

    def __init__(self, args: argparse.Namespace) -> None:
        torch.set_num_threads(args.threads)
        self._directory = ensure_embedded_target()
        self._drafter = build_drafter(_settings(args), self._directory)
        capabilities = self._drafter.capabilities
        checkpoint = HEADS_DIR / HEAD if args.draft_model is None else None
        tap = tap_for(capabilities, checkpoint)
        self._taps = [tap] if tap is not None else []
        self._target = load_target(self._directory, torch.bfloat16, self._taps)
        self._concurrency = args.concurrency

    def prompts(self, args: argparse.Namespace) -> list[tuple[int, ...]]:
        """Token ids of the questions."""
        text = load_text(self._directory)
        questions = per_subtask(read_questions(args.prompts), args.per_task)
        return [text.encode_chat([{"role": "user", "content": q.text}]) for q in questions]

    def run(self, rule: str, temperature: float, prompts: Sequence[tuple[int, ...]], max_new: int):
        """One answer per prompt, in order."""
        facts, rows = self._target.facts, PagedRows(self._target)
        forms = {
            tap.key: row_form(tap, self._target.row_width(tap.key), facts.dtype)
            for tap in self._taps
        }
        exchange = DraftExchange(TargetEnd(facts.vocab_size, facts.max_context, "", forms), rows)
        drafter = ArgmaxDrafter(self._drafter) if rule == "argmax" else self._drafter
        exchange.add_local(drafter, SOURCE)
        planner = StaticPlanner([SourcePlan(SOURCE, Plan(PlanKind.CHAIN, DEPTH))], 10.0)
        settings = EngineSettings(
            num_slots=2048 * self._concurrency,
            max_tokens_per_step=512,
            max_running=self._concurrency,
            max_draft_wait_s=10.0,
        )
        engine = Engine(self._target, exchange, planner, settings, rows)
        runs: list[list[TokenRun]] = [[] for _ in prompts]
        acceptance = Acceptance.REJECTION if rule == "rejection" else Acceptance.EXACT
        for number, prompt in enumerate(prompts):
            params = SamplingParams(
                temperature=temperature, seed=number, max_tokens=max_new, acceptance=acceptance
            )
            request = GenerationRequest(f"{rule}-{number}", prompt, params)
            engine.submit(request, runs[number].append)
        while engine.step():
            pass
        engine.close()
        self._target.free()
        answers = []
        for found in runs:
            counts = found[-1].counts
            assert counts is not None, "the last run has counts"
            answers.append(Answer(tuple(t for run in found for t in run.ids), counts))
        return answers


def _settings(args: argparse.Namespace) -> DrafterSettings:
    limits = DrafterLimits(cache_mb=256, max_context=2048)
    if args.draft_model is not None:
        kind, checkpoint = "draft_model", str(args.draft_model)
    else:
        kind, checkpoint = "eagle3", HEAD
    return DrafterSettings(kind=kind, name=SOURCE, checkpoint=checkpoint, limits=limits)


def summary(answers: Sequence[Answer]) -> dict[str, float | list[float]]:
    """tau, its standard error over questions, and the share of rounds by accepted length."""
    rounds = sum(a.counts.num_rounds - 1 for a in answers)
    tau = sum(a.counts.num_output - 1 for a in answers) / rounds
    taus = torch.tensor([a.tau for a in answers])
    by_depth = [0] * DEPTH
    for answer in answers:
        for depth, count in enumerate(answer.counts.accepted_by_depth):
            by_depth[depth] += count
    drafted = sum(a.counts.num_drafted for a in answers)
    return {
        "tau": round(tau, 3),
        "standard_error": round(float(taus.std() / len(answers) ** 0.5), 3),
        "first_token": round(by_depth[0] / rounds, 3),
        "by_depth": [round(count / rounds, 3) for count in by_depth],
        "accepted_share": round(sum(a.counts.num_accepted for a in answers) / drafted, 3),
        "tokens": sum(a.counts.num_output for a in answers),
    }


def main() -> int:
    """Run, print a table and a JSON line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--prompts", type=Path, default=Path(__file__).parent / "spec_bench_48.jsonl"
    )
    parser.add_argument("--per-task", type=int, default=2)
    parser.add_argument("--max-new", type=int, default=64)
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--temperatures", type=float, nargs="+", default=TEMPERATURES)
    parser.add_argument("--draft-model", type=Path)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    bench = Bench(args)
    prompts = bench.prompts(args)
    result: dict[str, dict[str, object]] = {}
    print("| T | rule | tau | first token | accepted of 4, by depth |")
    print("|---|---|---|---|---|")
    different = 0
    for temperature in args.temperatures:
        found = {rule: bench.run(rule, temperature, prompts, args.max_new) for rule in RULES}
        different += sum(
            a.ids != b.ids for a, b in zip(found["argmax"], found["same noise"], strict=True)
        )
        for rule, answers in found.items():
            line = result[f"{rule} at {temperature}"] = summary(answers)
            depths = " ".join(f"{share:.2f}" for share in line["by_depth"])
            print(
                f"| {temperature} | {rule} | {line['tau']:.2f} +- {line['standard_error']:.2f} "
                f"| {line['first_token']:.2f} | {depths} |",
                flush=True,
            )
    print(f"texts that differ between argmax and same noise: {different}")
    print(json.dumps(result))
    if args.json is not None:
        args.json.write_text(json.dumps(result, indent=1))
    return 0 if different == 0 else 1


if __name__ == "__main__":
    raise SystemExit(main())
