"""Which model families are served, and the refusal, by name, of all others.

A family is listed when a tiny model of it was compared with transformers' own `generate`, token
for token, through paged attention and drafts (tests/unit/model/family_cases.py). Knows configs
only, so that a wrong target is refused before its weights are read.
"""

from pathlib import Path
from typing import Final

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, PreTrainedConfig

from protos.errors import CheckpointError, ConfigError

SERVED: Final = (
    "gemma2",
    "gemma3",
    "gemma3_text",
    "gpt2",
    "gpt_oss",
    "llama",
    "mistral",
    "mixtral",
    "olmo2",
    "olmo3",
    "phi3",
    "qwen2",
    "qwen3",
    "qwen3_moe",
    "smollm3",
)
"""`model_type` of every family that is served, as its config.json says it."""

_TOO_LARGE_FOR_FP16: Final = ("gemma2", "gemma3", "gemma3_text")
"""Families whose states leave float16's range, trained in bfloat16 as they are."""


def read_config(directory: Path) -> PreTrainedConfig:
    """The config of the target in `directory`.

    Raises CheckpointError when there is none, or what it describes is not served.
    """
    if not (directory / "config.json").is_file():
        raise CheckpointError(f"{directory.name} holds no config.json")
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(
            directory, local_files_only=True, trust_remote_code=False
        )
    except (OSError, ValueError, KeyError, TypeError, StrictDataclassError) as error:
        # What transformers raises for unknown model types, broken JSON and values of a wrong type.
        reason = str(error).strip().partition("\n")[0]
        raise CheckpointError(f"{directory.name}: config.json is not served: {reason}") from error
    refuse_unserved(config, directory.name)
    return config


def refuse_unserved(config: PreTrainedConfig, name: str) -> None:
    """Raise CheckpointError when the model called `name` is not among those that are served."""
    if config.model_type not in SERVED:
        what = f"model_type {config.model_type!r}"
        if getattr(config, "is_encoder_decoder", False):
            what += " has an encoder, and"
        raise CheckpointError(
            f"{name}: {what} is not among the families that are served: {', '.join(SERVED)}"
        )
    quantised = getattr(config, "quantization_config", None)
    if quantised:
        values = quantised if isinstance(quantised, dict) else quantised.to_dict()
        method = str(values.get("quant_method", "of an unnamed method"))
        raise CheckpointError(
            f"{name}: quantised weights ({method}) are not served; save it in bf16 first"
        )


def refuse_dtype(config: PreTrainedConfig, dtype: torch.dtype) -> None:
    """Raise ConfigError when the family does not compute in `dtype`."""
    if dtype == torch.float16 and config.model_type in _TOO_LARGE_FOR_FP16:
        raise ConfigError(f"dtype: fp16 overflows in {config.model_type} models; use bf16 or fp32")
