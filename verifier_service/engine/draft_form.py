"""Which feature rows a drafter is sent, decided once per connection from its capability record.

Fused rows when the drafter names a projection and the target keeps fused rows under the drafter's
digest; raw rows when the target keeps those; nothing for a drafter that needs nothing. Knows no
session and no wire.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from protos.errors import IncompatiblePair
from protos.exchange import Capabilities
from protos.features import DType, FeatureForm


@dataclass(frozen=True, slots=True)
class RowForm:
    """Rows as one session carries them. tap: the key they are read under."""

    form: FeatureForm = FeatureForm.NONE
    width: int = 0
    dtype: DType = DType.BF16
    tap: str = ""

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return self.width * self.dtype.num_bytes


@dataclass(frozen=True, slots=True)
class TargetEnd:
    """The target as the exchange must know it. taps: rows kept beside the KV, by tap key, which
    is the drafter's digest."""

    vocab_size: int
    max_context: int
    digest: str = ""
    taps: Mapping[str, RowForm] | None = None


def choose_form(capabilities: Capabilities, target: TargetEnd) -> RowForm:
    """The rows to send this drafter.

    Raises IncompatiblePair when the pair cannot work: another target, too small a vocabulary, or
    rows that the target does not keep.
    """
    if capabilities.target_digest and target.digest not in ("", capabilities.target_digest):
        raise IncompatiblePair(
            f"{capabilities.name} belongs to target {capabilities.target_digest}, "
            f"this one is {target.digest}"
        )
    if capabilities.vocab_size and capabilities.vocab_size < target.vocab_size:
        raise IncompatiblePair(
            f"{capabilities.name} knows {capabilities.vocab_size} ids, "
            f"the target has {target.vocab_size}"
        )
    widths = {FeatureForm.FUSED: capabilities.fused_width, FeatureForm.RAW: capabilities.raw_width}
    if not any(widths.values()):
        return RowForm()
    kept = (target.taps or {}).get(capabilities.digest)
    if kept is None:
        raise IncompatiblePair(
            f"{capabilities.name} needs feature rows; none are kept for its checkpoint "
            f"{capabilities.digest or '(no digest)'}"
        )
    if widths.get(kept.form, 0) != kept.width:
        raise IncompatiblePair(
            f"{capabilities.name} takes {widths[FeatureForm.FUSED]} fused or "
            f"{widths[FeatureForm.RAW]} raw elements a row, kept are {kept.width} {kept.form}"
        )
    return kept
