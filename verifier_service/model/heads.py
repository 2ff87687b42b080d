"""What both forms of attention share: heads, query rows by head, masks, softmax.

Shapes: as in attention.py.
"""

from dataclasses import dataclass

import torch
from torch.nn import functional

from verifier_service.model.kv import TILE

_HIDDEN = float("-inf")


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """Heads of a layer, and the multiple to which query rows are padded (invariance.py)."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    multiple: int

    @property
    def group_size(self) -> int:
        """Query heads that share a key-value head."""
        return self.num_heads // self.num_kv_heads


@dataclass(frozen=True, slots=True)
class Scoring:
    """What a layer does to scores beside the scale (queries come scaled).

    window: a row sees only positions above its own - window. softcap: scores become
    softcap * tanh(score / softcap). sinks: [A] a logit per head that only takes weight away.
    """

    window: int | None = None
    softcap: float | None = None
    sinks: torch.Tensor | None = None


class HeadRows:
    """Query rows sorted by key-value head: [B * n, A, D] <-> [B * H, M, D], padding zero.

    rows: B * n adjacent flat rows, or int64 [B * n], which may name a row again that comes to the
    same.
    queries: what scores are made of. mixed: what attention of these rows becomes.
    """

    def __init__(
        self,
        batch: int,
        num_rows: int,
        shape: AttentionShape,
        like: torch.Tensor,
        rows: slice | torch.Tensor,
    ) -> None:
        """like: a tensor of the pool's dtype and device."""
        heads, self._group_size = shape.num_kv_heads, shape.group_size
        self._split = (batch, num_rows, heads, self._group_size, shape.head_dim)
        self._real = num_rows * self._group_size
        self.num_rows = -(-self._real // shape.multiple) * shape.multiple
        size = (batch * heads, self.num_rows, shape.head_dim)
        self.queries = like.new_zeros(size)
        self.mixed = torch.zeros_like(self.queries)
        self._into, self._from = self._rows(self.queries), self._rows(self.mixed)
        self._source = self._sink = self._into
        self._rows_of_step = rows
        self._flat = self._out = self._picked = self.queries

    def _rows(self, by_head: torch.Tensor) -> torch.Tensor:
        """[B * H, M, D] -> [B, n, H, G, D], a view without padding."""
        batch, num_rows, heads, group, head_dim = self._split
        real = by_head.view(batch, heads, self.num_rows, head_dim)[:, :, : self._real]
        return real.view(batch, heads, num_rows, group, head_dim).transpose(1, 2)

    def bind(self, queries: torch.Tensor, out: torch.Tensor) -> None:
        """Where `load` reads from and `store` writes to, [R, A, D] of the whole step each."""
        rows = self._rows_of_step
        if isinstance(rows, slice):
            self._source, self._sink = queries[rows].view(self._split), out[rows].view(self._split)
        else:
            self._flat, self._out = queries, out
            self._picked = out.new_empty(len(rows), *out.shape[1:])
            self._source = self._sink = self._picked.view(self._split)

    def load(self) -> None:
        """Fill `queries`."""
        rows = self._rows_of_step
        if isinstance(rows, torch.Tensor):
            torch.index_select(self._flat, 0, rows, out=self._picked)
        self._into.copy_(self._source)

    def store(self, mixed: torch.Tensor | None = None) -> None:
        """Hand `mixed` out, the own one or one given, [B, H, M, D] however it lies."""
        rows = self._rows_of_step
        self._sink.copy_(self._from if mixed is None else self._rows(mixed))
        if isinstance(rows, torch.Tensor):
            self._out.index_copy_(0, rows, self._picked)

    def by_row(self, rows: torch.Tensor) -> torch.Tensor:
        """[..., n, x] -> [..., M, x]: each row for every query head of a group, then zeros."""
        repeated = rows.repeat_interleave(self._group_size, dim=-2)
        return functional.pad(repeated, (0, 0, 0, self.num_rows - repeated.shape[-2]))

    def by_query_head(self, sinks: torch.Tensor) -> torch.Tensor:
        """[A] -> [B * H, M], the value of each query row's own head."""
        batch, num_rows, heads, group, _ = self._split
        rows = sinks.view(1, heads, 1, group).expand(batch, heads, num_rows, group)
        rows = rows.reshape(batch * heads, -1)
        return functional.pad(rows, (0, self.num_rows - rows.shape[-1]))


def hide(hidden: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A mask to add to scores: -inf where hidden, else 0."""
    mask = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device)
    return mask.masked_fill_(hidden, _HIDDEN)


def cap(scores: torch.Tensor, softcap: float | None) -> None:
    """Soft-cap scores in place."""
    if softcap is not None:
        scores.div_(softcap).tanh_().mul_(softcap)


def soften(
    scores: torch.Tensor, sinks: torch.Tensor | None, rows: HeadRows, out: torch.Tensor
) -> None:
    """Softmax over positions of scores [B * H, M, P]; sinks take their share and are dropped.

    The sink stands in a tile of its own behind the last one, so that it is added last whatever
    the number of masked tiles.
    """
    if sinks is None:
        torch.softmax(scores, dim=-1, out=out)
        return
    sink = scores.new_full((*scores.shape[:-1], TILE), _HIDDEN)
    sink[..., 0] = rows.by_query_head(sinks)
    weights = torch.softmax(torch.cat([scores, sink], dim=-1), dim=-1)
    out.copy_(weights[..., : scores.shape[-1]])
