"""Attention of a branching span: shared prefix tiles, then the tail in two orders of its keys.

Scores are one product with all keys, put into position order for softmax; the tail's weights are
then put into pair order (tree_layout.py), so that one product per tile serves all nodes.

Shapes: n nodes, H key-value heads, G query heads each, D head_dim, M = n * G rows, padded,
P = positions of all tiles, K keys of the span (prefix and nodes, padded), E entries in pair order.
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
from verifier_service.model.tree_layout import TreeGroup


class TreeAttention:
    """One branching span, for all layers of one shape."""

    def __init__(self, group: TreeGroup, shape: AttentionShape, dtype: torch.dtype) -> None:
        self._group = group
        self._begin = group.prefix_tiles * TILE
        self._heads = heads = shape.num_kv_heads
        self._queries = HeadRows(1, group.num_rows, shape, dtype)
        by_row = self._queries.by_row
        gather = by_row(group.gather)
        self._gather = gather.expand(heads, *gather.shape)
        self._tail_masks: dict[int | None, torch.Tensor] = {None: by_row(group.mask)}
        self._prefix_masks: dict[int | None, torch.Tensor | None] = {None: None}
        self._weights = [by_row(tile.weight) for tile in group.pair_tiles]
        # Rows of a side seen as [S * H, D], head by head.
        own = torch.arange(heads)[:, None]
        self._tile_index = [(tile.slots * heads + own).flatten() for tile in group.pair_tiles]
        if group.slots is not None:
            self._key_index = (group.slots * heads + own).flatten()
            prefix = (group.slots * heads + own)[:, : self._begin]
            prefix = prefix.reshape(heads, group.prefix_tiles, TILE)
            self._prefix_index = prefix.transpose(0, 1).flatten()
        self.rows = slice(group.first_row, group.first_row + group.num_rows)

    def attend(
        self,
        scoring: Scoring,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        """StepAttention.attend for this group's rows."""
        group, begin, head_dim = self._group, self._begin, keys.shape[-1]
        by_head = self._queries.load(queries)
        weights = soften(self._scores(scoring, by_head, keys), scoring.sinks, self._queries)
        num_tiles = group.prefix_tiles + group.tail_tiles
        parts = by_head.new_empty(num_tiles, *by_head.shape)
        if begin:
            shared = weights[..., :begin].view(*weights.shape[:2], -1, TILE).permute(2, 0, 1, 3)
            torch.bmm(
                shared.reshape(-1, weights.shape[1], TILE),
                self._prefix_values(values),
                out=parts[: group.prefix_tiles].view(-1, *by_head.shape[1:]),
            )
        side = values.view(-1, head_dim)
        for number, tile in enumerate(group.pair_tiles):
            low = begin + number * TILE
            chosen = weights[..., low : low + TILE].index_select(-1, tile.columns)
            chosen *= self._weights[number]
            entries = side.index_select(0, self._tile_index[number])
            torch.bmm(
                chosen,
                entries.view(self._heads, -1, head_dim),
                out=parts[group.prefix_tiles + number],
            )
        self._queries.collect(add_tiles(parts.view(num_tiles, -1, head_dim)), out)

    def _scores(self, scoring: Scoring, by_head: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        """Scores in position order, masked: [H, M, P]."""
        window, begin = scoring.window, self._begin
        if window not in self._tail_masks:
            self._make_window_masks(window or 0)
        scores = torch.bmm(by_head, self._keys(keys).transpose(1, 2))
        cap(scores, scoring.softcap)
        tail = scores[..., begin:].gather(-1, self._gather)
        tail += self._tail_masks[window]
        if not begin:
            return tail
        prefix = scores[..., :begin]
        prefix_mask = self._prefix_masks[window]
        if prefix_mask is not None:
            prefix += prefix_mask
        return torch.cat([prefix, tail], dim=-1)

    def _keys(self, keys: torch.Tensor) -> torch.Tensor:
        """K of the prefix and all nodes, [H, K, D]."""
        group, head_dim = self._group, keys.shape[-1]
        if group.first_slot is None:
            own = keys.view(-1, head_dim).index_select(0, self._key_index)
            return own.view(self._heads, -1, head_dim)
        run = keys[group.first_slot : group.first_slot + group.num_keys]
        return run.transpose(0, 1).contiguous()

    def _prefix_values(self, values: torch.Tensor) -> torch.Tensor:
        """V of the shared tiles, [prefix_tiles * H, TILE, D]."""
        group, head_dim = self._group, values.shape[-1]
        if group.first_slot is None:
            own = values.view(-1, head_dim).index_select(0, self._prefix_index)
            return own.view(-1, TILE, head_dim)
        run = values[group.first_slot : group.first_slot + self._begin]
        tiles = run.view(-1, TILE, self._heads, head_dim).transpose(1, 2)
        return tiles.reshape(-1, TILE, head_dim)

    def _make_window_masks(self, window: int) -> None:
        group, begin = self._group, self._begin
        columns = torch.arange(begin + group.tail_tiles * TILE)
        mask = hide(columns <= group.positions[:, None] - window, group.mask.dtype)
        self._prefix_masks[window] = self._queries.by_row(mask[:, :begin])
        self._tail_masks[window] = self._queries.by_row(mask[:, begin:] + group.mask)
