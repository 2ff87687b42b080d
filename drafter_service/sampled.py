"""Drafting by sampling, for `acceptance: rejection` (design 4): a token out of a sparse q.

q is the drafter's own distribution under the request's temperature and filters, cut to its
MAX_Q_IDS best ids, renormalised and rounded; the token is drawn from exactly that q with the noise
of purpose DRAFT, and q travels with it. Nothing may be left out, kept or pruned because of which
token was drawn: that is what would bias the output. So drafts of such requests are chains of the
asked length, whatever their scores.

Shapes: N rows, W draft vocabulary, C ids considered.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from drafter_service.topk import stable_topk
from protos.errors import MalformedTree
from protos.noise import Purpose, draw
from protos.params import SamplingParams
from protos.sparse import MAX_Q_IDS, SparseQ, sparse_q


@dataclass(frozen=True, slots=True)
class Drawn:
    """A sampled draft token, and q: its score is the log of its probability there."""

    token: int
    q: SparseQ


def draw_chain_tokens(
    logits_NW: Tensor,
    params: Sequence[SamplingParams],
    positions: Sequence[int],
    target_ids_W: Tensor,
) -> list[Drawn | None]:
    """One token per row, for the request and the position given per row; any mixture of requests.

    positions: absolute index of the token being drafted, prompt included. target_ids_W: the target
    id of each draft logit. None for a row whose logits are not finite. Temperatures must be above
    greedy (`SamplingParams.uses_rejection`).
    """
    columns_NC, logits_NC = stable_topk(logits_NW, MAX_Q_IDS)
    temperature_N = torch.tensor([row.temperature for row in params], dtype=torch.float64)
    scaled_NW = logits_NW.to(torch.float64) / temperature_N[:, None].to(logits_NW.device)
    norm_N = scaled_NW.logsumexp(-1).cpu().numpy()
    target_ids = target_ids_W.cpu().numpy()
    drawn: list[Drawn | None] = []
    for n, (row, position) in enumerate(zip(params, positions, strict=True)):
        if not np.isfinite(norm_N[n]):
            drawn.append(None)
            continue
        probs_C = np.exp(logits_NC[n] / row.temperature - norm_N[n])
        kept = _num_kept(probs_C, row)
        ids = target_ids[columns_NC[n, :kept]].tolist()
        drawn.append(_draw(ids, probs_C[:kept] / probs_C[:kept].sum(), row, position))
    return drawn


def _num_kept(probs_C: npt.NDArray[np.float64], params: SamplingParams) -> int:
    """How many of the best ids min-p, top-k and top-p leave, at least one."""
    count = len(probs_C)
    if params.min_p > 0.0:
        count = int((probs_C >= params.min_p * probs_C[0]).sum())
    if params.top_k > 0:
        count = min(count, params.top_k)
    if params.top_p < 1.0:
        before = np.cumsum(probs_C[:count]) - probs_C[:count]
        count = int((before < params.top_p).sum())
    return max(count, 1)


def _draw(
    ids: Sequence[int], probs: npt.NDArray[np.float64], params: SamplingParams, position: int
) -> Drawn | None:
    try:
        q = sparse_q(ids, probs.tolist())
    except MalformedTree:
        return None
    index = draw(params.seed, Purpose.DRAFT, position, q.ids, q.weights)
    return Drawn(q.ids[index], q)
