"""Which token ids may be chosen in one row: temperature, then min-p, top-k, top-p (design 4).

Ranked by score, highest first, ties to the lowest id, the survivors of every filter are a prefix.
Knows nothing of noise, trees or requests. Invariant: a row's survivors depend on that row alone,
never on its neighbours. Nothing here sorts a vocabulary unless the nucleus asks for it: min-p and
top-k are thresholds, and `is_in_nucleus` answers for one id without any ranking.

Shapes: V vocabulary, C survivors.
"""

import math

import numpy as np
import torch

from protos.params import SamplingParams


def scaled_scores(logits_V: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """float32 logits over temperature, which must be above greedy."""
    temperature = torch.tensor(params.temperature, dtype=torch.float32, device=logits_V.device)
    return logits_V.to(torch.float32) / temperature


def score_floor(scores_V: torch.Tensor, params: SamplingParams) -> torch.Tensor | None:
    """The lowest score that min-p and top-k let through (ties included); None when they are off.

    min-p in logs: a probability is at least min_p times the highest exactly when its score is at
    least the highest score plus log(min_p).
    """
    floor = None
    if params.min_p > 0.0:
        log_min_p = torch.tensor(math.log(params.min_p), dtype=torch.float32)
        floor = scores_V.max() + log_min_p.to(scores_V.device)
    if 0 < params.top_k < scores_V.shape[0]:
        kth = torch.topk(scores_V, params.top_k).values[-1]
        floor = kth if floor is None else torch.maximum(floor, kth)
    return floor


def survivors(
    scores_V: torch.Tensor, params: SamplingParams, floor: torch.Tensor | None
) -> torch.Tensor:
    """Ids that may be chosen, best first, int64 [C], C >= 1. `floor` is `score_floor`'s."""
    if floor is None:
        ids = torch.arange(scores_V.shape[0], device=scores_V.device)
    else:
        ids = torch.nonzero(scores_V >= floor).squeeze(1)
    # `ids` ascend, so a stable sort leaves the lowest id first among equal scores.
    ids = ids[torch.sort(scores_V[ids], descending=True, stable=True).indices]
    if params.top_k > 0:
        ids = ids[: params.top_k]
    if params.top_p < 1.0:
        weights = torch.softmax(scores_V, dim=-1)[ids].to(torch.float64)
        running = weights.cumsum(0)
        # Rank r stays when the mass before it is under top_p of what the filters above left.
        mass = running[-1] if floor is not None else torch.ones_like(running[-1])
        count = int((running[:-1] < params.top_p * mass).sum()) + 1
        ids = ids[:count]
    return ids


def is_in_nucleus(probs_V: torch.Tensor, token_id: int, top_p: float) -> bool:
    """Whether the mass ranked before this id is under top_p; min-p and top-k being off."""
    own = probs_V[token_id]
    ahead_V = probs_V > own
    ahead_V[:token_id] |= probs_V[:token_id] == own
    if probs_V.device.type == "cpu":
        # A third of what indexing by a mask takes.
        ids = np.flatnonzero(ahead_V.numpy())
        return float(probs_V.numpy()[ids].sum(dtype=np.float64)) < top_p
    return float(probs_V[ahead_V].to(torch.float64).sum()) < top_p
