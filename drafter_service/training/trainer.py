"""One training update, and everything that must survive a restart.

bf16 (or float32) network for the arithmetic, float32 master weights for AdamW. Knows a network, a
recipe's loss and the optimiser; knows no clock, no schedule and no directory layout. Invariant: the
state after an update is a function of (state before, its batches, rate), so a run resumed from its
checkpoint continues bit for bit; batches and workers only group the terms of one sum.
"""

import copy
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Generic, Protocol, TypeVar

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from drafter_service.training.batches import Batch
from drafter_service.training.recipe import Loss, StepSums
from drafter_service.training.workers import Alone, Workers

MAX_STEPS = 32
"""Steps or slots that reports are added up for."""
FIRST_UPDATES, FOLLOW_EVERY = 64, 4
"""After so many updates the average follows every so many: it reads and writes all weights."""

Net = TypeVar("Net", bound=nn.Module)


class LossOf(Protocol):
    """A recipe's loss."""

    def __call__(self, batch: Batch, number: int) -> Loss:
        """Of the trained network on a batch; `number` counts updates from 0."""


@dataclass(frozen=True, slots=True)
class OptimiserSettings:
    """AdamW, clipping, and the running average of the weights."""

    weight_decay: float = 0.01
    beta1: float = 0.9
    beta2: float = 0.95
    clip_norm: float = 1.0
    average_decay: float = 0.998


@dataclass(frozen=True, slots=True)
class Position:
    """Where in the data a run stands; the next batch is `batch` of `epoch`."""

    update: int = 0
    epoch: int = 0
    batch: int = 0
    rows: int = 0


@dataclass(frozen=True, slots=True)
class UpdateReport:
    """What an update did: sums per step over all workers, and the gradient's norm."""

    loss: float
    steps: StepSums
    grad_norm: float


class _ScaledAdamW(torch.optim.AdamW):
    """Fused AdamW that divides gradients as it reads them, by what mixed precision calls scale."""

    grad_scale: Tensor
    found_inf: Tensor


class Trainer(Generic[Net]):
    """Owns the network, its master weights and the optimiser's state."""

    def __init__(
        self,
        net: Net,
        loss_of: LossOf,
        settings: OptimiserSettings,
        compute_dtype: torch.dtype = torch.bfloat16,
        workers: Workers | None = None,
    ) -> None:
        """`net`, in float32, is converted in place; `loss_of` sees it through its recipe."""
        self._settings = settings
        self._loss_of = loss_of
        self.dtype = compute_dtype
        self._workers = workers if workers is not None else Alone()
        trained = [(name, p) for name, p in net.named_parameters() if p.requires_grad]
        self._master = {name: p.detach().float().clone() for name, p in trained}
        self.net = net.to(compute_dtype)
        self._compute = {name: p for name, p in net.named_parameters() if p.requires_grad}
        self._average = {name: p.clone() for name, p in self._master.items()}
        self._gradients = {name: torch.zeros_like(p) for name, p in self._master.items()}
        decayed = [p for p in self._master.values() if p.dim() > 1]
        others = [p for p in self._master.values() if p.dim() <= 1]
        self._optimiser = _ScaledAdamW(
            [
                {"params": decayed, "weight_decay": settings.weight_decay},
                {"params": others, "weight_decay": 0.0},
            ],
            lr=0.0,
            betas=(settings.beta1, settings.beta2),
            fused=True,
        )
        for name, master in self._master.items():
            master.grad = self._gradients[name]

    def update(self, batches: Iterable[Batch], rate: float, number: int) -> UpdateReport:
        """One step of the optimiser on this worker's batches; `number` counts updates from 0.

        No batch at all is a worker's share too, when the others have some.
        """
        sums: list[StepSums] = []
        total = denominator = 0.0
        for batch in batches:
            loss = self._loss_of(batch, number)
            loss.total.backward()  # type: ignore[no-untyped-call]
            self._collect(first=not sums)
            total, denominator = total + float(loss.total.detach()), denominator + loss.denominator
            sums.append(loss.steps)
        if not sums:
            torch._foreach_zero_(list(self._gradients.values()))
        counted = torch.tensor([total, denominator], dtype=torch.float32)
        steps = self._add_up(sums, counted)
        total, denominator = counted.tolist()
        grad_norm = self._apply(rate, max(denominator, 1e-12))
        self._follow(number)
        return UpdateReport(total / max(denominator, 1e-12), steps, grad_norm)

    @torch.no_grad()
    def _collect(self, first: bool) -> None:
        """Move a pass's gradients into the float32 ones; the first replaces the last update's."""
        for name, parameter in self._compute.items():
            gradient = self._gradients[name]
            if parameter.grad is None:
                if first:
                    gradient.zero_()
            elif first:
                gradient.copy_(parameter.grad)
            else:
                gradient.add_(parameter.grad)
            parameter.grad = None

    def _add_up(self, sums: list[StepSums], counted: Tensor) -> StepSums:
        """Gradients, `counted` and step sums over all workers."""
        table = torch.zeros(3, MAX_STEPS)
        for steps in sums:
            for row, values in enumerate((steps.losses, steps.hits, steps.counts)):
                table[row, : len(values)] += torch.tensor(values)
        self._workers.add_up([*self._gradients.values(), counted, table])
        length = int(table[2].nonzero().max()) + 1 if table[2].any() else 0
        losses, hits, counts = (tuple(row[:length].tolist()) for row in table)
        return StepSums(losses, hits, counts)

    @torch.no_grad()
    def _apply(self, rate: float, denominator: float) -> float:
        """One step of AdamW on gradient / denominator, clipped; the gradient's norm before that.

        Mean and clipping are one division inside the optimiser: two passes over memory less.
        """
        norms = torch._foreach_norm(list(self._gradients.values()))
        grad_norm = torch.linalg.vector_norm(torch.stack(norms)) / denominator
        over = (grad_norm + 1e-6) / self._settings.clip_norm
        self._optimiser.grad_scale = over.clamp_min(1.0) * denominator
        self._optimiser.found_inf = torch.zeros(())
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
        every = 1 if number < FIRST_UPDATES else FOLLOW_EVERY
        if number % every:
            return
        decay = min(self._settings.average_decay, (1 + number) / (10 + number)) ** every
        torch._foreach_lerp_(list(self._average.values()), list(self._master.values()), 1.0 - decay)

    def master_weights(self) -> dict[str, Tensor]:
        """float32 weights by parameter name of the network; not copies."""
        return self._master

    @torch.no_grad()
    def averaged_net(self) -> Net:
        """A copy of the network with the running average of its weights: what is worth keeping
        while the rate is still high. At the end of a schedule both are nearly the same."""
        net = copy.deepcopy(self.net)
        parameters = dict(net.named_parameters())
        for name, average in self._average.items():
            parameters[name].copy_(average)
        return net

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
