"""One or more runs over their training: held-out acceptance by depth, loss and rate.

A row of panels per run, acceptance on a common scale, so that runs can be laid beside each other.
Knows what `run_log` gives.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from drafter_service.training.plots.style import (
    draw_line,
    finish_axes,
    new_figure,
    styles,
    write_png,
)
from drafter_service.training.run_log import RunLog

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_ROW_IN: Final = 3.4
_MILLION: Final = 1e6
_SEEN: Final = "answer tokens read (millions)"


@dataclass(frozen=True, slots=True)
class Curve:
    """A run to draw, and what to call it."""

    name: str
    log: RunLog


def draw_curves(runs: Sequence[Curve], path: Path) -> None:
    """Write the plot. Raises ConfigError without matplotlib, or where nothing can be written."""
    figure = new_figure(_ROW_IN * len(runs))
    rows = figure.subplots(len(runs), 2, squeeze=False, sharex="all")
    for acceptance in rows[1:, 0]:  # losses of two families are not of one kind
        acceptance.sharey(rows[0, 0])
    for (left, right), run in zip(rows, runs, strict=True):
        _draw_acceptance(left, run)
        _draw_loss(right, run)
    write_png(figure, path)


def _draw_acceptance(axes: "Axes", run: Curve) -> None:
    checks = run.log.checks
    seen = [check.rows / _MILLION for check in checks]
    depths = max((len(check.accuracy) for check in checks), default=0)
    for depth, style in zip(range(depths), styles(), strict=False):
        shares = [
            check.accuracy[depth] if depth < len(check.accuracy) else float("nan")
            for check in checks
        ]
        draw_line(axes, seen, shares, style, f"depth {depth + 1}")
    finish_axes(axes, _SEEN, "held-out acceptance (share of positions)")
    axes.set_ylim(bottom=0.0)
    axes.set_title(f"{run.name}: acceptance by depth", fontsize="medium")
    if checks:
        axes.legend(fontsize="small", frameon=False)
    else:
        axes.text(0.5, 0.5, "not checked yet", ha="center", transform=axes.transAxes)


def _draw_loss(axes: "Axes", run: Curve) -> None:
    seen = [report.rows / _MILLION for report in run.log.reports]
    of_loss, of_rate = itertools.islice(styles(), 2)
    losses = [report.loss for report in run.log.reports]
    drawn = draw_line(axes, seen, losses, of_loss, "loss", is_dense=True)
    finish_axes(axes, _SEEN, "training loss (nats)")
    axes.set_title(f"{run.name}: loss and rate", fontsize="medium")
    rates = axes.twinx()
    last = [report.rates[-1] if report.rates else float("nan") for report in run.log.reports]
    label = "learning rate"
    drawn += draw_line(rates, seen, last, of_rate, label, is_dense=True, is_dashed=True)
    rates.set_ylabel(label)
    rates.set_ylim(bottom=0.0)
    rates.ticklabel_format(axis="y", style="sci", scilimits=(0, 0))
    rates.spines["top"].set_visible(False)
    axes.legend(handles=drawn, fontsize="small", frameon=False)
