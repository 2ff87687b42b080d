"""How a run goes: one line to read and one JSON line to keep, every few updates.

Knows no trainer. Invariant: the JSON lines hold the rate of every update, so a run whose schedule
followed the clock can be repeated.
"""

import math
import time
from collections.abc import Callable
from dataclasses import asdict
from datetime import datetime, timedelta

import torch
from torch import Tensor

from drafter_service.training.schedule import Schedule
from drafter_service.training.trainer import Position, UpdateReport

REPORT_EVERY = 20
LogLine = Callable[[dict[str, object]], None]


class Meter:
    """Sums reports of updates."""

    def __init__(
        self, report: Callable[[str], None], log: LogLine, schedule: Schedule, position: Position
    ) -> None:
        self._report, self._log, self._schedule = report, log, schedule
        self._last: tuple[Position, int, float, UpdateReport]
        self._restart(position)

    def _restart(self, position: Position) -> None:
        self._rates: list[float] = []
        self._losses: list[float] = []
        self._sums: Tensor = torch.zeros(3, 1, dtype=torch.float64)
        self._since, self._rows = time.monotonic(), position.rows

    def add(
        self,
        position: Position,
        num_batches: int,
        rate: float,
        update: UpdateReport,
    ) -> None:
        """One update made, in a pass of `num_batches`."""
        self._rates.append(rate)
        steps = update.steps
        length = len(steps.counts)
        if length > self._sums.shape[1]:
            self._sums = torch.nn.functional.pad(self._sums, (0, length - self._sums.shape[1]))
        rows = [steps.losses, steps.hits, steps.counts]
        self._sums[:, :length] += torch.tensor(rows, dtype=torch.float64)
        self._losses.append(update.loss)
        self._last = (position, num_batches, rate, update)
        if position.update % REPORT_EVERY == 0:
            self._tell()

    def flush(self) -> None:
        """Tell of the last few updates, if there were any since the last report."""
        if self._losses:
            self._tell()

    def _tell(self) -> None:
        position, num_batches, rate, update = self._last
        losses, accuracy = (self._sums[:2] / self._sums[2].clamp_min(1)).tolist()
        seconds = max(1e-9, time.monotonic() - self._since)
        speed = (position.rows - self._rows) / seconds
        loss = sum(self._losses) / len(self._losses)
        left_s = self._schedule.left_s(position.update, seconds / len(self._rates))
        self._log(
            {
                **asdict(position),
                "rates": self._rates,
                "loss": loss,
                "update_losses": self._losses,
                "losses": losses,
                "accuracy": accuracy,
                "counts": self._sums[2].tolist(),
                "rows_per_s": speed,
                "left_s": left_s,
                "grad_norm": update.grad_norm,
            }
        )
        along = position.epoch + position.batch / num_batches
        shown = " ".join(f"{value:.3f}" for value in accuracy)
        self._report(
            f"update {position.update}, pass {along:.2f}: loss {loss:.3f}, acceptance by step "
            f"{shown}, {speed:.0f} positions/s, rate {rate:.1e}, {_remaining(left_s)}"
        )
        self._restart(position)


def _remaining(left_s: float) -> str:
    """How long still, and the hour of the end on this machine's clock."""
    minutes = math.ceil(left_s / 60)
    span = f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60:02} min"
    end = datetime.now() + timedelta(seconds=left_s)
    return f"{span} left, until {end:%H:%M}" + (f" on {end:%d %b}" if left_s > 20 * 3600 else "")
