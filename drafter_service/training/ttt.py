"""Training-time test: the head run on its own outputs, as it will be when it drafts.

Step 0 runs every answer row on true features; step j runs the same rows on the feedback of step
j-1, with the ground-truth token j further on, rotary position j further on, compared with the
target's distribution j further on (paper 2503.01840; `reference/eagle.md` 5.1).

Every layer attends as `ttt_attention` says: to the step-0 rows before, and to the row's own later
steps. So rows never see each other's later steps, and a step may go on with some rows only, at the
price of those alone. Prompt rows run at step 0 only, in the last layer for their keys alone.

Knows nothing of files or optimisers, nor which family a head is of. Invariant: what a layer takes
and gives is the head's own.

Shapes: M answer rows of a batch, G prompt rows, N answer rows still active, C head hidden size,
A feature width, Z input width of a layer's q, k and v.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from drafter_service.eagle3.layer import DraftLayer
from drafter_service.training.batches import Batch
from drafter_service.training.ttt_attention import Pair, TttAttention


class ChainHead(Protocol):
    """A head that drafts one token after another out of features and its own feedback."""

    target_ids: Tensor
    """[W] target id of every draft id."""

    @property
    def layers(self) -> tuple[DraftLayer, ...]:
        """In order."""

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Per layer, how many rows back it attends (None: all)."""

    def fuse(self, features_NA: Tensor) -> Tensor:
        """g [N, C]."""

    def enter(self, token_ids_N: Tensor, g_NC: Tensor) -> tuple[Tensor, Tensor]:
        """(what every layer is given beside the hidden state, what the first takes for it)."""

    def take(self, layer: DraftLayer, embedded_NC: Tensor, h_NC: Tensor) -> tuple[Tensor, Tensor]:
        """(attention input [N, Z], residual [N, C]) of a layer."""

    def rotary(self, positions_N: Tensor, dtype: torch.dtype) -> Pair:
        """(cos, sin)."""

    def logits(self, y_NC: Tensor) -> Tensor:
        """float32, in the order of `target_ids`."""

    def feedback(self, y_NC: Tensor) -> Tensor:
        """What the next step takes for features."""


@dataclass(frozen=True, slots=True)
class StepOutput:
    """One step's active rows, what came out, and what it is compared with."""

    step: int
    rows: Tensor  # [N] flat answer rows, ascending
    y: Tensor  # [N, C]
    target_rows: Tensor  # [N] row of the batch whose `final` is the target
    valid: Tensor  # [N] False where the target lies past the record's end


AfterStep = Callable[[StepOutput], Tensor | None]
"""Sees a step's output; says which of its rows go on ([N] bool, None for all of them)."""


def shifted_rows(batch: Batch, rows_N: Tensor, step: int) -> Pair:
    """(the row `step` further on within the same record [N], whether it exists [N])."""
    shifted_N, last_N = rows_N + step, batch.last_row[rows_N]
    return torch.minimum(shifted_N, last_N), shifted_N <= last_N


def unroll(head: ChainHead, batch: Batch, num_steps: int, after: AfterStep) -> None:
    """Run up to `num_steps` steps of the head over a batch, handing each to `after`."""
    rows_N = torch.arange(batch.num_rows)
    g_NC = head.fuse(batch.features)
    y_NC, attentions = _first_step(head, batch, g_NC)
    for step in range(num_steps):
        shifted_N, valid_N = shifted_rows(batch, rows_N, step)
        if step:
            y_NC = _later_step(head, batch, attentions, (rows_N, shifted_N, g_NC), step)
        kept_N = after(StepOutput(step, rows_N, y_NC, shifted_N, valid_N))
        if step + 1 == num_steps:
            return
        g_NC = head.feedback(y_NC)
        if kept_N is not None:
            rows_N, g_NC = rows_N[kept_N], g_NC[kept_N]
            for attention in attentions:
                attention.narrow(kept_N)
        if not len(rows_N):
            return


def _first_step(head: ChainHead, batch: Batch, g_NC: Tensor) -> tuple[Tensor, list[TttAttention]]:
    """(y of the answer rows, one attention per layer holding the step-0 keys)."""
    rows_N = torch.arange(batch.num_rows)
    cos_sin = head.rotary(batch.positions, g_NC.dtype)
    prompt_cos_sin = head.rotary(batch.prompt_positions, g_NC.dtype)
    embedded, h_NC = head.enter(batch.ids, g_NC)
    prompt_embedded, p_GC = head.enter(batch.prompt_ids, head.fuse(batch.prompt_features))
    attentions: list[TttAttention] = []
    for layer, window in zip(head.layers, head.windows, strict=True):
        z_NZ, residual_NC = head.take(layer, embedded, h_NC)
        prompt_z, prompt_residual = head.take(layer, prompt_embedded, p_GC)
        prompt = layer.keys_values(prompt_z, prompt_cos_sin)
        answer = layer.keys_values(z_NZ, cos_sin)
        attention = TttAttention(batch.records, prompt, answer, window)
        attentions.append(attention)
        h_NC = layer.finish(residual_NC, attention.attend(layer.queries(z_NZ, cos_sin), rows_N))
        if len(attentions) < len(head.layers):
            mixed = attention.attend_prompt(layer.queries(prompt_z, prompt_cos_sin))
            p_GC = layer.finish(prompt_residual, mixed)
    return h_NC, attentions


def _later_step(
    head: ChainHead,
    batch: Batch,
    attentions: list[TttAttention],
    active: tuple[Tensor, Tensor, Tensor],
    step: int,
) -> Tensor:
    """y of the active rows: (rows, rows `step` further on, what they take for features)."""
    rows_N, shifted_N, g_NC = active
    cos_sin = head.rotary(batch.positions[rows_N] + step, g_NC.dtype)
    embedded, h_NC = head.enter(batch.ids[shifted_N], g_NC)
    for layer, attention in zip(head.layers, attentions, strict=True):
        z_NZ, residual_NC = head.take(layer, embedded, h_NC)
        attention.add_step(*layer.keys_values(z_NZ, cos_sin))
        h_NC = layer.finish(residual_NC, attention.attend(layer.queries(z_NZ, cos_sin), rows_N))
    return h_NC
