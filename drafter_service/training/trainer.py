"""One training update, and everything that must survive a restart.

bf16 (or float32) head for the arithmetic, float32 master weights for AdamW. Knows the head, the
loss and the optimiser; knows no clock, no schedule and no directory layout. Invariant: the state
after an update is a function of (state before, batch, rate), so a run resumed from its
checkpoint continues bit for bit.

Shapes: M answer rows of a batch, W draft vocabulary.
"""

import copy
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from drafter_service.eagle3.head import Eagle3Head
from drafter_service.training.batches import Batch
from drafter_service.training.loss import fused_loss, target_probs
from drafter_service.training.ttt import StepOutput, unroll


@dataclass(frozen=True, slots=True)
class OptimiserSettings:
    """AdamW and the shape of the loss."""

    num_steps: int = 3
    step_decay: float = 0.8
    weight_decay: float = 0.01
    beta1: float = 0.9
    beta2: float = 0.95
    clip_norm: float = 1.0
    average_decay: float = 0.998
    missed_share: float = 1.0


@dataclass(frozen=True, slots=True)
class Position:
    """Where in the data a run stands; the next batch is `batch` of `epoch`."""

    update: int = 0
    epoch: int = 0
    batch: int = 0
    rows: int = 0


@dataclass(frozen=True, slots=True)
class UpdateReport:
    """Sums over an update, per step, so that reports can be added."""

    losses: tuple[float, ...]
    hits: tuple[int, ...]
    counts: tuple[int, ...]
    grad_norm: float


@dataclass(frozen=True, slots=True)
class StepHits:
    """Per active row of a step: loss, whether the best guess was right, whether it counts."""

    losses: Tensor  # [N]
    hits: Tensor  # [N]
    counted: Tensor  # [N]


class Trainer:
    """Owns the head, its master weights and the optimiser's state."""

    def __init__(
        self,
        head: Eagle3Head,
        target_rows_WH: Tensor,
        draft_index_V: Tensor,
        settings: OptimiserSettings,
        compute_dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        """`target_rows_WH`: rows of the target's lm_head that the draft vocabulary keeps."""
        self._settings = settings
        self.dtype = compute_dtype
        self._target_rows_WH = target_rows_WH.to(compute_dtype)
        self._draft_index_V = draft_index_V
        trained = [(name, p) for name, p in head.named_parameters() if p.requires_grad]
        self._master = {name: p.detach().float().clone() for name, p in trained}
        self.head = head.to(compute_dtype)
        self._compute = {name: p for name, p in head.named_parameters() if p.requires_grad}
        self._average = {name: p.clone() for name, p in self._master.items()}
        decayed = [p for p in self._master.values() if p.dim() > 1]
        others = [p for p in self._master.values() if p.dim() <= 1]
        self._optimiser = torch.optim.AdamW(
            [
                {"params": decayed, "weight_decay": settings.weight_decay},
                {"params": others, "weight_decay": 0.0},
            ],
            lr=0.0,
            betas=(settings.beta1, settings.beta2),
            fused=True,
        )

    def update(self, batch: Batch, rate: float, number: int) -> UpdateReport:
        """One step of the optimiser on one batch; `number` counts updates from 0."""
        loss = _BatchLoss(self, batch, number, self._settings.num_steps)
        unroll(self.head, batch, self._settings.num_steps, loss.after)
        loss.total.backward()  # type: ignore[no-untyped-call]
        grad_norm = self._apply(rate)
        self._follow(number)
        return UpdateReport(tuple(loss.losses), tuple(loss.hits), tuple(loss.counts), grad_norm)

    def step_loss(
        self, batch: Batch, output: StepOutput, probs_MW: Tensor
    ) -> tuple[Tensor, StepHits]:
        """Weighted loss of one step of a batch, and how its rows did.

        Rows without a target, or whose target's choice cannot be drafted, do not count.
        """
        choices_N = batch.choices[output.target_rows]
        wanted_N = torch.where(choices_N >= 0, self._draft_index_V[choices_N.clamp_min(0)], -1)
        counted_N = output.valid & (wanted_N >= 0)
        weight = self._settings.step_decay**output.step / batch.num_rows
        normed_NC = self.head.norm(output.y) if self.head.config.norm_logits else output.y
        total, rows = fused_loss(
            normed_NC, self.head.lm_head.weight, probs_MW, output.target_rows, counted_N * weight
        )
        return total, StepHits(rows.losses, (rows.best == wanted_N) & counted_N, counted_N)

    def target_probs(self, batch: Batch) -> Tensor:
        """[M, W] the target's distributions of a batch, on the draft vocabulary."""
        return target_probs(batch.final, self._target_rows_WH)

    def rows_to_go_on(self, output: StepOutput, hits_N: Tensor, number: int) -> Tensor:
        """[N] rows worth another step: those a draft would really reach, and some others.

        A draft reaches depth d + 1 only where depth d was right, so the rows that missed are
        mostly spared the cost of later steps. Random, but a function of the update's number.
        """
        generator = torch.Generator().manual_seed(number * 16 + output.step)
        lucky_N = torch.rand(len(hits_N), generator=generator) < self._settings.missed_share
        return (hits_N | lucky_N) & output.valid

    @torch.no_grad()
    def _apply(self, rate: float) -> float:
        for name, parameter in self._compute.items():
            gradient = parameter.grad
            self._master[name].grad = None if gradient is None else gradient.float()
            parameter.grad = None
        grad_norm = torch.nn.utils.clip_grad_norm_(
            self._master.values(), self._settings.clip_norm, foreach=True
        )
        for group in self._optimiser.param_groups:
            group["lr"] = rate
        self._optimiser.step()
        self._publish()
        return float(grad_norm)

    @torch.no_grad()
    def _publish(self) -> None:
        for name, parameter in self._compute.items():
            parameter.copy_(self._master[name])

    @torch.no_grad()
    def _follow(self, number: int) -> None:
        # Early on the average must forget the random start, hence the growing decay.
        decay = min(self._settings.average_decay, (1 + number) / (10 + number))
        torch._foreach_lerp_(list(self._average.values()), list(self._master.values()), 1.0 - decay)

    def master_weights(self) -> dict[str, Tensor]:
        """float32 weights by parameter name of the head; not copies."""
        return self._master

    @torch.no_grad()
    def averaged_head(self) -> Eagle3Head:
        """A copy of the head with the running average of its weights: what is worth keeping
        while the rate is still high. At the end of a schedule both are nearly the same."""
        head = copy.deepcopy(self.head)
        parameters = dict(head.named_parameters())
        for name, average in self._average.items():
            parameters[name].copy_(average)
        return head

    def save(self, path: Path, position: Position, extra: dict[str, str]) -> None:
        """Write weights, optimiser state and position; the file appears whole or not at all."""
        tensors = dict(self._state_tensors())
        metadata = {"position": json.dumps(asdict(position)), **extra}
        temporary = path.with_suffix(".tmp")
        save_file(tensors, temporary, metadata=metadata)
        os.replace(temporary, path)

    @torch.no_grad()
    def load(self, path: Path) -> tuple[Position, dict[str, str]]:
        """Continue from `save`; returns the position and the other metadata."""
        with safe_open(path, framework="pt") as stream:
            metadata: dict[str, str] = stream.metadata()
            for name, master in self._master.items():
                master.copy_(stream.get_tensor(f"master.{name}"))
                self._average[name].copy_(stream.get_tensor(f"average.{name}"))
                self._optimiser.state[master] = {
                    "step": stream.get_tensor(f"step.{name}"),
                    "exp_avg": stream.get_tensor(f"mean.{name}"),
                    "exp_avg_sq": stream.get_tensor(f"square.{name}"),
                }
        self._publish()
        position = Position(**json.loads(metadata.pop("position")))
        return position, metadata

    @torch.no_grad()
    def load_weights(self, path: Path) -> None:
        """Take the weights of a saved run, with a fresh optimiser: a warm restart."""
        with safe_open(path, framework="pt") as stream:
            for name, master in self._master.items():
                master.copy_(stream.get_tensor(f"average.{name}"))
                self._average[name].copy_(master)
        self._publish()

    @torch.no_grad()
    def take_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Start from these weights, one for every trained parameter, with a fresh optimiser."""
        for name, master in self._master.items():
            master.copy_(weights[name])
            self._average[name].copy_(master)
        self._publish()

    def _state_tensors(self) -> Iterator[tuple[str, Tensor]]:
        for name, master in self._master.items():
            state = self._optimiser.state[master]
            yield f"master.{name}", master
            yield f"average.{name}", self._average[name]
            yield f"step.{name}", state["step"]
            yield f"mean.{name}", state["exp_avg"]
            yield f"square.{name}", state["exp_avg_sq"]


class _BatchLoss:
    """Collects the loss of a batch while it is unrolled."""

    def __init__(self, trainer: Trainer, batch: Batch, number: int, num_steps: int) -> None:
        self._trainer, self._batch, self._number = trainer, batch, number
        self._probs_MW = trainer.target_probs(batch)
        self.total = torch.zeros(())
        self.losses = [0.0] * num_steps
        self.hits = [0] * num_steps
        self.counts = [0] * num_steps

    def after(self, output: StepOutput) -> Tensor:
        total, rows = self._trainer.step_loss(self._batch, output, self._probs_MW)
        self.total = self.total + total
        self.losses[output.step] = float((rows.losses * rows.counted).sum())
        self.hits[output.step] = int(rows.hits.sum())
        self.counts[output.step] = int(rows.counted.sum())
        return self._trainer.rows_to_go_on(output, rows.hits, self._number)
