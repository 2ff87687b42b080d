"""`choose` for many rows at once, for a device: the same choices in a handful of batched kernels.

Rows fall into three groups: greedy ones share an argmax; sampled ones without filters get noise for
the whole vocabulary; filtered ones are ranked, as far as their survivors reach, and noise is made
for the ranks that survive only. Two values are read back per group of filtered rows (who needs a
full ranking, how many survive at most), and all tokens at the end. Invariant: equal to
`choice.choose` row by row (tested bit for bit on a CPU).

Shapes: N rows, V vocabulary, C ids with noise.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch

from protos.noise import Purpose, gumbel_from_bits, noise_bits_tensor, noise_key
from protos.params import SamplingParams
from verifier_service.device import ship
from verifier_service.sampling.choice import ChoiceRow, choose_shaped
from verifier_service.sampling.processors import NARROW
from verifier_service.sampling.rejection import choose_by_rejection

_MAX_ELEMENTS: Final = 2**24
"""Of a batch of sampled rows: a temporary in float64 stays within 128 MiB."""


@dataclass(frozen=True, slots=True)
class _Batch:
    """Sampling values of N rows as columns [N, 1].

    row: [N], of the logits. key: of the noise. log_min_p: -inf where off. top_k: V where off.
    has_floor: min-p or top-k is on.
    """

    row: torch.Tensor
    key: torch.Tensor
    temperature: torch.Tensor
    log_min_p: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    has_floor: torch.Tensor


def choose_batch(logits: torch.Tensor, rows: Sequence[ChoiceRow]) -> list[int | None]:
    """The chosen id per asked row of logits [*, V]; None where the best score is not finite."""
    return choose_shaped(_choose_batch, logits, rows)


def _choose_batch(logits: torch.Tensor, rows: Sequence[ChoiceRow]) -> list[int | None]:
    vocab_size = logits.shape[1]
    groups: tuple[list[int], ...] = ([], [], [])
    for index, row in enumerate(rows):
        if row.params.uses_rejection:
            continue
        kind = 0 if row.params.greedy else 1 + _is_filtered(row.params, vocab_size)
        groups[kind].append(index)
    order: list[int] = []
    found: list[torch.Tensor] = []
    for group, pick in zip(groups, (_greedy, _sample, _sample_filtered), strict=True):
        size = len(group) if pick is _greedy else max(1, _MAX_ELEMENTS // vocab_size)
        for first in range(0, len(group), max(size, 1)):
            part = group[first : first + size]
            order += part
            found.append(pick(logits, [rows[index] for index in part]))
    tokens: list[int | None] = [None] * len(rows)
    if found:
        for index, token in zip(order, torch.cat(found).tolist(), strict=True):
            tokens[index] = token if token >= 0 else None
    for index, row in enumerate(rows):
        if row.params.uses_rejection:
            logits_V = logits[row.row]
            tokens[index] = choose_by_rejection(logits_V, row.params, row.position, row.proposal)
    return tokens


def _is_filtered(params: SamplingParams, vocab_size: int) -> bool:
    return params.min_p > 0.0 or 0 < params.top_k < vocab_size or params.top_p < 1.0


def _greedy(logits: torch.Tensor, rows: list[ChoiceRow]) -> torch.Tensor:
    """Ids [N], -1 for none. torch.argmax returns the first of equal maxima: the lowest id."""
    (where,) = ship((torch.tensor([row.row for row in rows]),), logits.device)
    picked_NV = logits.index_select(0, where)
    ids_N1 = picked_NV.argmax(-1, keepdim=True)
    return _or_none(ids_N1.squeeze(1), picked_NV.gather(1, ids_N1).squeeze(1))


def _sample(logits: torch.Tensor, rows: list[ChoiceRow]) -> torch.Tensor:
    batch = _columns(rows, logits)
    scores_NV = _scores(logits, batch)
    ids_V = torch.arange(scores_NV.shape[1], device=scores_NV.device)
    total_NV = scores_NV.to(torch.float64) + _noise(batch, ids_V)
    return _or_none(total_NV.argmax(-1), scores_NV.amax(-1))


def _sample_filtered(logits: torch.Tensor, rows: list[ChoiceRow]) -> torch.Tensor:
    """From the best NARROW ids where these hold all survivors, else from a full ranking."""
    batch = _columns(rows, logits)
    scores_NV = _scores(logits, batch)
    if scores_NV.shape[1] <= NARROW:
        return _draw(batch, scores_NV, *_ranked(scores_NV))
    ranked_NC, ids_NC = _best(scores_NV)
    is_whole_N = _holds_survivors(batch, scores_NV, ranked_NC, ids_NC)
    tokens_N = _draw(batch, scores_NV, ranked_NC, ids_NC)
    wide = [index for index, is_whole in enumerate(is_whole_N.tolist()) if not is_whole]
    if wide:
        again = _columns([rows[index] for index in wide], logits)
        scores_NV = _scores(logits, again)
        tokens_N[wide] = _draw(again, scores_NV, *_ranked(scores_NV))
    return tokens_N


def _ranked(scores_NV: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """All scores best first, ties to the lowest id, and their ids."""
    ranked_NV, ids_NV = torch.sort(scores_NV, dim=-1, descending=True, stable=True)
    return ranked_NV, ids_NV


def _best(scores_NV: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The same of NARROW best; which ids tie for the last place is not said."""
    ids_NC = torch.topk(scores_NV, NARROW).indices.sort(-1).values
    ranked_NC, order_NC = _ranked(scores_NV.gather(1, ids_NC))
    return ranked_NC, ids_NC.gather(1, order_NC)


def _holds_survivors(
    batch: _Batch, scores_NV: torch.Tensor, ranked_NC: torch.Tensor, ids_NC: torch.Tensor
) -> torch.Tensor:
    """Whether every survivor of a row is among these, [N]: a filter ends inside, and no outsider
    ties with the last of them."""
    last_N1 = ranked_NC[:, -1:]
    is_prefix_N1 = (scores_NV >= last_N1).sum(-1, keepdim=True) == ranked_NC.shape[1]
    ends_N1 = batch.top_k <= ranked_NC.shape[1]
    ends_N1 = ends_N1 | (last_N1 < ranked_NC[:, :1] + batch.log_min_p)
    mass_N1 = torch.softmax(scores_NV, dim=-1).gather(1, ids_NC).to(torch.float64).cumsum(-1)
    # Where a floor is on, top-p is of a mass that is known only when the floor ends inside.
    ends_N1 = ends_N1 | (~batch.has_floor & (mass_N1[:, -1:] >= batch.top_p))
    return (is_prefix_N1 & ends_N1).squeeze(1)


def _draw(
    batch: _Batch, scores_NV: torch.Tensor, ranked_NC: torch.Tensor, ids_NC: torch.Tensor
) -> torch.Tensor:
    """The choices among ranked ids. Best first, what the filters leave is a prefix."""
    ranks_C = torch.arange(ranked_NC.shape[1], device=ranked_NC.device)
    kept_NC = (ranked_NC >= ranked_NC[:, :1] + batch.log_min_p) & (ranks_C < batch.top_k)
    probs_NC = torch.softmax(scores_NV, dim=-1).gather(1, ids_NC)
    running_NC = torch.where(kept_NC, probs_NC, 0.0).to(torch.float64).cumsum(-1)
    # Rank r stays when the mass before it is under top_p of what the filters above left.
    last_N1 = running_NC[:, -1:]
    mass_N1 = torch.where(batch.has_floor, last_N1, torch.ones_like(last_N1))
    before = (running_NC[:, :-1] < batch.top_p * mass_N1).sum(-1, keepdim=True)
    kept_NC &= (ranks_C <= before) | (batch.top_p >= 1.0)
    top_N = ranked_NC[:, 0]
    count = max(int(kept_NC.sum(-1).amax()), 1)
    kept_NC, ids_NC = kept_NC[:, :count], ids_NC[:, :count]
    total_NC = ranked_NC[:, :count].to(torch.float64) + _noise(batch, ids_NC)
    total_NC = torch.where(kept_NC, total_NC, -math.inf)
    best_NC = kept_NC & (total_NC == total_NC.amax(-1, keepdim=True))
    ids_N = torch.where(best_NC, ids_NC, scores_NV.shape[1]).amin(-1)
    return _or_none(ids_N, top_N)


def _or_none(ids_N: torch.Tensor, top_N: torch.Tensor) -> torch.Tensor:
    return torch.where(torch.isfinite(top_N), ids_N, -1)


def _columns(rows: list[ChoiceRow], logits: torch.Tensor) -> _Batch:
    params, vocab_size = [row.params for row in rows], logits.shape[1]
    log_min_p = [math.log(p.min_p) if p.min_p > 0.0 else -math.inf for p in params]
    top_k = [p.top_k if 0 < p.top_k < vocab_size else vocab_size for p in params]
    has_floor = [p.min_p > 0.0 or k < vocab_size for p, k in zip(params, top_k, strict=True)]
    keys = [noise_key(row.params.seed, Purpose.CHOICE, row.position) for row in rows]
    signed = [key - (1 << 64) if key >= 1 << 63 else key for key in keys]
    batch = _Batch(
        row=torch.tensor([row.row for row in rows]),
        key=torch.tensor(signed)[:, None],
        temperature=torch.tensor([p.temperature for p in params], dtype=torch.float32)[:, None],
        log_min_p=torch.tensor(log_min_p, dtype=torch.float32)[:, None],
        top_k=torch.tensor(top_k)[:, None],
        top_p=torch.tensor([p.top_p for p in params], dtype=torch.float64)[:, None],
        has_floor=torch.tensor(has_floor)[:, None],
    )
    return ship(batch, logits.device)


def _scores(logits: torch.Tensor, batch: _Batch) -> torch.Tensor:
    return logits.index_select(0, batch.row).to(torch.float32) / batch.temperature


def _noise(batch: _Batch, ids: torch.Tensor) -> torch.Tensor:
    """Gumbel noise in float64 for ids [V] or [N, C]."""
    return gumbel_from_bits(noise_bits_tensor(batch.key, ids))
