"""An `eagle3` drafter out of a checkpoint directory and its target's."""

from pathlib import Path

from drafter_service.checkpoint.eagle3_reader import head_of
from drafter_service.config import DrafterSettings
from drafter_service.device import compute_device
from drafter_service.eagle3.drafter import Eagle3
from drafter_service.feature_head import HeadSession
from drafter_service.head_loading import (
    DTYPES,
    MIB,
    head_capabilities,
    open_checkpoint,
)
from drafter_service.service import SessionDrafter


def load_eagle3(
    settings: DrafterSettings, target_dir: Path | None, incarnation: int
) -> SessionDrafter[HeadSession]:
    """Raises ConfigError, CheckpointError or IncompatiblePair, naming what is wrong."""
    opened = open_checkpoint(settings, target_dir, "eagle3")
    head = head_of(opened.described, opened.directory, opened.shared, DTYPES[settings.dtype])
    head = head.to(compute_device(settings.device))
    limits = settings.limits
    algorithm = Eagle3(head, limits.cache_mb * MIB, limits.max_context + limits.max_depth)
    fused_width = head.config.hidden_size if head.config.has_fc else 0
    capabilities = head_capabilities(settings, opened, incarnation, fused_width)
    return SessionDrafter(capabilities, algorithm, settings.idle_session_s)
