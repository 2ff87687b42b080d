"""Training-time test: the head run on its own outputs, as it will be when it drafts.

Step 0 runs every answer row on true features; step j runs the same rows on the feedback of step
j-1, with the ground-truth token j further on, rotary position j further on, compared with the
target's distribution j further on (paper 2503.01840; `reference/eagle.md` 5.1).

Attention: a query of step j at row t sees the step-0 keys of rows <= t, and of every later step
1..j the one key of its own row. `mask_by_definition` says so in plain loops; `TttAttention` is
the fast form: one score block against step-0 keys plus j single columns. So rows never see each
other's later steps, and a step may go on with some rows only, at the price of those alone.

Knows nothing of files or optimisers. Invariant: the step itself is `Eagle3Head`'s.

Shapes: T rows of a record (prompt rows first), M answer rows of a batch, N of them still active,
R active ones of one record, Q query heads, K kv heads, D head_dim, C head hidden size.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from drafter_service.eagle3.head import Eagle3Head
from drafter_service.training.batches import Batch, RecordRows

Pair = tuple[Tensor, Tensor]


def mask_by_definition(num_rows: int, step: int) -> Tensor:
    """[T, (step + 1) * T] bool: which key of steps 0..step a query of `step` at row t may see."""
    mask = torch.zeros(num_rows, (step + 1) * num_rows, dtype=torch.bool)
    for query in range(num_rows):
        for key in range(num_rows):
            mask[query, key] = key <= query
        for later in range(1, step + 1):
            mask[query, later * num_rows + query] = True
    return mask


class TttAttention:
    """Keys and values of all steps of one batch; attends record by record."""

    def __init__(self, records: tuple[RecordRows, ...], prompt: Pair, answer: Pair) -> None:
        """`prompt` and `answer`: step-0 (k, v) of the flat prompt rows and answer rows."""
        self._records = records
        self._base = [
            (_join(prompt[0], answer[0], rows), _join(prompt[1], answer[1], rows))
            for rows in records
        ]
        self._later: list[Pair] = []

    def add_step(self, k_NKD: Tensor, v_NKD: Tensor) -> None:
        """Keys and values that a later step contributes to its own, active rows."""
        self._later.append((k_NKD, v_NKD))

    def narrow(self, kept_N: Tensor) -> None:
        """Go on with the active rows where `kept_N` holds."""
        self._later = [(k_NKD[kept_N], v_NKD[kept_N]) for k_NKD, v_NKD in self._later]

    def attend(self, q_NQD: Tensor, rows_N: Tensor) -> Tensor:
        """[N, Q * D]: step-0 keys at or before the row, plus the row's own later keys.

        `rows_N`: ascending flat answer rows of the queries.
        """
        bounds = torch.tensor([rows.answer.start for rows in self._records])
        starts = [*torch.searchsorted(rows_N, bounds).tolist(), len(rows_N)]
        mixed: list[Tensor] = []
        for record, (rows, base) in enumerate(zip(self._records, self._base, strict=True)):
            active = slice(starts[record], starts[record + 1])
            last_seen = rows_N[active] - rows.answer.start + rows.prompt.stop - rows.prompt.start
            mixed.append(self._attend_record(q_NQD[active], base, active, last_seen))
        return torch.cat(mixed)

    def _attend_record(
        self, q_RQD: Tensor, base: Pair, active: slice, last_seen_R: Tensor
    ) -> Tensor:
        k_KTD, v_KTD = base
        num_rows, num_heads, dim = q_RQD.shape
        num_kv, num_keys, _ = k_KTD.shape
        share = num_heads // num_kv
        scale = dim**-0.5
        q_KRSD = q_RQD.view(num_rows, num_kv, share, dim).transpose(0, 1)
        q_KXD = q_KRSD.reshape(num_kv, num_rows * share, dim)
        scores = (q_KXD @ k_KTD.transpose(1, 2) * scale).view(num_kv, num_rows, share, num_keys)
        late_RT = torch.arange(num_keys) > last_seen_R[:, None]
        columns = [scores.masked_fill(late_RT[None, :, None], float("-inf"))]
        for k_NKD, _ in self._later:
            k_KR1D = k_NKD[active].transpose(0, 1)[:, :, None]
            columns.append((q_KRSD * k_KR1D).sum(-1, keepdim=True) * scale)
        weights = torch.cat(columns, dim=-1).softmax(dim=-1, dtype=torch.float32).to(q_RQD.dtype)
        on_base = weights[..., :num_keys].reshape(num_kv, num_rows * share, num_keys)
        mixed = (on_base @ v_KTD).view(num_kv, num_rows, share, dim)
        for later, (_, v_NKD) in enumerate(self._later):
            v_KR1D = v_NKD[active].transpose(0, 1)[:, :, None]
            mixed = mixed + weights[..., num_keys + later, None] * v_KR1D
        return mixed.transpose(0, 1).reshape(num_rows, num_heads * dim)


def _join(prompt_GKD: Tensor, answer_MKD: Tensor, rows: RecordRows) -> Tensor:
    return torch.cat([prompt_GKD[rows.prompt], answer_MKD[rows.answer]]).transpose(0, 1)


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


def unroll(head: Eagle3Head, batch: Batch, num_steps: int, after: AfterStep) -> None:
    """Run up to `num_steps` steps of the head over a batch, handing each to `after`."""
    cos_sin = head.rotary(batch.prompt_positions, head.lm_head.weight.dtype)
    prompt_z, _ = head.mix(batch.prompt_ids, head.fuse(batch.prompt_features))
    prompt = head.keys_values(prompt_z, cos_sin)
    g_NC = head.fuse(batch.features)
    rows_N = torch.arange(batch.num_rows)
    attention: TttAttention | None = None
    for step in range(num_steps):
        shifted_N, valid_N = shifted_rows(batch, rows_N, step)
        z_NZ, residual_NC = head.mix(batch.ids[shifted_N], g_NC)
        cos_sin = head.rotary(batch.positions[rows_N] + step, z_NZ.dtype)
        k_NKD, v_NKD = head.keys_values(z_NZ, cos_sin)
        if attention is None:
            attention = TttAttention(batch.records, prompt, (k_NKD, v_NKD))
        else:
            attention.add_step(k_NKD, v_NKD)
        y_NC = head.finish(residual_NC, attention.attend(head.queries(z_NZ, cos_sin), rows_N))
        kept_N = after(StepOutput(step, rows_N, y_NC, shifted_N, valid_N))
        g_NC = head.feedback(y_NC)
        if kept_N is not None:
            attention.narrow(kept_N)
            rows_N, g_NC = rows_N[kept_N], g_NC[kept_N]
        if not len(rows_N):
            return
