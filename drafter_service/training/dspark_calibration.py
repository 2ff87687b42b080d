"""Makes the confidence of a trained drafter honest, without another tensor in its file.

    said' = scale * said + shift        fitted so that sigmoid(said') is the rate of acceptance

The head is linear, so both fold into its weight and bias. They are fitted on held-out answers which
the figures are not taken from. One pair for all slots: the format has no place for one a slot.
Knows no files.

Shapes: N reached drafts.
"""

import copy
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from drafter_service.dflash.net import BlockNet
from drafter_service.training.batches import Batch
from drafter_service.training.dspark_check import calibration_error, joined, walk

NEWTON_STEPS = 50
PRIOR = 1.0
"""Pull towards changing nothing, as strong as that many drafts: keeps few drafts finite."""


class HeldOutData(Protocol):
    """Held-out answers, the same batches in the same order every time."""

    def held_out(self) -> Iterator[tuple[Batch, tuple[bool, ...]]]: ...


@dataclass(frozen=True, slots=True)
class Affine:
    """What a logit is multiplied by, and what is added."""

    scale: float
    shift: float


@dataclass(frozen=True, slots=True)
class Calibration:
    """The fit, and the calibration errors on other held-out answers before and after it."""

    affine: Affine
    num_drafts: int
    ece_before: float
    ece_after: float


def calibrated(net: BlockNet, data: HeldOutData, most: int | None) -> tuple[BlockNet, Calibration]:
    """A copy with a fitted confidence head: fitted on the `most` batches after the first `most`,
    measured on the first; on every second one and the others when `most` is None."""
    batches = [batch for batch, _ in itertools.islice(data.held_out(), most and 2 * most)]
    if most is None:
        fit, rest = batches[1::2], batches[0::2]
    else:
        fit, rest = batches[most:], batches[:most]
    said_N, agreed_N = _reached(net, fit)
    affine = fitted(said_N, agreed_N)
    other_N, hit_N = _reached(net, rest)
    after_N = other_N * affine.scale + affine.shift
    found = Calibration(
        affine,
        len(said_N),
        calibration_error(other_N.sigmoid(), hit_N),
        calibration_error(after_N.sigmoid(), hit_N),
    )
    return with_affine(net, affine), found


def _reached(net: BlockNet, batches: list[Batch]) -> tuple[Tensor, Tensor]:
    whole = joined([walk(net, batch) for batch in batches], net.config.num_drafts)
    return whole.said[whole.reached], whole.agreed[whole.reached]


def fitted(said_N: Tensor, agreed_N: Tensor) -> Affine:
    """The most likely pair, by Newton's method; (1, 0) without drafts."""
    given_N2 = torch.stack([said_N.double(), torch.ones(len(said_N), dtype=torch.float64)], dim=1)
    agreed = agreed_N.double()
    start = torch.tensor([1.0, 0.0], dtype=torch.float64)

    def cost(pair: Tensor) -> Tensor:
        told = functional.binary_cross_entropy_with_logits(given_N2 @ pair, agreed, reduction="sum")
        return told + 0.5 * PRIOR * (pair - start).square().sum()

    pair = start.clone()
    for _ in range(NEWTON_STEPS):
        rates_N = (given_N2 @ pair).sigmoid()
        slope = given_N2.T @ (rates_N - agreed) + PRIOR * (pair - start)
        bend = (given_N2.T * (rates_N * (1 - rates_N))) @ given_N2
        step = torch.linalg.solve(bend + PRIOR * torch.eye(2, dtype=torch.float64), slope)
        while cost(pair - step) > cost(pair) and float(step.abs().max()) > 1e-9:
            step = step / 2
        pair = pair - step
        if float(step.abs().max()) < 1e-9:
            break
    return Affine(float(pair[0]), float(pair[1]))


@torch.no_grad()
def with_affine(net: BlockNet, affine: Affine) -> BlockNet:
    """A copy whose confidence head says `scale * said + shift`."""
    changed = copy.deepcopy(net)
    head = changed.confidence_head
    assert head is not None  # the recipe's net has one
    head.proj.weight.mul_(affine.scale)
    head.proj.bias.mul_(affine.scale).add_(affine.shift)
    return changed
