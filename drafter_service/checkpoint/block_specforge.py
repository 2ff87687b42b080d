"""SpecForge's config.json of DFlash and DSpark drafters: z-lab's form with a `projector_type`.

DFlash is trained in place, DSpark anchor-first (slot k predicts the position after it), whatever
SpecForge's own generation helper does (`reference/dflash.md` 0). Torch-free.
"""

from dataclasses import replace

from drafter_service.checkpoint import block_zlab
from drafter_service.checkpoint.block_facts import BlockFacts, read_confidence, read_markov
from drafter_service.checkpoint.description import CheckpointFiles
from drafter_service.dflash.config import Layout
from protos.errors import CheckpointError

FORMAT = "specforge"
_PROJECTORS = ("dflash", "dspark")
_PLAIN_ATTENTION = (None, "gqa", "mha", "full")


def recognise(files: CheckpointFiles) -> bool:
    """By `projector_type` inside `dflash_config`."""
    return "projector_type" in (files.config.get("dflash_config") or {})


def read_facts(files: CheckpointFiles) -> BlockFacts:
    """Raises CheckpointError for a projector or an attention that is not done here."""
    fields = dict(files.config["dflash_config"])
    projector = fields.pop("projector_type")
    if projector not in _PROJECTORS:
        raise CheckpointError(
            f"projector_type {projector!r} is not supported, only {', '.join(_PROJECTORS)}"
        )
    mode = fields.get("attention_mode")
    if mode not in _PLAIN_ATTENTION:
        raise CheckpointError(f"attention_mode {mode!r} is not supported")
    facts = block_zlab.read_facts(replace(files, config={**files.config, "dflash_config": fields}))
    if projector == "dflash":
        return facts
    return replace(
        facts,
        layout=Layout.ANCHOR_FIRST,
        markov=read_markov(fields),
        confidence=read_confidence(fields),
        notes=("the layout is not stated: anchor-first, as SpecForge trains DSpark",),
    )
