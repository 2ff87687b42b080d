"""An `eagle3` drafter out of a checkpoint directory and its target's.

The target is needed for its embedding, where the checkpoint has none, and for its digest. Facts of
the head come from its checkpoint; limits come from the settings.
"""

from pathlib import Path

import torch

from drafter_service.checkpoint.describe import describe, target_layers
from drafter_service.checkpoint.description import CheckpointDescription
from drafter_service.checkpoint.eagle3_reader import read_eagle3_head
from drafter_service.checkpoint.target import read_target_weights
from drafter_service.config import DrafterSettings
from drafter_service.eagle3.config import Eagle3Config
from drafter_service.eagle3.drafter import Eagle3
from drafter_service.feature_head import HeadSession
from drafter_service.service import SessionDrafter
from protos.digest import directory_digest
from protos.errors import ConfigError, IncompatiblePair
from protos.exchange import Capabilities, PlanKind, Projection

HEADS_DIR = Path(__file__).resolve().parent.parent / "heads"
"""Checkpoints that are shipped with the package."""

_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
_MIB = 1024 * 1024


def load_eagle3(
    settings: DrafterSettings, target_dir: Path | None, incarnation: int
) -> SessionDrafter[HeadSession]:
    """Raises ConfigError or CheckpointError, naming what is wrong."""
    directory = checkpoint_dir(settings.checkpoint)
    num_layers: int | None = None
    embedding: torch.Tensor | None = None
    target_digest = ""
    if target_dir is not None:
        num_layers = target_layers(target_dir)
        embedding = read_target_weights(target_dir).embed_tokens
        target_digest = directory_digest(target_dir)
    described = describe(directory, num_layers)
    _check_pair(described, embedding)
    head = read_eagle3_head(directory, embedding, _DTYPES[settings.dtype], num_layers)
    head = head.to(_device(settings.device))
    limits = settings.limits
    algorithm = Eagle3(head, limits.cache_mb * _MIB, limits.max_context + limits.max_depth)
    capabilities = _capabilities(settings, described, incarnation, target_digest)
    return SessionDrafter(capabilities, algorithm, settings.idle_session_s)


def checkpoint_dir(checkpoint: str) -> Path:
    """Directory of a shipped head by its name, or of any checkpoint by its path."""
    if not checkpoint:
        raise ConfigError("kind eagle3 needs `checkpoint`: a directory or a shipped head's name")
    shipped = HEADS_DIR / checkpoint
    if Path(checkpoint).name == checkpoint and shipped.is_dir():
        return shipped
    directory = Path(checkpoint)
    if not directory.is_dir():
        names = sorted(path.name for path in HEADS_DIR.glob("*") if path.is_dir())
        raise ConfigError(
            f"checkpoint {directory.name!r} is no directory; shipped heads: {', '.join(names)}"
        )
    return directory


def _check_pair(
    described: CheckpointDescription[Eagle3Config], embedding: torch.Tensor | None
) -> None:
    """A target of another shape cannot belong to this head, whatever its rows would say."""
    config = described.config
    expected = (config.vocab_size, config.target_hidden_size)
    if embedding is not None and tuple(embedding.shape) != expected:
        raise IncompatiblePair(
            f"the head was made for a target with an embedding of {expected}, "
            f"not {tuple(embedding.shape)}"
        )


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device: cuda is not available here")
    return torch.device(name)


def _capabilities(
    settings: DrafterSettings,
    described: CheckpointDescription[Eagle3Config],
    incarnation: int,
    target_digest: str,
) -> Capabilities:
    config, projection, limits = described.config, described.projection, settings.limits
    return Capabilities(
        kind=settings.kind,
        name=settings.label,
        incarnation=incarnation,
        plan_kinds=(PlanKind.CHAIN, PlanKind.TREE),
        digest=described.digest,
        target_digest=target_digest,
        aux_layers=config.aux_layers,
        raw_width=config.feature_size,
        fused_width=config.hidden_size,
        projection=None
        if projection is None
        else Projection(projection.fc, projection.norms, projection.norm_eps, projection.norm_form),
        vocab_size=config.vocab_size,
        max_context=limits.max_context,
        max_sessions=limits.max_sessions,
        max_depth=limits.max_depth,
        max_width=limits.max_width,
        max_nodes=limits.max_nodes,
    )
