"""Feature rows of a step: aux states gathered from the decoder, projected where a tap says so.

An aux state is the raw residual stream after a decoder layer, or for FINAL_LAYER the state after
the target's last norm (design 2). Each tap becomes one row
per token: the concatenation of its aux states, or that through a drafter's input projection, read
from the drafter's own checkpoint. Knows no slots; kv.py keeps the rows.

Shapes: R rows, H hidden_size, K = number of aux layers * H, width of the projected row.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from torch.nn import functional

from protos.errors import CheckpointError
from protos.features import FINAL_LAYER, ProjectionSpec
from verifier_service.model.linear import Linear
from verifier_service.step import TapSpec

_NORM_FORMS = ("none", "concat", "each", "after")


class Projection:
    """A drafter's input projection: [R, K] -> [R, width], by ProjectionSpec's norm_form."""

    def __init__(
        self,
        spec: ProjectionSpec,
        hidden_size: int,
        dtype: torch.dtype,
        device: torch.device | None = None,
    ) -> None:
        """device: where aux states are; None: the CPU."""
        num_layers = len(spec.aux_layers)
        joined = num_layers * hidden_size
        if spec.norm_form not in _NORM_FORMS:
            raise CheckpointError(
                f"norm_form must be one of {', '.join(_NORM_FORMS)}, not {spec.norm_form!r}"
            )
        norm_widths = {
            "none": [],
            "concat": [joined],
            "each": [hidden_size] * num_layers,
            "after": [spec.width],
        }[spec.norm_form]
        if len(spec.norms) != len(norm_widths):
            raise CheckpointError(
                f"norm_form {spec.norm_form!r} needs {len(norm_widths)} norms, "
                f"not {len(spec.norms)}"
            )
        tensors = _read(spec)
        _expect(spec.fc, tensors[spec.fc], (spec.width, joined))
        bias: torch.Tensor | None = None
        if spec.fc_bias:
            _expect(spec.fc_bias, tensors[spec.fc_bias], (spec.width,))
            bias = tensors[spec.fc_bias].to(device, dtype)
        self.fc = Linear(tensors[spec.fc].to(device, dtype), bias)
        self._norms = []
        for name, width in zip(spec.norms, norm_widths, strict=True):
            _expect(name, tensors[name], (width,))
            self._norms.append(tensors[name].to(device, dtype))
        self._form = spec.norm_form
        self._eps = spec.norm_eps

    def __call__(self, states: Sequence[torch.Tensor]) -> torch.Tensor:
        """Aux states [R, H] each, low to high -> [R, width]."""
        if self._form == "each":
            states = [
                self._norm(state, weight) for state, weight in zip(states, self._norms, strict=True)
            ]
        joined = torch.cat(list(states), dim=-1)
        if self._form == "concat":
            joined = self._norm(joined, self._norms[0])
        rows = self.fc(joined)
        return self._norm(rows, self._norms[0]) if self._form == "after" else rows

    def _norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return functional.rms_norm(x, weight.shape, weight, self._eps)


@dataclass(frozen=True, slots=True)
class _Tap:
    aux_layers: tuple[int, ...]
    width: int
    projection: Projection | None


class Taps:
    """All taps of a target: which aux layers they need, and their rows of a step."""

    def __init__(
        self,
        specs: Sequence[TapSpec],
        num_layers: int,
        hidden_size: int,
        dtype: torch.dtype,
        device: torch.device | None = None,
    ) -> None:
        self._taps: dict[str, _Tap] = {}
        for spec in specs:
            if spec.key in self._taps:
                raise CheckpointError(f"two taps share the key {spec.key!r}")
            layers = spec.aux_layers
            if not layers or list(layers) != sorted(set(layers)):
                raise CheckpointError(f"aux layers must be distinct and ascending, not {layers}")
            inner = [layer for layer in layers if layer != FINAL_LAYER]
            if inner and not 0 <= inner[0] <= inner[-1] < num_layers:
                raise CheckpointError(
                    f"aux layers {layers} are not all among the target's 0 to {num_layers - 1}"
                )
            projection = None
            if spec.projection is not None:
                if spec.projection.aux_layers != layers:
                    raise CheckpointError(
                        f"a tap of layers {layers} has a projection of {spec.projection.aux_layers}"
                    )
                projection = Projection(spec.projection, hidden_size, dtype, device)
            width = spec.projection.width if spec.projection else len(layers) * hidden_size
            self._taps[spec.key] = _Tap(layers, width, projection)

    @property
    def aux_layers(self) -> frozenset[int]:
        """Every layer some tap reads."""
        return frozenset(layer for tap in self._taps.values() for layer in tap.aux_layers)

    @property
    def widths(self) -> dict[str, int]:
        """Elements of one row, per tap."""
        return {key: tap.width for key, tap in self._taps.items()}

    @property
    def linears(self) -> list[Linear]:
        """The projections' matrices, for the invariance check."""
        return [tap.projection.fc for tap in self._taps.values() if tap.projection]

    def rows(self, states: Mapping[int, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Rows [R, width] per tap from aux states [R, H] by layer."""
        rows = {}
        for key, tap in self._taps.items():
            own = [states[layer] for layer in tap.aux_layers]
            rows[key] = torch.cat(own, dim=-1) if tap.projection is None else tap.projection(own)
        return rows


def _read(spec: ProjectionSpec) -> dict[str, torch.Tensor]:
    path = Path(spec.file)
    if not path.is_file():
        raise CheckpointError(f"the projection's file {path.name} does not exist")
    with safe_open(path, framework="pt") as file:
        names = set(file.keys())
        wanted = [spec.fc, *spec.norms, *([spec.fc_bias] if spec.fc_bias else [])]
        missing = [name for name in wanted if name not in names]
        if missing:
            raise CheckpointError(f"{path.name} has no tensor {', '.join(missing)}")
        return {name: file.get_tensor(name) for name in wanted}


def _expect(name: str, tensor: torch.Tensor, shape: tuple[int, ...]) -> None:
    if tuple(tensor.shape) != shape:
        raise CheckpointError(f"{name} must be {list(shape)}, not {list(tensor.shape)}")
