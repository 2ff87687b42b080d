"""What a request's options make of its rows of logits, before temperature and filters (design 4).

In this order, in float32: allowed ids and grammar, min_tokens, logit bias, repetition, frequency
and presence penalty. Rows are changed together, by index; a row without options never comes here.
Invariant: a row's result depends on that row, its options and its own past alone. `reference`
states the same in plain loops.

Shapes: N rows, V vocabulary, E entries (a row, an id and what happens there), G rows with a
grammar, W words of 32 ids each.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from verifier_service.device import ship
from verifier_service.sampling.history import History, Past


@dataclass(slots=True)
class _Entries:
    """Places in [N, V], in parts, and a value for each."""

    rows: list[torch.Tensor] = field(default_factory=list)
    ids: list[torch.Tensor] = field(default_factory=list)
    values: list[torch.Tensor] = field(default_factory=list)

    def add(self, row: int, ids: torch.Tensor, values: torch.Tensor | None = None) -> None:
        """Entries of one row."""
        self.rows.append(torch.full_like(ids, row))
        self.ids.append(ids)
        self.values.append(torch.zeros(ids.shape[0]) if values is None else values)

    def at(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Rows, ids and values on the device."""
        parts = (torch.cat(self.rows), torch.cat(self.ids), torch.cat(self.values))
        return ship(parts, device)


def shape_logits(
    logits: torch.Tensor, rows: Sequence[int], pasts: Sequence[Past], positions: Sequence[int]
) -> torch.Tensor:
    """float32 [N, V]: these rows of logits [*, V] as their options want them.

    positions: absolute index of the token that each row chooses.
    """
    (where,) = ship((torch.tensor(rows),), logits.device)
    shaped_NV = logits.index_select(0, where).to(torch.float32)
    words = {
        row: past.history.grammar.allowed(past.path)
        for row, past in enumerate(pasts)
        if past.history.grammar is not None
    }
    _allow(shaped_NV, pasts)
    _keep_words(shaped_NV, words)
    _mask_ends(shaped_NV, pasts, positions, words)
    _bias(shaped_NV, pasts)
    _penalise(shaped_NV, pasts)
    return shaped_NV


def _allow(shaped_NV: torch.Tensor, pasts: Sequence[Past]) -> None:
    allowed = _Entries()
    for row, past in enumerate(pasts):
        if past.history.options.allowed_token_ids:
            allowed.add(row, torch.tensor(past.history.options.allowed_token_ids))
    masked = [int(part[0]) for part in allowed.rows]
    if masked:
        rows, ids, _ = allowed.at(shaped_NV.device)
        (whole,) = ship((torch.tensor(masked),), shaped_NV.device)
        kept_E = shaped_NV[rows, ids]
        shaped_NV[whole] = float("-inf")
        shaped_NV[rows, ids] = kept_E


def _keep_words(shaped_NV: torch.Tensor, words: Mapping[int, torch.Tensor]) -> None:
    """Mask what a grammar's bits leave out, in the rows that have some."""
    if not words:
        return
    parts = (torch.tensor(list(words)), torch.stack(list(words.values())))
    rows_G, words_GW = ship(parts, shaped_NV.device)
    places = torch.arange(32, dtype=torch.int32, device=shaped_NV.device)
    bits_GV = ((words_GW.unsqueeze(-1) >> places) & 1).flatten(1)[:, : shaped_NV.shape[1]]
    kept_GV = shaped_NV[rows_G].masked_fill_(bits_GV == 0, float("-inf"))
    shaped_NV[rows_G] = kept_GV


def _mask_ends(
    shaped_NV: torch.Tensor,
    pasts: Sequence[Past],
    positions: Sequence[int],
    words: Mapping[int, torch.Tensor],
) -> None:
    masked = _Entries()
    for row, (past, position) in enumerate(zip(pasts, positions, strict=True)):
        history = past.history
        is_early = position - history.num_prompt < history.options.min_tokens
        if is_early and history.end_ids and not _is_over(words.get(row), history):
            masked.add(row, torch.tensor(history.end_ids))
    if masked.rows:
        rows, ids, _ = masked.at(shaped_NV.device)
        shaped_NV[rows, ids] = float("-inf")


def _is_over(words_W: torch.Tensor | None, history: History) -> bool:
    """True where a grammar, and the allowed ids with it, leave nothing but ends."""
    if words_W is None:
        return False
    left_W = words_W.clone()
    if history.options.allowed_token_ids:
        left_W &= _words_of(history.options.allowed_token_ids, left_W.shape[0])
    left_W &= ~_words_of(history.end_ids, left_W.shape[0])
    return not bool(left_W.any())


def _words_of(ids: Sequence[int], num_words: int) -> torch.Tensor:
    """int32 [W] with a bit for each id."""
    bits = torch.zeros(num_words * 32, dtype=torch.bool)
    bits[torch.tensor(ids)] = True
    weights = torch.tensor([1 << place for place in range(31)] + [-(1 << 31)])
    return (bits.view(-1, 32) * weights).sum(-1).to(torch.int32)


def _bias(shaped_NV: torch.Tensor, pasts: Sequence[Past]) -> None:
    biased = _Entries()
    for row, past in enumerate(pasts):
        if past.history.options.logit_bias:
            ids, values = zip(*past.history.options.logit_bias, strict=True)
            biased.add(row, torch.tensor(ids), torch.tensor(values, dtype=torch.float32))
    if biased.rows:
        rows, ids_E, values_E = biased.at(shaped_NV.device)
        shaped_NV[rows, ids_E] = shaped_NV[rows, ids_E] + values_E


def _penalise(shaped_NV: torch.Tensor, pasts: Sequence[Past]) -> None:
    seen = _Entries()
    for row, past in enumerate(pasts):
        if past.history.options.has_penalties:
            here = past.history.seen(past.path)
            seen.add(row, here.ids, here.counts)
    if not seen.rows:
        return
    options = [past.history.options for past in pasts]
    columns = torch.tensor(
        [(o.repetition_penalty, o.frequency_penalty, o.presence_penalty) for o in options],
        dtype=torch.float32,
    )
    rows, ids, counts_E = seen.at(shaped_NV.device)
    (columns,) = ship((columns,), shaped_NV.device)
    repetition_E, frequency_E, presence_E = columns[rows].unbind(1)
    values_E = shaped_NV[rows, ids]
    values_E = torch.where(values_E > 0.0, values_E / repetition_E, values_E * repetition_E)
    values_E = values_E - frequency_E * counts_E
    values_E = values_E - presence_E * (counts_E > 0.0)
    shaped_NV[rows, ids] = values_E
