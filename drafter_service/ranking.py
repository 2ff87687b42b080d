"""Ranking a node's children: log-probabilities, or the target's own noise added (design 4).

At temperature 0 a child's score is its log-probability over the draft vocabulary. Above, the values
are logits / T + gumbel(seed, position, target id), after the request's filters, and the score is
their log-softmax: the noise that will decide the target's choice is known, so guessing means
guessing with it (Gumbel coupling, arXiv 2408.07978).

Ties go to the lower index in the draft vocabulary (bf16 logits tie often), which `torch.topk` alone
does not promise.

Shapes: N rows, W draft vocabulary, M children ranked per row, P distinct (seed, position) pairs.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from protos.noise import Purpose, gumbel
from protos.params import SamplingParams

_SLACK = 16
"""Candidates taken beyond those needed, so that a tie at the edge is settled without a sort."""


@dataclass(frozen=True, slots=True)
class NodeRows:
    """`num_rows` consecutive rows whose children stand at `position`, for one request."""

    num_rows: int
    params: SamplingParams
    position: int


@dataclass(frozen=True, slots=True)
class Ranked:
    """Per row: target ids [N, M] and log-scores [N, M] of the best children, best first; and [N]
    whether all values were finite.

    A score of -inf marks an id that the filters removed.
    """

    ids: npt.NDArray[np.int64]
    scores: npt.NDArray[np.float64]
    finite: npt.NDArray[np.bool_]


def rank_children(
    logits_NW: Tensor, groups: Sequence[NodeRows], target_ids_W: Tensor, count: int
) -> Ranked:
    """The best `count` children of every row; groups follow each other in row order."""
    count = min(count, logits_NW.shape[1])
    greedy = [group.params.greedy for group in groups for _ in range(group.num_rows)]
    if all(greedy):
        return _rank(logits_NW, target_ids_W, count)
    values: list[Tensor] = []
    first = 0
    for group in groups:
        rows = slice(first, first + group.num_rows)
        first = rows.stop
        if not group.params.greedy:
            values.append(_noised(logits_NW[rows], group, target_ids_W))
    sampled = _rank(torch.cat(values), target_ids_W, count)
    if not any(greedy):
        return sampled
    # Greedy rows stay in float32, so that they score the same in any company.
    greedy_N = np.array(greedy)
    ranked = _rank(logits_NW[torch.from_numpy(greedy_N)], target_ids_W, count)
    ids = np.empty((len(greedy), count), np.int64)
    scores = np.empty((len(greedy), count), np.float64)
    finite = np.empty(len(greedy), np.bool_)
    for which_N, part in ((greedy_N, ranked), (~greedy_N, sampled)):
        ids[which_N], scores[which_N], finite[which_N] = part.ids, part.scores, part.finite
    return Ranked(ids, scores, finite)


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


def _rank(values_NW: Tensor, target_ids_W: Tensor, count: int) -> Ranked:
    indices, values = stable_topk(values_NW, count)
    norm_N = values_NW.logsumexp(-1).to(torch.float64).cpu().numpy()
    finite_N = np.isfinite(norm_N)
    norm_N = np.where(finite_N, norm_N, 0.0)
    scores = values - norm_N[:, None]
    return Ranked(target_ids_W.cpu().numpy()[indices], scores, finite_N)


def _noised(logits_NW: Tensor, group: NodeRows, target_ids_W: Tensor) -> Tensor:
    """logits / T after the filters, plus the noise of the children's position; float64 [N, W]."""
    params = group.params
    scaled_NW = _filtered(logits_NW / params.temperature, params)
    position = torch.tensor([group.position])
    noise_1W = gumbel(params.seed, Purpose.CHOICE, position, target_ids_W)
    return scaled_NW.to(torch.float64) + noise_1W


def _filtered(scaled_NW: Tensor, params: SamplingParams) -> Tensor:
    """Remove what the request's min-p, top-k and top-p would remove from the drafter's own
    distribution: the target cannot choose there either, as far as the two agree."""
    width = scaled_NW.shape[1]
    if params.min_p > 0.0:
        floor_N1 = scaled_NW.amax(-1, keepdim=True) + math.log(params.min_p)
        scaled_NW = scaled_NW.masked_fill(scaled_NW < floor_N1, float("-inf"))
    if 0 < params.top_k < width:
        least_N1 = scaled_NW.topk(params.top_k, dim=-1).values[:, -1:]
        scaled_NW = scaled_NW.masked_fill(scaled_NW < least_N1, float("-inf"))
    if params.top_p < 1.0:
        ordered_NW, columns_NW = scaled_NW.sort(dim=-1, descending=True, stable=True)
        probs_NW = ordered_NW.softmax(-1)
        outside_NW = probs_NW.cumsum(-1) - probs_NW >= params.top_p
        outside_NW[:, 0] = False
        removed_NW = torch.zeros_like(outside_NW).scatter(-1, columns_NW, outside_NW)
        scaled_NW = scaled_NW.masked_fill(removed_NW, float("-inf"))
    return scaled_NW
