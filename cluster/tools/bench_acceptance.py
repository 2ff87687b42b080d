"""`outrider bench acceptance`: how many tokens a round commits, by kind of draft and of question.

Question: what acceptance length (tau) do the shipped drafters reach on greedy answers? One turn of
every question is answered once per variant by the real engine with a fixed plan; the text must
not depend on the variant, and differences are counted. Drafters run in this process, so nothing
is late. tau counts every round after the prompt's own step, rounds without a draft included.

Confounders: tau depends on the questions, on the number of new tokens (texts that repeat
themselves grow easy for look-ups), and on nothing that a machine does: speed is `bench serve`'s.
"""

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from cluster.config import NGRAM, ClusterConfig, read_config
from cluster.tools.bench_prompts import Question, per_subtask, read_questions
from cluster.tools.serving import default_config, prepare_target
from protos.errors import ConfigError, OutriderError
from protos.exchange import Plan, PlanKind
from protos.generation import GenerationRequest, RunCounts, Speculation, SpeculationMode
from protos.params import SamplingParams

_TREE: Final = Plan(PlanKind.TREE, depth=6, width=10, nodes=31)


@dataclass(frozen=True, slots=True)
class Variant:
    """Drafters with the plan that each of them is asked for."""

    name: str
    drafters: tuple[str, ...]
    plan: Plan

    @property
    def speculation(self) -> Speculation:
        """The request's override."""
        return Speculation(SpeculationMode.FIXED, self.drafters, self.plan)


@dataclass(frozen=True, slots=True)
class Answer:
    """What one question brought under one variant."""

    question: Question
    ids: tuple[int, ...]
    counts: RunCounts

    @property
    def num_rounds(self) -> int:
        """Rounds after the prompt's own step."""
        return self.counts.num_rounds - 1

    @property
    def num_committed(self) -> int:
        """Tokens of those rounds."""
        return self.counts.num_output - 1


def main(argv: Sequence[str]) -> int:
    """Run, print a table, write JSON on request."""
    args = _parser().parse_args(argv)
    config = _colocated(read_config(args.config or default_config()), args)
    questions = per_subtask(read_questions(args.prompts), args.per_task)
    variants = _variants(config, args.variants.split(",") if args.variants else None)
    prepare_target(config)
    began = time.monotonic()
    answers = asyncio.run(_run(config, questions, variants, args.max_new, args.concurrency))
    result = report(answers) | {
        "questions": len(questions),
        "max_new": args.max_new,
        "seconds": round(time.monotonic() - began, 1),
    }
    _print(result)
    if args.json is not None:
        args.json.write_text(json.dumps(result, indent=1))
    return 0 if result["different_texts"] == 0 else 1


def report(answers: Mapping[str, Sequence[Answer]]) -> dict[str, object]:
    """tau over all questions, by subtask and by category; acceptance by depth; text differences."""
    first = next(iter(answers.values()))
    different = sum(
        any(other[i].ids != answer.ids for other in answers.values())
        for i, answer in enumerate(first)
    )
    categories = list(dict.fromkeys(a.question.category for a in first))
    subtasks = list(dict.fromkeys(a.question.subtask for a in first))
    return {
        "tau": {name: _tau(found) for name, found in answers.items()},
        "tau_mean_of_questions": {
            name: round(sum(_tau([a]) for a in found) / len(found), 4)
            for name, found in answers.items()
        },
        "by_category": {
            category: {
                name: _tau([a for a in found if a.question.category == category])
                for name, found in answers.items()
            }
            for category in categories
        },
        "by_subtask": {
            subtask: {
                name: _tau([a for a in found if a.question.subtask == subtask])
                for name, found in answers.items()
            }
            for subtask in subtasks
        },
        "acceptance_by_depth": {name: _by_depth(found) for name, found in answers.items()},
        "drafted_per_round": {
            name: round(
                sum(a.counts.num_drafted for a in found) / max(sum(a.num_rounds for a in found), 1),
                2,
            )
            for name, found in answers.items()
        },
        "accepted_by_source": {name: _by_source(found) for name, found in answers.items()},
        "different_texts": different,
    }


def _tau(answers: Sequence[Answer]) -> float:
    rounds = sum(answer.num_rounds for answer in answers)
    return round(sum(a.num_committed for a in answers) / rounds, 4) if rounds else 1.0


def _by_depth(answers: Sequence[Answer]) -> list[float]:
    """Share of rounds that accepted at least 1, 2, .. draft tokens."""
    deepest = max((len(a.counts.accepted_by_depth) for a in answers), default=0)
    rounds = max(sum(answer.num_rounds for answer in answers), 1)
    sums = [0] * deepest
    for answer in answers:
        for depth, count in enumerate(answer.counts.accepted_by_depth):
            sums[depth] += count
    return [round(count / rounds, 4) for count in sums]


def _by_source(answers: Sequence[Answer]) -> dict[str, int]:
    total: dict[str, int] = {}
    for answer in answers:
        for source, count in answer.counts.accepted_by_source:
            total[source] = total.get(source, 0) + count
    return total


async def _run(
    config: ClusterConfig,
    questions: Sequence[Question],
    variants: Sequence[Variant],
    max_new: int,
    concurrency: int,
) -> dict[str, list[Answer]]:
    from cluster.fleet.assembly import build_verifier, resolve_target
    from cluster.http.text import load_text

    service = build_verifier(config, token="").service
    text = load_text(resolve_target(config.verifier.target))
    params = SamplingParams(temperature=0.0, max_tokens=max_new)
    gate = asyncio.Semaphore(concurrency)

    async def answer(question: Question, variant: Variant, number: int) -> Answer:
        prompt = text.encode_chat([{"role": "user", "content": question.text}])
        request = GenerationRequest(
            f"{variant.name}-{number}", prompt, params, speculation=variant.speculation
        )
        ids: list[int] = []
        async with gate:
            async for run in service.generate(request):
                ids.extend(run.ids)
                if run.error:
                    raise OutriderError(run.error)
        if run.counts is None:
            raise OutriderError("the engine ended a request without counts")
        return Answer(question, tuple(ids), run.counts)

    service.start()
    found: dict[str, list[Answer]] = {}
    try:
        for variant in variants:
            began = time.monotonic()
            asks = [answer(q, variant, i) for i, q in enumerate(questions)]
            found[variant.name] = list(await asyncio.gather(*asks))
            print(
                f"{variant.name}: tau {_tau(found[variant.name]):.3f} "
                f"({time.monotonic() - began:.0f} s)",
                file=sys.stderr,
                flush=True,
            )
    finally:
        service.stop()
    return found


def _variants(config: ClusterConfig, names: Sequence[str] | None) -> list[Variant]:
    """All variants that the configured drafters allow, or the named ones."""
    learnt = tuple(entry.name for entry in config.drafters)
    every = [Variant("ngram8", (NGRAM,), Plan(PlanKind.CHAIN, depth=8))]
    if learnt:
        every += [
            Variant("chain4", learnt[:1], Plan(PlanKind.CHAIN, depth=4)),
            Variant("tree", learnt[:1], _TREE),
            Variant("merged", (learnt[0], NGRAM), _TREE),
        ]
    known = [variant.name for variant in every]
    for name in names or ():
        if name not in known:
            raise ConfigError(f"--variants knows {', '.join(known)} here, not {name!r}")
    return [variant for variant in every if names is None or variant.name in names]


def _colocated(config: ClusterConfig, args: argparse.Namespace) -> ClusterConfig:
    """The same drafters inside this process, and room for a tree of every request."""
    document = config.model_dump()
    rows = 512 + 32 * args.concurrency
    document["verifier"]["engine"] |= {
        "max_tokens_per_step": rows,
        "max_running": args.concurrency,
        "num_slots": max(document["verifier"]["engine"]["num_slots"], 2048 * args.concurrency),
    }
    for entry in document["drafters"]:
        entry |= {"colocated": True, "replicas": None, "autoscaling": None}
    if args.head is not None:
        document["drafters"] = [
            {"name": "eagle3", "kind": "eagle3", "checkpoint": str(args.head), "colocated": True}
        ]
    return ClusterConfig.model_validate(document)


def _print(result: Mapping[str, object]) -> None:
    tau, subtasks = result["tau"], result["by_subtask"]
    assert isinstance(tau, dict)
    assert isinstance(subtasks, dict)
    names = list(tau)
    print("| subtask | " + " | ".join(names) + " |")
    print("|---|" + "---|" * len(names))
    for subtask, row in subtasks.items():
        print(f"| {subtask} | " + " | ".join(f"{row[name]:.2f}" for name in names) + " |")
    print("| all | " + " | ".join(f"{tau[name]:.2f}" for name in names) + " |")
    print(f"texts that differ between variants: {result['different_texts']}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="outrider bench acceptance", description=__doc__)
    parser.add_argument("--prompts", type=Path, required=True, help="JSONL with turns or q")
    parser.add_argument("--config", type=Path, help="cluster whose drafters are measured")
    parser.add_argument("--head", type=Path, help="an EAGLE-3 checkpoint instead of the config's")
    parser.add_argument("--per-task", type=int, default=8, help="questions of every subtask")
    parser.add_argument("--max-new", type=int, default=128)
    parser.add_argument("--concurrency", type=int, default=8, help="questions at once")
    parser.add_argument("--variants", help="of tree, chain4, ngram8, merged; default all")
    parser.add_argument("--json", type=Path)
    return parser
