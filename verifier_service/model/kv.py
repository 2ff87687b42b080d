"""The pool: K, V and feature rows of every slot, and the one move that touches them all.

Knows slots, not requests or pages. Slot 0 is scrap: padding rows are written there and masked
positions read from there, so every slot must stay finite; the pool starts as zeros. TILE spare
slots at the end let a contiguous run be read in whole tiles.

Heads come before slots, [layers, 2, heads, slots, dim], because attention reads one head's run of
slots at a time: from memory that is more than twice as fast as slots before heads (38 us against
91 for 1,024 positions of SmolLM2).

Shapes: L layers, S slots, H key-value heads, D head_dim.
"""

from collections.abc import Mapping

import torch

TILE = 64
"""Positions per tile: the unit of attention's reduction (design 6)."""


class Pool:
    """KV of all layers in one tensor [L, 2, H, S, D], and feature rows [S, width] per tap."""

    def __init__(
        self,
        num_layers: int,
        num_slots: int,
        num_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        row_widths: Mapping[str, int],
    ) -> None:
        self.num_slots = num_slots + TILE
        self.num_heads = num_heads
        self.head_dim = head_dim
        self.kv = torch.zeros(num_layers, 2, num_heads, self.num_slots, head_dim, dtype=dtype)
        self.rows = {
            key: torch.zeros(self.num_slots, width, dtype=dtype)
            for key, width in row_widths.items()
        }
        self.layers = self.kv.unbind(0)
        self.vectors = self.kv.view(num_layers, -1, head_dim).unbind(0)
        """Per layer all of K and V as [2 * H * S, D]; `index` says where a slot lies."""

    def runs(self, first: int, count: int) -> tuple[torch.Tensor, ...]:
        """Per layer a view of `count` adjacent slots, [2, H, count, D]."""
        return self.kv[:, :, :, first : first + count].unbind(0)

    def index(self, side: int, slots: torch.Tensor) -> torch.Tensor:
        """Rows of `vectors` that hold K (side 0) or V (1) of `slots`: int64 [H, *slots.shape]."""
        heads = torch.arange(side * self.num_heads, (side + 1) * self.num_heads)
        return heads.view(-1, *[1] * slots.dim()) * self.num_slots + slots

    def move(self, source: torch.Tensor, destination: torch.Tensor) -> None:
        """Copy slots `source` to `destination` (int64 [n]) in all layers and row stores.

        Everything is read before anything is written, so the two may overlap.
        """
        self.kv.index_copy_(3, destination, self.kv.index_select(3, source))
        for store in self.rows.values():
            store.index_copy_(0, destination, store.index_select(0, source))
