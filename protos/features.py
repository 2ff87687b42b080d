"""Feature rows: what a drafter eats besides tokens, as bytes and descriptors without tensors.

Row t belongs to token t and holds the target's aux states of that token: `raw` (concatenated,
low to high) or `fused` (already through the drafter's input projection). Rows trail tokens by
one: T committed tokens come with T - 1 rows, because the anchor has not been through the target.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from protos.errors import MalformedRows

FINAL_LAYER: Final = 65535
"""As an aux layer: the state after the target's last norm (design 2's `final`). Sorts last."""


class DType(StrEnum):
    """Element type of rows on the wire, always little-endian."""

    BF16 = "bf16"
    FP32 = "fp32"
    FP16 = "fp16"

    @property
    def num_bytes(self) -> int:
        """Bytes of one element."""
        return 4 if self is DType.FP32 else 2


class FeatureForm(StrEnum):
    """What a drafter wants to be sent."""

    NONE = "none"
    RAW = "raw"
    FUSED = "fused"


@dataclass(frozen=True, slots=True)
class FeatureRows:
    """Rows [start, start + count) of one session, `width` elements each, row-major."""

    start: int
    count: int
    width: int
    dtype: DType
    data: bytes

    def __post_init__(self) -> None:
        if self.start < 0 or self.count < 1 or self.width < 1:
            raise MalformedRows(
                f"rows need start >= 0, count and width >= 1, not {self.start}, {self.count}, "
                f"{self.width}"
            )
        expected = self.count * self.width * self.dtype.num_bytes
        if len(self.data) != expected:
            raise MalformedRows(
                f"{self.count} rows of {self.width} {self.dtype} elements are {expected} bytes, "
                f"not {len(self.data)}"
            )

    @property
    def end(self) -> int:
        """One past the last row."""
        return self.start + self.count


@dataclass(frozen=True, slots=True)
class ProjectionSpec:
    """Where a verifier finds a drafter's input projection, and how it is applied.

    aux_layers are design 2's (the raw residual stream after that decoder layer, from 0). `width`
    is the fused row's. `file` is a safetensors file; `fc`, `fc_bias` (where there is one) and
    `norms` name tensors in it.
    norm_form: `none`; `concat` (one RMSNorm over the concatenation); `each` (one per aux layer);
    `after` (one RMSNorm on the projected row, DFlash).
    """

    digest: str
    aux_layers: tuple[int, ...]
    width: int
    file: str
    fc: str
    norms: tuple[str, ...] = ()
    norm_eps: float = 1e-6
    norm_form: str = "none"
    fc_bias: str = ""
