"""Paged tree attention in tiles: a row's output depends on its own prefix alone, bit for bit.

Works on a StepLayout and one layer's side of the pool; knows no model. Keys are reduced in tiles
of TILE absolute positions; masked positions weigh exact zero; tiles add up in position order.
Queries of all heads meet keys of all heads in one product (a query is zero outside its own head's
columns, and zeros change no sum), so a contiguous run of slots is read where it lies.

Shapes: R flat rows, n rows of a block, B blocks, A query heads, H key-value heads, G = A / H,
D head_dim, W = H * D, T tiles, P = T * TILE positions, M = n * A query rows, padded.
"""

from dataclasses import dataclass

import torch
from torch.nn import functional

from verifier_service.model.kv import TILE
from verifier_service.model.layout import ChainGroup, StepLayout
from verifier_service.model.tree_layout import TreeGroup

_HIDDEN = float("-inf")


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """Heads of a layer, and the multiple to which query rows are padded (invariance.py)."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    multiple: int

    @property
    def width(self) -> int:
        """Elements of one slot's K (or V), all heads."""
        return self.num_kv_heads * self.head_dim

    def padded(self, num_rows: int) -> int:
        """Query rows of a block of `num_rows`, padding included."""
        return -(-num_rows * self.num_heads // self.multiple) * self.multiple


@dataclass(frozen=True, slots=True)
class Scoring:
    """What a layer does to scores beside the scale (queries come scaled).

    window: a row sees only positions above its own - window. softcap: scores become
    softcap * tanh(score / softcap). sinks: [A] a logit per head that only takes weight away.
    """

    window: int | None = None
    softcap: float | None = None
    sinks: torch.Tensor | None = None


class StepAttention:
    """Attention of one step, for all layers of one shape; buffers are made once per step."""

    def __init__(self, layout: StepLayout, shape: AttentionShape, dtype: torch.dtype) -> None:
        self._parts = [
            _TreeAttention(group, shape, dtype)
            if isinstance(group, TreeGroup)
            else _ChainAttention(group, shape, dtype)
            for group in layout.groups
        ]

    def attend(
        self,
        scoring: Scoring,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        """Write out [R, A, D] from scaled queries [R, A, D] and the pool's sides [S, W].

        The step's own K and V are in the pool already. Padding rows of `out` are left alone.
        """
        for part in self._parts:
            rows = part.rows
            part.attend(scoring, queries[rows], keys, values, out[rows])


class _Spread:
    """Queries spread over the columns of all heads, and outputs collected from them."""

    def __init__(
        self, batch: int, num_rows: int, shape: AttentionShape, dtype: torch.dtype
    ) -> None:
        heads, width = shape.num_kv_heads, shape.width
        self._split = (batch, num_rows, heads, shape.num_heads // heads, heads, shape.head_dim)
        self._real = num_rows * shape.num_heads
        self.num_rows = shape.padded(num_rows)
        self.buffer = torch.zeros(batch, self.num_rows, width, dtype=dtype)
        self._own_columns = self._diagonal(self.buffer)

    def _diagonal(self, spread: torch.Tensor) -> torch.Tensor:
        """[B, n, G, D, H]: of each query head the columns of its own key-value head."""
        return spread[:, : self._real].view(self._split).diagonal(dim1=2, dim2=4)

    def _by_head(self, rows: torch.Tensor) -> torch.Tensor:
        batch, num_rows, heads, group, _, head_dim = self._split
        return rows.view(batch, num_rows, heads, group, head_dim).permute(0, 1, 3, 4, 2)

    def load(self, queries: torch.Tensor) -> torch.Tensor:
        """queries [B * n, A, D] -> [B, M, W]."""
        self._own_columns.copy_(self._by_head(queries))
        return self.buffer

    def collect(self, mixed: torch.Tensor, out: torch.Tensor) -> None:
        """mixed [B * M, W] -> out [B * n, A, D]."""
        batch, width = self._split[0], mixed.shape[-1]
        self._by_head(out).copy_(self._diagonal(mixed.view(batch, self.num_rows, width)))


class _ChainAttention:
    """Blocks without branches: one product for scores, one per tile for outputs."""

    def __init__(self, group: ChainGroup, shape: AttentionShape, dtype: torch.dtype) -> None:
        self._group = group
        self._batch = len(group.starts)
        self._real = group.num_rows * shape.num_heads
        self._heads = shape.num_heads
        self._spread = _Spread(self._batch, group.num_rows, shape, dtype)
        self._masks: dict[int | None, tuple[int, torch.Tensor | None]] = {
            None: (group.mask_start, group.mask)
        }
        first = group.first_row
        self.rows = slice(first, first + self._batch * group.num_rows)

    def attend(
        self,
        scoring: Scoring,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        group, batch, rows = self._group, self._batch, self._spread.num_rows
        size = group.num_tiles * TILE
        spread = self._spread.load(queries)
        if group.first_slot is not None:
            run = slice(group.first_slot, group.first_slot + size)
            scores = functional.linear(spread[0], keys[run])[None]
            tiles = values[run]
        else:
            assert group.slots is not None
            assert group.tile_slots is not None
            own = keys.index_select(0, group.slots.view(-1)).view(batch, size, -1)
            scores = torch.bmm(spread, own.transpose(1, 2))
            tiles = values.index_select(0, group.tile_slots.view(-1))
        scores = _cap(scores, scoring.softcap)
        mask_start, mask = self._mask(scoring.window)
        if mask is not None:
            real = scores[:, : self._real].view(batch, group.num_rows, self._heads, size)
            real[..., mask_start:] += mask[:, :, None]
        weights = _soften(scores, scoring.sinks)
        weights = weights.view(batch, rows, -1, TILE).permute(2, 0, 1, 3)
        parts = torch.bmm(
            weights.reshape(-1, rows, TILE), tiles.view(-1, TILE, tiles.shape[-1])
        ).view(group.num_tiles, batch * rows, -1)
        self._spread.collect(_add_tiles(parts), out)

    def _mask(self, window: int | None) -> tuple[int, torch.Tensor | None]:
        if window not in self._masks:
            self._masks[window] = self._window_mask(window or 0)
        return self._masks[window]

    def _window_mask(self, window: int) -> tuple[int, torch.Tensor | None]:
        """The group's mask with positions beyond the window hidden too."""
        group = self._group
        positions = group.positions
        if int(positions.max()) < window:
            return self._masks[None]
        columns = torch.arange(group.num_tiles * TILE)
        mask = torch.zeros(*positions.shape, len(columns), dtype=self._spread.buffer.dtype)
        mask.masked_fill_(columns <= positions[..., None] - window, _HIDDEN)
        if group.mask is not None:
            mask[..., group.mask_start :] += group.mask
        return 0, mask


class _TreeAttention:
    """A branching span: shared prefix tiles, then the tail in position and in pair order."""

    def __init__(self, group: TreeGroup, shape: AttentionShape, dtype: torch.dtype) -> None:
        self._group = group
        self._spread = _Spread(1, group.num_rows, shape, dtype)
        self._repeat = (shape.num_heads, self._spread.num_rows)
        self._gather = self._by_query(group.gather)
        self._prefix_masks: dict[int | None, torch.Tensor | None] = {None: None}
        self._tail_masks: dict[int | None, torch.Tensor] = {None: self._by_query(group.mask)}
        self._weights = [self._by_query(tile.weight) for tile in group.pair_tiles]
        self.rows = slice(group.first_row, group.first_row + group.num_rows)

    def _by_query(self, rows: torch.Tensor) -> torch.Tensor:
        """[n, x] -> [M, x]: each row for all its heads, zeros for padding."""
        heads, padded = self._repeat
        repeated = rows.repeat_interleave(heads, dim=0)
        return functional.pad(repeated, (0, 0, 0, padded - repeated.shape[0]))

    def attend(
        self,
        scoring: Scoring,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        group = self._group
        spread = self._spread.load(queries)[0]
        scores = self._scores(scoring, spread, keys)
        weights = _soften(scores, scoring.sinks)
        begin = group.prefix_tiles * TILE
        num_tiles = group.prefix_tiles + group.tail_tiles
        parts = spread.new_empty(num_tiles, *spread.shape)
        if begin:
            shared = weights[:, :begin].view(-1, group.prefix_tiles, TILE).transpose(0, 1)
            tiles = _prefix(group, values).view(-1, TILE, values.shape[-1])
            torch.bmm(shared.contiguous(), tiles, out=parts[: group.prefix_tiles])
        for number, tile in enumerate(group.pair_tiles):
            low = begin + number * TILE
            chosen = weights[:, low : low + TILE].index_select(1, tile.columns)
            chosen *= self._weights[number]
            torch.mm(
                chosen, values.index_select(0, tile.slots), out=parts[group.prefix_tiles + number]
            )
        self._spread.collect(_add_tiles(parts), out)

    def _scores(self, scoring: Scoring, spread: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        """Scores in position order, masked: [M, P]."""
        group, window = self._group, scoring.window
        if window not in self._tail_masks:
            self._make_window_masks(window or 0)
        by_key = _cap(
            functional.linear(spread, keys.index_select(0, group.key_slots)), scoring.softcap
        )
        tail = by_key.gather(1, self._gather)
        tail += self._tail_masks[window]
        if not group.prefix_tiles:
            return tail
        prefix = _cap(functional.linear(spread, _prefix(group, keys)), scoring.softcap)
        prefix_mask = self._prefix_masks[window]
        if prefix_mask is not None:
            prefix += prefix_mask
        return torch.cat([prefix, tail], dim=1)

    def _make_window_masks(self, window: int) -> None:
        group = self._group
        begin = group.prefix_tiles * TILE
        columns = torch.arange(begin + group.tail_tiles * TILE)
        outside = columns <= group.positions[:, None] - window
        mask = torch.zeros(outside.shape, dtype=group.mask.dtype).masked_fill_(outside, _HIDDEN)
        self._prefix_masks[window] = self._by_query(mask[:, :begin])
        self._tail_masks[window] = self._by_query(mask[:, begin:] + group.mask)


def _prefix(group: TreeGroup, side: torch.Tensor) -> torch.Tensor:
    """K or V of the whole tiles before a tree, [prefix_tiles * TILE, W]."""
    if group.first_slot is not None:
        return side[group.first_slot : group.first_slot + group.prefix_tiles * TILE]
    assert group.prefix_slots is not None
    return side.index_select(0, group.prefix_slots)


def _cap(scores: torch.Tensor, softcap: float | None) -> torch.Tensor:
    if softcap is None:
        return scores
    return scores.div_(softcap).tanh_().mul_(softcap)


def _soften(scores: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
    """Softmax over positions (last dimension); sinks take their share and are dropped.

    scores: [..., M, P]. The sink stands in a tile of its own behind the last one, so that it is
    added last whatever the number of masked tiles.
    """
    if sinks is None:
        return torch.softmax(scores, dim=-1)
    heads = sinks.shape[0]
    rows = scores.shape[-2]
    column = sinks.to(scores.dtype).repeat(-(-rows // heads))[:rows]
    sink = scores.new_full((*scores.shape[:-1], TILE), _HIDDEN)
    sink[..., 0] = column
    weights = torch.softmax(torch.cat([scores, sink], dim=-1), dim=-1)
    return weights[..., : scores.shape[-1]].contiguous()


def _add_tiles(parts: torch.Tensor) -> torch.Tensor:
    """[T, M, W] -> [M, W], in position order (trailing zero tiles change nothing)."""
    return parts[0] if parts.shape[0] == 1 else parts.sum(0)
