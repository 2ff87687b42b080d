"""Attention of many sessions' rows, each over its own cached rows and nothing else.

The linear layers of a head see one flat batch; here the batch falls apart into sessions again. A
part writes its new rows behind its cached ones and attends to both. Rows of other sessions are
never read, not even masked, so nothing of one session (not a NaN) can reach another.

Shapes: N rows of a part, Q query heads, K key-value heads, G = Q / K, D head_dim, L rows read.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from drafter_service.cache import KvSlab

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""attend(layer, q [N, Q, D], k [N, K, D], v [N, K, D]) -> [N, Q * D]"""


@dataclass(frozen=True, slots=True)
class Part:
    """One session's share of a forward: `num_rows` new rows behind `cached_len` cached ones.

    tail: which of the last rows read each new row sees, bool [N, at most L] with the new rows as
    its last N columns; everything before the tail is seen by all. None: all of it (one row).
    base_row: the newest row made of true features, where the new rows are drafts behind it. A
    window is counted from there: drafts see the rows their base row sees, and all of their own.
    """

    start: int
    cached_len: int
    num_rows: int
    tail: Tensor | None = None
    base_row: int | None = None

    def first_visible(self, window: int | None) -> int:
        """The first row that any new row sees through a window of so many rows."""
        if window is None:
            return 0
        newest = self.cached_len if self.base_row is None else self.base_row
        return max(0, newest - window + 1)


def causal_tail(num_rows: int) -> Tensor | None:
    """Rows in order: each sees itself and those before it."""
    if num_rows == 1:
        return None
    return torch.ones(num_rows, num_rows, dtype=torch.bool).tril()


def attend_over(
    slab: KvSlab, parts: Sequence[Part], windows: Sequence[int | None] = (None,)
) -> Attend:
    """The callback a head's layers call, each with its own number.

    windows: per layer, how many rows back it sees; None: all of them.
    """

    def attend(layer: int, q_NQD: Tensor, k_NKD: Tensor, v_NKD: Tensor) -> Tensor:
        window = windows[layer]
        mixed: list[Tensor] = []
        first = 0
        for part in parts:
            rows = slice(first, first + part.num_rows)
            slab.write(part.start + part.cached_len, k_NKD[rows], v_NKD[rows], layer)
            hidden = part.first_visible(window)
            length = part.cached_len + part.num_rows - hidden
            k_KLD, v_KLD = slab.read(part.start + hidden, length, layer)
            tail = part.tail if window is None else _windowed(part, window, length)
            mixed.append(_attend_part(q_NQD[rows], k_KLD, v_KLD, tail))
            first = rows.stop
        return mixed[0] if len(mixed) == 1 else torch.cat(mixed)

    return attend


def _windowed(part: Part, window: int, length: int) -> Tensor | None:
    """Which of the last `length` rows each new row sees: bool [N, length], or the part's tail
    where all new rows look equally far back."""
    if part.base_row is not None or part.num_rows == 1:
        return part.tail
    columns = torch.arange(
        part.cached_len + part.num_rows - length, part.cached_len + part.num_rows
    )
    rows_N1 = torch.arange(part.cached_len, part.cached_len + part.num_rows)[:, None]
    return (columns <= rows_N1) & (columns > rows_N1 - window)


def _attend_part(q_NQD: Tensor, k_KLD: Tensor, v_KLD: Tensor, tail: Tensor | None) -> Tensor:
    """[N, Q * D]. Query heads of one kv head are folded into rows: several times faster on CPU
    in bf16 than asking SDPA for grouped heads."""
    num_rows, num_heads, head_dim = q_NQD.shape
    num_kv, length = k_KLD.shape[:2]
    group = num_heads // num_kv
    folded = q_NQD.view(num_rows, num_kv, group, head_dim).permute(1, 2, 0, 3)
    q_KRD = folded.reshape(num_kv, group * num_rows, head_dim)
    bias: Tensor | None = None
    if tail is not None:
        bias_NL = q_NQD.new_zeros(num_rows, length)
        bias_NL[:, length - tail.shape[1] :].masked_fill_(~tail.to(q_NQD.device), float("-inf"))
        bias = bias_NL.repeat(group, 1)
    mixed_KRD = scaled_dot_product_attention(q_KRD[None], k_KLD[None], v_KLD[None], attn_mask=bias)
    mixed = mixed_KRD.view(num_kv, group, num_rows, head_dim).permute(2, 0, 1, 3)
    return mixed.reshape(num_rows, num_heads * head_dim)
