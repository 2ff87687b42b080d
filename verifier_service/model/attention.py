"""Paged tree attention in tiles: a row's output depends on its own prefix alone, bit for bit.

Works on a StepLayout and one layer's side of the pool; knows no model. Keys are reduced in tiles
of TILE absolute positions; masked positions weigh exact zero; tiles add up in position order
(trailing zero tiles change nothing). Every matrix product has one batch entry per key-value head
and query rows padded to a multiple.

Shapes: R flat rows, n rows of a block, B blocks, A query heads, H key-value heads, G = A / H,
D head_dim, T tiles, P = T * TILE positions, M = n * G query rows of one head, padded.
"""

import torch

from verifier_service.model.heads import (
    AttentionShape,
    HeadRows,
    Scoring,
    add_tiles,
    cap,
    hide,
    soften,
)
from verifier_service.model.kv import TILE
from verifier_service.model.layout import ChainGroup, StepLayout
from verifier_service.model.tree_attention import TreeAttention
from verifier_service.model.tree_layout import TreeGroup


class StepAttention:
    """Attention of one step, for all layers of one shape; buffers are made once per step."""

    def __init__(self, layout: StepLayout, shape: AttentionShape, dtype: torch.dtype) -> None:
        self._parts = [
            TreeAttention(group, shape, dtype)
            if isinstance(group, TreeGroup)
            else ChainAttention(group, shape, dtype)
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
        """Write out [R, A, D] from scaled queries [R, A, D] and the pool's sides [S, H, D].

        The step's own K and V are in the pool already. Padding rows of `out` are left alone.
        """
        for part in self._parts:
            rows = part.rows
            part.attend(scoring, queries[rows], keys, values, out[rows])


class ChainAttention:
    """Blocks without branches: one product for scores, one per tile for outputs."""

    def __init__(self, group: ChainGroup, shape: AttentionShape, dtype: torch.dtype) -> None:
        self._group = group
        self._batch = batch = len(group.starts)
        self._heads = shape.num_kv_heads
        self._queries = HeadRows(batch, group.num_rows, shape, dtype)
        self._masks: dict[int | None, tuple[int, torch.Tensor | None]] = {
            None: (group.mask_start, self._by_query(group.mask))
        }
        if group.slots is not None:
            # [B, H, P] and [T, B, H, TILE]: rows of a side seen as [S * H, D].
            own = group.slots[:, None] * self._heads + torch.arange(self._heads)[:, None]
            self._key_index = own.flatten()
            tiles = own.view(batch, self._heads, group.num_tiles, TILE)
            self._value_index = tiles.permute(2, 0, 1, 3).flatten()
        first = group.first_row
        self.rows = slice(first, first + batch * group.num_rows)

    def _by_query(self, mask: torch.Tensor | None) -> torch.Tensor | None:
        """[B, n, x] -> [B, 1, M, x]."""
        return None if mask is None else self._queries.by_row(mask)[:, None]

    def attend(
        self,
        scoring: Scoring,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        """StepAttention.attend for this group's rows."""
        size = self._group.num_tiles * TILE
        head_dim = keys.shape[-1]
        own_keys, tiles = self._gather(keys, values)
        scores = torch.bmm(self._queries.load(queries), own_keys.transpose(1, 2))
        cap(scores, scoring.softcap)
        mask_start, mask = self._mask(scoring.window)
        if mask is not None:
            by_block = scores.view(self._batch, self._heads, -1, size)
            by_block[..., mask_start:] += mask
        weights = soften(scores, scoring.sinks, self._queries)
        by_tile = weights.view(*weights.shape[:2], -1, TILE).permute(2, 0, 1, 3)
        parts = torch.bmm(by_tile.reshape(-1, weights.shape[1], TILE), tiles)
        parts = parts.view(self._group.num_tiles, -1, head_dim)
        self._queries.collect(add_tiles(parts), out)

    def _gather(
        self, keys: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """K as [B * H, P, D] and V as [T * B * H, TILE, D]."""
        group, head_dim = self._group, keys.shape[-1]
        size = group.num_tiles * TILE
        if group.first_slot is None:
            own = keys.view(-1, head_dim).index_select(0, self._key_index)
            tiles = values.view(-1, head_dim).index_select(0, self._value_index)
            return own.view(-1, size, head_dim), tiles.view(-1, TILE, head_dim)
        run = slice(group.first_slot, group.first_slot + size)
        tiles = values[run].view(-1, TILE, self._heads, head_dim).transpose(1, 2)
        return (
            keys[run].transpose(0, 1).contiguous(),
            tiles.reshape(-1, TILE, head_dim),
        )

    def _mask(self, window: int | None) -> tuple[int, torch.Tensor | None]:
        """First masked position, and the mask from there on [B, 1, M, P - first]."""
        if window not in self._masks:
            self._masks[window] = self._window_mask(window or 0)
        return self._masks[window]

    def _window_mask(self, window: int) -> tuple[int, torch.Tensor | None]:
        group = self._group
        positions = group.positions
        if int(positions.max()) < window:
            return self._masks[None]
        columns = torch.arange(group.num_tiles * TILE)
        mask = hide(columns <= positions[..., None] - window, self._queries.buffer.dtype)
        if group.mask is not None:
            mask[..., group.mask_start :] += group.mask
        return 0, self._by_query(mask)
