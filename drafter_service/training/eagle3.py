"""The recipe of EAGLE-3 and 3.1: training-time test on a draft vocabulary.

A new head, its loss (`eagle3_loss`), figures on held-out answers, export. Knows no optimiser.

Shapes: W draft vocabulary.
"""

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from drafter_service.checkpoint.eagle3_reader import read_eagle3_head
from drafter_service.checkpoint.target import read_target_weights
from drafter_service.checkpoint.writer import write_eagle3
from drafter_service.eagle3.head import Eagle3Head
from drafter_service.training.batches import Batch
from drafter_service.training.data import Data
from drafter_service.training.eagle3_loss import Eagle3Loss, LossShape
from drafter_service.training.eagle3_settings import Eagle3Settings
from drafter_service.training.evaluate import evaluate
from drafter_service.training.norms import with_trained_norms
from drafter_service.training.recipe import HeldOut, Loss
from drafter_service.training.start import (
    copy_target_layers,
    head_config,
    inherited_weights,
    new_head,
)
from drafter_service.training.vocab import draft_index


class Eagle3Recipe:
    """See `recipe.Recipe`."""

    settings_type = Eagle3Settings

    def __init__(self, settings: Eagle3Settings, data: Data) -> None:
        target = read_target_weights(settings.target)
        vocab = data.vocab(settings.head.draft_vocab_size)
        config = head_config(settings.head, data.target_config)
        target_ids_W = torch.from_numpy(vocab.target_ids)
        self.net = new_head(config, target, target_ids_W, settings.seed)
        if settings.head.start == "target_layers":
            copy_target_layers(self.net, settings.target)
        with_trained_norms(self.net)
        self.facts = {"draft_vocab_coverage": vocab.coverage}
        self._settings = settings
        dtype: torch.dtype = getattr(torch, settings.compute_dtype)
        self._loss = Eagle3Loss(
            self.net,
            target.lm_head[target_ids_W].to(dtype) if settings.targets == "full" else None,
            torch.from_numpy(draft_index(vocab.target_ids, config.vocab_size)),
            LossShape(
                settings.num_steps,
                settings.step_decay,
                settings.missed_share,
                settings.comparison,
            ),
        )

    def loss(self, batch: Batch, number: int) -> Loss:
        """Eagle3Loss of `net`."""
        return self._loss(batch, number)

    def check(self, net: nn.Module, data: Data) -> HeldOut:
        """Agreement by depth and replayed chains on held-out answers."""
        assert isinstance(net, Eagle3Head)
        found = evaluate(net, data.held_out())
        return HeldOut(found.chain_tau, asdict(found))

    def inherited(self, checkpoint: Path) -> dict[str, Tensor]:
        """Weights of an exported head, whose draft vocabulary may differ."""
        embedding = read_target_weights(self._settings.target).embed_tokens
        old = read_eagle3_head(checkpoint, embedding, torch.float32)
        return inherited_weights(old, self.net)

    def write(self, output: Path, net: nn.Module, name: str, provenance: Mapping[str, Any]) -> None:
        """The layout that vLLM and SGLang read."""
        assert isinstance(net, Eagle3Head)
        write_eagle3(output, net, name, provenance=dict(provenance))
