"""Attention of a branching span: shared prefix tiles, then the tail in two orders of its keys.

Scores are one product with all keys, put into position order for softmax; the tail's weights are
then put into pair order (tree_layout.py), so that one product per tile serves all nodes.

Shapes: n nodes, H key-value heads, G query heads each, D head_dim, M = n * G rows, padded,
P = positions of all tiles, K keys of the span (prefix and nodes, padded), E entries in pair order.
"""

import torch

from verifier_service.model.heads import AttentionShape, HeadRows, Scoring, cap, hide, soften
from verifier_service.model.kv import TILE, Pool
from verifier_service.model.tree_layout import TreeGroup


class TreeAttention:
    """One branching span, for all layers of one shape."""

    def __init__(self, group: TreeGroup, shape: AttentionShape, pool: Pool) -> None:
        heads, head_dim, kv = shape.num_kv_heads, shape.head_dim, pool.kv
        tiles, begin = group.prefix_tiles, group.prefix_tiles * TILE
        self._group = group
        self._pool = pool
        self._begin = begin
        flat = slice(group.first_row, group.first_row + group.num_rows)
        self.queries = HeadRows(1, group.num_rows, shape, kv, flat)
        rows, by_row = self.queries.num_rows, self.queries.by_row
        self._read_together(heads, head_dim)
        self._by_key = kv.new_empty(heads, rows, group.num_keys)
        gather = by_row(group.gather)
        self._gather = gather.expand(heads, *gather.shape).contiguous()
        self._tail_masks: dict[int | None, torch.Tensor] = {None: by_row(group.mask)}
        self._prefix_masks: dict[int | None, torch.Tensor | None] = {None: None}
        size = begin + group.tail_tiles * TILE
        self._scores = kv.new_empty(heads, rows, size)
        self._weights = torch.empty_like(self._scores)
        # The prefix's weights tile by tile, [prefix_tiles, H, M, TILE].
        self._tiled = self._weights[..., :begin].view(heads, rows, tiles, TILE).permute(2, 0, 1, 3)
        self._by_tile = kv.new_empty(tiles * heads, rows, TILE)
        self._on_path = [by_row(tile.weight) for tile in group.pair_tiles]
        self._parts = kv.new_empty(tiles + group.tail_tiles, heads, rows, head_dim)

    def _read_together(self, heads: int, head_dim: int) -> None:
        """One gather for all that is read of a layer: K, the prefix's V, V in pair order."""
        group, pool = self._group, self._pool
        prefix = group.slots[: self._begin].view(group.prefix_tiles, TILE)
        indices = [
            pool.index(0, group.slots),
            pool.index(1, prefix).transpose(0, 1),
            *(pool.index(1, tile.slots) for tile in group.pair_tiles),
        ]
        self._index = torch.cat([index.flatten() for index in indices])
        self._vectors = pool.kv.new_empty(len(self._index), head_dim)
        split = torch.split(self._vectors, [index.numel() for index in indices])
        self._keys = split[0].view(heads, -1, head_dim).transpose(1, 2)
        self._prefix_values = split[1].view(-1, TILE, head_dim)
        self._entries = [entries.view(heads, -1, head_dim) for entries in split[2:]]

    def attend(self, layer: int, scoring: Scoring) -> None:
        """StepAttention.attend for this group's rows."""
        group, queries = self._group, self.queries
        queries.load()
        torch.index_select(self._pool.vectors[layer], 0, self._index, out=self._vectors)
        self._score(scoring)
        soften(self._scores, scoring.sinks, queries, self._weights)
        parts, tiles = self._parts, group.prefix_tiles
        if tiles:
            self._by_tile.view(self._tiled.shape).copy_(self._tiled)
            torch.bmm(self._by_tile, self._prefix_values, out=parts[:tiles].flatten(0, 1))
        for number, tile in enumerate(group.pair_tiles):
            low = self._begin + number * TILE
            chosen = self._weights[..., low : low + TILE].index_select(-1, tile.columns)
            chosen.mul_(self._on_path[number])
            torch.bmm(chosen, self._entries[number], out=parts[tiles + number])
        torch.sum(parts, dim=0, out=queries.mixed)
        queries.store()

    def _score(self, scoring: Scoring) -> None:
        """Scores in position order, masked: [H, M, P]."""
        window, begin = scoring.window, self._begin
        if window not in self._tail_masks:
            self._make_window_masks(window or 0)
        torch.bmm(self.queries.queries, self._keys, out=self._by_key)
        cap(self._by_key, scoring.softcap)
        tail = self._by_key[..., begin:].gather(-1, self._gather)
        tail.add_(self._tail_masks[window])
        prefix, prefix_mask = self._by_key[..., :begin], self._prefix_masks[window]
        if prefix_mask is not None:
            prefix.add_(prefix_mask)
        torch.cat([prefix, tail], dim=-1, out=self._scores)

    def _make_window_masks(self, window: int) -> None:
        group, begin = self._group, self._begin
        columns = torch.arange(begin + group.tail_tiles * TILE, device=group.positions.device)
        mask = hide(columns <= group.positions[:, None] - window, group.mask.dtype)
        self._prefix_masks[window] = self.queries.by_row(mask[:, :begin])
        self._tail_masks[window] = self.queries.by_row(mask[:, begin:] + group.mask)
