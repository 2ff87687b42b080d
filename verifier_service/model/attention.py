"""Paged tree attention in tiles: a row's output depends on its own prefix alone, bit for bit.

Works on a StepLayout and a pool; knows no model. Keys are reduced in tiles of TILE absolute
positions; masked positions weigh exact zero; tiles add up in position order (trailing zero tiles
change nothing). Every matrix product has one batch entry per key-value head and query rows padded
to a multiple. Buffers and views are made once per step: at one row a layer's attention is a dozen
calls whose overhead is all that counts.

Shapes: R flat rows, n rows of a block, B blocks, A query heads, H key-value heads, G = A / H,
D head_dim, T tiles, P = T * TILE positions, M = n * G query rows of one head, padded.
"""

import torch

from verifier_service.model.heads import AttentionShape, HeadRows, Scoring, cap, hide, soften
from verifier_service.model.kv import TILE, Pool
from verifier_service.model.layout import ChainGroup, StepLayout
from verifier_service.model.tree_attention import TreeAttention
from verifier_service.model.tree_layout import TreeGroup


class StepAttention:
    """Attention of one step, for all layers of one shape."""

    def __init__(self, layout: StepLayout, shape: AttentionShape, pool: Pool) -> None:
        self._parts = [
            TreeAttention(group, shape, pool)
            if isinstance(group, TreeGroup)
            else ChainAttention(group, shape, pool)
            for group in layout.groups
        ]

    def bind(self, queries: torch.Tensor, out: torch.Tensor) -> None:
        """Say where scaled queries [R, A, D] come from and where outputs [R, A, D] go.

        Padding rows of `out` are left alone.
        """
        for part in self._parts:
            part.queries.bind(queries, out)

    def attend(self, layer: int, scoring: Scoring) -> None:
        """Fill `out` for one layer; the step's own K and V of that layer are in the pool."""
        for part in self._parts:
            part.attend(layer, scoring)


class ChainAttention:
    """Blocks without branches: one product for scores, one per tile for outputs."""

    def __init__(self, group: ChainGroup, shape: AttentionShape, pool: Pool) -> None:
        heads, head_dim, kv = shape.num_kv_heads, shape.head_dim, pool.kv
        batch, tiles, size = group.num_blocks, group.num_tiles, group.num_tiles * TILE
        self._group = group
        self._pool = pool
        self.queries = HeadRows(batch, group.num_rows, shape, kv, _flat_rows(group))
        rows = self.queries.num_rows
        # K and V as [2, B * H, P, D].
        self._kv = kv.new_empty(2, batch * heads, size, head_dim)
        self._keys = self._kv[0].transpose(1, 2)
        self._values = self._kv[1].view(-1, TILE, head_dim)
        if group.first_slot is not None:
            self._runs = pool.runs(group.first_slot, size)
        else:
            assert group.slots is not None
            sides = [pool.index(side, group.slots).transpose(0, 1) for side in (0, 1)]
            self._index = torch.stack(sides).flatten()
        self._scores = kv.new_empty(batch * heads, rows, size)
        self._by_block = self._scores.view(batch, heads, rows, size)
        self._weights = torch.empty_like(self._scores)
        # The same weights tile by tile, [B * H, T, M, TILE].
        self._tiled = self._weights.view(-1, rows, tiles, TILE).transpose(1, 2)
        self._by_tile = kv.new_empty(batch * heads * tiles, rows, TILE)
        self._parts = kv.new_empty(batch * heads * tiles, rows, head_dim)
        self._masked: dict[int | None, tuple[torch.Tensor, torch.Tensor] | None] = {
            None: self._place(group.mask_start, group.mask)
        }

    def attend(self, layer: int, scoring: Scoring) -> None:
        """StepAttention.attend for this group's rows."""
        queries = self.queries
        queries.load()
        self._read(layer)
        torch.bmm(queries.queries, self._keys, out=self._scores)
        cap(self._scores, scoring.softcap)
        masked = self._mask(scoring.window)
        if masked is not None:
            scores, mask = masked
            scores.add_(mask)
        soften(self._scores, scoring.sinks, queries, self._weights)
        self._by_tile.view(self._tiled.shape).copy_(self._tiled)
        torch.bmm(self._by_tile, self._values, out=self._parts)
        by_tile = self._parts.view(*self._tiled.shape[:3], -1)
        torch.sum(by_tile, dim=1, out=queries.mixed)
        queries.store()

    def _read(self, layer: int) -> None:
        if self._group.first_slot is not None:
            self._kv.copy_(self._runs[layer])
        else:
            out = self._kv.view(-1, self._kv.shape[-1])
            torch.index_select(self._pool.vectors[layer], 0, self._index, out=out)

    def _place(
        self, first: int, mask: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """A mask [B, n, P - first] as (scores that it is added to, [B, 1, M, P - first])."""
        if mask is None:
            return None
        return self._by_block[..., first:], self.queries.by_row(mask)[:, None]

    def _mask(self, window: int | None) -> tuple[torch.Tensor, torch.Tensor] | None:
        if window not in self._masked:
            self._masked[window] = self._window_mask(window or 0)
        return self._masked[window]

    def _window_mask(self, window: int) -> tuple[torch.Tensor, torch.Tensor] | None:
        group = self._group
        positions = group.positions
        if int(positions.max()) < window:
            return self._masked[None]
        columns = torch.arange(group.num_tiles * TILE, device=positions.device)
        mask = hide(columns <= positions[..., None] - window, self._kv.dtype)
        if group.mask is not None:
            mask[..., group.mask_start :] += group.mask
        return self._place(0, mask)


def _flat_rows(group: ChainGroup) -> slice | torch.Tensor:
    if group.first_row is not None:
        return slice(group.first_row, group.first_row + group.num_blocks * group.num_rows)
    assert group.rows is not None
    return group.rows
