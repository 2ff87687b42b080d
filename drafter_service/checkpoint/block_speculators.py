"""speculators' config.json (vLLM) of dflash, dflash2 and dspark drafters.

Layers nest in `transformer_layer_config`; layer ids are inputs (one more than outputs); the layout
is stated by `sample_from_anchor`; windows are counted from the anchor. lm_head is in the file when
the vocabulary is reduced (`reference/dflash.md` 0, 1.10). Torch-free.
"""

from drafter_service.checkpoint.block_facts import (
    BlockFacts,
    ids_of,
    layer_masks,
    read_confidence,
    read_convolution,
    read_markov,
    read_selector,
)
from drafter_service.checkpoint.description import CheckpointFiles, Json
from drafter_service.dflash.config import Layout
from protos.errors import CheckpointError

FORMAT = "speculators"
_TYPES = ("dflash", "dflash2", "dspark")


def recognise(files: CheckpointFiles) -> bool:
    """By `speculators_model_type`."""
    return files.config.get("speculators_model_type") in _TYPES


def read_facts(files: CheckpointFiles) -> BlockFacts:
    """Raises CheckpointError for what is not supported, KeyError for what is missing."""
    config = files.config
    kind = config["speculators_model_type"]
    if config.get("projector_type", "dflash") != "dflash":
        raise CheckpointError(f"projector_type {config['projector_type']!r} is not supported")
    layer = config["transformer_layer_config"]
    inputs = ids_of(config.get("aux_hidden_state_layer_ids"))
    anchored = config.get("sample_from_anchor")
    if anchored is None:
        anchored = kind == "dspark" or bool(config.get("shift_label"))
    non_causal = config.get("sliding_window_non_causal", kind == "dflash2")
    return BlockFacts(
        layer=layer,
        layout=Layout.ANCHOR_FIRST if anchored else Layout.IN_PLACE,
        block_size=int(config.get("block_size", 8)),
        mask_id=config.get("mask_token_id"),
        aux_layers=tuple(layer_id - 1 for layer_id in inputs) if inputs else None,
        masks=layer_masks(layer, None, sliding_causal=not non_causal, from_anchor=True),
        num_target_layers=files.num_target_layers,
        target_hidden_size=config.get("target_hidden_size"),
        draft_vocab_size=config.get("draft_vocab_size"),
        convolution=read_convolution(config) if kind == "dflash2" else None,
        selector=read_selector(config) if kind == "dflash2" else None,
        markov=read_markov(_with_defaults(config)) if kind == "dspark" else None,
        confidence=read_confidence(_with_defaults(config)) if kind == "dspark" else None,
        notes=()
        if "sample_from_anchor" in config
        else (f"sample_from_anchor is not stated: {bool(anchored)}, the library's default",),
    )


def _with_defaults(config: Json) -> Json:
    """The library's own defaults of a dspark config."""
    defaults = {
        "markov_rank": 256,
        "markov_head_type": "vanilla",
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
    }
    return {**defaults, **config}
