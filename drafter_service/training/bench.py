"""How fast does a recipe train, and how much of the time would its matrix products take alone?

Question: positions a second of a whole update (loss, backward, optimiser) for EAGLE-3 at 1, 2 and 3
steps of training-time test and for every other recipe; beside it the rate of matrix products of
the same shapes, strides and dtype run by themselves, and the share: FLOPs counted from the shapes
that are really multiplied (backward included) over (that rate x the update's time).
Confounders: other processes on the cores (updates and products take turns, median and quartiles
are printed; `--clock cpu` counts this process's own seconds, for one thread on a shared machine);
what the head has learnt (every row takes every step here, in training rows that missed mostly do
not); reading features (not counted, printed beside).

`outrider bench train [--kinds eagle3,eagle] [--rows 768] [--config KIND=FILE] [--json FILE]`.
Random answers, features and target of the embedded default's sizes.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import nn

from drafter_service.training.batches import Batch
from drafter_service.training.bench_products import Clock, ProductCounter, ProductsAlone
from drafter_service.training.bench_world import LAYERS, World, write_world
from drafter_service.training.data import Data
from drafter_service.training.recipe import RECIPES, family_of
from drafter_service.training.trainer import OptimiserSettings, Trainer
from protos.errors import ConfigError

CLOCKS: dict[str, Clock] = {"wall": time.perf_counter, "cpu": time.process_time}
EAGLE3_STEPS = (1, 2, 3)


@dataclass(frozen=True, slots=True)
class Variant:
    """One line of the table."""

    name: str
    kind: str
    changes: dict[str, Any]


class Measured:
    """A recipe under way, and the products of its update."""

    def __init__(self, variant: Variant, world: World, rows: int, threads: int) -> None:
        paths = {field.name: getattr(world, field.name) for field in fields(world)}
        shared = {"rows_per_update": rows, "threads": threads, "record_layers": LAYERS}
        family = family_of(variant.kind)
        settings = family.settings_type(**(paths | shared | variant.changes))
        data = Data(settings)
        recipe = family.make(settings, data)
        self.trainer: Trainer[nn.Module] = Trainer(
            recipe.net, recipe.loss, OptimiserSettings(), getattr(torch, settings.compute_dtype)
        )
        started = time.perf_counter()
        self.batch: Batch = data.load(data.epoch(0)[0])
        self.load_s = time.perf_counter() - started
        self.number = 0
        self.update(time.perf_counter)
        with ProductCounter() as counter:
            self.update(time.perf_counter)
        self.alone = ProductsAlone(counter.counts)
        self.positions = [0.0]

    def update(self, clock: Clock) -> float:
        """Seconds of one update."""
        started = clock()
        report = self.trainer.update([self.batch], 1e-6, self.number)
        spent = clock() - started
        self.number += 1
        self.positions = list(report.steps.counts)
        return spent


def variants(kinds: Sequence[str], configs: dict[str, dict[str, Any]]) -> list[Variant]:
    """EAGLE-3 by steps and by source of the target's distribution, one line for the others."""
    found: list[Variant] = []
    for kind in kinds:
        given = configs.get(kind, {})
        if kind != "eagle3":
            found.append(Variant(kind, kind, given))
            continue
        for steps in EAGLE3_STEPS:
            changes = {"targets": "top", "missed_share": 1.0} | given | {"num_steps": steps}
            found.append(Variant(f"eagle3/{steps}", kind, changes))
        full = {"missed_share": 1.0} | given | {"num_steps": max(EAGLE3_STEPS), "targets": "full"}
        found.append(Variant(f"eagle3/{max(EAGLE3_STEPS)}/full", kind, full))
    return found


def measure(measured: dict[str, Measured], repeats: int, clock: Clock) -> dict[str, dict[str, Any]]:
    """Updates and products of all variants in turn, so that a slow spell hits all of them."""
    updates: dict[str, list[float]] = {name: [] for name in measured}
    products: dict[str, list[float]] = {name: [] for name in measured}
    for _ in range(repeats):
        for name, each in measured.items():
            updates[name].append(each.update(clock))
            products[name].append(each.alone.seconds(clock))
    return {name: _row(each, updates[name], products[name]) for name, each in measured.items()}


def _row(measured: Measured, updates: list[float], products: list[float]) -> dict[str, Any]:
    update_s, product_s = statistics.median(updates), statistics.median(products)
    rate = measured.alone.flops / product_s
    rows = measured.batch.num_rows
    return {
        "rows": rows,
        "compared_by_step": measured.positions,
        "update_ms": _spread(updates),
        "products_alone_ms": _spread(products),
        "load_ms": 1e3 * measured.load_s,
        "positions_per_s": rows / update_s,
        "compared_per_s": sum(measured.positions) / update_s,
        "gflop": measured.alone.flops / 1e9,
        "product_gflop_per_s": rate / 1e9,
        "share": measured.alone.flops / (rate * update_s),
    }


def _spread(seconds: list[float]) -> dict[str, float]:
    low, median, high = statistics.quantiles(seconds, n=4)
    return {"median": 1e3 * median, "low": 1e3 * low, "high": 1e3 * high}


def main(argv: Sequence[str] | None = None) -> int:
    """Print a table for people and, with --json, one object for machines."""
    parser = argparse.ArgumentParser("outrider bench train", description=__doc__.split("\n")[0])
    parser.add_argument("--kinds", default=",".join(RECIPES), help=f"some of {','.join(RECIPES)}")
    parser.add_argument("--rows", type=int, default=768, help="answer rows of an update")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--clock", choices=sorted(CLOCKS), default="wall")
    parser.add_argument(
        "--config", action="append", default=[], metavar="KIND=FILE", help="recipe settings (YAML)"
    )
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(argv)
    torch.set_num_threads(options.threads)
    wanted = variants(options.kinds.split(","), dict(_config(text) for text in options.config))
    with tempfile.TemporaryDirectory() as directory:
        world = write_world(Path(directory), 4 * options.rows)
        measured = {v.name: Measured(v, world, options.rows, options.threads) for v in wanted}
        table = measure(measured, max(2, options.repeats), CLOCKS[options.clock])
    for name, row in table.items():
        spread = row["update_ms"]
        print(
            f"{name:16} {row['rows']:5} rows {spread['median']:8.1f} ms "
            f"[{spread['low']:.1f}, {spread['high']:.1f}] {row['positions_per_s']:7.0f} rows/s "
            f"{row['compared_per_s']:7.0f} positions/s over steps {row['gflop']:7.1f} GFLOP, alone "
            f"{row['product_gflop_per_s']:5.0f} GFLOP/s, share {row['share']:.2f}"
        )
    if options.json is not None:
        report = {"threads": options.threads, "clock": options.clock, "torch": torch.__version__}
        options.json.write_text(json.dumps(report | {"train": table}, indent=1) + "\n")
    return 0


def _config(text: str) -> tuple[str, dict[str, Any]]:
    kind, _, path = text.partition("=")
    if kind not in RECIPES or not path:
        raise ConfigError(f"--config expects KIND=FILE with one of {','.join(RECIPES)}, got {text}")
    settings: dict[str, Any] = yaml.safe_load(Path(path).read_text())
    paths = ("answers", "target", "features", "run")
    return kind, {key: value for key, value in settings.items() if key not in paths}


if __name__ == "__main__":
    raise SystemExit(main())
