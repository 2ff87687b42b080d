"""A training run: data, recipe, schedule, checkpoints, log. Restarts where it was stopped.

    <run>/state.safetensors     master weights, optimiser, position (replaced atomically)
    <run>/best.safetensors      averaged weights of the best check so far, by replayed tau
    <run>/log.jsonl             one line per start, per report (with the rates), per held-out check

Knows no command line and no launcher; of several workers the first writes, and its clock and the
wish to stop that reaches it count for all. Invariant: everything that decides the next update is in
the state file or in the settings, but for the rate when the schedule follows the clock; the log
records the rates.
"""

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, astuple, dataclass, replace
from pathlib import Path

import torch
from safetensors import safe_open
from torch import nn

from drafter_service.training.batches import Batch, split_share
from drafter_service.training.best import Best
from drafter_service.training.continuing import check_continues
from drafter_service.training.data import Data
from drafter_service.training.meter import Meter
from drafter_service.training.provenance import Origin, origin_of
from drafter_service.training.recipe import HeldOut, family_of
from drafter_service.training.schedule import DeadlineSchedule, Schedule, StepSchedule
from drafter_service.training.settings import TrainSettings
from drafter_service.training.telling import told_settings
from drafter_service.training.trainer import OptimiserSettings, Position, Trainer
from drafter_service.training.workers import Alone, Workers
from protos.errors import ConfigError

STATE_NAME = "state.safetensors"
BEST_NAME = "best.safetensors"
LOG_NAME = "log.jsonl"


@dataclass(frozen=True, slots=True)
class Started:
    """A run about to make its next update. origin: what a warm start began with, if it did."""

    trainer: Trainer[nn.Module]
    position: Position
    schedule: Schedule
    origin: Origin | None


class Run:
    """Drives the trainer until the schedule is over."""

    def __init__(
        self,
        kind: str,
        settings: TrainSettings,
        report: Callable[[str], None],
        workers: Workers | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """settings: of the kind's own type; clock: seconds since the epoch, for deadlines."""
        torch.set_num_threads(settings.threads)
        self._settings = settings
        self._told = {"kind": kind, **told_settings(settings)}
        self._report = report
        self._workers = workers if workers is not None else Alone()
        self._clock = clock
        self.data = Data(settings)
        self._epoch: tuple[int, list[tuple[int, ...]]] = (0, self.data.epoch(0))
        self._is_first = self._workers.rank == 0
        settings.run.mkdir(parents=True, exist_ok=True)
        self._state_path = settings.run / STATE_NAME
        self._best = Best(settings.run / BEST_NAME)
        self._log_path = settings.run / LOG_NAME
        self.recipe = family_of(kind).make(settings, self.data)
        for name, fact in self.recipe.facts.items():
            self._say(f"{name}: {fact}")

    def start(self, warm_from: Path | None = None) -> Started:
        """Resume from the state file, or begin anew, or from another run's weights.

        Raises ConfigError when the run was begun with settings that shape its updates otherwise, or
        when the workers see different state files.
        """
        trainer = self._new_trainer()
        position, extra = Position(), {"started": repr(self._clock())}
        if self._state_path.exists():
            with safe_open(self._state_path, framework="pt") as stream:
                check_continues(json.loads(stream.metadata().get("settings", "{}")), self._told)
            position, extra = trainer.load(self._state_path)
        elif warm_from is not None:
            if warm_from.is_dir():
                trainer.take_weights(self.recipe.inherited(warm_from))
            else:
                trainer.load_weights(warm_from)
            extra["origin"] = json.dumps(origin_of(warm_from))
        if self._workers.agree(astuple(position)) != astuple(position):
            raise ConfigError("workers see different states: the run's directory must be shared")
        self._extra = {"settings": json.dumps(self._told), **extra}
        origin = json.loads(extra["origin"]) if "origin" in extra else None
        return Started(trainer, position, self._schedule(float(extra["started"])), origin)

    def _new_trainer(self) -> Trainer[nn.Module]:
        settings = self._settings
        optimiser = OptimiserSettings(
            weight_decay=settings.weight_decay, clip_norm=settings.clip_norm
        )
        dtype: torch.dtype = getattr(torch, settings.compute_dtype)
        return Trainer(self.recipe.net, self.recipe.loss, optimiser, dtype, self._workers)

    def _schedule(self, started: float) -> Schedule:
        s = self._settings
        if s.minutes is not None:
            end = started + 60 * s.minutes
            floor = s.floor_share
            return DeadlineSchedule(s.peak_rate, started, end, s.warmup_updates, floor, self._clock)
        updates = round((s.epochs or 1.0) * len(self.data.epoch(0)))
        return StepSchedule(s.peak_rate, updates, s.warmup_updates, s.floor_share)

    def train(
        self, started: Started, stopped: Callable[[], bool] = lambda: False
    ) -> HeldOut | None:
        """Until the schedule is over; saves, then reports on the held-out answers.

        `stopped` is asked before every update, of the first worker: once it says so, the state is
        saved and the answer is None.
        """
        trainer, position, schedule = started.trainer, started.position, started.schedule
        meter = Meter(self._say, self._log, schedule, position)
        if position.update:
            self._say(f"goes on after update {position.update}")
        self._log({"started": True, **asdict(position), "workers": self._workers.count})
        self._saved = self._checked = time.monotonic()
        decided = self._decide(schedule, position, stopped)
        while decided.goes_on:
            indices, num_updates, after = self._next(position)
            update = trainer.update(self._batches(indices), decided.rate, position.update)
            position = after
            meter.add(position, num_updates, decided.rate, update)
            self._now_and_then(trainer, position, meter)
            decided = self._decide(schedule, position, stopped)
        meter.flush()
        self._save(trainer, position)
        if decided.is_stopped:
            self._say(f"stopped after update {position.update}; the same command goes on")
            return None
        return self.check(trainer.averaged_net(), position)

    def _decide(
        self, schedule: Schedule, position: Position, stopped: Callable[[], bool]
    ) -> "Decision":
        """What all workers do next. Clocks differ and signals reach one process only, so one
        worker decides: another that stopped or went on by itself would leave it waiting."""
        mine = (0.0, 0.0, 0.0)
        if self._is_first:
            rate, is_over = schedule.rate(position.update), schedule.is_over(position.update)
            mine = (rate, float(is_over), float(not is_over and stopped()))
        rate, over, stop = self._workers.agree(mine)
        return Decision(rate, bool(over), bool(stop))

    def _next(self, position: Position) -> tuple[tuple[int, ...], int, Position]:
        """(records of the next update, updates of its epoch, the position after it)."""
        if self._epoch[0] != position.epoch:
            self._epoch = (position.epoch, self.data.epoch(position.epoch))
        updates = self._epoch[1]
        if position.batch >= len(updates):
            return self._next(replace(position, epoch=position.epoch + 1, batch=0))
        indices = updates[position.batch]
        rows = sum(self.data.records[index].answer_len for index in indices)
        after = replace(
            position,
            update=position.update + 1,
            batch=position.batch + 1,
            rows=position.rows + rows,
        )
        return indices, len(updates), after

    def _batches(self, indices: tuple[int, ...]) -> Iterator[Batch]:
        """This worker's share of an update, in passes of at most `rows_per_pass` rows."""
        most = self._settings.rows_per_pass
        waiting: list[int] = []
        rows = 0
        for index in split_share(indices, self._workers.rank, self._workers.count):
            length = self.data.records[index].answer_len
            if waiting and most is not None and rows + length > most:
                yield self.data.load(waiting)
                waiting, rows = [], 0
            waiting.append(index)
            rows += length
        if waiting:
            yield self.data.load(waiting)

    def _now_and_then(self, trainer: Trainer[nn.Module], position: Position, meter: Meter) -> None:
        now = time.monotonic()
        if now - self._saved > self._settings.checkpoint_every_s:
            meter.flush()  # the log may know more updates than the state, never fewer
            self._save(trainer, position)
            self._saved = now
        if now - self._checked > self._settings.evaluate_every_s:
            self.check(trainer.averaged_net(), position)
            self._checked = time.monotonic()

    def _save(self, trainer: Trainer[nn.Module], position: Position) -> None:
        if self._is_first and position.update:
            trainer.save(self._state_path, position, self._extra)

    def check(self, net: nn.Module, position: Position) -> HeldOut:
        """Held-out figures, logged; the best weights so far are kept. The first worker's work."""
        if not self._is_first:
            return HeldOut(0.0, {})
        found = self.recipe.check(net, self.data)
        self._log({"held_out": dict(found.figures), "score": found.score, **asdict(position)})
        self._say(f"held-out tau {found.score:.4f} {found.figures}")
        self._best.offer(net, found.score, position)
        return found

    @property
    def has_best(self) -> bool:
        """Whether a check has kept weights."""
        return self._best.score > float("-inf")

    def best_net(self) -> tuple[nn.Module, Position]:
        """The network of the best check, and where it was found.

        Raises FileNotFoundError before the first check.
        """
        net = self.recipe.net.to(getattr(torch, self._settings.compute_dtype))
        return net, self._best.load_into(net)

    def _log(self, line: dict[str, object]) -> None:
        if self._is_first:
            with self._log_path.open("a") as stream:
                stream.write(json.dumps({**line, "time": time.time()}) + "\n")

    def _say(self, line: str) -> None:
        if self._is_first:
            self._report(line)


@dataclass(frozen=True, slots=True)
class Decision:
    """What the workers do next: another update at this rate, unless one of the two says no."""

    rate: float
    is_over: bool
    is_stopped: bool

    @property
    def goes_on(self) -> bool:
        return not (self.is_over or self.is_stopped)
