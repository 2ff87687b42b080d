"""The recipe of DFlash: blocks filled in place, each draft compared with what came.

A new net, its loss (`block_loss`), figures on held-out answers, export. Knows no optimiser.

Shapes: W ids of the loss.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from pydantic import Field
from torch import Tensor, nn

from drafter_service.checkpoint.block_writer import write_block
from drafter_service.checkpoint.target import read_target_weights
from drafter_service.dflash.config import Layout
from drafter_service.dflash.net import BlockNet
from drafter_service.training.batches import Batch
from drafter_service.training.block_check import check_blocks
from drafter_service.training.block_loss import BlockLoss, BlockLossShape, Targets, Weighting
from drafter_service.training.block_settings import BlockSettings
from drafter_service.training.block_start import (
    block_config,
    copy_target_layers,
    inherited_block,
    new_block_net,
)
from drafter_service.training.data import Data
from drafter_service.training.recipe import HeldOut, Loss
from drafter_service.training.vocab import draft_index


class DflashSettings(BlockSettings):
    """`outrider train dflash`."""

    targets: Targets = Field(
        default=Targets.HARD, description="Recorded ids, or the target's best by probability."
    )
    weighting: Weighting = Field(
        default=Weighting.DECAY, description="By a draft's place (gamma), or D-PACE (alpha)."
    )
    dpace_alpha: float = Field(default=0.5, ge=0, lt=1, description="Smoothing of D-PACE.")


class DflashRecipe:
    """See `recipe.Recipe`."""

    settings_type = DflashSettings

    def __init__(self, settings: DflashSettings, data: Data) -> None:
        self._target = read_target_weights(settings.target)
        self._settings = settings
        config = block_config(settings.head, data.target_config, Layout.IN_PLACE)
        self.net = new_block_net(config, self._target, settings.seed)
        self._num_target_layers = int(data.target_config["num_hidden_layers"])
        if settings.head.start == "target_layers":
            copy_target_layers(self.net, settings.target)
        vocab = data.vocab(settings.loss_vocab_size or config.vocab_size)
        self.facts = {"loss_vocab_coverage": vocab.coverage}
        dtype: torch.dtype = getattr(torch, settings.compute_dtype)
        kept_W = torch.from_numpy(vocab.target_ids)
        shape = BlockLossShape(
            settings.anchor_share,
            settings.targets,
            settings.weighting,
            settings.gamma,
            settings.dpace_alpha,
        )
        self._loss = BlockLoss(
            self.net,
            self._target.lm_head[kept_W].to(dtype),
            torch.from_numpy(draft_index(vocab.target_ids, config.vocab_size)),
            shape,
        )

    def loss(self, batch: Batch, number: int) -> Loss:
        """BlockLoss of `net`."""
        return self._loss(batch, number)

    def check(self, net: nn.Module, data: Data) -> HeldOut:
        """Agreement by draft and replayed chains on held-out answers."""
        assert isinstance(net, BlockNet)
        return check_blocks(net, data.held_out(), self._settings.check_batches)

    def inherited(self, checkpoint: Path) -> dict[str, Tensor]:
        """Weights of an exported drafter of the same shape."""
        return inherited_block(checkpoint, self._target, self.net)

    def write(self, output: Path, net: nn.Module, name: str, provenance: Mapping[str, Any]) -> None:
        """z-lab's layout, which vLLM and SGLang read."""
        assert isinstance(net, BlockNet)
        write_block(output, net, self._num_target_layers, name, dict(provenance))
