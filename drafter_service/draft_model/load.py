"""A `draft_model` drafter out of a Hugging Face directory, beside its target's.

Facts of the model come from its own directory (its own configuration decides, not the target's);
limits come from the settings. The target's directory is needed for one thing: to see that both
speak one vocabulary.
"""

import logging
from pathlib import Path

import torch

from drafter_service.cache import KvSlab
from drafter_service.checkpoint.safetensors_header import read_json
from drafter_service.config import DrafterSettings
from drafter_service.device import compute_device
from drafter_service.draft_model.attention import PackedRows
from drafter_service.draft_model.drafter import DraftModel
from drafter_service.draft_model.model import (
    PackedModel,
    kv_shape,
    num_positions,
    read_model,
    text_config,
)
from drafter_service.draft_model.session import ModelSession
from drafter_service.draft_model.vocabulary import VocabularySizes, num_draftable
from drafter_service.service import SessionDrafter
from protos.digest import directory_digest
from protos.errors import CheckpointError, ConfigError
from protos.exchange import Capabilities, PlanKind

logger = logging.getLogger(__name__)

_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
_MIB = 1024 * 1024


def load_draft_model(
    settings: DrafterSettings, target_dir: Path | None, incarnation: int
) -> SessionDrafter[ModelSession]:
    """Raises ConfigError, CheckpointError or IncompatiblePair, naming what is wrong."""
    directory = Path(settings.checkpoint)
    if not settings.checkpoint or not directory.is_dir():
        raise ConfigError("kind draft_model needs `checkpoint`: the directory of a causal model")
    model = read_model(directory, _DTYPES[settings.dtype]).to(compute_device(settings.device))
    config = text_config(model)
    num_ids = vocab_size = int(config.vocab_size)
    target_digest = ""
    if target_dir is not None:
        sizes = VocabularySizes(vocab_size, _vocab_size(target_dir))
        num_ids = num_draftable(directory, target_dir, sizes)
        vocab_size = sizes.target
        target_digest = directory_digest(target_dir)
    num_kv_heads, head_dim = kv_shape(config)
    dtype, num_layers = _DTYPES[settings.dtype], int(config.num_hidden_layers)
    num_bytes = settings.limits.cache_mb * _MIB
    slab = KvSlab(num_bytes, num_kv_heads, head_dim, dtype, model.device, num_layers)
    packed = PackedModel(model, slab, num_ids)
    _try(packed)
    context = min(settings.limits.max_context, num_positions(config))
    if context < settings.limits.max_context:
        logger.info("%s drafts up to its own context of %d tokens", settings.label, context)
    capabilities = _capabilities(
        settings, incarnation, directory_digest(directory), target_digest, vocab_size, context
    )
    algorithm = DraftModel(packed, slab, num_layers)
    return SessionDrafter(capabilities, algorithm, settings.idle_session_s)


def _try(packed: PackedModel) -> None:
    """One token through the model: what its family asks of attention shows now."""
    logits = packed.step([0], [PackedRows(0, 0, 1, (0,))], [0])
    if not bool(torch.isfinite(logits).all()):
        raise CheckpointError("the draft model's logits are not finite")


def _vocab_size(directory: Path) -> int:
    """Rows of the target's embedding, as its configuration says."""
    config = read_json(directory / "config.json")
    size = config.get("vocab_size", config.get("text_config", {}).get("vocab_size"))
    if not isinstance(size, int):
        raise CheckpointError("the target's config.json states no vocab_size")
    return size


def _capabilities(
    settings: DrafterSettings,
    incarnation: int,
    digest: str,
    target_digest: str,
    vocab_size: int,
    max_context: int,
) -> Capabilities:
    limits = settings.limits
    return Capabilities(
        kind=settings.kind,
        name=settings.label,
        incarnation=incarnation,
        plan_kinds=(PlanKind.CHAIN, PlanKind.TREE, PlanKind.STATIC),
        digest=digest,
        target_digest=target_digest,
        vocab_size=vocab_size,
        max_context=max_context,
        max_sessions=limits.max_sessions,
        max_depth=limits.max_depth,
        max_width=limits.max_width,
        max_nodes=limits.max_nodes,
        gives_q=True,
    )
