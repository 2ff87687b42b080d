"""What loading any head of the EAGLE family has in common: checkpoint, target, capability record.

The target is needed for its embedding and lm_head, where the checkpoint has none, and for its
digest. Facts of a head come from its checkpoint; limits come from the settings.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from drafter_service.checkpoint.describe import describe, target_layers
from drafter_service.checkpoint.description import CheckpointDescription
from drafter_service.checkpoint.eagle3_reader import SharedWeights
from drafter_service.checkpoint.target import read_target_weights
from drafter_service.config import DrafterSettings
from protos.digest import directory_digest
from protos.errors import ConfigError, IncompatiblePair
from protos.exchange import Capabilities, PlanKind, Projection

HEADS_DIR = Path(__file__).resolve().parent / "heads"
"""Checkpoints that are shipped with the package."""

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
MIB = 1024 * 1024


@dataclass(frozen=True, slots=True)
class OpenedCheckpoint:
    """A described checkpoint and what its target lends; no digest where no target was given."""

    directory: Path
    described: CheckpointDescription[Any]
    shared: SharedWeights
    target_digest: str


def open_checkpoint(
    settings: DrafterSettings, target_dir: Path | None, kind: str
) -> OpenedCheckpoint:
    """Raises ConfigError, CheckpointError or IncompatiblePair, naming what is wrong."""
    directory = checkpoint_dir(settings.checkpoint)
    num_layers: int | None = None
    shared = SharedWeights()
    target_digest = ""
    if target_dir is not None:
        num_layers = target_layers(target_dir)
        weights = read_target_weights(target_dir)
        shared = SharedWeights(weights.embed_tokens, weights.lm_head)
        target_digest = directory_digest(target_dir)
    described = describe(directory, num_layers).choose(settings.variant)
    if described.kind != kind:
        raise ConfigError(f"the checkpoint is one of kind {described.kind}, not {kind}")
    _check_pair(described, shared.embed_tokens)
    return OpenedCheckpoint(directory, described, shared, target_digest)


def checkpoint_dir(checkpoint: str) -> Path:
    """Directory of a shipped head by its name, or of any checkpoint by its path."""
    if not checkpoint:
        raise ConfigError("this kind needs `checkpoint`: a directory or a shipped head's name")
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


def head_capabilities(
    settings: DrafterSettings, opened: OpenedCheckpoint, incarnation: int, fused_width: int
) -> Capabilities:
    """The record of a head that drafts chains and trees. fused_width 0: raw rows only."""
    described, limits = opened.described, settings.limits
    projection: Projection | None = None
    if (spec := described.projection) is not None:
        projection = Projection(spec.fc, spec.norms, spec.norm_eps, spec.norm_form, spec.fc_bias)
    return Capabilities(
        kind=settings.kind,
        name=settings.label,
        incarnation=incarnation,
        plan_kinds=(PlanKind.CHAIN, PlanKind.TREE, PlanKind.STATIC),
        digest=described.digest,
        target_digest=opened.target_digest,
        aux_layers=described.aux_layers,
        raw_width=len(described.aux_layers) * described.target_hidden_size,
        fused_width=fused_width,
        projection=projection,
        vocab_size=described.vocab_size,
        max_context=limits.max_context,
        max_sessions=limits.max_sessions,
        max_depth=limits.max_depth,
        max_width=limits.max_width,
        max_nodes=limits.max_nodes,
        gives_q=True,
    )


def _check_pair(described: CheckpointDescription[Any], embedding: torch.Tensor | None) -> None:
    """A target of another shape cannot belong to this head, whatever its rows would say."""
    expected = (described.vocab_size, described.target_hidden_size)
    if embedding is not None and tuple(embedding.shape) != expected:
        raise IncompatiblePair(
            f"the head was made for a target with an embedding of {expected}, "
            f"not {tuple(embedding.shape)}"
        )
