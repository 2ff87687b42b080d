"""Attention of the training-time test: step-0 rows as usual, later steps each for its own row.

A query of step j at row t sees the step-0 keys of rows <= t (through a window, of the last ones),
and of every later step 1..j the one key of its own row. `mask_by_definition` says so in plain
loops; `TttAttention` is the fast form: one score block against step-0 keys plus j single columns.

Knows no head. Shapes: T rows of a record (prompt rows first), M answer rows of a batch, N of them
still active, R active ones of one record, Q query heads, K kv heads, D head_dim, S = Q / K.
"""

import itertools
from typing import Protocol

import torch
from torch import Tensor, split_with_sizes
from torch.autograd.function import FunctionCtx

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
        num_rows, num_heads, dim = q_RQD.shape
        num_kv, num_keys, _ = base[0].shape
        shape = (num_rows, num_kv, num_heads // num_kv, dim)
        q_KRSD = (q_RQD * dim**-0.5).view(shape).transpose(0, 1)
        own = [x_RKD.transpose(0, 1) for pair in later for x_RKD in pair]
        hidden_RT = self._hidden(num_keys, last_seen_R)
        mixed: Tensor = _Attend.apply(  # type: ignore[no-untyped-call]
            q_KRSD.reshape(num_kv, num_rows * shape[2], dim), *base, hidden_RT, *own
        )
        mixed_KRSD = mixed.view(num_kv, num_rows, shape[2], dim)
        return mixed_KRSD.transpose(0, 1).reshape(num_rows, num_heads * dim)

    def _hidden(self, num_keys: int, last_seen_R: Tensor) -> Tensor:
        """[R, T] which step-0 keys a row does not see."""
        keys_T, last_R1 = torch.arange(num_keys), last_seen_R[:, None]
        hidden_RT = keys_T > last_R1
        if self._window is not None:
            hidden_RT = hidden_RT | (keys_T <= last_R1 - self._window)
        return hidden_RT


class _Saved(Protocol):
    @property
    def saved_tensors(self) -> tuple[Tensor, ...]: ...


class _Attend(torch.autograd.Function):
    """Of one record, X = R * S rows of queries: fewer passes over the scores than autograd makes.

    With w the weights and o the mixture, d score = w * (do . v - do . o).
    """

    @staticmethod
    def forward(
        ctx: FunctionCtx,
        q_KXD: Tensor,
        k_KTD: Tensor,
        v_KTD: Tensor,
        hidden_RT: Tensor,
        *own: Tensor,
    ) -> Tensor:
        """[K, X, D]. own: k and v [K, R, D] of every later step in turn. q is scaled already."""
        num_kv, num_queries, dim = q_KXD.shape
        num_rows, num_keys = hidden_RT.shape
        share = num_queries // num_rows if num_rows else 1
        q_KRSD = q_KXD.view(num_kv, num_rows, share, dim)
        scores = (q_KXD @ k_KTD.transpose(1, 2)).view(num_kv, num_rows, share, num_keys)
        scores.masked_fill_(hidden_RT[None, :, None], float("-inf"))
        if own:
            columns = [(q_KRSD * k_KRD[:, :, None]).sum(-1, keepdim=True) for k_KRD in own[::2]]
            scores = torch.cat([scores, *columns], dim=-1)
        weights = scores.softmax(dim=-1, dtype=torch.float32).to(q_KXD.dtype)
        on_base, *on_own = split_with_sizes(weights, [num_keys] + [1] * (len(own) // 2), dim=-1)
        on_base = on_base.reshape(num_kv, num_queries, num_keys)
        mixed_KXD = on_base @ v_KTD
        mixed_KRSD = mixed_KXD.view_as(q_KRSD)
        for weight_KRS1, v_KRD in zip(on_own, own[1::2], strict=True):
            mixed_KRSD.add_(weight_KRS1 * v_KRD[:, :, None])
        ctx.save_for_backward(q_KXD, k_KTD, v_KTD, on_base, mixed_KXD, *own, *on_own)
        return mixed_KXD

    @staticmethod
    def backward(ctx: _Saved, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q_KXD, k_KTD, v_KTD, on_base, mixed_KXD, *rest = ctx.saved_tensors
        steps = len(rest) // 3
        own, on_own = rest[: 2 * steps], rest[2 * steps :]
        (grad_KXD,) = grads
        along_KX1 = (grad_KXD * mixed_KXD).sum(-1, keepdim=True)
        grad_scores = (grad_KXD @ v_KTD.transpose(1, 2)).sub_(along_KX1).mul_(on_base)
        grad_q = grad_scores @ k_KTD
        grad_k = grad_scores.transpose(1, 2) @ q_KXD
        grad_v = on_base.transpose(1, 2) @ grad_KXD
        found: list[Tensor | None] = [grad_q, grad_k, grad_v, None]
        for number, weight_KRS1 in enumerate(on_own):
            k_KRD, v_KRD = own[2 * number], own[2 * number + 1]
            num_kv, num_rows, dim = k_KRD.shape
            shape = (num_kv, num_rows, weight_KRS1.shape[2], dim)
            grad_KRSD, q_KRSD = grad_KXD.reshape(shape), q_KXD.view(shape)
            score_KRS1 = (grad_KRSD * v_KRD[:, :, None]).sum(-1, keepdim=True)
            score_KRS1 = (score_KRS1 - along_KX1.view_as(score_KRS1)) * weight_KRS1
            grad_q.view(shape).add_(score_KRS1 * k_KRD[:, :, None])
            found += [(score_KRS1 * q_KRSD).sum(2), (weight_KRS1 * grad_KRSD).sum(2)]
        return tuple(found)
