"""Measures t_verify of a target: real spans on a pool of its own, a few seconds, kept on disk.

Knows no drafters. Runs before the engine allocates its pool, because it allocates one itself. The
result is only where the planner starts from; every real step corrects it.
"""

import hashlib
import json
import logging
import tempfile
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
_CHAINS: Final = (1, 16, 4, 32, 8, 64)
_TREES: Final = (16, 32, 8)
_FEWEST_POINTS: Final = 2
_VERSION: Final = 2


def load_or_measure(
    target: Target,
    cache_dir: Path | None,
    budget_s: float = 5.0,
    clock: Callable[[], float] = time.perf_counter,
) -> VerifyTable:
    """The table of this target and machine: from disk if its fingerprint was seen, else measured.

    A cache that cannot be read or written is not an error: measuring takes seconds. What a busy
    machine had no time to measure twice is used now and not kept.
    """
    path = None if cache_dir is None else cache_dir / f"verify-{_cache_key(target)}.json"
    if path is not None and path.is_file():
        try:
            return _from_json(path.read_text())
        except (OSError, ValueError, KeyError) as error:
            logger.warning("measured costs cannot be read, measuring again: %s", error)
    table, is_sound = _measure(target, budget_s, clock)
    if path is not None and is_sound:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            # A place of its own: other replicas may be measuring the same target.
            with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
                written = Path(scratch, path.name)
                written.write_text(_to_json(table))
                written.replace(path)
        except OSError as error:
            logger.warning("measured costs are not kept: %s", error)
    return table


def measure(
    target: Target, budget_s: float = 5.0, clock: Callable[[], float] = time.perf_counter
) -> VerifyTable:
    """Time chains and trees of several sizes, pass after pass, until the budget is spent.

    The least time of each counts: whatever else the machine does only adds, and passes over all
    sizes let a slow spell hit all of them. Allocates its own pool in the target. Chains of 1 and
    16 rows are measured at least.
    """
    return _measure(target, budget_s, clock)[0]


def _measure(
    target: Target, budget_s: float, clock: Callable[[], float]
) -> tuple[VerifyTable, bool]:
    """The table, and whether every size was timed more than once."""
    begin = clock()
    longest = min(_LONG_CONTEXT, target.facts.max_context - max(_CHAINS))
    context = max(min(_CONTEXT, longest), 1)
    target.allocate(1 + max(longest, context) + max(_CHAINS))
    points = [(rows, context, False) for rows in _CHAINS]
    points += [(rows, context, True) for rows in _TREES]
    points += [(1, longest, False)] if longest > context else []
    spans = {point: _span(*point) for point in points}
    least_s: dict[tuple[int, int, bool], float] = {}
    num_passes = 0
    _time_s(target, spans[points[0]], clock)
    while len(least_s) < _FEWEST_POINTS or clock() - begin < budget_s:
        for point, span in spans.items():
            if len(least_s) >= _FEWEST_POINTS and clock() - begin >= budget_s:
                break
            took_s = _time_s(target, span, clock)
            least_s[point] = min(least_s.get(point, took_s), took_s)
        else:
            num_passes += 1
    chain = {rows: s for (rows, at, tree), s in least_s.items() if at == context and not tree}
    extra = {
        rows: max(s - chain[rows], 0.0)
        for (rows, _, tree), s in least_s.items()
        if tree and rows in chain
    }
    long_s = least_s.get((1, longest, False), 0.0) if longest > context else 0.0
    per_position_s = max(long_s - chain[1], 0.0) / (longest - context) if long_s else 0.0
    return VerifyTable(chain, extra, context, per_position_s), num_passes > 1


def _time_s(target: Target, span: Span, clock: Callable[[], float]) -> float:
    begin = clock()
    # Reading a value back waits for devices that work on their own.
    target.forward([span]).reshape(-1)[:1].tolist()
    return clock() - begin


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
