"""A training run: data, recipe, schedule, checkpoints, log. Restarts where it was stopped.

    <run>/state.safetensors     master weights, optimiser, position (replaced atomically)
    <run>/best.safetensors      averaged weights of the best check so far, by replayed tau
    <run>/log.jsonl             one line per report, with the rate, and one per held-out check

Knows no command line and no launcher; of several workers the first writes. Invariant: everything
that decides the next update is in the state file or in the settings, but for the rate when the
schedule follows the clock; the log records the rates.
"""

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

from drafter_service.training.batches import Batch, split_share
from drafter_service.training.continuing import check_continues
from drafter_service.training.data import Data
from drafter_service.training.meter import Meter
from drafter_service.training.recipe import HeldOut, family_of
from drafter_service.training.schedule import DeadlineSchedule, Schedule, StepSchedule
from drafter_service.training.settings import TrainSettings
from drafter_service.training.telling import told_settings
from drafter_service.training.trainer import OptimiserSettings, Position, Trainer
from drafter_service.training.workers import Alone, Workers

STATE_NAME = "state.safetensors"
BEST_NAME = "best.safetensors"
LOG_NAME = "log.jsonl"


@dataclass(frozen=True, slots=True)
class Started:
    """A run about to make its next update."""

    trainer: Trainer[nn.Module]
    position: Position
    schedule: Schedule


class Run:
    """Drives the trainer until the schedule is over."""

    def __init__(
        self,
        kind: str,
        settings: TrainSettings,
        report: Callable[[str], None],
        workers: Workers | None = None,
    ) -> None:
        """settings: of the kind's own type."""
        torch.set_num_threads(settings.threads)
        self._settings = settings
        self._told = {"kind": kind, **told_settings(settings)}
        self._report = report
        self._workers = workers if workers is not None else Alone()
        self._data = Data(settings)
        self._is_first = self._workers.rank == 0
        settings.run.mkdir(parents=True, exist_ok=True)
        self._state_path = settings.run / STATE_NAME
        self._best_path = settings.run / BEST_NAME
        self._log_path = settings.run / LOG_NAME
        self.recipe = family_of(kind).make(settings, self._data)
        for name, fact in self.recipe.facts.items():
            self._say(f"{name}: {fact}")

    def start(self, warm_from: Path | None = None) -> Started:
        """Resume from the state file, or begin anew, or from another run's weights.

        Raises ConfigError when the run was begun with settings that shape its updates otherwise.
        """
        trainer = self._new_trainer()
        position, extra = Position(), {"started": repr(time.time())}
        if self._state_path.exists():
            with safe_open(self._state_path, framework="pt") as stream:
                check_continues(json.loads(stream.metadata().get("settings", "{}")), self._told)
            position, extra = trainer.load(self._state_path)
        elif warm_from is not None:
            extra["warm_from"] = warm_from.name
            if warm_from.is_dir():
                trainer.take_weights(self.recipe.inherited(warm_from))
            else:
                trainer.load_weights(warm_from)
        self.extra = {"settings": json.dumps(self._told), **extra}
        return Started(trainer, position, self._schedule(float(extra["started"])))

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
            return DeadlineSchedule(s.peak_rate, started, end, s.warmup_updates, s.floor_share)
        updates = round((s.epochs or 1.0) * len(self._data.epoch(0)))
        return StepSchedule(s.peak_rate, updates, s.warmup_updates, s.floor_share)

    def train(self, started: Started) -> HeldOut:
        """Until the schedule is over; saves, then reports on the held-out answers."""
        trainer, position, schedule = started.trainer, started.position, started.schedule
        meter = Meter(self._say, self._log, schedule, position)
        self._saved = self._checked = time.monotonic()
        while not schedule.is_over(position.update):
            updates = self._data.epoch(position.epoch)
            for indices in updates[position.batch :]:
                rate = schedule.rate(position.update)
                update = trainer.update(self._batches(indices), rate, position.update)
                position = replace(
                    position,
                    update=position.update + 1,
                    batch=position.batch + 1,
                    rows=position.rows + sum(self._data.records[i].answer_len for i in indices),
                )
                meter.add(position, len(updates), rate, update)
                self._now_and_then(trainer, position)
                if schedule.is_over(position.update):
                    break
            else:
                position = replace(position, epoch=position.epoch + 1, batch=0)
        self._save(trainer, position)
        return self.check(trainer.averaged_net(), position)

    def _batches(self, indices: tuple[int, ...]) -> Iterator[Batch]:
        """This worker's share of an update, in passes of at most `rows_per_pass` rows."""
        most = self._settings.rows_per_pass
        waiting: list[int] = []
        rows = 0
        for index in split_share(indices, self._workers.rank, self._workers.count):
            length = self._data.records[index].answer_len
            if waiting and most is not None and rows + length > most:
                yield self._data.load(waiting)
                waiting, rows = [], 0
            waiting.append(index)
            rows += length
        if waiting:
            yield self._data.load(waiting)

    def _now_and_then(self, trainer: Trainer[nn.Module], position: Position) -> None:
        now = time.monotonic()
        if now - self._saved > self._settings.checkpoint_every_s:
            self._save(trainer, position)
            self._saved = now
        if now - self._checked > self._settings.evaluate_every_s:
            self.check(trainer.averaged_net(), position)
            self._checked = time.monotonic()

    def _save(self, trainer: Trainer[nn.Module], position: Position) -> None:
        if self._is_first:
            trainer.save(self._state_path, position, self.extra)

    def check(self, net: nn.Module, position: Position) -> HeldOut:
        """Held-out figures, logged; the best weights so far are kept. The first worker's work."""
        if not self._is_first:
            return HeldOut(0.0, {})
        found = self.recipe.check(net, self._data)
        line = {"held_out": dict(found.figures), "score": found.score, **asdict(position)}
        self._log({**line, "time": time.time()})
        self._say(f"held-out tau {found.score:.4f} {found.figures}")
        if found.score > self.best_score():
            metadata = {"score": repr(found.score), "position": json.dumps(asdict(position))}
            temporary = self._best_path.with_suffix(".tmp")
            weights = {name: p.contiguous() for name, p in _trained(net).items()}
            save_file(weights, temporary, metadata=metadata)
            temporary.replace(self._best_path)
        return found

    def best_score(self) -> float:
        """Of the best check so far, minus infinity before the first."""
        if not self._best_path.exists():
            return float("-inf")
        with safe_open(self._best_path, framework="pt") as stream:
            return float(stream.metadata()["score"])

    @torch.no_grad()
    def best_net(self) -> tuple[nn.Module, Position]:
        """The network of the best check, and where it was found.

        Raises FileNotFoundError before the first check.
        """
        net = self.recipe.net.to(getattr(torch, self._settings.compute_dtype))
        parameters = dict(net.named_parameters())
        for name, weight in load_file(self._best_path).items():
            parameters[name].copy_(weight)
        with safe_open(self._best_path, framework="pt") as stream:
            position = Position(**json.loads(stream.metadata()["position"]))
        return net, position

    def _log(self, line: dict[str, object]) -> None:
        if self._is_first:
            with self._log_path.open("a") as stream:
                stream.write(json.dumps(line) + "\n")

    def _say(self, line: str) -> None:
        if self._is_first:
            self._report(line)


def _trained(net: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.detach() for name, p in net.named_parameters() if p.requires_grad}
