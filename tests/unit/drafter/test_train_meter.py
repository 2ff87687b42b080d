"""One line of progress says what a watcher asks, and the log holds every loss and rate."""

import re
from datetime import datetime, timedelta

import pytest
import torch

from drafter_service.training.best import Best
from drafter_service.training.meter import REPORT_EVERY, Meter
from drafter_service.training.recipe import StepSums
from drafter_service.training.schedule import StepSchedule
from drafter_service.training.trainer import Position, UpdateReport


def run_meter(num_updates: int, schedule: StepSchedule) -> tuple[list[str], list[dict]]:
    """2 steps an update: of 8 and 4 positions 6 and 1 agree; the loss is the update's number."""
    said, logged = [], []
    meter = Meter(said.append, logged.append, schedule, Position())
    for number in range(1, num_updates + 1):
        sums = StepSums(losses=(16.0, 4.0), hits=(6.0, 1.0), counts=(8.0, 4.0))
        position = Position(update=number, epoch=1, batch=number, rows=8 * number)
        meter.add(position, 100, 0.5 / number, UpdateReport(float(number), sums, 0.25))
    meter.flush()
    meter.flush()
    return said, logged


def test_a_line_has_loss_acceptance_speed_time_left_and_the_hour():
    said, _ = run_meter(REPORT_EVERY, StepSchedule(1.0, 1000, 0))
    (line,) = said
    assert "update 20, pass 1.20: loss 10.500, acceptance by step 0.750 0.250," in line
    assert re.search(r", \d+ positions/s, rate 2\.5e-02, \d+ min left, until \d\d:\d\d$", line)


def test_updates_after_the_last_line_are_told_once_when_asked():
    _, logged = run_meter(REPORT_EVERY + 3, StepSchedule(1.0, 1000, 0))
    assert [line["update"] for line in logged] == [20, 23]
    losses = [loss for line in logged for loss in line["update_losses"]]
    rates = [rate for line in logged for rate in line["rates"]]
    assert losses == [float(number) for number in range(1, 24)]
    assert rates == [0.5 / number for number in range(1, 24)]
    assert logged[1]["counts"] == [24.0, 12.0]
    assert logged[1]["losses"] == [2.0, 1.0]
    assert run_meter(0, StepSchedule(1.0, 1000, 0)) == ([], [])


class Left:
    """A schedule that ends after a fixed time."""

    def __init__(self, left_s: float) -> None:
        self._left_s = left_s

    def left_s(self, update: int, seconds_per_update: float) -> float:
        return self._left_s


@pytest.mark.parametrize(
    ("left_s", "said"),
    [(30, "1 min left"), (5400, "90 min left"), (7260, "2 h 01 min left"), (90000, " on ")],
)
def test_time_left_is_told_in_fitting_units(left_s, said):
    (line,), _ = run_meter(1, Left(left_s))
    assert said in line
    hours = {f"{datetime.now() + timedelta(seconds=left_s + late):%H:%M}" for late in (-60, 0)}
    assert any(f"until {hour}" in line for hour in hours)


def test_only_better_weights_replace_the_best(tmp_path):
    best, net = Best(tmp_path / "best.safetensors"), torch.nn.Linear(2, 2)
    assert best.score == float("-inf")
    for number, score in enumerate((1.5, 1.25, 1.5, 1.75)):
        torch.nn.init.constant_(net.weight, float(number))
        best.offer(net, score, Position(update=number))
    assert best.score == 1.75
    kept = torch.nn.Linear(2, 2)
    assert best.load_into(kept) == Position(update=3)
    assert torch.equal(kept.weight, torch.full((2, 2), 3.0))
    best.offer(net, 1.75, Position(update=9))
    assert best.load_into(kept) == Position(update=3)
