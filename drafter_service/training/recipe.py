"""What a family of drafters brings to the trainer, and which families there are.

A recipe knows its network, its loss and its checkpoint; the trainer knows optimisers, the run knows
schedules, files and workers. Invariant: a loss is a sum over rows with its denominator beside it,
and draws nothing from global random state (`draws`), so batches may be split over passes and
workers and still add up to the same update.
"""

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor, nn

from drafter_service.training.batches import Batch
from drafter_service.training.settings import TrainSettings
from protos.errors import ConfigError

if TYPE_CHECKING:
    from drafter_service.training.data import Data

RECIPES: Mapping[str, str] = {
    "eagle": "drafter_service.training.eagle:EagleRecipe",
    "eagle3": "drafter_service.training.eagle3:Eagle3Recipe",
    "dflash": "drafter_service.training.dflash:DflashRecipe",
    "dspark": "drafter_service.training.dspark:DsparkRecipe",
}
"""Families by their kind: module and class, imported when chosen."""


@dataclass(frozen=True, slots=True)
class StepSums:
    """Sums per step of an unrolled head, or per slot of a block, so that reports can be added."""

    losses: tuple[float, ...]
    hits: tuple[float, ...]
    counts: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Loss:
    """What a batch costs: `total / denominator`, with the total a differentiable scalar."""

    total: Tensor
    denominator: float
    steps: StepSums


@dataclass(frozen=True, slots=True)
class HeldOut:
    """How good a network is on held-out answers. score: replayed tau, which chooses the best
    checkpoint; figures: everything else that is worth a line in the log."""

    score: float
    figures: Mapping[str, object]


class Recipe(Protocol):
    """One family, bound to the settings and data of a run."""

    net: nn.Module
    """A new network in float32; the trainer converts it to the arithmetic's dtype in place."""
    facts: Mapping[str, object]
    """What provenance should say besides the settings, e.g. the draft vocabulary's coverage."""

    def loss(self, batch: Batch, number: int) -> Loss:
        """Of `net` on a batch; `number` counts updates and seeds whatever is drawn."""

    def check(self, net: nn.Module, data: "Data") -> HeldOut:
        """Figures of a network like `net` on the held-out answers."""

    def inherited(self, checkpoint: Path) -> dict[str, Tensor]:
        """float32 weights for every trained parameter of `net`, from an exported checkpoint.

        Raises ConfigError when it is of another shape.
        """

    def write(self, output: Path, net: nn.Module, name: str, provenance: Mapping[str, Any]) -> None:
        """Export a network like `net` in the family's public format."""


@dataclass(frozen=True, slots=True)
class Family:
    """How a recipe is made: `make` takes settings of the type beside it."""

    settings_type: type[TrainSettings]
    make: Callable[[TrainSettings, "Data"], Recipe]


def family_of(kind: str) -> Family:
    """Raises ConfigError naming the known kinds."""
    if kind not in RECIPES:
        raise ConfigError(f"no recipe trains {kind!r}; known: {', '.join(RECIPES)}")
    module, _, name = RECIPES[kind].partition(":")
    made = getattr(importlib.import_module(module), name)
    return Family(made.settings_type, made)
