"""Which feature rows to keep for a drafter, and the input projection that makes them.

Knows capability records and the names of tensors in a checkpoint, no algorithm. Invariant: rows
are fused only with the very checkpoint that the drafter runs (its digest is compared).
"""

import hashlib
import json
from pathlib import Path

from safetensors import safe_open

from protos.errors import CheckpointError, IncompatiblePair
from protos.exchange import Capabilities
from protos.features import DType, FeatureForm, ProjectionSpec
from verifier_service.engine.draft_form import RowForm
from verifier_service.step import TapSpec

_DIGEST_HEX = 32


def tap_for(capabilities: Capabilities, checkpoint: Path | None) -> TapSpec | None:
    """The rows to keep for a drafter: fused when its checkpoint is here, else raw; None: none.

    Raises CheckpointError or IncompatiblePair when the checkpoint cannot be the drafter's.
    """
    if not capabilities.aux_layers:
        return None
    projection = capabilities.projection
    if checkpoint is None or projection is None or not capabilities.fused_width:
        return TapSpec(capabilities.digest, capabilities.aux_layers)
    digest = _digest(checkpoint)
    if digest != capabilities.digest:
        raise IncompatiblePair(
            f"the checkpoint given for drafter {capabilities.name} has digest {digest}, "
            f"the drafter runs {capabilities.digest}"
        )
    spec = ProjectionSpec(
        digest=digest,
        aux_layers=capabilities.aux_layers,
        width=capabilities.fused_width,
        file=str(_file_with(checkpoint, projection.fc)),
        fc=projection.fc,
        norms=projection.norms,
        norm_eps=projection.norm_eps,
        norm_form=projection.norm_form,
        fc_bias=projection.fc_bias,
    )
    return TapSpec(digest, capabilities.aux_layers, spec)


def row_form(tap: TapSpec, width: int, dtype: DType) -> RowForm:
    """The rows under a tap as the draft exchange describes them."""
    form = FeatureForm.RAW if tap.projection is None else FeatureForm.FUSED
    return RowForm(form, width, dtype, tap.key)


def _digest(checkpoint: Path) -> str:
    """As drafters report it: sha256 over config.json and the weight files, in order of name."""
    sha = hashlib.sha256()
    for path in [checkpoint / "config.json", *_weight_files(checkpoint)]:
        try:
            with path.open("rb") as stream:
                while chunk := stream.read(1 << 20):
                    sha.update(chunk)
        except OSError as error:
            raise CheckpointError(f"{path.name} of {checkpoint.name} cannot be read") from error
    return sha.hexdigest()[:_DIGEST_HEX]


def _weight_files(checkpoint: Path) -> list[Path]:
    """The files an index names, or the one file; others beside them are strays."""
    index = checkpoint / "model.safetensors.index.json"
    if not index.is_file():
        return [checkpoint / "model.safetensors"]
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise CheckpointError(f"{index.name} of {checkpoint.name} cannot be read") from error
    if strange := [name for name in names if Path(str(name)).name != name]:
        raise CheckpointError(f"{index.name} of {checkpoint.name} names {strange[0]!r}")
    return [checkpoint / name for name in names]


def _file_with(checkpoint: Path, tensor: str) -> Path:
    for path in _weight_files(checkpoint):
        with safe_open(path, framework="pt") as weights:
            if tensor in weights.keys():  # noqa: SIM118  # not a mapping: only keys() exists
                return path
    raise CheckpointError(f"{checkpoint.name} holds no tensor {tensor}")
