"""Question: does the planner find the drafters worth asking, and what does it cost where none is?

A simulation with a virtual clock: fake drafters, the verify times measured on two cores
(`planner_world.CPU_STEP_S`), independent luck per drafter, random text. Confounders that it
cannot show: real drafters' luck is correlated and changes with the text, scores of a real head
say more than these, and the planner's own time is not on the virtual clock (it is printed apart).

    python -m tests.benchmarks.planner_simulation [--json FILE]

`best fixed` is the best of several fixed plans over the same drafters: what an owner who knew
everything beforehand could have configured.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from protos.exchange import Plan, PlanKind
from protos.generation import Speculation, SpeculationMode
from tests.benchmarks.planner_world import FakeDrafter, World
from verifier_service.planning.costs import VerifyCosts, default_table
from verifier_service.planning.planner import AdaptivePlanner

STEPS = 1200
SEEDS = (0, 1, 2)


def poor() -> FakeDrafter:
    """Fast and poor: a look-up in this process."""
    return FakeDrafter("poor", lambda step: 0.25, 0.0001, spread=0.1, trees=False, local=True)


def good() -> FakeDrafter:
    """Slow and good: a head behind a wire."""
    return FakeDrafter("good", lambda step: 0.75, 0.004, 0.0015)


def dying() -> FakeDrafter:
    """Good, and gone after a hundred steps."""
    return FakeDrafter("dying", lambda step: 0.7, 0.003, 0.001, alive=lambda step: step < 100)


def hostile() -> FakeDrafter:
    """Never right."""
    return FakeDrafter("hostile", lambda step: 0.0, 0.004, 0.0015, spread=0.0)


def reformed() -> FakeDrafter:
    """Hostile for 400 steps, then good."""
    return FakeDrafter(
        "reformed", lambda step: 0.0 if step < 400 else 0.8, 0.004, 0.0015, spread=0.0
    )


def fallen() -> FakeDrafter:
    """Good for 400 steps, then hostile."""
    return FakeDrafter("fallen", lambda step: 0.8 if step < 400 else 0.0, 0.004, 0.0015, spread=0.0)


Makers = Sequence[Callable[[], FakeDrafter]]
CASES: tuple[tuple[str, int, Makers], ...] = (
    ("poor", 1, (poor,)),
    ("good", 1, (good,)),
    ("poor + good", 1, (poor, good)),
    ("poor + good + dying", 1, (poor, good, dying)),
    ("poor + good", 8, (poor, good)),
    ("hostile", 1, (hostile,)),
    ("hostile", 8, (hostile,)),
    ("poor + hostile", 1, (poor, hostile)),
    ("hostile, then good", 1, (reformed,)),
    ("good, then hostile", 1, (fallen,)),
)
FIXED = (
    *(Plan(PlanKind.CHAIN, depth=d) for d in (1, 2, 3, 4, 6)),
    *(Plan(PlanKind.TREE, depth=d, width=8, nodes=n) for d, n in ((3, 8), (4, 16), (6, 31))),
)


def run_case(makers: Makers, concurrency: int, seed: int) -> dict[str, object]:
    """One planned run, by thirds, and the best fixed plan in the same world."""
    planner = AdaptivePlanner(VerifyCosts(default_table()))
    world = World(planner, [make() for make in makers], concurrency, seed=seed)
    begin = time.perf_counter()
    thirds = [world.run(STEPS // 3) for _ in range(3)]
    own_s = time.perf_counter() - begin
    best = best_fixed(makers, concurrency, seed) if seed == SEEDS[0] else None
    total = world.total
    return {
        "speedups": [third.speedup for third in thirds],
        "asked": [{k: v / concurrency for k, v in third.asked.items()} for third in thirds],
        "overrun_steps": total.worst_overrun_s / total.plain_step_s,
        "best_fixed": best,
        "step_us": own_s / STEPS * 1e6,
    }


def best_fixed(makers: Makers, concurrency: int, seed: int) -> float:
    """Speed-up of the best fixed plan, over all drafters together and each alone; 1: none."""
    names = [()] if len(makers) == 1 else [(), *((make().name,) for make in makers)]
    speedups = [1.0]
    for plan in FIXED:
        for name in names:
            world = World(
                AdaptivePlanner(VerifyCosts(default_table())),
                [make() for make in makers],
                concurrency,
                seed=seed,
                speculation=Speculation(SpeculationMode.FIXED, name, plan),
            )
            speedups.append(world.run(STEPS // 3).speedup)
    return max(speedups)


def main() -> None:
    """Print the table; one JSON object for machines on request."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    print(
        "| drafters | at once | speed-up by third | best fixed | worst overrun, plain steps |"
        " asked of 400 steps, by third |"
    )
    print("|---|---|---|---|---|---|")
    result = {}
    for name, concurrency, makers in CASES:
        runs = [run_case(makers, concurrency, seed) for seed in SEEDS]
        result[f"{name} @{concurrency}"] = runs
        speedups = [statistics.median(r["speedups"][i] for r in runs) for i in range(3)]
        asked = "; ".join(
            f"{make().name} "
            + " / ".join(
                f"{statistics.median(r['asked'][i].get(make().name, 0) for r in runs):.0f}"
                for i in range(3)
            )
            for make in makers
        )
        print(
            f"| {name} | {concurrency} | {' / '.join(f'{s:.2f}' for s in speedups)} |"
            f" {runs[0]['best_fixed']:.2f} |"
            f" {max(r['overrun_steps'] for r in runs):.1f} | {asked} |"
        )
    if args.json:
        args.json.write_text(json.dumps(result))


if __name__ == "__main__":
    main()
