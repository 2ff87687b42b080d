"""Block drafters (DFlash, DFlash 2, DSpark, JetSpec): which checkpoints are, and what they say.

One reader per public format; this is the table of them. Torch-free.
"""

from collections.abc import Callable
from dataclasses import dataclass

from drafter_service.checkpoint import (
    block_deepspec,
    block_specforge,
    block_speculators,
    block_zlab,
)
from drafter_service.checkpoint.block_facts import BlockFacts, block_config
from drafter_service.checkpoint.block_names import check_maps, tensor_names
from drafter_service.checkpoint.description import (
    CheckpointDescription,
    CheckpointFiles,
    Family,
)
from drafter_service.checkpoint.safetensors_header import checkpoint_digest
from drafter_service.dflash.config import BlockConfig
from protos.errors import CheckpointError
from protos.features import ProjectionSpec

DFLASH = "dflash"
DSPARK = "dspark"


@dataclass(frozen=True, slots=True)
class _Format:
    recognise: Callable[[CheckpointFiles], bool]
    read_facts: Callable[[CheckpointFiles], BlockFacts]
    name: str = ""


_FORMATS = (
    _Format(block_speculators.recognise, block_speculators.read_facts, block_speculators.FORMAT),
    _Format(block_specforge.recognise, block_specforge.read_facts, block_specforge.FORMAT),
    _Format(block_zlab.recognise, block_zlab.read_facts),
    _Format(block_deepspec.recognise, block_deepspec.read_facts, block_deepspec.FORMAT),
)


def recognise_block(files: CheckpointFiles) -> bool:
    """Whether one of the formats takes it."""
    return any(form.recognise(files) for form in _FORMATS)


def describe_block(files: CheckpointFiles) -> CheckpointDescription[BlockConfig]:
    """Raises CheckpointError, naming what is missing, unknown, unsupported or of a wrong shape."""
    form = next((form for form in _FORMATS if form.recognise(files)), None)
    if form is None:
        raise CheckpointError("not a block drafter's config: no block_size, no dflash_config")
    config = block_config(form.read_facts(files), files.tensors)
    names = tensor_names(config, files.tensors)
    check_maps(config, files.tensors)
    digest = checkpoint_digest(files.directory)
    return CheckpointDescription(
        kind=kind_of(config),
        format=form.name or block_zlab.format_name(files.config),
        digest=digest,
        config=config,
        names=names,
        tensors=files.tensors,
        projection=_projection(files, digest, config, names),
        aux_layers=config.aux_layers,
        vocab_size=config.vocab_size,
        draft_vocab_size=config.draft_vocab_size,
        target_hidden_size=config.target_hidden_size,
        own_embedding="embed_tokens.weight" in names,
        own_lm_head="lm_head.weight" in names,
    )


BLOCK = Family("block drafters", recognise_block, describe_block)


def kind_of(config: BlockConfig) -> str:
    """`dspark` with a serial or a confidence head, else `dflash`."""
    has_heads = config.markov is not None or config.confidence is not None
    return DSPARK if has_heads else DFLASH


def _projection(
    files: CheckpointFiles, digest: str, config: BlockConfig, names: dict[str, str]
) -> ProjectionSpec | None:
    """fc, then the norm on what it makes. None when both are not in one file: raw rows then."""
    used = (names["fc.weight"], names["hidden_norm.weight"])
    holders = {files.tensors[name].file for name in used}
    if len(holders) != 1:
        return None
    return ProjectionSpec(
        digest=digest,
        aux_layers=config.aux_layers,
        width=config.hidden_size,
        file=str(files.directory / holders.pop()),
        fc=used[0],
        norms=(used[1],),
        norm_eps=config.norm_eps,
        norm_form="after",
    )
