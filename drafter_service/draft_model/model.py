"""A causal language model of transformers that runs flat batches of many sessions' rows.

Any family whose attention goes through AttentionInterface: positions are explicit, the cache is
the drafter's own slab. Safetensors only, no code out of the directory, no hub. Knows no session
and no tree.

Shapes: N rows, M rows whose logits are wanted, V ids that may be drafted.
"""

import inspect
import logging
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.utils import logging as transformers_logging

from drafter_service.cache import KvSlab
from drafter_service.checkpoint.safetensors_header import read_json
from drafter_service.draft_model.attention import (
    ATTENTION_NAME,
    PackedRows,
    PackedStep,
    register_attention,
)
from protos.errors import CheckpointError

logger = logging.getLogger(__name__)


class PackedModel:
    """One model over one slab. num_ids: ids [0, num_ids) may be drafted; the rest is padding."""

    def __init__(self, model: PreTrainedModel, slab: KvSlab, num_ids: int) -> None:
        _require_served(model)
        config = text_config(model)
        self._model = model
        self._slab = slab
        self._num_layers: int = config.num_hidden_layers
        self.device = model.device
        self.num_embedded: int = config.vocab_size
        self.ids_V = torch.arange(num_ids, device=self.device)

    @torch.inference_mode()
    def step(
        self, token_ids: Sequence[int], parts: Sequence[PackedRows], wanted: Sequence[int]
    ) -> Tensor:
        """Write the rows' keys and values; logits [M, V] of the flat rows `wanted`."""
        step = PackedStep(self._slab, parts)
        positions = [position for part in parts for position in part.positions]
        output = self._model(
            input_ids=torch.tensor([token_ids], device=self.device),
            position_ids=torch.tensor([positions], device=self.device),
            use_cache=False,
            logits_to_keep=torch.tensor(wanted, dtype=torch.int64, device=self.device),
            outrider_packed=step,
        )
        if step.num_calls != self._num_layers:
            raise CheckpointError(
                f"{step.num_calls} of {self._num_layers} layers of "
                f"{type(self._model).__name__} attend through AttentionInterface"
            )
        logits_MV: Tensor = output.logits[0, :, : len(self.ids_V)]
        return logits_MV.to(torch.float32)


def read_model(
    directory: Path, dtype: torch.dtype, attention: str = ATTENTION_NAME
) -> PreTrainedModel:
    """Raises CheckpointError when the directory holds no model that can be used."""
    if not (directory / "config.json").is_file():
        raise CheckpointError(f"draft model {directory.name!r} holds no config.json")
    if read_json(directory / "config.json").get("quantization_config") is not None:
        raise CheckpointError(f"draft model {directory.name!r} is quantised: not supported")
    if not list(directory.glob("*.safetensors")):
        raise CheckpointError(f"draft model {directory.name!r} holds no safetensors weights")
    register_attention()
    was_enabled = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        model: PreTrainedModel
        model, report = AutoModelForCausalLM.from_pretrained(
            directory,
            dtype=dtype,
            attn_implementation=attention,
            local_files_only=True,
            use_safetensors=True,
            trust_remote_code=False,
            # Named below, which transformers' own error does not.
            ignore_mismatched_sizes=True,
            output_loading_info=True,
        )
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        # Such messages name directories; ours do not.
        text = str(error).replace(str(directory), directory.name)
        raise CheckpointError(f"draft model {directory.name!r}: {text}") from error
    finally:
        if was_enabled:
            transformers_logging.enable_progress_bar()
    _check_complete(directory, report)
    return model.eval().requires_grad_(False)


def _check_complete(directory: Path, report: Mapping[str, Iterable[Any]]) -> None:
    """transformers fills absent weights with random numbers; here they are an error."""
    for name, found, expected in report.get("mismatched_keys", ()):
        raise CheckpointError(
            f"draft model {directory.name!r}: {name} is {list(found)}, expected {list(expected)}"
        )
    missing = sorted(report.get("missing_keys", ()))
    if missing:
        raise CheckpointError(f"draft model {directory.name!r} lacks {', '.join(missing[:4])}")
    unknown = sorted(report.get("unexpected_keys", ()))
    if unknown:
        logger.warning("draft model %s: not used: %s", directory.name, ", ".join(unknown[:4]))


def text_config(model: PreTrainedModel) -> PreTrainedConfig:
    """The language model's configuration."""
    config: PreTrainedConfig = model.config.get_text_config()
    return config


def kv_shape(config: PreTrainedConfig) -> tuple[int, int]:
    """Key-value heads and head_dim."""
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    head_dim = getattr(config, "head_dim", None)
    return int(heads), int(head_dim or config.hidden_size // config.num_attention_heads)


def num_positions(config: PreTrainedConfig) -> int:
    """Positions the model may be run at. Raises CheckpointError for rotary scalings that look at
    more than a token's own position."""
    own = getattr(config, "max_position_embeddings", None)
    if not own:
        raise CheckpointError(f"{config.model_type} states no max_position_embeddings")
    parameters = getattr(config, "rope_parameters", None) or {}
    nested = [value for value in parameters.values() if isinstance(value, dict)]
    for rope in nested or [parameters]:
        kind = rope.get("rope_type", "default")
        if kind == "dynamic":
            raise CheckpointError(
                "rope_type 'dynamic' changes a token's rotation with its neighbours' length"
            )
        if kind == "longrope":
            # Beyond, the factors depend on the longest row of the batch.
            short = rope.get("original_max_position_embeddings") or getattr(
                config, "original_max_position_embeddings", own
            )
            own = min(own, short)
    return int(own)


def _require_served(model: PreTrainedModel) -> None:
    name = type(model).__name__
    if not model._supports_attention_backend:
        raise CheckpointError(f"{name}'s attention does not go through AttentionInterface")
    accepted = inspect.signature(model.forward).parameters
    for needed in ("position_ids", "logits_to_keep"):
        if needed not in accepted:
            raise CheckpointError(f"{name} takes no {needed}")
