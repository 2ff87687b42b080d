"""The pool: K, V and feature rows of every slot, and the one move that touches them all.

Knows slots, not requests or pages. Slot 0 is scrap: padding rows are written there and masked
positions read from there, so every slot must stay finite; the pool starts as zeros. TILE spare
slots at the end let a contiguous run be viewed in whole tiles.

Shapes: L layers, S slots, H key-value heads, D head_dim.
"""

from collections.abc import Mapping

import torch

TILE = 64
"""Positions per tile: the unit of attention's reduction (design 6)."""


class Pool:
    """KV of all layers in one tensor [L, 2, S, H, D], and feature rows [S, width] per tap."""

    def __init__(
        self,
        num_layers: int,
        num_slots: int,
        num_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        row_widths: Mapping[str, int],
    ) -> None:
        slots = num_slots + TILE
        self.kv = torch.zeros(num_layers, 2, slots, num_heads, head_dim, dtype=dtype)
        self.rows = {
            key: torch.zeros(slots, width, dtype=dtype) for key, width in row_widths.items()
        }
        # Per layer, [S, H, D]: what attention reads.
        self.keys = [self.kv[layer, 0] for layer in range(num_layers)]
        self.values = [self.kv[layer, 1] for layer in range(num_layers)]
        self.num_slots = num_slots

    def move(self, source: torch.Tensor, destination: torch.Tensor) -> None:
        """Copy slots `source` to `destination` (int64 [n]) in all layers and row stores.

        Everything is read before anything is written, so the two may overlap.
        """
        self.kv.index_copy_(2, destination, self.kv.index_select(2, source))
        for store in self.rows.values():
            store.index_copy_(0, destination, store.index_select(0, source))
