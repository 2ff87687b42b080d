"""The EAGLE-3 family: which checkpoints belong to it, and what they say. Torch-free."""

from drafter_service.checkpoint.description import (
    CheckpointDescription,
    CheckpointFiles,
    Family,
    Variant,
)
from drafter_service.checkpoint.eagle3_formats import read_configs, read_dialect
from drafter_service.checkpoint.eagle3_names import LAYER_PREFIXES, tensor_names
from drafter_service.checkpoint.safetensors_header import TensorInfo, checkpoint_digest
from drafter_service.eagle3.config import Eagle3Config
from protos.errors import CheckpointError
from protos.features import ProjectionSpec

KIND = "eagle3"


def recognise_eagle3(files: CheckpointFiles) -> bool:
    """By its config's markers, or by the norm on the hidden branch of the first layer."""
    config = files.config
    if "speculators_model_type" in config:
        return config["speculators_model_type"] in ("eagle3", "peagle")
    if "block_size" in config or "dflash_config" in config:
        return False
    names = files.bare_names
    return (
        any("eagle3" in str(name).lower() for name in config.get("architectures") or [])
        or "eagle_config" in config
        or "draft_vocab_size" in config
        or any(f"{prefix}hidden_norm.weight" in names for prefix in LAYER_PREFIXES)
    )


def describe_eagle3(files: CheckpointFiles) -> CheckpointDescription[Eagle3Config]:
    """Raises CheckpointError, naming what is missing, unknown or of the wrong shape."""
    tensors = files.tensors
    variants = read_configs(files.config, tensors, files.num_target_layers)
    config = next(iter(variants.values()))
    names = tensor_names(config, tensors)
    _check_vocabulary(config, tensors)
    digest = checkpoint_digest(files.directory)
    return CheckpointDescription(
        kind=KIND,
        format=read_dialect(files.config).name,
        digest=digest,
        config=config,
        names=names,
        tensors=tensors,
        projection=_projection(files, digest, config, names),
        aux_layers=config.aux_layers,
        vocab_size=config.vocab_size,
        draft_vocab_size=config.draft_vocab_size,
        target_hidden_size=config.target_hidden_size,
        own_embedding="embed_tokens.weight" in names,
        own_lm_head="lm_head.weight" in names,
        variants=tuple(
            Variant(label, variant, variant.aux_layers) for label, variant in variants.items()
        )
        if len(variants) > 1
        else (),
    )


EAGLE3 = Family("EAGLE-3", recognise_eagle3, describe_eagle3)


def _check_vocabulary(config: Eagle3Config, tensors: dict[str, TensorInfo]) -> None:
    maps = {name.removeprefix("model."): info for name, info in tensors.items()}
    reduced = config.draft_vocab_size != config.vocab_size
    if reduced and "d2t" not in maps:
        raise CheckpointError(
            f"draft vocabulary of {config.draft_vocab_size} out of {config.vocab_size} without d2t"
        )
    for name, size in (("d2t", config.draft_vocab_size), ("t2d", config.vocab_size)):
        if name in maps and maps[name].shape != (size,):
            raise CheckpointError(f"{name}: expected shape ({size},), got {maps[name].shape}")


def _projection(
    files: CheckpointFiles, digest: str, config: Eagle3Config, names: dict[str, str]
) -> ProjectionSpec | None:
    """None for a head that takes its one feature as it is."""
    if not config.has_fc:
        return None
    norms: tuple[str, ...] = ()
    form = "none"
    if config.norm_before_fc:
        norms, form = (names["input_norm.weight"],), "concat"
    elif config.fc_norm:
        norms = tuple(names[f"fc_norm.{aux}.weight"] for aux in range(config.num_aux))
        form = "each"
    fc_bias = names["fc.bias"] if config.fc_bias else ""
    parts = [names["fc.weight"], *norms, *([fc_bias] if fc_bias else [])]
    holders = {files.tensors[name].file for name in parts}
    if len(holders) != 1:
        raise CheckpointError(f"fc and its norms are spread over several files: {sorted(holders)}")
    return ProjectionSpec(
        digest=digest,
        aux_layers=config.aux_layers,
        width=config.hidden_size,
        file=str(files.directory / holders.pop()),
        fc=names["fc.weight"],
        norms=norms,
        norm_eps=config.norm_eps,
        norm_form=form,
        fc_bias=fc_bias,
    )
