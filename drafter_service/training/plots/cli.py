"""`outrider plot`: PNG pictures of training runs, from their logs and provenance.

    outrider plot curves RUN... --out FILE.png       acceptance by depth, loss and rate
    outrider plot scaling DIR... --out FILE.png      tau against data, a line per family

DIR is a run or an exported head; `--tau FILE.json` of `outrider evaluate` takes tau from there,
by the directory's name. Knows argv and stdout.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from drafter_service.training.plots.curves import Curve, draw_curves
from drafter_service.training.plots.scaling import draw_scaling, points_of, read_taus
from drafter_service.training.run_log import read_run_log
from protos.errors import OutriderError


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0, or 1 with the reason on stderr."""
    arguments = _parser().parse_args(argv)
    try:
        if arguments.what == "curves":
            runs = [
                Curve(path.resolve().name, read_run_log(path / "log.jsonl"))
                for path in arguments.runs
            ]
            draw_curves(runs, arguments.out)
        else:
            taus = read_taus(arguments.tau)
            points = [p for d in arguments.drafters for p in points_of(d, taus, arguments.shape)]
            draw_scaling(points, arguments.out)
    except OutriderError as error:
        print(f"outrider plot: {error}", file=sys.stderr)
        return 1
    print(f"wrote {arguments.out}")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="outrider plot",
        description="PNG pictures of training runs, from their logs and provenance.",
    )
    kinds = parser.add_subparsers(dest="what", required=True)
    curves = kinds.add_parser("curves", help="runs over their training")
    curves.add_argument("runs", nargs="+", type=Path, help="directories of runs")
    scaling = kinds.add_parser("scaling", help="tau against data")
    scaling.add_argument("drafters", nargs="+", type=Path, help="runs or exported heads")
    scaling.add_argument(
        "--tau",
        nargs="+",
        type=Path,
        default=[],
        metavar="JSON",
        help="take tau from these files of outrider evaluate, by the directories' names; "
        "default: the replayed tau of each one's held-out answers",
    )
    scaling.add_argument(
        "--shape", nargs="+", default=[], help="shapes to draw, such as tree chain4; default: all"
    )
    for parts in (curves, scaling):
        parts.add_argument("--out", type=Path, required=True, help="the PNG file to write")
    return parser
