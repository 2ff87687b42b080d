"""How every plot looks: Okabe and Ito's colours, a marker of its own per line, PNG at 100 dpi.

matplotlib comes with the extra `outrider[train]` and is imported when something is drawn; figures
are made without pyplot, so no display is asked for. Knows no run.
"""

import importlib.util
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Final

from protos.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

WIDTH_IN: Final = 8.0
"""800 pixels."""
_DPI: Final = 100
# Told apart by people who do not tell red from green (Okabe and Ito, 2008).
_COLOURS: Final = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_MARKERS: Final = ("o", "s", "^", "D", "v", "P", "X")


@dataclass(frozen=True, slots=True)
class Style:
    """What tells a line from the others."""

    colour: str
    marker: str


def new_figure(height_in: float) -> "Figure":
    """An empty figure of the common width. Raises ConfigError where there is no matplotlib."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("a plot needs matplotlib: pip install 'outrider[train]'")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH_IN, height_in), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def styles() -> Iterator[Style]:
    """One line's after another's, alike only after all colours are used."""
    return cycle(map(Style, _COLOURS, _MARKERS))


def draw_line(
    axes: "Axes",
    across: Sequence[float],
    up: Sequence[float],
    style: Style,
    label: str,
    *,
    is_dense: bool = False,
    is_dashed: bool = False,
) -> "list[Line2D]":
    """A line; a dense one has no markers."""
    return axes.plot(
        across,
        up,
        label=label,
        color=style.colour,
        marker="" if is_dense else style.marker,
        markersize=4.5,
        linewidth=1.6,
        linestyle="--" if is_dashed else "-",
    )


def finish_axes(axes: "Axes", across: str, up: str) -> None:
    """Labels with units, and a light grid."""
    axes.set_xlabel(across)
    axes.set_ylabel(up)
    axes.grid(visible=True, color="0.9")
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def write_png(figure: "Figure", path: Path) -> None:
    """Raises ConfigError where it cannot be written."""
    try:
        figure.savefig(path, format="png", dpi=_DPI)
    except OSError as error:
        raise ConfigError(f"the plot {path.name} cannot be written: {error.strerror}") from error
