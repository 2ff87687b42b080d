"""A training run: data, head, schedule, checkpoints, log. Restarts where it was stopped.

    <run>/state.safetensors     master weights, optimiser, position (replaced atomically)
    <run>/log.jsonl             one line per report, with the rate, and one per held-out check

Knows no command line. Invariant: everything that decides the next update is in the state file or
in the settings, but for the rate when the schedule follows the clock; the log records the rates.
"""

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from drafter_service.checkpoint.eagle3_reader import read_eagle3_head
from drafter_service.checkpoint.target import read_target_weights
from drafter_service.eagle3.head import Eagle3Head
from drafter_service.training.data import Data
from drafter_service.training.evaluate import HeldOutReport, evaluate
from drafter_service.training.meter import Meter
from drafter_service.training.schedule import DeadlineSchedule, Schedule, StepSchedule
from drafter_service.training.settings import TrainSettings
from drafter_service.training.start import head_config, inherited_weights, new_head
from drafter_service.training.trainer import OptimiserSettings, Position, Trainer
from drafter_service.training.vocab import draft_index

STATE_NAME = "state.safetensors"
LOG_NAME = "log.jsonl"


@dataclass(frozen=True, slots=True)
class Started:
    """A run about to make its next update."""

    trainer: Trainer
    position: Position
    schedule: Schedule


class Run:
    """Drives the trainer until the schedule is over."""

    def __init__(self, settings: TrainSettings, report: Callable[[str], None]) -> None:
        torch.set_num_threads(settings.threads)
        self._settings = settings
        self._report = report
        self._data = Data(settings)
        settings.run.mkdir(parents=True, exist_ok=True)
        self._state_path = settings.run / STATE_NAME
        self._log_path = settings.run / LOG_NAME

    def start(self, warm_from: Path | None = None) -> Started:
        """Resume from the state file, or begin anew, or from another run's weights."""
        trainer = self._new_trainer()
        position, extra = Position(), {"started": repr(time.time())}
        if self._state_path.exists():
            position, extra = trainer.load(self._state_path)
        elif warm_from is not None and warm_from.is_dir():
            trainer.take_weights(self._weights_of(warm_from, trainer.head))
        elif warm_from is not None:
            trainer.load_weights(warm_from)
        self._extra = extra
        return Started(trainer, position, self._schedule(float(extra["started"])))

    def _new_trainer(self) -> Trainer:
        settings = self._settings
        target = read_target_weights(settings.target)
        vocab = self._data.vocab()
        config = head_config(settings.head, self._data.target_config)
        target_ids = torch.from_numpy(vocab.target_ids)
        head = new_head(config, target, target_ids, settings.seed)
        self.vocab_coverage = vocab.coverage
        self._report(f"draft vocabulary covers {vocab.coverage:.4f} of the training answers")
        optimiser = OptimiserSettings(
            num_steps=settings.num_steps,
            step_decay=settings.step_decay,
            missed_share=settings.missed_share,
            weight_decay=settings.weight_decay,
            clip_norm=settings.clip_norm,
        )
        index = torch.from_numpy(draft_index(vocab.target_ids, config.vocab_size))
        dtype: torch.dtype = getattr(torch, settings.compute_dtype)
        return Trainer(head, target.lm_head[target_ids], index, optimiser, dtype)

    def _weights_of(self, checkpoint: Path, head: Eagle3Head) -> dict[str, Tensor]:
        embedding = read_target_weights(self._settings.target).embed_tokens
        old = read_eagle3_head(checkpoint, embedding, torch.float32)
        return inherited_weights(old, head)

    def _schedule(self, started: float) -> Schedule:
        s = self._settings
        if s.minutes is not None:
            end = started + 60 * s.minutes
            return DeadlineSchedule(s.peak_rate, started, end, s.warmup_updates, s.floor_share)
        updates = round((s.epochs or 1.0) * len(self._data.epoch(0)))
        return StepSchedule(s.peak_rate, updates, s.warmup_updates, s.floor_share)

    def train(self, started: Started) -> HeldOutReport:
        """Until the schedule is over; saves, then reports on the held-out answers."""
        trainer, position, schedule = started.trainer, started.position, started.schedule
        meter = Meter(self._report, self._log, schedule, position)
        self._saved = self._checked = time.monotonic()
        while not schedule.is_over(position.update):
            batches = self._data.epoch(position.epoch)
            for indices in batches[position.batch :]:
                batch = self._data.load(indices)
                rate = schedule.rate(position.update)
                update = trainer.update(batch, rate, position.update)
                position = replace(
                    position,
                    update=position.update + 1,
                    batch=position.batch + 1,
                    rows=position.rows + batch.num_rows,
                )
                meter.add(position, len(batches), rate, update)
                self._now_and_then(trainer, position)
                if schedule.is_over(position.update):
                    break
            else:
                position = replace(position, epoch=position.epoch + 1, batch=0)
        trainer.save(self._state_path, position, self._extra)
        return self.check(trainer.averaged_head(), position)

    def _now_and_then(self, trainer: Trainer, position: Position) -> None:
        now = time.monotonic()
        if now - self._saved > self._settings.checkpoint_every_s:
            trainer.save(self._state_path, position, self._extra)
            self._saved = now
        if now - self._checked > self._settings.evaluate_every_s:
            self.check(trainer.averaged_head(), position)
            self._checked = now

    def check(self, head: Eagle3Head, position: Position) -> HeldOutReport:
        """Held-out figures, logged."""
        found = evaluate(head, self._data.held_out())
        self._log({"held_out": asdict(found), **asdict(position), "time": time.time()})
        accuracy = " ".join(f"{value:.4f}" for value in found.accuracy)
        self._report(f"held-out accuracy {accuracy}; chain tau {found.chain_tau:.4f}")
        return found

    def _log(self, line: dict[str, object]) -> None:
        with self._log_path.open("a") as stream:
            stream.write(json.dumps(line) + "\n")
