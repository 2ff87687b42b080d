"""The largest entries of rows, ties in the order of their index.

bf16 logits tie often, and `torch.topk` promises no order among ties. Knows nothing of what the
values mean.

Shapes: N rows, W entries of a row.
"""

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

_SLACK = 16
"""Candidates taken beyond those needed, so that a tie at the edge is settled without a sort."""


def stable_topk(
    values_NW: Tensor, count: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
    """Indices and values [N, count] of the largest entries; ties go to the lower index."""
    width = values_NW.shape[1]
    taken = min(width, count + _SLACK)
    top, indices = values_NW.topk(taken, dim=-1)
    values = top.to(torch.float64).cpu().numpy()
    columns = indices.cpu().numpy()
    order = np.lexsort((columns, -values), axis=-1)[:, :count]
    best = np.take_along_axis(columns, order, axis=-1)
    best_values = np.take_along_axis(values, order, axis=-1)
    if taken < width:
        for row in np.flatnonzero(best_values[:, -1] <= values[:, -1]):
            # The tie at the edge may go on beyond what was taken.
            sorted_row, sorted_columns = values_NW[row].sort(descending=True, stable=True)
            best[row] = sorted_columns[:count].cpu().numpy()
            best_values[row] = sorted_row[:count].to(torch.float64).cpu().numpy()
    return best, best_values
