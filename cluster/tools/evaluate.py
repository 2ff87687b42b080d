"""`outrider evaluate`: tau and acceptance of drafters, replayed against recorded texts.

The text of a request does not depend on its drafter (law 1), so the target answers every question
once per temperature; text and feature rows are kept, and any number of heads and shapes is then
replayed against them without the target. Counts are those of a live run (`outrider bench
acceptance`): rounds after the prompt's own step, rounds without a draft included.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from cluster.fleet.assembly import resolve_target
from cluster.tools.bench_prompts import Question, per_subtask, read_questions
from cluster.tools.evaluate_heads import (
    NGRAM,
    Head,
    best_reading,
    build_head,
    build_ngram,
    find_heads,
)
from cluster.tools.evaluate_plot import draw, require_matplotlib
from cluster.tools.evaluate_report import Counts, Evaluation
from drafter_service.replay_counts import ReplayCounts, total
from drafter_service.shapes import KNOWN, Shape, default_shapes, parse_shape
from protos.errors import ConfigError
from verifier_service.config import EMBEDDED, THREAD_WAITING

if TYPE_CHECKING:
    from drafter_service.drafter import Drafter
    from protos.recorded import RecordedText

_ENVIRONMENT: Final = THREAD_WAITING | {"HF_HUB_OFFLINE": "1"}
Texts = dict[float, "list[RecordedText]"]


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; 0 when everything was replayed."""
    args = _parser().parse_args(argv)
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    if args.plot is not None:
        require_matplotlib()
    asked = [parse_shape(name) for name in dict.fromkeys(args.shapes)]
    questions = read_questions(args.prompts)
    if args.per_task is not None:
        questions = per_subtask(questions, args.per_task)
    questions = questions[: args.limit]
    if not questions:
        raise ConfigError("no questions are left to evaluate on")
    target_dir = resolve_target(args.target)
    is_lookup = bool(asked) and all(shape.is_lookup for shape in asked)
    heads = [] if is_lookup else find_heads(args.heads, target_dir)
    plan = _planned(heads, asked, target_dir, args.dtype)
    began = time.monotonic()
    texts = _record(args, target_dir, questions, heads)
    recorded_s = time.monotonic() - began
    found = _Replays(args, target_dir, texts).run(
        plan, [s for s in asked or default_shapes([]) if s.is_lookup]
    )
    facts = {
        "max_new": args.max_new,
        "seed": args.seed,
        "target": next(iter(texts.values()))[0].target_digest,
        "heads": {head.name: {"kind": head.kind, "digest": head.digest} for head in heads},
        "record_s": round(recorded_s, 1),
        "replay_s": round(time.monotonic() - began - recorded_s, 1),
    }
    evaluation = Evaluation(questions, found, facts)
    print("\n".join(evaluation.tables()))
    if args.json is not None:
        args.json.write_text(json.dumps(evaluation.report(), indent=1) + "\n", encoding="utf-8")
    if args.plot is not None:
        draw(evaluation, args.plot)
    return 0


def _planned(
    heads: Sequence[Head], asked: Sequence[Shape], target_dir: Path, dtype: str
) -> list[tuple[Head, list[Shape]]]:
    """Every head with its shapes. Loads each once, so that nothing is refused after long work.

    Raises ConfigError, CheckpointError or IncompatiblePair.
    """
    planned = []
    for head in heads:
        offered = build_head(head, head.readings[0].label, target_dir, dtype, 1, 1).capabilities
        shapes = asked or default_shapes([offered])
        planned.append((head, [shape for shape in shapes if shape.suits(offered)]))
    done = {shape.name for _, shapes in planned for shape in shapes}
    if idle := [s.name for s in asked if not s.is_lookup and s.name not in done]:
        raise ConfigError(f"none of the heads drafts {', '.join(idle)}")
    return planned


def _record(
    args: argparse.Namespace, target_dir: Path, questions: Sequence[Question], heads: Sequence[Head]
) -> Texts:
    """Texts by temperature; the target is loaded only where some are missing."""
    from cluster.http.text import load_text
    from protos.digest import directory_digest
    from protos.features import DType
    from verifier_service.data.recorded import RecordSettings, TextRecorder
    from verifier_service.data.recording_engine import RecordingTarget
    from verifier_service.model.embedded import default_cache_dir

    text = load_text(target_dir)
    prompts = [text.encode_chat([{"role": "user", "content": q.text}]) for q in questions]
    layers = sorted(frozenset().union(*(head.layers for head in heads)))
    digest, dtype = directory_digest(target_dir), DType(args.dtype)
    cache = args.cache or default_cache_dir() / "recorded"
    target = RecordingTarget(target_dir, dtype, args.batch, args.threads, args.device)

    texts: Texts = {}
    for temperature in args.temperatures:
        settings = RecordSettings(
            target_digest=digest,
            dtype=dtype,
            temperature=temperature,
            top_k=args.top_k,
            top_p=args.top_p,
            min_p=args.min_p,
            seed=args.seed,
            max_new=args.max_new,
        )
        progress = _Progress(f"texts at temperature {temperature:g}")
        texts[temperature] = TextRecorder(cache, settings).texts(
            prompts, layers, target.engine, progress.made
        )
    return texts


@dataclass(frozen=True, slots=True)
class _Replays:
    """Replays every head, one after the other, so that only one is held in memory."""

    args: argparse.Namespace
    target_dir: Path
    texts: Texts

    def run(
        self, planned: Sequence[tuple[Head, Sequence[Shape]]], lookups: Sequence[Shape]
    ) -> dict[float, Counts]:
        """Counts by temperature, head and shape."""
        found: dict[float, Counts] = {temperature: {} for temperature in self.texts}
        for head, shapes in planned:
            drafter = self._drafter(head)
            for shape in shapes:
                self._replay(found, head.name, drafter, shape)
        for shape in lookups:
            self._replay(found, NGRAM, self._ngram(), shape)
        return found

    def _replay(
        self, found: dict[float, Counts], name: str, drafter: "Drafter", shape: Shape
    ) -> None:
        from drafter_service.replay import Source, replay
        from verifier_service.planning.fixed_admission import FixedAdmission

        sources = [Source(name, drafter)]
        if shape.is_merged:
            # A verifier is given its look-up first.
            sources.insert(0, Source(NGRAM, self._ngram()))
        for temperature, texts in self.texts.items():
            progress = _Progress(f"{name} {shape.name} at temperature {temperature:g}", len(texts))
            counts = replay(
                texts,
                sources,
                shape.plan_for(drafter.capabilities),
                FixedAdmission(),
                self.args.window,
                progress.replayed,
            )
            progress.end(counts)
            found[temperature].setdefault(name, {})[shape.name] = counts

    def _drafter(self, head: Head) -> "Drafter":
        """The head's drafter; of a checkpoint that can be read in several ways the best one."""

        def build(variant: str) -> "Drafter":
            args, folder = self.args, self.target_dir
            return build_head(
                head, variant, folder, args.dtype, args.window, self._longest, args.device
            )

        reading = head.readings[0]
        if len(head.readings) > 1:
            reading = best_reading(head, build, next(iter(self.texts.values())))
            _say(f"{head.name} is read as {reading.name}")
        return build(reading.label)

    def _ngram(self) -> "Drafter":
        return build_ngram(self.args.window, self._longest)

    @property
    def _longest(self) -> int:
        return max(text.max_len for texts in self.texts.values() for text in texts)


class _Progress:
    """One line on stderr at most every ten seconds, and one at the end of a replay."""

    def __init__(self, what: str, num_texts: int = 0) -> None:
        self._what = what
        self._num_texts = num_texts
        self._began_s = self._shown_s = time.monotonic()

    def made(self, done: int, every: int, num_tokens: int) -> None:
        """Texts were recorded."""
        elapsed = max(time.monotonic() - self._began_s, 1e-6)
        rate, left_s = num_tokens / elapsed, elapsed / done * (every - done)
        line = f"{done}/{every}, {rate:.0f} tokens/s, {left_s:.0f} s left"
        self._show(line, done == every)

    def replayed(self, done: int) -> None:
        """Texts have ended."""
        self._show(f"{done}/{self._num_texts}", False)

    def end(self, counts: Sequence[ReplayCounts]) -> None:
        """The replay is over."""
        elapsed = time.monotonic() - self._began_s
        self._show(f"tau {total(counts).tau:.3f} ({elapsed:.1f} s)", True)

    def _show(self, line: str, is_last: bool) -> None:
        now = time.monotonic()
        if is_last or now - self._shown_s >= 10.0:
            self._shown_s = now
            _say(f"{self._what}: {line}")


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _number(least: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"expected a number of at least {least}, not {text!r}")
        return int(text)

    return parse


def _temperatures(text: str) -> list[float]:
    try:
        values = [float(part) for part in text.split(",")]
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"expected numbers between commas: {text!r}") from error
    if not all(0.0 <= value <= 2.0 for value in values):
        raise argparse.ArgumentTypeError(f"temperatures lie between 0 and 2, not {text!r}")
    return list(dict.fromkeys(values))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="outrider evaluate", description=__doc__)
    parser.add_argument("--prompts", type=Path, required=True, help="JSONL with turns or q")
    parser.add_argument("--target", default=EMBEDDED, help=f"directory, or `{EMBEDDED}`")
    parser.add_argument(
        "--heads",
        nargs="+",
        default=[],
        metavar="[NAME=][KIND:]CHECKPOINT",
        help="directories or shipped heads; default: all shipped ones",
    )
    parser.add_argument(
        "--shapes",
        type=lambda text: text.split(","),
        default=[],
        help=f"of {KNOWN}, between commas; default: what each head is made for",
    )
    parser.add_argument("--temperatures", type=_temperatures, default=[0.0, 1.0])
    parser.add_argument("--max-new", type=_number(1), default=128)
    parser.add_argument("--limit", type=_number(1), help="the first questions only")
    parser.add_argument("--per-task", type=_number(1), help="so many questions of every subtask")
    parser.add_argument("--top-k", type=_number(0), default=0)
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--min-p", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", choices=("bf16", "fp32"), default="bf16")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--cache", type=Path, help="where texts and rows are kept")
    parser.add_argument("--batch", type=_number(1), default=32, help="texts made at once")
    parser.add_argument("--window", type=_number(1), default=64, help="texts replayed at once")
    parser.add_argument("--threads", type=_number(1), help="torch threads")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path, help="PNG; needs the extra `train`")
    return parser
