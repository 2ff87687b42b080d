"""`choose` for many rows at once, for a device: the same choices in a handful of batched kernels.

Rows fall into three groups: greedy ones share an argmax; sampled ones without filters get noise for
the whole vocabulary; filtered ones are ranked, and noise is made for the ranks that survive only.
One value is read back per group of filtered rows (how many survive at most), and all tokens at the
end. Invariant: equal to `choice.choose` row by row (tested bit for bit on a CPU).

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
    """Ranked best first, ties to the lowest id, what the filters leave is a prefix."""
    batch = _columns(rows, logits)
    scores_NV = _scores(logits, batch)
    ranked_NV, ids_NV = torch.sort(scores_NV, dim=-1, descending=True, stable=True)
    top_N = ranked_NV[:, 0]
    ranks_V = torch.arange(ranked_NV.shape[1], device=ranked_NV.device)
    kept_NV = (ranked_NV >= ranked_NV[:, :1] + batch.log_min_p) & (ranks_V < batch.top_k)
    probs_NV = torch.softmax(scores_NV, dim=-1).gather(1, ids_NV)
    running_NV = torch.where(kept_NV, probs_NV, 0.0).to(torch.float64).cumsum(-1)
    # Rank r stays when the mass before it is under top_p of what the filters above left.
    last_N1 = running_NV[:, -1:]
    mass_N1 = torch.where(batch.has_floor, last_N1, torch.ones_like(last_N1))
    before = (running_NV[:, :-1] < batch.top_p * mass_N1).sum(-1, keepdim=True)
    kept_NV &= (ranks_V <= before) | (batch.top_p >= 1.0)
    count = max(int(kept_NV.sum(-1).amax()), 1)
    kept_NC, ids_NC = kept_NV[:, :count], ids_NV[:, :count]
    total_NC = ranked_NV[:, :count].to(torch.float64) + _noise(batch, ids_NC)
    total_NC = torch.where(kept_NC, total_NC, -math.inf)
    best_NC = kept_NC & (total_NC == total_NC.amax(-1, keepdim=True))
    ids_N = torch.where(best_NC, ids_NC, ids_NV.shape[1]).amin(-1)
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
