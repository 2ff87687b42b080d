"""Ranking a node's children: log-probabilities, or the target's own noise added (design 4).

At temperature 0 a child's score is its log-probability over the draft vocabulary. Above, the values
are logits / T + gumbel(seed, position, target id), after the request's filters, and the score is
their log-softmax: the noise that will decide the target's choice is known, so guessing means
guessing with it (Gumbel coupling, arXiv 2408.07978).

Ties go to the lower index in the draft vocabulary. Requests that use rejection are drafted by
sampling instead (`sampled`).

Shapes: N rows, W draft vocabulary, M children ranked per row, P distinct (seed, position) pairs.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from drafter_service.sampled import draw_chain_tokens
from drafter_service.topk import stable_topk
from protos.noise import Purpose, gumbel
from protos.params import SamplingParams
from protos.sparse import SparseQ


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

    A score of -inf marks an id that the filters removed. q: per row, what the first child was
    sampled from, for requests that use rejection (else None, or nothing at all).
    """

    ids: npt.NDArray[np.int64]
    scores: npt.NDArray[np.float64]
    finite: npt.NDArray[np.bool_]
    q: tuple[SparseQ | None, ...] = ()


_Method = Callable[[Tensor, Sequence[NodeRows], Tensor, int], Ranked]


def rank_children(
    logits_NW: Tensor, groups: Sequence[NodeRows], target_ids_W: Tensor, count: int
) -> Ranked:
    """The best `count` children of every row; groups follow each other in row order.

    A request that uses rejection gets a sampled child first and the q it was drawn from; the rest
    of its children are evidence, not drafts.
    """
    count = min(count, logits_NW.shape[1])
    chosen: dict[_Method, tuple[list[NodeRows], list[int]]] = {}
    first = 0
    for group in groups:
        own, rows = chosen.setdefault(_method(group.params), ([], []))
        own.append(group)
        rows.extend(range(first, first + group.num_rows))
        first += group.num_rows
    if len(chosen) == 1:
        return next(iter(chosen))(logits_NW, groups, target_ids_W, count)
    # Greedy rows stay in float32, so that they score the same in any company.
    parts = [
        (rows, method(logits_NW[torch.tensor(rows)], own, target_ids_W, count))
        for method, (own, rows) in chosen.items()
    ]
    return _joined(parts, first, count)


def _method(params: SamplingParams) -> _Method:
    if params.greedy:
        return _by_probability
    return _by_sampling if params.uses_rejection else _with_noise


def _by_probability(
    logits_NW: Tensor, groups: Sequence[NodeRows], target_ids_W: Tensor, count: int
) -> Ranked:
    return _rank(logits_NW, target_ids_W, count)


def _with_noise(
    logits_NW: Tensor, groups: Sequence[NodeRows], target_ids_W: Tensor, count: int
) -> Ranked:
    values: list[Tensor] = []
    first = 0
    for group in groups:
        rows = slice(first, first + group.num_rows)
        first = rows.stop
        values.append(_noised(logits_NW[rows], group, target_ids_W))
    return _rank(torch.cat(values), target_ids_W, count)


def _by_sampling(
    logits_NW: Tensor, groups: Sequence[NodeRows], target_ids_W: Tensor, count: int
) -> Ranked:
    """The drawn token first, then the best other ids of its q; -inf where q has no more."""
    each = [group for group in groups for _ in range(group.num_rows)]
    drawn = draw_chain_tokens(
        logits_NW, [row.params for row in each], [row.position for row in each], target_ids_W
    )
    ids = np.zeros((len(each), count), np.int64)
    scores = np.full((len(each), count), -np.inf)
    for n, token in enumerate(drawn):
        if token is None:
            continue
        others = [i for i in token.q.ids if i != token.token][: count - 1]
        found = [token.token, *others]
        ids[n, : len(found)] = found
        scores[n, : len(found)] = [math.log(token.q.probability(i)) for i in found]
    finite = np.array([token is not None for token in drawn])
    return Ranked(ids, scores, finite, tuple(None if t is None else t.q for t in drawn))


def _joined(parts: Sequence[tuple[list[int], Ranked]], num_rows: int, count: int) -> Ranked:
    ids = np.empty((num_rows, count), np.int64)
    scores = np.empty((num_rows, count), np.float64)
    finite = np.empty(num_rows, np.bool_)
    q: list[SparseQ | None] = [None] * num_rows
    for rows, part in parts:
        ids[rows], scores[rows], finite[rows] = part.ids, part.scores, part.finite
        for row, of_row in zip(rows, part.q, strict=False):
            q[row] = of_row
    return Ranked(ids, scores, finite, tuple(q))


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
