"""Measures t_verify of a target: real spans on a pool of its own, a few seconds, kept on disk.

Knows no drafters. Runs before the engine allocates its pool, because it allocates one itself. The
result is only where the planner starts from; every real step corrects it.
"""

import hashlib
import json
import logging
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

import torch

from verifier_service.planning.costs import VerifyTable
from verifier_service.step import Span, Target

logger = logging.getLogger(__name__)

_CONTEXT: Final = 256
_LONG_CONTEXT: Final = 1024
_REPEATS: Final = 3
_CHAINS: Final = (1, 16, 4, 32, 8, 64)
_TREES: Final = (16, 32, 8)
_VERSION: Final = 1


def load_or_measure(target: Target, cache_dir: Path | None, budget_s: float = 5.0) -> VerifyTable:
    """The table of this target and machine: from disk if its fingerprint was seen, else measured.

    A cache that cannot be read or written is not an error: measuring takes seconds.
    """
    path = None if cache_dir is None else cache_dir / f"verify-{_cache_key(target)}.json"
    if path is not None and path.is_file():
        try:
            return _from_json(path.read_text())
        except (OSError, ValueError, KeyError) as error:
            logger.warning("measured costs cannot be read, measuring again: %s", error)
    table = measure(target, budget_s)
    if path is not None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            scratch = path.with_suffix(".tmp")
            scratch.write_text(_to_json(table))
            scratch.replace(path)
        except OSError as error:
            logger.warning("measured costs are not kept: %s", error)
    return table


def measure(
    target: Target, budget_s: float = 5.0, clock: Callable[[], float] = time.perf_counter
) -> VerifyTable:
    """Time chains and trees of several sizes, most telling first, until the budget is spent.

    Allocates its own pool in the target. At least chains of 1 and 16 rows are measured.
    """
    begin = clock()
    longest = min(_LONG_CONTEXT, target.facts.max_context - max(_CHAINS))
    context = max(min(_CONTEXT, longest), 1)
    target.allocate(1 + max(longest, context) + max(_CHAINS))
    chain: dict[int, float] = {}
    trees: dict[int, float] = {}

    def time_left() -> bool:
        return len(chain) < 2 or clock() - begin < budget_s

    for rows in _CHAINS:
        if time_left():
            chain[rows] = _median_s(target, _span(rows, context, False), clock)
    for rows in _TREES:
        if time_left() and rows in chain:
            trees[rows] = _median_s(target, _span(rows, context, True), clock) - chain[rows]
    per_position_s = 0.0
    if time_left() and longest > context:
        long_s = _median_s(target, _span(1, longest, False), clock)
        per_position_s = max(long_s - chain[1], 0.0) / (longest - context)
    return VerifyTable(chain, {r: max(s, 0.0) for r, s in trees.items()}, context, per_position_s)


def _median_s(target: Target, span: Span, clock: Callable[[], float]) -> float:
    times = []
    for _ in range(_REPEATS + 1):
        begin = clock()
        # Reading a value back waits for devices that work on their own.
        target.forward([span]).reshape(-1)[:1].tolist()
        times.append(clock() - begin)
    return statistics.median(times[1:])


def _span(rows: int, context: int, branching: bool) -> Span:
    """A chain, or a tree whose levels are as wide as a draft's: two children, then chains."""
    parents = tuple(max(row - 2, 0) if row else -1 for row in range(rows)) if branching else None
    return Span(
        key=0,
        token_ids=tuple(1 + row % 7 for row in range(rows)),
        start=context,
        slots=torch.arange(1, 1 + context + rows, dtype=torch.int64),
        parents=parents,
        num_logits=rows,
        first_slot=1,
    )


def _cache_key(target: Target) -> str:
    facts = target.facts
    text = f"{_VERSION}|{facts.fingerprint}|{facts.digest}|{torch.get_num_threads()}"
    return hashlib.sha256(text.encode()).hexdigest()[:24]


def _to_json(table: VerifyTable) -> str:
    return json.dumps(
        {
            "chain": {str(r): s for r, s in table.chain.items()},
            "branch_extra": {str(r): s for r, s in table.branch_extra.items()},
            "context": table.context,
            "per_position_s": table.per_position_s,
        }
    )


def _from_json(text: str) -> VerifyTable:
    data = json.loads(text)
    return VerifyTable(
        chain={int(r): float(s) for r, s in data["chain"].items()},
        branch_extra={int(r): float(s) for r, s in data["branch_extra"].items()},
        context=int(data["context"]),
        per_position_s=float(data["per_position_s"]),
    )
