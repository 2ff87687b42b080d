"""Feature rows off the wire into tensors. Checks nothing: sizes and types were checked on entry."""

from collections.abc import Sequence

import torch
from torch import Tensor

from protos.features import DType, FeatureRows

TORCH_DTYPES = {
    DType.BF16: torch.bfloat16,
    DType.FP32: torch.float32,
    DType.FP16: torch.float16,
}


def decode_rows(pieces: Sequence[FeatureRows]) -> Tensor:
    """One tensor [N, width] out of pieces of one width and type, in their order."""
    first = pieces[0]
    # A bytearray, because torch warns about read-only buffers.
    data = bytearray().join(piece.data for piece in pieces)
    return torch.frombuffer(data, dtype=TORCH_DTYPES[first.dtype]).view(-1, first.width)
