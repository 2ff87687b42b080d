"""What log.jsonl says of a run, as if it had never been interrupted.

A run that goes on from its state file repeats updates made after the last save; a line "started"
at that update takes back what was logged beyond it. Knows no run. Invariant: updates of the reports
rise, each once.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from protos.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Report:
    """One line of progress: sums over the updates since the one before, ending at `update`."""

    update: int
    rows: int
    loss: float
    update_losses: tuple[float, ...]
    rates: tuple[float, ...]
    accuracy: tuple[float, ...]  # by step, over training rows


@dataclass(frozen=True, slots=True)
class Check:
    """One look at the held-out answers. accuracy: by depth; score: replayed tau."""

    update: int
    rows: int
    score: float
    accuracy: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class RunLog:
    """A run's reports and checks, in order."""

    reports: list[Report] = field(default_factory=list)
    checks: list[Check] = field(default_factory=list)


def read_run_log(path: Path) -> RunLog:
    """Raises ConfigError when there is no such file or no line of it can be read.

    A line that a crash has cut short is passed over.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path.parent.name} holds no {path.name}") from error
    log = RunLog()
    num_read = 0
    for raw in text.splitlines():
        try:
            line = json.loads(raw)
        except ValueError:
            continue
        if isinstance(line, dict):
            _add(log, line)
            num_read += 1
    if not num_read:
        raise ConfigError(f"{path.name} of {path.parent.name} holds no line of a run")
    return log


def _add(log: RunLog, line: Mapping[str, object]) -> None:
    update, rows = int(_number(line, "update")), int(_number(line, "rows"))
    if line.get("started"):
        log.reports[:] = [kept for r in log.reports if (kept := _until(r, update, rows))]
        log.checks[:] = [check for check in log.checks if check.update <= update]
    elif "held_out" in line:
        figures = line["held_out"]
        accuracy = _numbers(figures, "accuracy") if isinstance(figures, Mapping) else ()
        log.checks[:] = [check for check in log.checks if check.update < update]
        log.checks.append(Check(update, rows, _number(line, "score"), accuracy))
    elif "rates" in line:
        log.reports.append(
            Report(
                update,
                rows,
                _number(line, "loss"),
                _numbers(line, "update_losses"),
                _numbers(line, "rates"),
                _numbers(line, "accuracy"),
            )
        )


def _until(report: Report, update: int, rows: int) -> Report | None:
    """What of a report was made up to `update`, by when `rows` had been read."""
    lost = report.update - update
    if lost <= 0:
        return report
    losses = report.update_losses[: max(0, len(report.update_losses) - lost)]
    if not losses:
        return None
    rates = report.rates[: len(losses)]
    return Report(update, rows, sum(losses) / len(losses), losses, rates, report.accuracy)


def _number(line: Mapping[str, object], name: str) -> float:
    value = line.get(name)
    return float(value) if isinstance(value, int | float) else float("nan")


def _numbers(line: Mapping[str, object], name: str) -> tuple[float, ...]:
    values = line.get(name)
    if not isinstance(values, list):
        return ()
    return tuple(float(value) for value in values if isinstance(value, int | float))
