"""tau against the data a drafter learned from, one line per family (and shape).

A point is a run or an exported head whose provenance says its family and its answer tokens. Its tau
is that of an evaluation's JSON, found by the directory's name, or else the replayed tau of its own
held-out answers. Knows no head.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from drafter_service.training.facts_file import read_facts
from drafter_service.training.plots.style import (
    draw_line,
    finish_axes,
    new_figure,
    styles,
    write_png,
)
from drafter_service.training.run_log import read_run_log
from protos.errors import ConfigError

HELD_OUT: Final = "held-out chain"
"""The shape of a tau that comes from a run's own checks."""
Taus = Mapping[str, Mapping[str, float]]
"""By head and shape, as `outrider evaluate --json` has them."""


@dataclass(frozen=True, slots=True)
class Point:
    """One drafter: its family, what it learned from, and how it drafts in one shape."""

    family: str
    shape: str
    num_tokens: int
    tau: float


def read_taus(paths: Sequence[Path]) -> dict[str, dict[str, float]]:
    """The `tau` tables of evaluations, joined. Raises ConfigError for anything else."""
    taus: dict[str, dict[str, float]] = {}
    for path in paths:
        try:
            found = json.loads(path.read_text(encoding="utf-8"))["tau"]
            for head, shapes in found.items():
                table = {str(shape): float(tau) for shape, tau in shapes.items()}
                taus.setdefault(str(head), {}).update(table)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(
                f'{path.name} is no evaluation, {{"tau": {{head: {{shape: number}}}}}}: {error!r}'
            ) from error
    return taus


def points_of(directory: Path, taus: Taus, shapes: Sequence[str] = ()) -> list[Point]:
    """Points of a run or a head: one per shape wanted, all that were evaluated if none is named.

    Raises ConfigError when the provenance says too little, or nothing was measured.
    """
    facts = read_facts(directory)
    data = facts.get("data")
    num_tokens = data.get("train_answer_tokens") if isinstance(data, dict) else None
    if not isinstance(num_tokens, int):
        raise ConfigError(
            f"the provenance of {directory.name} does not say how much it learned from"
        )
    found = dict(taus.get(directory.name, {})) if taus else {HELD_OUT: _held_out(directory, facts)}
    wanted = {shape: found[shape] for shape in (shapes or found) if shape in found}
    if not wanted:
        raise ConfigError(
            f"no tau of {directory.name}{' as ' + ', '.join(shapes) if shapes else ''}; known: "
            f"{', '.join(sorted(found)) or ', '.join(sorted(taus)) or 'none'}"
        )
    family = str(facts.get("kind", "drafter"))
    return [Point(family, shape, num_tokens, tau) for shape, tau in wanted.items()]


def _held_out(directory: Path, facts: Mapping[str, object]) -> float:
    figures = facts.get("held_out")
    tau = figures.get("tau") if isinstance(figures, dict) else None
    if isinstance(tau, int | float):
        return float(tau)
    checks = read_run_log(directory / "log.jsonl").checks
    if not checks:
        raise ConfigError(f"{directory.name} has not been checked yet")
    return max(check.score for check in checks)


def draw_scaling(points: Sequence[Point], path: Path) -> None:
    """Write the plot. Raises ConfigError without matplotlib, or where nothing can be written."""
    figure = new_figure(4.8)
    axes = figure.subplots()
    lines = sorted({(point.family, point.shape) for point in points})
    for (family, shape), style in zip(lines, styles(), strict=False):
        along = sorted(
            (point.num_tokens, point.tau)
            for point in points
            if (point.family, point.shape) == (family, shape)
        )
        tokens, taus = zip(*along, strict=True)
        draw_line(axes, tokens, taus, style, f"{family}, {shape}")
        for at, tau in along:
            axes.annotate(
                f"{tau:.2f}",
                (at, tau),
                (0, _label_offset(points, at, tau)),
                textcoords="offset points",
                ha="center",
                fontsize="small",
            )
    axes.set_xscale("log", base=2)
    ticks = sorted({point.num_tokens for point in points})
    axes.set_xticks(ticks, [_tokens(number) for number in ticks], minor=False)
    axes.margins(x=0.08, y=0.12)
    finish_axes(axes, "answer tokens learned from", "tau (tokens committed per round)")
    axes.set_title("acceptance length against data", fontsize="medium")
    axes.legend(frameon=False)
    write_png(figure, path)


def _label_offset(points: Sequence[Point], num_tokens: int, tau: float) -> int:
    """Above the point, or below where another one lies just above it; in points of type."""
    taus = [point.tau for point in points]
    near = 0.06 * (max(taus) - min(taus))
    above = (p.tau - tau for p in points if p.num_tokens == num_tokens and p.tau > tau)
    return -14 if any(gap < near for gap in above) else 7


def _tokens(number: int) -> str:
    return f"{number / 1e6:.2f} M" if number >= 1e6 else f"{number / 1e3:.0f} k"
