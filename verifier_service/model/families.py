"""Which model families are served, and the refusal, by name, of all others. Torch-free.

A family is listed when a tiny model of it was compared with transformers' own `generate`, token
for token, through paged attention and drafts (tests/unit/model/family_cases.py). Reads config.json
only, so that a wrong target is refused before anything is started or loaded.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from protos.errors import CheckpointError, ConfigError
from protos.features import DType

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


def check_family(directory: Path, dtype: DType | None = None) -> None:
    """Raise CheckpointError when the target in `directory` is not among those that are served.

    dtype: what it is to compute in, if that is to be looked at. Raises ConfigError when the family
    does not.
    """
    file = directory / "config.json"
    if not file.is_file():
        raise CheckpointError(f"{directory.name} holds no config.json")
    try:
        fields = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{directory.name}: config.json cannot be read: {error}") from error
    if not isinstance(fields, dict):
        raise CheckpointError(f"{directory.name}: config.json is not an object")
    family = fields.get("model_type")
    if family not in SERVED:
        raise CheckpointError(_not_served(directory.name, fields))
    method = _quantisation(fields)
    if method:
        raise CheckpointError(
            f"{directory.name}: quantised weights ({method}) are not served; save it in bf16 first"
        )
    if dtype is DType.FP16 and family in _TOO_LARGE_FOR_FP16:
        raise ConfigError(f"dtype: fp16 overflows in {family} models; use bf16 or fp32")


def _not_served(name: str, fields: Mapping[str, object]) -> str:
    if "model_type" not in fields:
        return f"{name}: config.json states no model_type"
    what = f"model_type {fields['model_type']!r}"
    if fields.get("is_encoder_decoder"):
        what += " has an encoder, and"
    return f"{name}: {what} is not among the families that are served: {', '.join(SERVED)}"


def _quantisation(fields: Mapping[str, object]) -> str:
    """The method by which a target's weights are quantised, "" when they are not."""
    text = fields.get("text_config")
    for part in (fields, text if isinstance(text, dict) else {}):
        stated = part.get("quantization_config")
        if isinstance(stated, dict):
            return str(stated.get("quant_method", "of an unnamed method"))
    return ""
