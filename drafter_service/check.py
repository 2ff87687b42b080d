"""What a drafter's checkpoint is, as lines for people and keys for machines. Torch-free.

Facts only, as `checkpoint.describe` reads them; whether the drafter can be loaded and guesses well
is for whoever holds its target. Invariant: raises for every checkpoint that a loader would refuse
by its files' names, shapes and keys.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from drafter_service.checkpoint.describe import describe
from drafter_service.checkpoint.description import CheckpointDescription
from drafter_service.checkpoint.safetensors_header import read_checkpoint_headers, read_json
from protos.features import FINAL_LAYER

DRAFT_MODEL = "draft_model"
WIRE_BYTES = 2  # bf16, the default on the wire
_TOLD = ("vocab_size", "draft_vocab_size", "aux_layers", "target_hidden_size")


@dataclass(frozen=True, slots=True)
class CheckpointFacts:
    """kind: what loads it. described: None for a whole model, which has no parts to name."""

    kind: str
    values: Mapping[str, object]
    described: CheckpointDescription[Any] | None = None


def checkpoint_facts(directory: Path, num_target_layers: int | None) -> CheckpointFacts:
    """Format, kind, switches, layers, vocabulary, sizes, bytes on the wire.

    Raises CheckpointError, saying what is wrong with the files.
    """
    if _is_whole_model(directory):
        return CheckpointFacts(DRAFT_MODEL, _model_values(directory))
    described = describe(directory, num_target_layers)
    raw = len(described.aux_layers) * described.target_hidden_size * WIRE_BYTES
    fused = described.projection.width * WIRE_BYTES if described.projection else 0
    values: dict[str, object] = {
        "format": described.format,
        "kind": described.kind,
        "digest": described.digest,
        "aux layers": ["final" if n == FINAL_LAYER else n for n in described.aux_layers],
        "target hidden size": described.target_hidden_size,
        "vocabulary": described.vocab_size,
        "draft vocabulary": described.draft_vocab_size,
        "embedding": "its own" if described.own_embedding else "the target's",
        "lm_head": "its own" if described.own_lm_head else "the target's",
        **_config_values(described.config),
        **_sizes(described),
        "bytes per token on the wire": {"raw": raw, "fused": fused},
    }
    if described.variants:
        values["variants"] = [variant.label for variant in described.variants]
    return CheckpointFacts(described.kind, values, described)


def _is_whole_model(directory: Path) -> bool:
    """A causal language model with layers of its own from embedding to lm_head."""
    config = read_json(directory / "config.json")
    names = read_checkpoint_headers(directory)
    is_causal = any("ForCausalLM" in str(name) for name in config.get("architectures") or [])
    has_layers = any(name.endswith(".self_attn.q_proj.weight") for name in names)
    has_embedding = any(name.endswith("embed_tokens.weight") for name in names)
    parts = ("fc.weight", "hidden_norm.weight", "d2t")
    is_head = any(name.rpartition("model.")[2].endswith(parts) for name in names)
    return is_causal and has_layers and has_embedding and not is_head


def _model_values(directory: Path) -> dict[str, object]:
    config = read_json(directory / "config.json")
    wanted = ("architectures", "vocab_size", "num_hidden_layers", "hidden_size")
    found = {name: config.get(name) for name in wanted}
    return {"format": "Hugging Face", "kind": DRAFT_MODEL, **found}


def _config_values(config: object) -> dict[str, object]:
    """Every fact of a family; switches that are on as one list."""
    facts = _plain(config)
    assert isinstance(facts, dict), "a family describes its checkpoint by a dataclass"
    switches = [name for name, value in facts.items() if value is True]
    others = {n: v for n, v in facts.items() if not isinstance(v, bool) and n not in _TOLD}
    return {"switches": switches, **{name.replace("_", " "): v for name, v in others.items()}}


def _plain(value: object) -> object:
    """Dataclasses as mappings, tuples as lists, what is not there left out."""
    if is_dataclass(value):
        found = {field.name: _plain(getattr(value, field.name)) for field in fields(value)}
        return {name: item for name, item in found.items() if item not in (None, [], "")}
    if isinstance(value, tuple):
        return [] if set(value) == {None} else [_plain(item) for item in value]
    return str(value) if isinstance(value, StrEnum) else value


def _sizes(described: CheckpointDescription[Any]) -> dict[str, object]:
    used = [described.tensors[name] for name in described.names.values()]
    return {
        "tensors": len(described.tensors),
        "parameters": sum(math.prod(info.shape) for info in used),
    }
