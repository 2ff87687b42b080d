"""`outrider check TARGET DRAFTER`: what a drafter's checkpoint is, and whether the pair works.

Prints the facts, loads both, lets the drafter guess the test text (the very function that a
verifier runs when it meets a pair), and exits with 1 and the reason when the pair cannot work.
Knows no format and no algorithm.
"""

import argparse
import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from cluster.fleet.assembly import checkpoint_dir, resolve_target
from cluster.fleet.pairs import (
    TriedReading,
    best_reading,
    readings_of,
    taps_of,
    try_readings,
)
from drafter_service.config import DrafterSettings
from drafter_service.kinds import BUILT_IN, describe_checkpoint, known_kinds
from protos.errors import CheckpointError, ConfigError, IncompatiblePair, OutriderError
from verifier_service.config import EMBEDDED, THREAD_WAITING

if TYPE_CHECKING:
    from drafter_service.drafter import Drafter
    from drafter_service.kinds import Description

_ENVIRONMENT = THREAD_WAITING | {"HF_HUB_OFFLINE": "1"}


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; 0 when the pair works."""
    given = _parser().parse_args(argv)
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    report: dict[str, object] = {"works": False}
    try:
        _check(given, report)
        report["works"] = True
    except OutriderError as error:
        report["reason"] = str(error)
        print(f"outrider check: {error}", file=sys.stderr)
    if given.json is not None:
        given.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 0 if report["works"] else 1


def _check(given: argparse.Namespace, report: dict[str, object]) -> None:
    """Fill and print the report. Raises OutriderError when the pair cannot work."""
    from drafter_service.check import checkpoint_facts
    from drafter_service.check_weights import check_finite
    from drafter_service.checkpoint.describe import target_layers

    target_dir = resolve_target(given.target)
    directory = checkpoint_dir(given.drafter)
    num_layers = target_layers(target_dir)
    kind = given.kind
    description: Description | None = None
    if kind in ("", *BUILT_IN):
        facts = checkpoint_facts(directory, num_layers)
        _show(report, facts.values)
        if kind and kind != facts.kind:
            raise ConfigError(f"the checkpoint is one of kind {facts.kind}, not {kind}")
        kind, description = facts.kind, facts.described
        check_finite(directory)
    else:
        description = describe_checkpoint(kind, directory, num_layers)
        _show(report, {"kind": kind})
    tried = _try_pair(given, target_dir, directory, kind, description)
    kept = best_reading(tried)
    for one in tried:
        _show(report, {f"agreement, {one.reading.name}": _told(one)})
    if len(tried) > 1:
        _show(report, {"variant": kept.reading.label})
    _judge(kept, given.min_agreement)
    print(f"the pair works: {_told(kept)}")


def _try_pair(
    given: argparse.Namespace,
    target_dir: Path,
    directory: Path,
    kind: str,
    description: "Description | None",
) -> list[TriedReading]:
    from drafter_service.build import build_drafter
    from verifier_service.model.load import load_target
    from verifier_service.model.target import ROW_DTYPES

    by_name = {row_dtype.value: dtype for dtype, row_dtype in ROW_DTYPES.items()}
    readings = readings_of(description, given.variant)

    def build(variant: str) -> "Drafter":
        settings = DrafterSettings(
            kind=kind,
            checkpoint=str(directory),
            variant=variant,
            target=str(target_dir),
            dtype=given.dtype,
        )
        return build_drafter(settings, target_dir)

    build(readings[0].label)  # a drafter that cannot be loaded is refused before the target is
    target = load_target(
        target_dir, by_name[given.dtype], taps_of(readings), num_threads=given.threads
    )
    return try_readings(target, target_dir, readings, build)


def _judge(kept: TriedReading, min_agreement: float) -> None:
    """Raises IncompatiblePair or CheckpointError when the pair cannot be used."""
    score = kept.score
    if score.detail:
        raise CheckpointError(f"the drafter failed on the test text: {score.detail}")
    if trouble := score.trouble(min_agreement):
        raise IncompatiblePair(trouble)
    if not score.num_drafted:
        raise IncompatiblePair("the drafter guessed nothing on the test text")


def _told(one: TriedReading) -> str:
    score = one.score
    text = (
        f"{score.num_agreed} of {score.num_positions} first guesses are the target's choice "
        f"({100 * score.agreement:.1f} %)"
    )
    return f"{text}; {score.detail}" if score.detail else text


def _show(report: dict[str, object], values: Mapping[str, object]) -> None:
    for name, value in values.items():
        report[name] = value
        print(f"{name + ':':<32} {_text(value)}")


def _text(value: object) -> str:
    if isinstance(value, list):
        return ", ".join(_text(item) for item in value) or "none"
    if isinstance(value, dict):
        return ", ".join(f"{name} {_text(item)}" for name, item in value.items())
    return f"{value:,}" if isinstance(value, int) and value >= 10_000 else str(value)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("outrider check", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("target", help=f"directory of the target, or `{EMBEDDED}`")
    parser.add_argument("drafter", help="directory of a checkpoint, or a shipped head's name")
    parser.add_argument("--kind", default="", help=f"one of {', '.join(known_kinds())}")
    parser.add_argument("--variant", default="", help="a reading of files that leave one open")
    parser.add_argument("--dtype", choices=("bf16", "fp32"), default="bf16")
    parser.add_argument("--threads", type=int, default=None, help="torch threads")
    parser.add_argument("--min-agreement", type=float, default=0.05)
    parser.add_argument("--json", type=Path, help="write one JSON object to this file")
    return parser
