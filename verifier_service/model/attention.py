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

from verifier_service.model.block_keys import BlockKeys, block_mask, flat_rows
from verifier_service.model.block_layout import TILE_RULES, BlockGroup
from verifier_service.model.heads import AttentionShape, HeadRows, Scoring, cap, soften
from verifier_service.model.kv import TILE, Pool
from verifier_service.model.layout import StepLayout
from verifier_service.model.step_attention import (
    GroupsAttention,
    PlainAttention,
    PoolAttention,
    StepAttention,
)
from verifier_service.model.tree_attention import TreeAttention
from verifier_service.model.tree_layout import TreeGroup


class Tiles:
    """The reference backend: any device, any scoring."""

    name = "tiles"
    rules = TILE_RULES

    def over(self, pool: Pool) -> PoolAttention:
        """Backend.over."""

        def attention(layout: StepLayout, shape: AttentionShape) -> StepAttention:
            return GroupsAttention(
                [
                    TreeAttention(group, shape, pool)
                    if isinstance(group, TreeGroup)
                    else BlockAttention(group, shape, pool)
                    for group in layout.groups
                ]
            )

        return PlainAttention(attention)


class BlockAttention:
    """Blocks without branches: one product for scores, one per tile for outputs."""

    def __init__(self, group: BlockGroup, shape: AttentionShape, pool: Pool) -> None:
        heads, head_dim, kv = shape.num_kv_heads, shape.head_dim, pool.kv
        batch, tiles, size = group.num_blocks, group.num_tiles, group.num_tiles * TILE
        self._group = group
        self.queries = HeadRows(batch, group.num_rows, shape, kv, flat_rows(group))
        rows = self.queries.num_rows
        self._source = BlockKeys(group, pool)
        self._kv = self._source.new_buffer()
        self._keys = self._kv[0].view(-1, size, head_dim).transpose(1, 2)
        self._values = self._kv[1].view(-1, TILE, head_dim)
        self._scores = kv.new_empty(batch * heads, rows, size)
        self._by_block = self._scores.view(batch, heads, rows, size)
        self._weights = torch.empty_like(self._scores)
        # The same weights tile by tile, [B * H, T, M, TILE].
        self._tiled = self._weights.view(-1, rows, tiles, TILE).transpose(1, 2)
        self._by_tile = kv.new_empty(batch * heads * tiles, rows, TILE)
        self._parts = kv.new_empty(batch * heads * tiles, rows, head_dim)
        self._masked: dict[int | None, tuple[torch.Tensor, torch.Tensor] | None] = {}

    def attend(self, layer: int, scoring: Scoring) -> None:
        """StepAttention.attend for this group's rows."""
        queries = self.queries
        queries.load()
        self._source.read(layer, self._kv)
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

    def _mask(self, window: int | None) -> tuple[torch.Tensor, torch.Tensor] | None:
        """(scores that a mask is added to, the mask [B, 1, M, x]); None: nothing is masked."""
        if window not in self._masked:
            found = block_mask(self._group, window, self._kv.dtype)
            self._masked[window] = found and (
                self._by_block[..., found[0] :],
                self.queries.by_row(found[1])[:, None],
            )
        return self._masked[window]
