"""Design 4's rule of choice in plain loops: the definition that `choice` must equal.

Slow on purpose. Tests and rare checks use it; serving never does.
"""

import math
from collections.abc import Callable, Collection, Sequence
from typing import Final

import torch

from protos.noise import Purpose, noise_bits
from protos.options import LogitOptions
from protos.params import SamplingParams

_FLOAT32: Final = torch.float32


def shaped_reference(
    logits_V: torch.Tensor,
    options: LogitOptions,
    prompt: Sequence[int],
    output: Sequence[int],
    end_ids: Sequence[int],
    grammar: Callable[[Sequence[int]], Collection[int]] | None = None,
) -> torch.Tensor:
    """A row after its request's options, float32 [V]; output: everything said before this row.

    grammar: the ids that may follow an output.
    """
    shaped: list[float] = []
    followers = range(logits_V.shape[0]) if grammar is None else grammar(output)
    left = set(followers) & set(options.allowed_token_ids or followers) - set(end_ids)
    holds_back = len(output) < options.min_tokens and (grammar is None or left)
    for token, logit in enumerate(logits_V.to(_FLOAT32).tolist()):
        value = logit
        if options.allowed_token_ids and token not in options.allowed_token_ids:
            value = -math.inf
        if token not in followers:
            value = -math.inf
        if holds_back and token in end_ids:
            value = -math.inf
        for biased, bias in options.logit_bias:
            if biased == token:
                value = _round(value + _round(bias))
        if token in prompt or token in output:
            repetition = _round(options.repetition_penalty)
            value = _round(value / repetition if value > 0.0 else value * repetition)
            spent = _round(_round(options.frequency_penalty) * list(output).count(token))
            value = _round(value - spent)
        if token in output:
            value = _round(value - _round(options.presence_penalty))
        shaped.append(value)
    return torch.tensor(shaped, dtype=_FLOAT32)


def logprobs_reference(
    logits_V: torch.Tensor, token: int, num_top: int
) -> tuple[float, list[tuple[int, float]]]:
    """log p of a token in the raw distribution of one row, and the best ids with theirs."""
    values = torch.log_softmax(logits_V.to(_FLOAT32), dim=-1).tolist()
    ranked = sorted(range(len(values)), key=lambda i: (-values[i], i))
    return values[token], [(i, values[i]) for i in ranked[:num_top]]


def _round(value: float) -> float:
    """The nearest float32."""
    return float(torch.tensor(value, dtype=_FLOAT32))


def survivors_reference(logits_V: torch.Tensor, params: SamplingParams) -> list[int]:
    """Ids that may be chosen in one row, best first; sampling values must not be greedy."""
    scores_V = logits_V.to(torch.float32) / torch.tensor(params.temperature, dtype=torch.float32)
    scores = scores_V.tolist()
    probs = torch.softmax(scores_V, dim=-1).tolist()
    ranked = sorted(range(len(scores)), key=lambda i: (-scores[i], i))
    kept = ranked
    if params.min_p > 0.0:
        log_min_p = torch.tensor(math.log(params.min_p), dtype=torch.float32)
        floor = float(scores_V[ranked[0]] + log_min_p)
        kept = [i for i in kept if scores[i] >= floor]
    if 0 < params.top_k < len(kept):
        kept = kept[: params.top_k]
    if params.top_p < 1.0:
        mass = 1.0 if len(kept) == len(scores) else sum(probs[i] for i in kept)
        before, nucleus = 0.0, []
        for i in kept:
            if before >= params.top_p * mass:
                break
            nucleus.append(i)
            before += probs[i]
        kept = nucleus or kept[:1]
    return kept


def gumbel_reference(params: SamplingParams, position: int, token_id: int) -> float:
    """The noise one id gets at one position."""
    bits = noise_bits(params.seed, Purpose.CHOICE, position, token_id)
    return -math.log(-math.log(((bits >> 11) + 0.5) * 2.0**-53))


def choose_reference(logits_V: torch.Tensor, params: SamplingParams, position: int) -> int | None:
    """The choice at one row; None when its best score is not finite."""
    values = logits_V.to(torch.float32).tolist()
    if any(math.isnan(v) for v in values) or not math.isfinite(max(values)):
        return None
    if params.greedy:
        return min(range(len(values)), key=lambda i: (-values[i], i))
    scores = logits_V.to(torch.float32) / torch.tensor(params.temperature, dtype=torch.float32)
    kept = survivors_reference(logits_V, params)
    total = {i: float(scores[i]) + gumbel_reference(params, position, i) for i in kept}
    return min(kept, key=lambda i: (-total[i], i))
