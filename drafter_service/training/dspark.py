"""The recipe of DSpark: anchor-first blocks, a serial head over the token before, a confidence.

A new net, its loss (`dspark_loss`), figures on held-out answers, export. Knows no optimiser.

Shapes: V target vocabulary, C hidden size, R rank, W ids of the loss.
"""

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from pydantic import Field
from torch import Tensor, nn

from drafter_service.checkpoint.block_writer import write_block
from drafter_service.checkpoint.target import read_target_weights
from drafter_service.dflash.config import ConfidenceInput, Layout, Markov, MarkovKind
from drafter_service.dflash.net import BlockNet
from drafter_service.training.batches import Batch
from drafter_service.training.block_loss import Targets
from drafter_service.training.block_settings import BlockHeadSettings, BlockSettings
from drafter_service.training.block_start import (
    block_config,
    copy_target_layers,
    inherited_block,
    new_block_net,
)
from drafter_service.training.data import Data
from drafter_service.training.dspark_calibration import calibrated
from drafter_service.training.dspark_check import check_paths
from drafter_service.training.dspark_loss import DsparkLoss, DsparkShape, LossHead, Teacher
from drafter_service.training.dspark_rows import Shares
from drafter_service.training.recipe import HeldOut, Loss
from drafter_service.training.vocab import draft_index

W1_SPREAD = 0.5


class DsparkHeadSettings(BlockHeadSettings):
    """Shape of the drafter: block_size slots are as many drafts."""

    num_layers: int = Field(default=2, ge=1, le=16, description="Decoder layers.")
    markov_rank: int = Field(default=32, ge=1, description="Rank of the serial head.")


class DsparkSettings(BlockSettings):
    """`outrider train dspark`."""

    head: DsparkHeadSettings = DsparkHeadSettings()
    targets: Targets = Field(
        default=Targets.HARD,
        description="Cross entropy with recorded ids, or with the target's best by probability.",
    )
    teacher: Teacher = Field(
        default=Teacher.TOP,
        description="L1 to the target's recorded best ids, or to every id from its last states.",
    )
    ce_share: float = Field(default=0.1, ge=0, description="What the cross entropy is worth.")
    l1_share: float = Field(default=0.9, ge=0, description="What the L1 distance is worth.")
    confidence_share: float = Field(
        default=1.0, ge=0, description="What the confidence's cross entropy is worth."
    )


class DsparkRecipe:
    """See `recipe.Recipe`."""

    settings_type = DsparkSettings

    def __init__(self, settings: DsparkSettings, data: Data) -> None:
        self._target = read_target_weights(settings.target)
        self._settings = settings
        self._data = data
        config = block_config(
            settings.head,
            data.target_config,
            Layout.ANCHOR_FIRST,
            Markov(MarkovKind.VANILLA, settings.head.markov_rank),
            ConfidenceInput.HIDDEN_AND_TOKEN,
        )
        self.net = new_block_net(config, self._target, settings.seed)
        start_small_heads(self.net, self._target.embed_tokens)
        if settings.head.start == "target_layers":
            copy_target_layers(self.net, settings.target)
        vocab = data.vocab(settings.loss_vocab_size or config.vocab_size)
        self.facts = {"loss_vocab_coverage": vocab.coverage}
        dtype: torch.dtype = getattr(torch, settings.compute_dtype)
        head = LossHead(
            self._target.lm_head.to(dtype),
            torch.from_numpy(vocab.target_ids),
            torch.from_numpy(draft_index(vocab.target_ids, config.vocab_size)),
        )
        shape = DsparkShape(
            settings.anchor_share,
            settings.targets,
            settings.teacher,
            settings.gamma,
            Shares(settings.ce_share, settings.l1_share),
            settings.confidence_share,
        )
        self._loss = DsparkLoss(self.net, head, shape)

    def loss(self, batch: Batch, number: int) -> Loss:
        """DsparkLoss of `net`."""
        return self._loss(batch, number)

    def check(self, net: nn.Module, data: Data) -> HeldOut:
        """Walked chains on held-out answers, and how honest the confidence is."""
        assert isinstance(net, BlockNet)
        return check_paths(net, data.held_out(), self._settings.check_batches)

    def inherited(self, checkpoint: Path) -> dict[str, Tensor]:
        """Weights of an exported drafter of the same shape."""
        return inherited_block(checkpoint, self._target, self.net)

    def write(self, output: Path, net: nn.Module, name: str, provenance: Mapping[str, Any]) -> None:
        """speculators' layout, which vLLM reads; the confidence is calibrated before that."""
        assert isinstance(net, BlockNet)
        changed, found = calibrated(net, self._data, self._settings.check_batches)
        num_layers = int(self._data.target_config["num_hidden_layers"])
        told = {**provenance, "confidence_calibration": asdict(found)}
        write_block(output, changed, num_layers, name, told)


@torch.no_grad()
def start_small_heads(net: BlockNet, embedding_VC: Tensor) -> None:
    """The serial head begins without a say, the confidence at one half.

    w1 starts as the target's embedding on its R main directions, so that tokens which the target
    holds alike share what w2 learns; a random one would have to learn each token alone.
    """
    markov, confidence = net.markov_head, net.confidence_head
    assert markov is not None  # the caller made both
    assert confidence is not None
    centred_VC = embedding_VC.float() - embedding_VC.float().mean(0)
    _, directions_CC = torch.linalg.eigh(centred_VC.T @ centred_VC)
    main_VR = centred_VC @ directions_CC[:, -markov.markov_w1.embedding_dim :]
    markov.markov_w1.weight.copy_(main_VR * (W1_SPREAD / main_VR.std(0).clamp_min(1e-6)))
    markov.markov_w2.weight.zero_()
    confidence.proj.weight.zero_()
    confidence.proj.bias.zero_()
