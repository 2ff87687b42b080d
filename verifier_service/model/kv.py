"""The pool: K, V and feature rows of every slot, and the one move that touches them all.

Knows slots, not requests or pages. Slot 0 is scrap: padding rows are written there and masked
positions read from there, so every slot must stay finite; the pool starts as zeros. TILE spare
slots at the end let a contiguous run be read in whole tiles.

The pool lives on the target's device. Feature rows are only ever read for the wire, so their stores
are on the host: behind a device one copy a step brings them over, when somebody first asks.

Heads come before slots, [layers, 2, heads, slots, dim], because attention reads one head's run of
slots at a time: from memory that is more than twice as fast as slots before heads (38 us against
91 for 1,024 positions of SmolLM2).

Shapes: L layers, S slots, H key-value heads, D head_dim.
"""

from collections.abc import Mapping

import numpy as np
import torch

TILE = 64
"""Positions per tile: the unit of attention's reduction (design 6)."""
_WORD = 8
"""Bytes of a word; numpy knows no bf16."""


class RowStore:
    """Feature rows [S, width] of one tap, on the host."""

    def __init__(self, num_slots: int, width: int, dtype: torch.dtype) -> None:
        self._rows = torch.zeros(num_slots, width, dtype=dtype)
        self._arriving: tuple[torch.Tensor, torch.Tensor] | None = None

    def write(self, slots: torch.Tensor, rows: torch.Tensor) -> None:
        """Keep `rows` [n, width], from whatever device, under host `slots` int64 [n]."""
        if rows.device.type == "cpu":
            self._rows.index_copy_(0, slots, rows)
            return
        self._land()
        # Copied when it is asked for: by then the step's choices were read back, and nothing waits.
        self._arriving = slots, rows

    def read(self, slots: torch.Tensor) -> torch.Tensor:
        """Rows [n, width] of `slots` int64 [n]."""
        self._land()
        return self._rows.index_select(0, slots)

    def move(self, source: torch.Tensor, destination: torch.Tensor) -> None:
        """Copy rows between slots; everything is read before anything is written."""
        self._land()
        self._rows.index_copy_(0, destination, self._rows.index_select(0, source))

    def _land(self) -> None:
        if self._arriving is not None:
            slots, rows = self._arriving
            self._rows.index_copy_(0, slots, rows.cpu())
            self._arriving = None


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
        device: torch.device | None = None,
    ) -> None:
        """device: of K and V; None: the CPU."""
        self.num_slots = num_slots + TILE
        self.num_heads = num_heads
        self.head_dim = head_dim
        size = (num_layers, 2, num_heads, self.num_slots, head_dim)
        self.kv = torch.zeros(size, dtype=dtype, device=device)
        self.rows = {
            key: RowStore(self.num_slots, width, dtype) for key, width in row_widths.items()
        }
        self.layers = self.kv.unbind(0)
        self.vectors = self.kv.view(num_layers, -1, head_dim).unbind(0)
        """Per layer all of K and V as [2 * H * S, D]; `index` says where a slot lies."""
        has_words = self.kv.device.type == "cpu" and head_dim * dtype.itemsize % _WORD == 0
        self.words = tuple(as_words(layer) for layer in self.vectors) if has_words else None
        """On a CPU the same memory, [2 * H * S, D in words]: numpy copies scattered vectors three
        times as fast as torch does (7 us against 22 for 192 of them)."""
        self._index_of: torch.Tensor | None = None
        self._index = np.zeros(0, np.int64)
        self.clock = 0
        self.written = np.zeros(self.num_slots, np.int64)
        """The clock's count when a slot was last written; scrap's is always 0."""

    def stamp(self, slots: torch.Tensor) -> None:
        """Say that host slots int64 [n] are about to be written in all layers."""
        self.clock += 1
        self.written[slots.numpy()] = self.clock
        self.written[0] = 0

    def write(self, layer: int, slots: torch.Tensor, kv: torch.Tensor) -> None:
        """Put K and V of rows, [2, H, R, D], into their slots int64 [R]. `stamp` comes before."""
        if self.words is None:
            self.layers[layer].index_copy_(2, slots, kv)
            return
        if self._index_of is not slots:
            index = torch.stack([self.index(0, slots), self.index(1, slots)])
            self._index_of, self._index = slots, index.numpy()
        self.words[layer][self._index] = as_words(kv)

    def runs(self, first: int, count: int) -> tuple[torch.Tensor, ...]:
        """Per layer a view of `count` adjacent slots, [2, H, count, D]."""
        return self.kv[:, :, :, first : first + count].unbind(0)

    def index(self, side: int, slots: torch.Tensor) -> torch.Tensor:
        """Rows of `vectors` that hold K (side 0) or V (1) of `slots`: int64 [H, *slots.shape]."""
        first = side * self.num_heads
        heads = torch.arange(first, first + self.num_heads, device=slots.device)
        return heads.view(-1, *[1] * slots.dim()) * self.num_slots + slots

    def move(self, source: torch.Tensor, destination: torch.Tensor) -> None:
        """Copy slots `source` to `destination` (host int64 [n]) in all layers and row stores.

        Everything is read before anything is written, so the two may overlap.
        """
        self.stamp(destination)
        for store in self.rows.values():
            store.move(source, destination)
        device = self.kv.device
        read = self.kv.index_select(3, source.to(device))
        self.kv.index_copy_(3, destination.to(device), read)


def as_words(vectors: torch.Tensor) -> np.ndarray:
    """The memory of a host tensor [..., n] as int64 [..., n in words]."""
    return vectors.view(torch.int64).numpy()
