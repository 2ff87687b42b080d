"""An `eagle` drafter out of a checkpoint directory and its target's."""

from pathlib import Path

from drafter_service.checkpoint.eagle_reader import eagle_head_of
from drafter_service.config import DrafterSettings
from drafter_service.device import compute_device
from drafter_service.eagle.drafter import Eagle
from drafter_service.feature_head import HeadSession
from drafter_service.head_loading import (
    DTYPES,
    MIB,
    head_capabilities,
    open_checkpoint,
)
from drafter_service.service import SessionDrafter


def load_eagle(
    settings: DrafterSettings, target_dir: Path | None, incarnation: int
) -> SessionDrafter[HeadSession]:
    """Raises ConfigError, CheckpointError or IncompatiblePair, naming what is wrong."""
    opened = open_checkpoint(settings, target_dir, "eagle")
    head = eagle_head_of(
        opened.described, opened.directory, opened.shared, DTYPES[settings.dtype]
    ).to(compute_device(settings.device))
    limits = settings.limits
    algorithm = Eagle(head, limits.cache_mb * MIB, limits.max_context + limits.max_depth)
    capabilities = head_capabilities(settings, opened, incarnation, fused_width=0)
    return SessionDrafter(capabilities, algorithm, settings.idle_session_s)
