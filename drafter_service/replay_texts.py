"""Recorded texts out of tensors that a trainer holds, for replaying heads that are in training.

Knows no file. Shapes: N rows, A raw feature width.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from drafter_service.rows import TORCH_DTYPES
from protos.errors import MalformedRows
from protos.features import FeatureRows
from protos.params import SamplingParams
from protos.recorded import RecordedText

_ROW_TYPES = {dtype: row_type for row_type, dtype in TORCH_DTYPES.items()}


@dataclass(frozen=True, slots=True)
class TensorRows:
    """Raw rows [N, A] of one text, whatever layers they are of."""

    rows_NA: Tensor  # noqa: N815  # shape suffix

    def __call__(self, aux_layers: Sequence[int]) -> FeatureRows:
        """See `RawRows`."""
        rows = self.rows_NA
        if rows.dim() != 2 or rows.dtype not in _ROW_TYPES:
            raise MalformedRows(f"rows are [N, A] floats, not {list(rows.shape)} of {rows.dtype}")
        data = rows.detach().to("cpu").contiguous().view(torch.uint8).numpy().tobytes()
        return FeatureRows(0, len(rows), rows.shape[1], _ROW_TYPES[rows.dtype], data)


def text_of(
    ids: Sequence[int],
    prompt_len: int,
    rows_NA: Tensor,
    params: SamplingParams,
    max_len: int | None = None,
) -> RecordedText:
    """Prompt and answer, with the rows that a head takes, one per token (the last may be missing).

    params: as the answer was made, seed included. max_len: tokens at which it would have been cut;
    the text's own length when it is not known, so that nothing is drafted past its end.
    """
    length = len(ids)
    end = max(length, max_len or 0)
    return RecordedText(tuple(ids), prompt_len, length, end, params, TensorRows(rows_NA))
