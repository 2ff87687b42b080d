"""DeepSpec's config.json of DFlash and DSpark drafters: every key at top level.

Layout anchor-first (DeepSpec's DFlash is its DSpark without heads). Layer ids are outputs, -1 the
embedding's output. The file carries its own embedding and lm_head (`reference/dflash.md` 1.10).
Torch-free.
"""

from drafter_service.checkpoint.block_facts import (
    BlockFacts,
    ids_of,
    layer_masks,
    read_confidence,
    read_markov,
)
from drafter_service.checkpoint.block_zlab import target_depth
from drafter_service.checkpoint.description import CheckpointFiles
from drafter_service.dflash.config import Layout

FORMAT = "deepspec"


def recognise(files: CheckpointFiles) -> bool:
    """By a block size beside layer ids at top level, or by the model's name."""
    config = files.config
    if "speculators_model_type" in config or "dflash_config" in config:
        return False
    named = any("DSpark" in str(name) for name in config.get("architectures") or [])
    return "block_size" in config and ("target_layer_ids" in config or named)


def read_facts(files: CheckpointFiles) -> BlockFacts:
    """Raises CheckpointError for what is not supported, KeyError for what is missing."""
    config = files.config
    return BlockFacts(
        layer=config,
        layout=Layout.ANCHOR_FIRST,
        block_size=int(config["block_size"]),
        mask_id=config.get("mask_token_id"),
        aux_layers=ids_of(config["target_layer_ids"]),
        masks=layer_masks(config, config.get("is_causal"), sliding_causal=True),
        num_target_layers=target_depth(files),
        target_hidden_size=config.get("target_hidden_size"),
        markov=read_markov(config),
        confidence=read_confidence(config),
    )
