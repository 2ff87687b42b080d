"""Log probabilities of tokens under the target's raw distribution, before any processing.

float32 log-softmax of a row, the token's own value and the best ids. Knows rows, not requests.
Invariant: a row's values depend on its logits alone, ties of the best go to the lowest id.

Shapes: N rows asked for, V vocabulary.
"""

from collections.abc import Sequence
from typing import Final

import torch

from protos.generation import TokenLogprobs

_MAX_ELEMENTS: Final = 2**24
"""Of rows looked at together: a temporary in float32 stays within 64 MiB."""


def token_logprobs(
    logits: torch.Tensor, rows: Sequence[int], tokens: Sequence[int], num_top: int
) -> list[TokenLogprobs]:
    """Of the token chosen at each of these rows of logits [*, V], with the num_top best ids."""
    found: list[TokenLogprobs] = []
    size = max(1, _MAX_ELEMENTS // logits.shape[1])
    for first in range(0, len(rows), size):
        part = torch.tensor(rows[first : first + size], device=logits.device)
        picked_NV = torch.log_softmax(logits.index_select(0, part).to(torch.float32), dim=-1)
        own = torch.tensor(tokens[first : first + size], device=logits.device)
        values = picked_NV.gather(1, own.unsqueeze(1)).squeeze(1).tolist()
        tops = [_best(row_V, num_top) for row_V in picked_NV]
        found += [TokenLogprobs(value, top) for value, top in zip(values, tops, strict=True)]
    return found


def _best(logprobs_V: torch.Tensor, num_top: int) -> tuple[tuple[int, float], ...]:
    if not num_top:
        return ()
    count = min(num_top, logprobs_V.shape[0])
    # Ties of the last come along, and a stable sort puts the lowest id first.
    ids = torch.nonzero(logprobs_V >= torch.topk(logprobs_V, count).values[-1]).squeeze(1)
    values, order = torch.sort(logprobs_V[ids], descending=True, stable=True)
    return tuple(zip(ids[order][:count].tolist(), values[:count].tolist(), strict=True))
