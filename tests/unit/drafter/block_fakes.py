"""A tiny block drafter and the public training case, for the tests of block recipes."""

import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file

from drafter_service.checkpoint.block_reader import read_block_net
from drafter_service.checkpoint.describe import describe
from drafter_service.checkpoint.target import TargetWeights
from drafter_service.dflash.config import BlockConfig, LayerMask, Layout
from drafter_service.dflash.net import BlockNet
from drafter_service.eagle3.config import Rope
from drafter_service.training.batches import Batch
from drafter_service.training.block_start import new_block_net
from drafter_service.training.first_weights import FROZEN
from drafter_service.training.norms import with_trained_norms
from tests.unit.drafter.training_fakes import HIDDEN, LAYERS, VOCAB, one_record_batch

GOLDEN = Path(__file__).resolve().parents[4] / "shared" / "golden" / "dflash" / "training"
BLOCK = 4


def tiny_block_config(**changes) -> BlockConfig:
    facts = {
        "layout": Layout.IN_PLACE,
        "block_size": BLOCK,
        "mask_id": 1,
        "hidden_size": HIDDEN,
        "target_hidden_size": HIDDEN,
        "aux_layers": LAYERS,
        "masks": (LayerMask(), LayerMask()),
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 8,
        "intermediate_size": 32,
        "rope": Rope(theta=10000.0),
        "norm_eps": 1e-5,
        "vocab_size": VOCAB,
        "draft_vocab_size": VOCAB,
    }
    return BlockConfig(**{**facts, **changes})


def tiny_target(seed: int = 3) -> TargetWeights:
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(VOCAB, HIDDEN, generator=generator)
    return TargetWeights(rows, torch.rand(HIDDEN, generator=generator) + 0.5, rows)


def tiny_block(seed: int = 0, **changes) -> BlockNet:
    return new_block_net(tiny_block_config(**changes), tiny_target(), seed)


class PublicCase:
    """Two texts with fixed anchors and masks, as the public training code saw them."""

    def __init__(self, name: str, into: Path) -> None:
        into.mkdir(parents=True, exist_ok=True)
        shutil.copy(GOLDEN / f"{name}.config.json", into / "config.json")
        shutil.copy(GOLDEN / f"{name}.model.safetensors", into / "model.safetensors")
        target = load_file(GOLDEN / "target.safetensors")
        embedding, lm_head = target["model.embed_tokens.weight"], target["lm_head.weight"]
        self.net = read_block_net(into, describe(into), embedding, lm_head, torch.float32)
        with_trained_norms(self.net)
        for parameter_name, parameter in self.net.named_parameters():
            parameter.requires_grad_(parameter_name not in FROZEN)
        self.lm_head = lm_head
        self.io = load_file(GOLDEN / "io.safetensors")

    def batch(self, text: int) -> Batch:
        """Row t holds the feature of token t and token t + 1; its target follows the latter."""
        ids, final = self.io["input_ids"][text], self.io["target_last_hidden_post_norm"][text]
        choices = (final[1:] @ self.lm_head.T).argmax(-1)
        return one_record_batch(self.io["features"][text][:-1], ids[1:], final[1:], choices)

    def kept(self, text: int, name: str) -> torch.Tensor:
        """A tensor per anchor, without those that only pad."""
        return self.io[name][text][self.io["anchor_keep"][text]]

    def anchors(self, text: int) -> torch.Tensor:
        """Answer rows whose token is an anchor."""
        return self.kept(text, "anchors") - 1
