"""An evaluation as a PNG: tau by head and shape, and acceptance by depth. Knows counts only.

matplotlib comes with the extra `outrider[train]`; without it nothing else is missing.
"""

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, Final

from cluster.tools.evaluate_report import Counts, Evaluation
from drafter_service.replay_counts import total
from protos.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_WIDTH: Final = 11.0
_HEIGHT: Final = 4.2


def require_matplotlib() -> None:
    """Raise ConfigError, naming the extra, where there is no matplotlib."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("a plot needs matplotlib: pip install 'outrider[train]'")


def draw(evaluation: Evaluation, path: Path) -> None:
    """Write the plot, one row of panels per temperature. Raises ConfigError."""
    require_matplotlib()
    from matplotlib.figure import Figure

    rows = len(evaluation.found)
    figure = Figure(figsize=(_WIDTH, _HEIGHT * rows), layout="constrained")
    panels = figure.subplots(rows, 2, squeeze=False)
    for (bars, lines), (temperature, counts) in zip(panels, evaluation.found.items(), strict=True):
        _draw_taus(bars, counts)
        _draw_depths(lines, counts)
        bars.set_title(f"temperature {temperature:g}, {len(evaluation.questions)} questions")
    try:
        figure.savefig(path, format="png", dpi=120)
    except OSError as error:
        raise ConfigError(f"the plot {path.name} cannot be written: {error.strerror}") from error


def _draw_taus(axes: "Axes", counts: Counts) -> None:
    labels, values = [], []
    for head, shapes in counts.items():
        for shape, found in shapes.items():
            labels.append(f"{head}\n{shape}")
            values.append(total(found).tau)
    bars = axes.bar(range(len(values)), values)
    axes.bar_label(bars, fmt="%.2f")
    axes.set_xticks(range(len(labels)), labels, fontsize="x-small")
    axes.axhline(1.0, linewidth=0.8, color="gray")
    axes.set_ylabel("tokens committed per round")


def _draw_depths(axes: "Axes", counts: Counts) -> None:
    from matplotlib.ticker import MaxNLocator

    for head, shapes in counts.items():
        for shape, found in shapes.items():
            shares = total(found).acceptance_by_depth
            depths = range(1, len(shares) + 1)
            axes.plot(depths, shares, marker="o", markersize=3, label=f"{head} {shape}")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("depth")
    axes.set_ylabel("share of rounds that accepted it")
    axes.set_ylim(0.0, 1.0)
    axes.legend(fontsize="x-small")
