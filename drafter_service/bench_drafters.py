"""Random drafters of one size, one of each kind, for timing: what they draft does not matter.

All are made for a target like the embedded default (576 wide, 49,152 ids). EAGLE-3 and block
drafters have a draft vocabulary of 8,192; an EAGLE-1 head uses the whole one, as it must. The block
drafter has the usual five layers. The draft model is a fifth of the target.
"""

import tempfile
from pathlib import Path
from typing import TypeVar

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from drafter_service.build import build_drafter, fresh_incarnation
from drafter_service.config import DrafterLimits, DrafterSettings
from drafter_service.dflash.config import (
    BlockConfig,
    ConfidenceInput,
    LayerMask,
    Layout,
    Markov,
    MarkovKind,
)
from drafter_service.dflash.drafter import BlockDrafter
from drafter_service.dflash.net import BlockNet
from drafter_service.drafter import Drafter
from drafter_service.eagle.config import EagleConfig
from drafter_service.eagle.drafter import Eagle
from drafter_service.eagle.head import EagleHead
from drafter_service.eagle3.config import Eagle3Config, LayerFacts, Rope
from drafter_service.eagle3.drafter import Eagle3
from drafter_service.eagle3.head import Eagle3Head
from drafter_service.service import SessionDrafter
from protos.exchange import Capabilities, PlanKind

WIDTH, VOCAB, DRAFT_VOCAB = 576, 49152, 8192
BLOCK_SIZE = 8
_AUX = (1, 14, 26)
_ROPE = Rope(theta=100000.0)
_CACHE_BYTES = 256 << 20
_CONTEXT = 8192
Net = TypeVar("Net", EagleHead, Eagle3Head, BlockNet)


def random_ngram() -> Drafter:
    """There is nothing random about it."""
    return build_drafter(DrafterSettings(kind="ngram"))


def random_draft_model() -> Drafter:
    """A Llama of 6 layers, 288 wide: about 20 M parameters, 14 M of them its embedding."""
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=288,
        intermediate_size=768,
        num_hidden_layers=6,
        num_attention_heads=6,
        num_key_value_heads=2,
        max_position_embeddings=_CONTEXT,
        tie_word_embeddings=True,
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    with tempfile.TemporaryDirectory() as directory:
        model.save_pretrained(directory)
        settings = DrafterSettings(
            kind="draft_model", checkpoint=directory, limits=DrafterLimits(cache_mb=256)
        )
        return build_drafter(settings)


def random_eagle() -> Drafter:
    """An EAGLE-1 head of one layer over the whole vocabulary."""
    layer = LayerFacts(WIDTH, 9, 3, 64, 1536, 1e-5)
    head = _ready(EagleHead(EagleConfig(layer, _ROPE, VOCAB, _CONTEXT)))
    kinds = (PlanKind.CHAIN, PlanKind.TREE)
    capabilities = _capabilities("eagle", kinds, WIDTH, 0)
    return SessionDrafter(capabilities, Eagle(head, _CACHE_BYTES, _CONTEXT + 64), idle_s=3600.0)


def random_eagle3(mask_token_id: int | None = None) -> Drafter:
    """An EAGLE-3 head of one layer; with a mask token it drafts in parallel (P-EAGLE)."""
    config = Eagle3Config(
        hidden_size=WIDTH,
        target_hidden_size=WIDTH,
        aux_layers=_AUX,
        num_heads=9,
        num_kv_heads=3,
        head_dim=64,
        intermediate_size=1536,
        rope=_ROPE,
        norm_eps=1e-5,
        vocab_size=VOCAB,
        draft_vocab_size=DRAFT_VOCAB,
        mask_token_id=mask_token_id,
    )
    head = _ready(Eagle3Head(config, torch.arange(DRAFT_VOCAB) * 6))
    kinds = (PlanKind.CHAIN, PlanKind.TREE)
    capabilities = _capabilities("eagle3", kinds, config.feature_size, WIDTH)
    return SessionDrafter(capabilities, Eagle3(head, _CACHE_BYTES, _CONTEXT + 64), idle_s=3600.0)


def random_block(dspark: bool = False) -> Drafter:
    """A block drafter of five layers and eight slots; with DSpark's two heads if asked for."""
    config = BlockConfig(
        layout=Layout.ANCHOR_FIRST if dspark else Layout.IN_PLACE,
        block_size=BLOCK_SIZE,
        mask_id=VOCAB - 1,
        hidden_size=WIDTH,
        target_hidden_size=WIDTH,
        aux_layers=(1, 7, 14, 20, 26),
        masks=(LayerMask(),) * 5,
        num_heads=9,
        num_kv_heads=3,
        head_dim=64,
        intermediate_size=1536,
        rope=_ROPE,
        norm_eps=1e-6,
        vocab_size=VOCAB,
        draft_vocab_size=DRAFT_VOCAB,
        markov=Markov(MarkovKind.VANILLA, 64) if dspark else None,
        confidence=ConfidenceInput.HIDDEN_AND_TOKEN if dspark else None,
    )
    net = _ready(BlockNet(config))
    net.target_ids = torch.arange(DRAFT_VOCAB) * 6
    kinds = (PlanKind.CHAIN, PlanKind.TREE, PlanKind.BLOCK)
    kind = "dspark" if dspark else "dflash"
    capabilities = _capabilities(kind, kinds, config.feature_size, WIDTH, config.num_drafts)
    algorithm = BlockDrafter(net, _CACHE_BYTES, _CONTEXT)
    return SessionDrafter(capabilities, algorithm, idle_s=3600.0)


def shipped_eagle3(checkpoint: str, target: Path | None) -> Drafter:
    """A head out of a checkpoint."""
    return build_drafter(DrafterSettings(kind="eagle3", checkpoint=checkpoint), target)


def _ready(module: Net) -> Net:
    module.to(torch.bfloat16).eval().requires_grad_(False)
    module.reset_frequencies()  # they stay in float32
    return module


def _capabilities(
    kind: str,
    plan_kinds: tuple[PlanKind, ...],
    raw_width: int,
    fused_width: int,
    max_depth: int = 16,
) -> Capabilities:
    return Capabilities(
        kind=kind,
        name="random",
        incarnation=fresh_incarnation(),
        plan_kinds=plan_kinds,
        raw_width=raw_width,
        fused_width=fused_width,
        vocab_size=VOCAB,
        max_context=_CONTEXT,
        max_sessions=64,
        max_depth=max_depth,
        max_width=10,
        max_nodes=64,
    )
