"""Which feature rows to keep for a drafter, and the input projection that makes them.

Knows capability records and the names of tensors in a checkpoint, no algorithm. Invariant: rows
are fused only with the very checkpoint that the drafter runs (its digest is compared).
"""

import hashlib
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
    files = [checkpoint / "config.json", *sorted(checkpoint.glob("*.safetensors"))]
    for path in files:
        try:
            with path.open("rb") as stream:
                while chunk := stream.read(1 << 20):
                    sha.update(chunk)
        except OSError as error:
            raise CheckpointError(f"{path.name} of {checkpoint.name} cannot be read") from error
    return sha.hexdigest()[:_DIGEST_HEX]


def _file_with(checkpoint: Path, tensor: str) -> Path:
    for path in sorted(checkpoint.glob("*.safetensors")):
        with safe_open(path, framework="pt") as weights:
            if tensor in weights.keys():  # noqa: SIM118  # not a mapping: only keys() exists
                return path
    raise CheckpointError(f"{checkpoint.name} holds no tensor {tensor}")
