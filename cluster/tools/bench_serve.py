"""`outrider bench serve`: what speculation and HTTP do to speed, through the front door.

Question: how much faster does a user read with drafts chosen by the planner (`auto`) than
without (`off`), at several numbers of requests at once, and what does HTTP cost? A closed loop
streams greedy chat answers; off and auto alternate in one run, so that a machine that slows down
slows both; ratios are per repeat, then median and spread. Every answer must be the same in both.

Confounders: client, server and drafters share the cores here; the first pass after a start has a
planner without evidence (a warm-up pass goes first); short answers hide prompts' cost; tau, and
with it the gain, depends on the questions.
"""

import argparse
import asyncio
import json
import os
import statistics
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Final

from cluster.config import ClusterConfig, read_config
from cluster.tools.bench_load import Load, Stream, run_load, spread
from cluster.tools.bench_prompts import Question, per_subtask, read_questions
from cluster.tools.bench_server import resident_mb, round_split, started
from cluster.tools.calls import Speculation as Override
from cluster.tools.client import AsyncOutriderClient
from cluster.tools.serving import default_config
from protos.generation import GenerationRequest, Speculation, SpeculationMode
from protos.params import SamplingParams
from verifier_service.config import THREAD_WAITING

_MODES: Final = ("off", "auto")
_SUBTASKS: Final = 6

Cell = tuple[int, str]
"""Concurrency and mode."""


def main(argv: Sequence[str]) -> int:
    """Run, print a table, write JSON on request; 1 when a text differed."""
    args = _parser().parse_args(argv)
    # The engine beside the server waits like those of replicas; OpenMP reads this once, on loading.
    for name, value in THREAD_WAITING.items():
        os.environ.setdefault(name, value)
    questions = _questions(args)
    levels = [int(level) for level in args.concurrency.split(",")]
    config = read_config(args.config or default_config())
    if args.url:
        result = asyncio.run(_measure(args, args.url, None, None, questions, levels))
    else:
        with started(args.config, args.port) as (url, pid):
            result = asyncio.run(_measure(args, url, pid, config, questions, levels))
    _print(result)
    if args.json is not None:
        args.json.write_text(json.dumps(result, indent=1))
    return 0 if result["different_texts"] == 0 else 1


def report(
    loads: Mapping[Cell, Sequence[Load]],
    engine: Sequence[Load],
    http: Sequence[Load],
    categories: Sequence[str] = (),
) -> dict[str, object]:
    """Ratios per repeat, then median and spread; medians of the rest; differing texts.

    categories: of each question.
    """
    levels = list(dict.fromkeys(level for level, _ in loads))
    pairs = {
        level: list(zip(loads[level, "off"], loads[level, "auto"], strict=True)) for level in levels
    }
    texts: dict[int, set[tuple[int, ...]]] = {}
    for passes in [*loads.values(), engine, http]:
        for load in passes:
            for question, ids in load.texts().items():
                texts.setdefault(question, set()).add(ids)
    rates = {n: _rates(pairs[n]) for n in levels}
    members = {c: {i for i, own in enumerate(categories) if own == c} for c in categories}
    walls = {n: [auto.tokens_per_s / off.tokens_per_s for off, auto in pairs[n]] for n in levels}
    over = [e.tpot_s / h.tpot_s for e, h in zip(engine, http, strict=True)]
    return {
        "auto_over_off": {str(n): spread(rates[n])["median"] for n in levels},
        "auto_over_off_spread": {str(n): spread(rates[n]) for n in levels},
        "auto_over_off_by_category": {
            str(n): {
                category: round(statistics.median(found), 3)
                for category, asked in members.items()
                if (found := _rates([(off.of(asked), auto.of(asked)) for off, auto in pairs[n]]))
            }
            for n in levels
        },
        "end_to_end_ratio": {str(n): spread(walls[n])["median"] for n in levels},
        "http_over_engine": spread(over)["median"] if over else None,
        "http_over_engine_spread": spread(over) if over else None,
        "measured": {
            f"{mode}@{n}": {
                name: round(statistics.median(load.summary()[name] for load in passes), 3)
                for name in passes[0].summary()
            }
            for (n, mode), passes in loads.items()
        },
        "different_texts": sum(len(found) > 1 for found in texts.values()),
        "questions": len(texts),
    }


def _rates(pairs: Sequence[tuple[Load, Load]]) -> list[float]:
    """Decode rates of the second over the first, where both decoded anything."""
    return [off.tpot_s / auto.tpot_s for off, auto in pairs if off.tpot_s and auto.tpot_s]


async def _measure(
    args: argparse.Namespace,
    url: str,
    pid: int | None,
    config: ClusterConfig | None,
    questions: Sequence[Question],
    levels: Sequence[int],
) -> dict[str, object]:
    loads: dict[Cell, list[Load]] = {}
    split: dict[str, object] = {}
    async with AsyncOutriderClient(url, args.api_key) as client:
        streams = {mode: _http_stream(client, questions, mode, args.max_new) for mode in _MODES}
        for mode in _MODES:
            await run_load(streams[mode], min(len(questions), args.warm_up), 1)
        for level in levels:
            for repeat in range(args.repeats):
                # The order alternates, so that neither mode always runs on the warmer machine.
                for mode in _MODES if repeat % 2 == 0 else _MODES[::-1]:
                    before = await client.statistics()
                    load = await run_load(streams[mode], len(questions), level)
                    loads.setdefault((level, mode), []).append(load)
                    if mode == "auto":
                        split[str(level)] = round_split(before, await client.statistics())
                    _say(level, mode, repeat, load)
        memory = None if pid is None else resident_mb(pid)
        engine, http = await _beside_engine(args, config, questions, streams["off"])
    ordered = {(n, mode): loads[n, mode] for n in levels for mode in _MODES}
    result = report(ordered, engine, http, [question.category for question in questions])
    return result | {
        "round_split": split,
        "resident_mb": memory,
        "max_new": args.max_new,
        "repeats": args.repeats,
    }


async def _beside_engine(
    args: argparse.Namespace,
    config: ClusterConfig | None,
    questions: Sequence[Question],
    http_off: Stream,
) -> tuple[list[Load], list[Load]]:
    """Plain decoding through HTTP and by an engine in this process, alternating, one at a time."""
    if config is None or args.no_engine:
        return [], []
    from cluster.fleet.assembly import build_verifier, resolve_target
    from cluster.http.text import load_text
    from verifier_service.threads import in_passing_thread

    # As in a replica: a thread that stays would slow its steps down.
    alone = config.model_copy(update={"drafters": []})
    service = (await in_passing_thread(build_verifier, alone, "")).service
    text = load_text(resolve_target(config.verifier.target))
    few = min(len(questions), _SUBTASKS)
    params = SamplingParams(temperature=0.0, max_tokens=args.max_new)

    async def direct(index: int) -> AsyncIterator[tuple[int, ...]]:
        prompt = text.encode_chat([{"role": "user", "content": questions[index].text}])
        off = Speculation(SpeculationMode.OFF)
        async for run in service.generate(
            GenerationRequest(f"direct-{index}", prompt, params, speculation=off)
        ):
            yield run.ids

    service.start()
    engine: list[Load] = []
    http: list[Load] = []
    try:
        await run_load(direct, 1, 1)
        for repeat in range(args.repeats):
            for stream, found in ((direct, engine), (http_off, http))[:: 1 - 2 * (repeat % 2)]:
                found.append(await run_load(stream, few, 1))
    finally:
        await asyncio.to_thread(service.stop)
    return engine, http


def _http_stream(
    client: AsyncOutriderClient, questions: Sequence[Question], mode: str, max_new: int
) -> Stream:
    async def stream(index: int) -> AsyncIterator[tuple[int, ...]]:
        async for chunk in client.stream_chat(
            questions[index].text,
            max_tokens=max_new,
            temperature=0.0,
            return_token_ids=True,
            speculation=Override(mode=mode),
        ):
            yield chunk.token_ids

    return stream


def _questions(args: argparse.Namespace) -> list[Question]:
    """Equal numbers from every subtask, in turn, so that a prefix is a fair sample."""
    if args.quick:
        args.max_new, args.repeats = min(args.max_new, 48), min(args.repeats, 3)
        args.num_prompts = min(args.num_prompts, 2 * _SUBTASKS)
    every = read_questions(args.prompts)
    subtasks = list(dict.fromkeys(q.subtask for q in every))
    per_task = -(-args.num_prompts // len(subtasks))
    chosen = per_subtask(every, per_task)
    queues = [[q for q in chosen if q.subtask == s] for s in subtasks]
    mixed = [queue[i] for i in range(per_task) for queue in queues if i < len(queue)]
    return mixed[: args.num_prompts]


def _say(level: int, mode: str, repeat: int, load: Load) -> None:
    summary = load.summary()
    numbers = "  ".join(f"{name} {value:.1f}" for name, value in summary.items())
    print(f"concurrency {level} repeat {repeat} {mode}: {numbers}", file=sys.stderr, flush=True)


def _print(result: Mapping[str, object]) -> None:
    measured, rates = result["measured"], result["auto_over_off_spread"]
    walls = result["end_to_end_ratio"]
    assert isinstance(measured, dict)
    assert isinstance(rates, dict)
    assert isinstance(walls, dict)
    print("| at once | mode | TTFT ms | TPOT ms | p99 ITL ms | tokens/s | auto/off | end to end |")
    print("|---|---|---|---|---|---|---|---|")
    for level, ratio in rates.items():
        for mode in _MODES:
            m = measured[f"{mode}@{level}"]
            tail = (
                f"{ratio['median']:.2f} ({ratio['min']:.2f} to {ratio['max']:.2f}) |"
                f" {walls[level]:.2f}"
                if mode == "auto"
                else "|"
            )
            print(
                f"| {level} | {mode} | {m['ttft_ms']:.0f} | {m['tpot_ms']:.1f} |"
                f" {m['p99_itl_ms']:.0f} | {m['tokens_per_s']:.1f} | {tail} |"
            )
    by_category = result["auto_over_off_by_category"]
    assert isinstance(by_category, dict)
    for level, ratios in by_category.items():
        told = ", ".join(f"{category} {ratio:.2f}" for category, ratio in ratios.items())
        print(f"auto/off at {level} by category: {told}")
    print(f"HTTP over engine, off, one at a time: {result['http_over_engine']}")
    print(f"round split, ms: {json.dumps(result['round_split'])}")
    print(f"resident MB: {json.dumps(result['resident_mb'])}")
    print(f"texts that differ: {result['different_texts']} of {result['questions']}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="outrider bench serve", description=__doc__)
    parser.add_argument("--prompts", type=Path, required=True, help="JSONL with turns or q")
    parser.add_argument("--config", type=Path, help="cluster to start; default: the embedded one")
    parser.add_argument("--url", help="a running server instead of starting one")
    parser.add_argument("--api-key", default=None)
    parser.add_argument("--port", type=int, default=8123, help="of the server it starts")
    parser.add_argument("--concurrency", default="1,2,4,8")
    parser.add_argument("--num-prompts", type=int, default=48)
    parser.add_argument("--max-new", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--warm-up", type=int, default=6, help="questions asked before measuring")
    parser.add_argument("--no-engine", action="store_true", help="leave http_over_engine out")
    parser.add_argument("--quick", action="store_true", help="12 prompts, 48 new tokens")
    parser.add_argument("--json", type=Path)
    return parser
