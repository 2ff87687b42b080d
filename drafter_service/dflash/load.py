"""A `dflash` or `dspark` drafter out of a checkpoint directory and its target's.

The kinds differ in what their checkpoints hold, not in how they are loaded. Facts of the drafter
come from its checkpoint; limits come from the settings.
"""

from dataclasses import replace
from pathlib import Path

from drafter_service.checkpoint.block_reader import read_block_net
from drafter_service.config import DrafterSettings
from drafter_service.device import compute_device
from drafter_service.dflash.config import BlockConfig
from drafter_service.dflash.drafter import BlockDrafter
from drafter_service.dflash.session import BlockSession
from drafter_service.head_loading import (
    DTYPES,
    MIB,
    head_capabilities,
    open_checkpoint,
)
from drafter_service.service import SessionDrafter
from protos.errors import CheckpointError
from protos.exchange import PlanKind


def load_block(
    settings: DrafterSettings, target_dir: Path | None, incarnation: int
) -> SessionDrafter[BlockSession]:
    """Raises ConfigError, CheckpointError or IncompatiblePair, naming what is wrong."""
    opened = open_checkpoint(settings, target_dir, settings.kind)
    config: BlockConfig = opened.described.config
    if config.aux_layers[0] < 0:
        raise CheckpointError(
            "target_layer_ids has -1: a verifier does not send rows of the embedding's output"
        )
    shared, limits = opened.shared, settings.limits
    net = read_block_net(
        opened.directory,
        opened.described,
        shared.embed_tokens,
        shared.lm_head,
        DTYPES[settings.dtype],
    )
    net = net.to(compute_device(settings.device))
    algorithm = BlockDrafter(net, limits.cache_mb * MIB, limits.max_context)
    fused_width = config.hidden_size if opened.described.projection else 0
    capabilities = replace(
        head_capabilities(settings, opened, incarnation, fused_width),
        plan_kinds=(PlanKind.CHAIN, PlanKind.TREE, PlanKind.BLOCK),
        max_depth=min(limits.max_depth, config.num_drafts),
        gives_q=True,
    )
    return SessionDrafter(capabilities, algorithm, settings.idle_session_s)
