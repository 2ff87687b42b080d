"""The target's own choice at a row: argmax over surviving ids of score + Gumbel noise (design 4).

Knows rows, not trees: whoever asks says which rows, under which sampling values, for which
position. Invariant: a choice is a function of (the row's logits, params, position) alone;
neighbours, drafts and batch shape never enter. `reference` states the same in plain loops.

Greedy rows share one argmax. Sampled rows go one by one: 49k float64 values stay in cache, and
the walk asks for few (one a request and depth). Noise is made for those ids only that can win, and
nothing ranks the vocabulary.

Shapes: N rows asked for, V vocabulary, C ids with noise.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

import torch

from protos.counter import signed
from protos.noise import Purpose, gumbel_from_bits, noise_bits_tensor, noise_key
from protos.params import SamplingParams
from verifier_service.sampling.contenders import best_scored, contenders
from verifier_service.sampling.history import Past
from verifier_service.sampling.processors import (
    is_in_nucleus,
    scaled_scores,
    score_floor,
    survivors,
)
from verifier_service.sampling.rejection import Proposal, choose_by_rejection
from verifier_service.sampling.shaping import shape_logits

NUCLEUS_TRIES: Final = 12
"""Winners outside the nucleus before it is ranked; with top_p 0.9 a third one is rare."""


@dataclass(frozen=True, slots=True)
class ChoiceRow:
    """A row of the step's logits, and what decides the token drawn from it.

    position: absolute index of the token being chosen, prompt included. proposal: looked at for
    requests that use rejection only. past: for requests with logit options only.
    """

    row: int
    params: SamplingParams
    position: int
    proposal: Proposal | None = None
    past: Past | None = None


Choose = Callable[[torch.Tensor, Sequence[ChoiceRow]], list[int | None]]


def choose(logits: torch.Tensor, rows: Sequence[ChoiceRow]) -> list[int | None]:
    """The chosen id per asked row of logits [*, V]; None where the best score is not finite."""
    with _one_thread():
        return choose_shaped(_choose, logits, rows)


def choose_shaped(
    choose_plain: Choose, logits: torch.Tensor, rows: Sequence[ChoiceRow]
) -> list[int | None]:
    """`choose_plain` of all rows, those with logit options after these were applied."""
    shaped = [index for index, row in enumerate(rows) if row.past is not None]
    if not shaped:
        return choose_plain(logits, rows)
    asked = [rows[index] for index in shaped]
    pasts = [row.past for row in asked if row.past is not None]
    own = shape_logits(logits, [r.row for r in asked], pasts, [r.position for r in asked])
    moved = [replace(row, row=place, past=None) for place, row in enumerate(asked)]
    chosen = dict(zip(shaped, choose_plain(own, moved), strict=True))
    plain = [index for index, row in enumerate(rows) if row.past is None]
    chosen |= zip(plain, choose_plain(logits, [rows[index] for index in plain]), strict=True)
    return [chosen[index] for index in range(len(rows))]


def _choose(logits: torch.Tensor, rows: Sequence[ChoiceRow]) -> list[int | None]:
    chosen: list[int | None] = [None] * len(rows)
    greedy = [index for index, row in enumerate(rows) if row.params.greedy]
    if greedy:
        # In float32: argmax over bf16 takes thirty times as long on a CPU.
        picked_NV = _pick(logits, [rows[index].row for index in greedy]).to(torch.float32)
        ids_N = _argmax(picked_NV)
        finite_N = torch.isfinite(picked_NV.gather(1, ids_N.unsqueeze(1)).squeeze(1))
        for index, token, ok in zip(greedy, ids_N.tolist(), finite_N.tolist(), strict=True):
            chosen[index] = token if ok else None
    for index, row in enumerate(rows):
        if row.params.uses_rejection:
            logits_V = logits[row.row]
            chosen[index] = choose_by_rejection(logits_V, row.params, row.position, row.proposal)
        elif not row.params.greedy:
            chosen[index] = _sample(logits[row.row], row)
    return chosen


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Torch on the calling thread alone, within.

    A choice is a dozen operations on 49k elements: shared between two idle cores they take longer
    (1.1 ms a row, not 0.9), and while other processes want the cores every one of them waits for a
    sleeping thread to be scheduled. Switching costs 0.2 us.
    """
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)


def _argmax(scores_NV: torch.Tensor) -> torch.Tensor:
    """[N]: the lowest id of each row's best score; torch and numpy both document the first."""
    if scores_NV.device.type == "cpu":
        # A tenth of what torch takes on one thread.
        return torch.from_numpy(scores_NV.numpy().argmax(-1))
    return scores_NV.argmax(-1)


def _sample(logits_V: torch.Tensor, row: ChoiceRow) -> int | None:
    params = row.params
    scores_V = scaled_scores(logits_V, params)
    best = best_scored(scores_V)
    if best is None:
        return None
    floor = score_floor(scores_V, params)
    token = _draw_from_all(scores_V, row, best) if floor is None else None
    if token is not None:
        return token
    ids = survivors(scores_V, params, floor)
    total_C = scores_V[ids].to(torch.float64) + _noise(row, ids)
    return int(ids[total_C == total_C.max()].min())


def _draw_from_all(scores_V: torch.Tensor, row: ChoiceRow, best: int) -> int | None:
    """The choice where nothing but top-p filters; None after NUCLEUS_TRIES misses.

    The argmax over a nucleus is the first of the whole vocabulary's ranking that lies in it. The
    best-scored id always does, and whatever outranks it is a contender.
    """
    top_p = row.params.top_p
    ids, total_C = contenders(scores_V, _key(row), best)
    first = int(ids[total_C.argmax()])
    if top_p >= 1.0 or first == best:
        return first
    probs_V = torch.softmax(scores_V, dim=-1)
    ranked_C = ids[torch.sort(total_C, descending=True, stable=True).indices]
    for token in ranked_C[:NUCLEUS_TRIES].tolist():
        if is_in_nucleus(probs_V, token, top_p):
            return int(token)
    return None


def _noise(row: ChoiceRow, ids_C: torch.Tensor) -> torch.Tensor:
    key = torch.tensor(signed(_key(row)), device=ids_C.device)
    return gumbel_from_bits(noise_bits_tensor(key, ids_C))


def _key(row: ChoiceRow) -> int:
    return noise_key(row.params.seed, Purpose.CHOICE, row.position)


def _pick(logits: torch.Tensor, rows: list[int]) -> torch.Tensor:
    if rows == list(range(logits.shape[0])):
        return logits
    return logits[torch.tensor(rows, device=logits.device)]
