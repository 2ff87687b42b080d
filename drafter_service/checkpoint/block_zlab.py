"""z-lab's config.json of DFlash v1 and DFlash 2, and JetSpec's, which adds a causal mask.

The decoder layers stand at top level, the block in `dflash_config`. v2 looks every block key up
inside first, then at top level; v1 wrote `block_size` at top level. Layout in-place. Layer ids are
outputs (`reference/dflash.md` 1.4, 1.9). Torch-free.
"""

from drafter_service.checkpoint.block_facts import (
    BlockFacts,
    ids_of,
    layer_masks,
    read_convolution,
    read_selector,
)
from drafter_service.checkpoint.description import CheckpointFiles, Json
from drafter_service.dflash.config import Layout
from protos.errors import CheckpointError

_MODELS = ("DFlashDraftModel", "DFlash2DraftModel", "JetSpecDraftModel")


def recognise(files: CheckpointFiles) -> bool:
    """By `dflash_config`, or by the model's name with a block size."""
    config = files.config
    if "speculators_model_type" in config:
        return False
    named = any(name in _MODELS for name in config.get("architectures") or [])
    return "dflash_config" in config or (named and "block_size" in config)


def format_name(config: Json) -> str:
    """Which of the dialects this is."""
    fields = dict(config.get("dflash_config") or {})
    if fields.get("causal_head") is not None:
        return "jetspec"
    return "zlab-dflash2" if fields.get("selector_rank") else "zlab-dflash"


def read_facts(files: CheckpointFiles) -> BlockFacts:
    """Raises CheckpointError for what is not supported, KeyError for what is missing."""
    config = files.config
    fields = dict(config.get("dflash_config") or {})
    projector = fields.get("projector_type", "dflash")
    if projector != "dflash":
        raise CheckpointError(f"projector_type {projector!r} is not supported in this format")
    check_fields(fields)
    values = block_values(config, fields)
    softcap = values.get("final_logit_softcapping")
    return BlockFacts(
        layer=config,
        layout=Layout.ANCHOR_FIRST if fields.get("shift_label") else Layout.IN_PLACE,
        block_size=int(values["block_size"]),
        mask_id=values.get("mask_token_id"),
        aux_layers=ids_of(values.get("target_layer_ids")),
        masks=layer_masks(config, causal_flag(config, fields), sliding_causal=True),
        num_target_layers=target_depth(files),
        target_hidden_size=fields.get("target_hidden_size"),
        draft_vocab_size=config.get("draft_vocab_size"),
        embedding_scale=float(values.get("input_embedding_scale") or 1.0),
        output_multiplier=float(values.get("output_multiplier") or 1.0),
        softcap=float(softcap) if softcap else None,
        convolution=read_convolution(fields),
        selector=read_selector(fields),
        notes=layout_notes(fields),
    )


def block_values(config: Json, fields: Json) -> Json:
    """The file's keys, a block's own value before the one at top level."""
    return {**config, **{key: value for key, value in fields.items() if value is not None}}


def target_depth(files: CheckpointFiles) -> int | None:
    """Layers of the target the drafter was made for, as the file or the target says."""
    stated = files.config.get("num_target_layers") or files.num_target_layers
    return int(stated) if stated else None


def causal_flag(config: Json, fields: Json) -> bool | None:
    """What is asked of all layers: `is_causal` (z-lab), `causal_head` (JetSpec), `causal`."""
    for value in (fields.get("causal_head"), fields.get("causal"), config.get("is_causal")):
        if value is not None:
            return bool(value)
    return None


def check_fields(fields: Json) -> None:
    """Refuse switches of engines that change the maths and are not done here."""
    if fields.get("use_swa") or fields.get("swa_window_size"):
        raise CheckpointError("dflash_config.use_swa is not supported: say layer_types instead")
    if fields.get("mask_token") and fields.get("mask_token_id") is None:
        raise CheckpointError(
            "dflash_config.mask_token names a token without an id: mask_token_id is needed"
        )
    for name in ("attention_sink_bias", "attention_value_scale"):
        if fields.get(name):
            raise CheckpointError(f"dflash_config.{name} is not supported")


def layout_notes(fields: Json) -> tuple[str, ...]:
    """The file does not name its layout unless `shift_label` is there."""
    if "shift_label" in fields:
        return ()
    return ("the layout is not stated: in-place, as this format trains",)
