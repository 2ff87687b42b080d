"""What a drafter's checkpoint is, told without torch: for a head node that checks a cluster.

Covers EAGLE-3 heads. Knows no tensors' values. Invariant: `describe` and the reader that loads
the weights use the same functions for config and names, so they accept the same files.
"""

from dataclasses import dataclass
from pathlib import Path

from drafter_service.checkpoint.eagle3_formats import read_config
from drafter_service.checkpoint.eagle3_names import tensor_names
from drafter_service.checkpoint.safetensors_header import (
    TensorInfo,
    checkpoint_digest,
    read_checkpoint_headers,
    read_json,
)
from drafter_service.eagle3.config import Eagle3Config
from protos.errors import CheckpointError
from protos.features import ProjectionSpec

KIND = "eagle3"


@dataclass(frozen=True, slots=True)
class CheckpointDescription:
    """`config` has every fact; `names` maps the head's parameters to tensors of the files."""

    kind: str
    digest: str
    config: Eagle3Config
    names: dict[str, str]
    tensors: dict[str, TensorInfo]
    projection: ProjectionSpec

    @property
    def has_embedding(self) -> bool:
        """False: the head uses the target's embedding."""
        return "embed_tokens.weight" in self.names


def describe(directory: Path, num_target_layers: int | None = None) -> CheckpointDescription:
    """Raises CheckpointError when the head cannot be used, saying what was expected.

    `num_target_layers` is needed by formats that do not name their aux layers.
    """
    tensors = read_checkpoint_headers(directory)
    config = read_config(read_json(directory / "config.json"), tensors, num_target_layers)
    names = tensor_names(config, tensors)
    _check_vocabulary(config, tensors)
    digest = checkpoint_digest(directory)
    projection = _projection(directory, digest, config, names, tensors)
    return CheckpointDescription(KIND, digest, config, names, tensors, projection)


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
    directory: Path,
    digest: str,
    config: Eagle3Config,
    names: dict[str, str],
    tensors: dict[str, TensorInfo],
) -> ProjectionSpec:
    if config.fc_bias:
        raise CheckpointError("fc.bias: a projection with a bias is not supported")
    norms: tuple[str, ...] = ()
    form = "none"
    if config.norm_before_fc:
        norms, form = (names["input_norm.weight"],), "concat"
    elif config.fc_norm:
        norms = tuple(names[f"fc_norm.{aux}.weight"] for aux in range(config.num_aux))
        form = "each"
    files = {tensors[name].file for name in (names["fc.weight"], *norms)}
    if len(files) != 1:
        raise CheckpointError(f"fc and its norms are spread over several files: {sorted(files)}")
    return ProjectionSpec(
        digest=digest,
        aux_layers=config.aux_layers,
        width=config.hidden_size,
        file=str(directory / files.pop()),
        fc=names["fc.weight"],
        norms=norms,
        norm_eps=config.norm_eps,
        norm_form=form,
    )
