"""The papers' rule at one row, for requests that asked for it: accept with min(1, p/q), else sample
the normalised residual (design 4; Leviathan et al. 2211.17192).

Seen from the walk it is a choice like any other: the proposed token when the coin accepts it, a
token of the residual otherwise (never the proposed one), and a plain draw from p where nothing was
proposed. The text then depends on the drafts; its distribution does not, as long as

- the proposed token was drawn from exactly the q it is tested with (`draw_again` sees to that);
- draft, coin, residual and bonus use separate noise (four purposes, TV 0.04 to 0.24 otherwise);
- nothing cuts a chain because of its own tokens (`engine.rejection`).

Knows rows, not chains. Invariant: p is the distribution that `choice` draws from: the same scores,
the same survivors.

Shapes: V vocabulary, C ids of q.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from protos.noise import Purpose, draw, gumbel, uniform
from protos.params import SamplingParams
from protos.sparse import SparseQ
from verifier_service.sampling.processors import scaled_scores, score_floor, survivors


@dataclass(frozen=True, slots=True)
class Proposal:
    """A drafted token, and what it was sampled from."""

    token: int
    q: SparseQ


def draw_again(
    tokens: Sequence[int], q: Sequence[SparseQ], params: SamplingParams, position: int
) -> tuple[int, ...]:
    """The chain that the noise draws from these q, as far as the drafter's own tokens agree.

    Where they differ the chain ends with the token drawn here: the q that follow were made for
    another prefix. So a token is never taken on a drafter's word, and a faulty drafter costs
    accepted tokens, not the distribution. position: of the first token.
    """
    drawn: list[int] = []
    for depth, (token, part) in enumerate(zip(tokens, q, strict=True)):
        index = draw(params.seed, Purpose.DRAFT, position + depth, part.ids, part.weights)
        drawn.append(part.ids[index])
        if drawn[-1] != token:
            break
    return tuple(drawn)


def choose_by_rejection(
    logits_V: torch.Tensor, params: SamplingParams, position: int, proposal: Proposal | None
) -> int | None:
    """The token at one row; None where the best score is not finite.

    position: absolute index of the token being chosen. params: above greedy.
    """
    scores_V = scaled_scores(logits_V, params)
    if not torch.isfinite(scores_V.max()):
        return None
    p_V = target_probabilities(scores_V, params)
    if proposal is None:
        return _draw(p_V, params.seed, Purpose.BONUS, position)
    q_x = proposal.q.probability(proposal.token)
    if uniform(params.seed, Purpose.COIN, position) * q_x < float(p_V[proposal.token]):
        return proposal.token
    left_V = residual(p_V, proposal.q)
    if not bool((left_V > 0.0).any()):
        # p equals q but for rounding, so nothing is left to draw: the coin should have passed.
        return proposal.token
    return _draw(left_V, params.seed, Purpose.RESIDUAL, position)


def target_probabilities(scores_V: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """p over the surviving ids, float64 [V]; 0 elsewhere."""
    floor = score_floor(scores_V, params)
    if floor is None and params.top_p >= 1.0:
        return torch.softmax(scores_V.to(torch.float64), dim=-1)
    kept_C = survivors(scores_V, params, floor)
    p_V = torch.zeros(scores_V.shape[0], dtype=torch.float64, device=scores_V.device)
    p_V[kept_C] = torch.softmax(scores_V[kept_C].to(torch.float64), dim=-1)
    return p_V


def residual(p_V: torch.Tensor, q: SparseQ) -> torch.Tensor:
    """max(0, p - q), not normalised: a draw in proportion needs no norm."""
    ids_C = torch.tensor(q.ids, device=p_V.device)
    q_C = torch.tensor(q.weights, dtype=torch.float64, device=p_V.device) / q.total
    left_V = p_V.clone()
    left_V[ids_C] = (left_V[ids_C] - q_C).clamp_min(0.0)
    return left_V


def _draw(weights_V: torch.Tensor, seed: int, purpose: Purpose, position: int) -> int:
    """An id in proportion to its weight; ids without weight are never drawn."""
    ids_V = torch.arange(weights_V.shape[0], device=weights_V.device)
    noise_V = gumbel(seed, purpose, torch.tensor([position]), ids_V)[0]
    return int((weights_V.log() + noise_V).argmax())
