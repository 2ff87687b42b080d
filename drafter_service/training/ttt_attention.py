"""Attention of the training-time test: step-0 rows as usual, later steps each for its own row.

A query of step j at row t sees the step-0 keys of rows <= t (through a window, of the last ones),
and of every later step 1..j the one key of its own row. `mask_by_definition` says so in plain
loops; `TttAttention` is the fast form: one score block against step-0 keys plus j single columns.

Knows no head. Shapes: T rows of a record (prompt rows first), M answer rows of a batch, N of them
still active, R active ones of one record, Q query heads, K kv heads, D head_dim, S = Q / K.
"""

import itertools

import torch
from torch import Tensor, split_with_sizes

from drafter_service.training.batches import RecordRows

Pair = tuple[Tensor, Tensor]


def mask_by_definition(num_rows: int, step: int, window: int | None = None) -> Tensor:
    """[T, (step + 1) * T] bool: which key of steps 0..step a query of `step` at row t may see."""
    mask = torch.zeros(num_rows, (step + 1) * num_rows, dtype=torch.bool)
    for query in range(num_rows):
        for key in range(num_rows):
            mask[query, key] = key <= query and (window is None or key > query - window)
        for later in range(1, step + 1):
            mask[query, later * num_rows + query] = True
    return mask


class TttAttention:
    """Keys and values of all steps of one batch in one layer; attends record by record."""

    def __init__(
        self,
        records: tuple[RecordRows, ...],
        prompt: Pair,
        answer: Pair,
        window: int | None = None,
    ) -> None:
        """`prompt` and `answer`: step-0 (k, v) of the flat prompt rows and answer rows."""
        self._records = records
        self._window = window
        # `split` throughout: the backward of a slice would fill a whole tensor with zeros.
        counts = [rows.prompt.stop - rows.prompt.start for rows in records]
        answers = [rows.answer.stop - rows.answer.start for rows in records]
        keys, values = (
            [
                torch.cat(both).transpose(0, 1)
                for both in zip(
                    split_with_sizes(before, counts), split_with_sizes(after, answers), strict=True
                )
            ]
            for before, after in zip(prompt, answer, strict=True)
        )
        self._base = list(zip(keys, values, strict=True))
        self._prompt_lens = counts
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
        counts = [stop - start for start, stop in itertools.pairwise(starts)]
        later = [
            list(zip(split_with_sizes(k, counts), split_with_sizes(v, counts), strict=True))
            for k, v in self._later
        ]
        mixed: list[Tensor] = []
        for record, (q_RQD, rows_R) in enumerate(
            zip(split_with_sizes(q_NQD, counts), split_with_sizes(rows_N, counts), strict=True)
        ):
            last_seen_R = rows_R - self._records[record].answer.start + self._prompt_lens[record]
            own = [step[record] for step in later]
            mixed.append(self._attend_record(q_RQD, self._base[record], own, last_seen_R))
        return torch.cat(mixed)

    def attend_prompt(self, q_GQD: Tensor) -> Tensor:
        """[G, Q * D] of the prompt rows at step 0, each at or before itself."""
        mixed: list[Tensor] = []
        for q_RQD, (k_KTD, v_KTD) in zip(
            split_with_sizes(q_GQD, self._prompt_lens), self._base, strict=True
        ):
            length = len(q_RQD)
            base = (k_KTD[:, :length], v_KTD[:, :length])
            mixed.append(self._attend_record(q_RQD, base, [], torch.arange(length)))
        return torch.cat(mixed)

    def _attend_record(
        self, q_RQD: Tensor, base: Pair, later: list[Pair], last_seen_R: Tensor
    ) -> Tensor:
        k_KTD, v_KTD = base
        num_rows, num_heads, dim = q_RQD.shape
        num_kv, num_keys, _ = k_KTD.shape
        share = num_heads // num_kv
        scale = dim**-0.5
        q_KRSD = q_RQD.view(num_rows, num_kv, share, dim).transpose(0, 1)
        q_KXD = q_KRSD.reshape(num_kv, num_rows * share, dim)
        scores = (q_KXD @ k_KTD.transpose(1, 2) * scale).view(num_kv, num_rows, share, num_keys)
        hidden_RT = self._hidden(num_keys, last_seen_R)
        columns = [scores.masked_fill(hidden_RT[None, :, None], float("-inf"))]
        for k_RKD, _ in later:
            k_KR1D = k_RKD.transpose(0, 1)[:, :, None]
            columns.append((q_KRSD * k_KR1D).sum(-1, keepdim=True) * scale)
        weights = torch.cat(columns, dim=-1).softmax(dim=-1, dtype=torch.float32).to(q_RQD.dtype)
        weights, *on_later = split_with_sizes(weights, [num_keys] + [1] * len(later), dim=-1)
        on_base = weights.reshape(num_kv, num_rows * share, num_keys)
        mixed = (on_base @ v_KTD).view(num_kv, num_rows, share, dim)
        for weight_KRS1, (_, v_RKD) in zip(on_later, later, strict=True):
            mixed = mixed + weight_KRS1 * v_RKD.transpose(0, 1)[:, :, None]
        return mixed.transpose(0, 1).reshape(num_rows, num_heads * dim)

    def _hidden(self, num_keys: int, last_seen_R: Tensor) -> Tensor:
        """[R, T] which step-0 keys a row does not see."""
        keys_T, last_R1 = torch.arange(num_keys), last_seen_R[:, None]
        hidden_RT = keys_T > last_R1
        if self._window is not None:
            hidden_RT = hidden_RT | (keys_T <= last_R1 - self._window)
        return hidden_RT
