"""The recipe of EAGLE-1: the target's next final state, and its token, guessed in one step.

A new head, its loss (`eagle_loss`), figures on held-out answers, export. Knows no optimiser.

Shapes: W ids compared.
"""

import itertools
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from drafter_service.checkpoint.eagle_writer import write_eagle
from drafter_service.checkpoint.target import TargetWeights, read_target_weights
from drafter_service.eagle.head import EagleHead
from drafter_service.training.batches import Batch
from drafter_service.training.data import Data
from drafter_service.training.eagle_loss import (
    EagleLoss,
    EagleLossShape,
    TokenLoss,
    TopTokenLoss,
)
from drafter_service.training.eagle_settings import EagleSettings
from drafter_service.training.eagle_start import eagle_config, inherited_eagle, new_eagle_head
from drafter_service.training.evaluate import evaluate
from drafter_service.training.norms import with_trained_norms
from drafter_service.training.recipe import HeldOut, Loss
from drafter_service.training.vocab import draft_index


class EagleRecipe:
    """See `recipe.Recipe`."""

    settings_type = EagleSettings

    def __init__(self, settings: EagleSettings, data: Data) -> None:
        target = read_target_weights(settings.target)
        config = eagle_config(settings.head, data.target_config)
        self.net = new_eagle_head(config, target, settings.seed)
        with_trained_norms(self.net)
        self.facts: dict[str, object] = {}
        self._settings = settings
        shape = EagleLossShape(settings.feature_weight, settings.token_weight, settings.noise_std)
        self._loss = EagleLoss(self.net, self._token_loss(target, data), shape)

    def _token_loss(self, target: TargetWeights, data: Data) -> TokenLoss | TopTokenLoss:
        settings = self._settings
        lm_head = target.lm_head.to(getattr(torch, settings.compute_dtype))
        if settings.token_loss == "top":
            return TopTokenLoss(lm_head)
        vocab_size = self.net.config.vocab_size
        vocab = data.vocab(min(settings.loss_vocab_size or vocab_size, vocab_size))
        self.facts["loss_vocab_coverage"] = vocab.coverage
        index_V = torch.from_numpy(draft_index(vocab.target_ids, vocab_size))
        rows_WC = lm_head[torch.from_numpy(vocab.target_ids)]
        return TokenLoss(rows_WC, index_V, from_final=settings.targets == "full")

    def loss(self, batch: Batch, number: int) -> Loss:
        """EagleLoss of `net`."""
        return self._loss(batch, number)

    def check(self, net: nn.Module, data: Data) -> HeldOut:
        """Agreement by depth and replayed chains on held-out answers."""
        assert isinstance(net, EagleHead)
        found = evaluate(net, itertools.islice(data.held_out(), self._settings.check_batches))
        return HeldOut(found.chain_tau, asdict(found))

    def inherited(self, checkpoint: Path) -> dict[str, Tensor]:
        """Weights of an exported head of the same shape."""
        target = read_target_weights(self._settings.target)
        return inherited_eagle(checkpoint, target, self.net.config)

    def write(self, output: Path, net: nn.Module, name: str, provenance: Mapping[str, Any]) -> None:
        """The EAGLE repository's layout."""
        assert isinstance(net, EagleHead)
        write_eagle(output, net, provenance)
